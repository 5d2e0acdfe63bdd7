"""An agent whose every handler fails: `python -m tests.fakes.failing_agent FLAGS`.

`FAILING_AGENT` says how: `raise` (an exception of its own), `exit` (SystemExit, which no handler
means), `unencodable` (a reply that the operation cannot carry), `never` (a `Pending` that nobody
settles, for stops with requests in flight).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any
from unittest.mock import patch

from lmcache_nodeagent import assembly
from lmcache_nodeagent.__main__ import main
from lmcache_nodeagent.modules.calls import Call, Pending
from lmcache_nodeagent.transport.dispatch import Dispatcher

HOW = "FAILING_AGENT"


def _fails(call: Call, *payload: object) -> object:
    del call, payload
    match os.environ[HOW]:
        case "raise":
            raise RuntimeError("the storage is on fire")
        case "unencodable":
            return object()
        case "never":
            return Pending()
        case how:
            raise AssertionError(how)


def _dispatcher(handlers: Mapping[str, Callable[..., object]], **parts: Any) -> Dispatcher:  # noqa: ANN401
    return Dispatcher(handlers=dict.fromkeys(handlers, _fails), **parts)


if __name__ == "__main__":
    with patch.object(assembly, "Dispatcher", _dispatcher):
        raise SystemExit(main())
