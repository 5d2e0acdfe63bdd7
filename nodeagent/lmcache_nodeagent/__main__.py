"""`lmcache-nodeagent`: reads the configuration, serves until SIGTERM or SIGINT."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from lmcache_nodeagent.app import App
from lmcache_nodeagent.config_parsing import parse_config
from lmcache_nodeagent.contexts.bus_errors import survive_bus_errors
from lmcache_nodeagent.errors import AgentError, ConfigError
from lmcache_nodeagent.observability.logs import configure_logging

if TYPE_CHECKING:
    from types import FrameType

_SWITCH_SECONDS = 0.0005
"""How long one thread's Python holds up another's: a ping beside a long look-up's. Python's own
value is ten times as long."""

EXIT_FAILURE = 1
EXIT_USAGE = 2


class _Signals:
    """Remembers a signal that comes before there is an agent to stop. Thread: main.

    Takes no lock: one signal may come while another is being handled.
    """

    def __init__(self) -> None:
        self._received = False
        self._app: App | None = None
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self._received = True
        if self._app is not None:
            self._app.stop()

    def stop_on_signal(self, app: App) -> None:
        """Stop `app` at the next signal, or now if one has come already."""
        self._app = app
        if self._received:
            app.stop()


def main() -> int:
    """Run an agent; return the exit status: 0 after a stop, 2 for a bad configuration, else 1."""
    signals = _Signals()
    survive_bus_errors()
    sys.setswitchinterval(_SWITCH_SECONDS)
    if sys.stderr is None:  # closed by whoever started us
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115  # open to the end
    try:
        config = parse_config()
        configure_logging(config.log_level, config.log_format)
        app = App(config)
    except ConfigError as error:
        for problem in error.problems:
            print(f"lmcache-nodeagent: {problem}", file=sys.stderr)  # noqa: T201
        return EXIT_USAGE
    except AgentError as error:
        print(f"lmcache-nodeagent: {error}", file=sys.stderr)  # noqa: T201
        return EXIT_FAILURE
    signals.stop_on_signal(app)
    return app.run(when_serving=lambda: _announce(app))


def _announce(app: App) -> None:
    """Say on standard output, in one line of JSON, that requests are served."""
    ready = {
        "event": "agent_ready",
        "port": app.config.port,
        "http_port": app.http_port,
        "pid": os.getpid(),
        "boot_id": app.boot_id,
    }
    with contextlib.suppress(OSError):  # nobody listens; the agent serves all the same
        print(json.dumps(ready), flush=True)  # noqa: T201  # what standard output is for


if __name__ == "__main__":
    sys.exit(main())
