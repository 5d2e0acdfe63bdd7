"""An agent that starts a child without closing anything for it: `python -m ... FLAGS`.

The child prints nothing and sleeps; its process id stands in the file that `SPAWNING_AGENT` names.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

from lmcache_nodeagent import __main__ as program
from lmcache_nodeagent.app import App

PID_FILE = "SPAWNING_AGENT"


def _main() -> int:
    announce = program._announce

    def spawn_and_announce(app: App) -> None:
        child = subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(60)"], close_fds=False
        )
        Path(os.environ[PID_FILE]).write_text(str(child.pid))
        announce(app)

    with patch.object(program, "_announce", spawn_and_announce):
        return program.main()


if __name__ == "__main__":
    raise SystemExit(_main())
