"""Makes an agent's releases slow, as a driver that takes its time over unmapping does.

Python imports a module of this name before any program. A ConfigMap brings it into the agent's
container, `PYTHONPATH` names its folder, and the program is the product's own. While the file
`seconds` is in the volume, each context takes that long to close; when it has, it says so there.
"""

from __future__ import annotations

import time
from pathlib import Path

from lmcache_nodeagent.contexts.host import HostContext

_ORDER = Path("/release/seconds")
_CLOSED_AT = Path("/release/closed-at")
_LOOK_SECONDS = 0.02

_close = HostContext.close


def _close_slowly(context: HostContext) -> None:
    began_at = time.monotonic()
    seconds = float(_ORDER.read_text()) if _ORDER.exists() else 0.0
    while _ORDER.exists() and time.monotonic() - began_at < seconds:
        time.sleep(_LOOK_SECONDS)
    _close(context)
    _CLOSED_AT.write_text(str(time.clock_gettime(time.CLOCK_BOOTTIME)))


setattr(HostContext, "close", _close_slowly)  # noqa: B010  # nothing of the product knows of it
