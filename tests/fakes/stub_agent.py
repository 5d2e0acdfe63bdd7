"""An agent whose worker contexts are stubs: `python -m tests.fakes.stub_agent FLAGS`.

The parent side is `StubAgent`. It commands the child over a Unix socket, one JSON array per
line, [command, argument...], one JSON value back: hold a step, count opens and closes, turn the
clock forward. What the flags do not allow (windows of less than a second) comes by environment.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any
from unittest.mock import patch

from lmcache_nodeagent.app import App
from lmcache_nodeagent.clock import monotonic
from lmcache_nodeagent.config import AgentConfig
from lmcache_nodeagent.config_parsing import parse_config
from lmcache_nodeagent.liveness import live_settings
from lmcache_nodeagent.liveness.windows import LivenessSettings
from lmcache_nodeagent.observability.logs import configure_logging
from tests.fakes.agent_process import AgentProcess
from tests.fakes.stub_context import StubHooks, StubOpener

_CONTROL, _WINDOWS = "STUB_AGENT_CONTROL", "STUB_AGENT_WINDOWS"
STEPS = ("open", "gather", "scatter", "close")


class _Gates:
    """Holds or delays the steps of contexts. Threads: any."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  # guards: everything below
        self._to_hold = dict.fromkeys(STEPS, 0)
        self._holding = dict.fromkeys(STEPS, 0)
        self._delays = dict.fromkeys(STEPS, 0.0)

    def hold(self, step: str, times: int) -> None:
        """Let the next `times` steps of this kind wait until `let_go`."""
        with self._changed:
            self._to_hold[step] = times

    def let_go(self, step: str) -> None:
        """Let all held steps of this kind go on, and hold no more."""
        with self._changed:
            self._to_hold[step] = self._holding[step] = 0
            self._changed.notify_all()

    def delay(self, step: str, seconds: float) -> None:
        """Make every step of this kind take this long."""
        with self._changed:
            self._delays[step] = seconds

    def holding(self, step: str) -> int:
        """Count the steps that wait now."""
        with self._changed:
            return self._holding[step]

    def passes(self, step: str) -> None:
        """Take a step; returns when it may go on."""
        with self._changed:
            seconds = self._delays[step]
            if self._to_hold[step]:
                self._to_hold[step] -= 1
                self._holding[step] += 1
                self._changed.wait_for(lambda: not self._holding[step])
        time.sleep(seconds)


class _Child:
    """What the parent may ask for; see `StubAgent` for the meaning."""

    def __init__(self) -> None:
        self._gates = _Gates()
        self._clock_offset = 0.0
        self.opener = StubOpener(
            StubHooks(**{f"before_{step}": self._hook(step) for step in STEPS})
        )

    def _hook(self, step: str) -> Any:  # noqa: ANN401  # a callable without arguments
        return lambda: self._gates.passes(step)

    def now(self) -> float:
        return monotonic() + self._clock_offset

    def hold(self, step: str, times: int) -> None:
        self._gates.hold(step, times)

    def let_go(self, step: str) -> None:
        self._gates.let_go(step)

    def delay(self, step: str, seconds: float) -> None:
        self._gates.delay(step, seconds)

    def holding(self, step: str) -> int:
        return self._gates.holding(step)

    def jump(self, seconds: float) -> None:
        self._clock_offset += seconds

    def counts(self) -> dict[str, Any]:
        counts = self.opener.counts
        return {
            "opened": counts.opened,
            "closed": counts.closed,
            "gathered": counts.gathered_chunks,
            "scattered": counts.scattered_chunks,
            "handles": dict(counts.open_handles),
        }

    def serve(self, path: str) -> None:
        """Answer the parent until it goes. Thread: control."""
        with socket.socket(socket.AF_UNIX) as channel:
            channel.connect(path)
            lines = channel.makefile("rw")
            for line in lines:
                command, *arguments = json.loads(line)
                lines.write(json.dumps(getattr(self, command)(*arguments)) + "\n")
                lines.flush()


class StubAgent(AgentProcess):
    """An agent with stub contexts. `windows` overrides liveness settings by their field names."""

    def __init__(
        self, *flags: str, windows: Mapping[str, float] | None = None, port: int = 0
    ) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="stub-agent-")
        path = str(Path(self._directory.name) / "control")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen()
        self._channel: socket.socket | None = None
        super().__init__(
            *flags,
            module="tests.fakes.stub_agent",
            port=port,
            environ={_CONTROL: path, _WINDOWS: json.dumps(dict(windows or {}))},
        )

    def _ask(self, command: str, *arguments: object) -> Any:  # noqa: ANN401  # JSON
        if self._channel is None:
            self._channel, _ = self._listener.accept()
            self._lines = self._channel.makefile("rw")
        self._lines.write(json.dumps([command, *arguments]) + "\n")
        self._lines.flush()
        return json.loads(self._lines.readline())

    def hold(self, step: str, times: int = 1) -> None:
        """Let the next `times` steps (one of `STEPS`) wait until `let_go`."""
        self._ask("hold", step, times)

    def let_go(self, step: str) -> None:
        """Let every held step of this kind go on."""
        self._ask("let_go", step)

    def delay(self, step: str, seconds: float) -> None:
        """Make every step of this kind take this long."""
        self._ask("delay", step, seconds)

    def holding(self, step: str) -> int:
        """Count the steps of this kind that are held now."""
        return int(self._ask("holding", step))

    def jump(self, seconds: float) -> None:
        """Turn the agent's clock forward at one blow."""
        self._ask("jump", seconds)

    def counts(self) -> dict[str, Any]:
        """Return opened, closed, gathered, scattered, and handles: open mappings by segment."""
        counts: dict[str, Any] = self._ask("counts")
        return counts

    def close(self) -> None:
        """End the agent and the channel to it."""
        super().close()
        if self._channel is not None:
            self._lines.close()
            self._channel.close()
        self._listener.close()
        self._directory.cleanup()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _main() -> int:
    child = _Child()
    configure_logging("info", "json")
    config = parse_config()
    windows = json.loads(os.environ[_WINDOWS])
    real_settings = live_settings.liveness_settings

    def settings(config: AgentConfig) -> LivenessSettings:
        return replace(real_settings(config), **windows)

    with ExitStack() as patches:
        patches.enter_context(patch.object(live_settings, "liveness_settings", settings))
        patches.enter_context(patch("lmcache_nodeagent.app.monotonic", child.now))
        app = App(config, child.opener)
    signal.signal(signal.SIGTERM, lambda *_: app.stop())
    control = threading.Thread(
        target=child.serve, args=(os.environ[_CONTROL],), name="control", daemon=True
    )
    control.start()
    ready = {
        "event": "agent_ready",
        "port": app.config.port,
        "http_port": app.http_port,
        "pid": os.getpid(),
        "boot_id": app.boot_id,
    }
    return app.run(when_serving=lambda: print(json.dumps(ready), flush=True))  # noqa: T201


if __name__ == "__main__":
    raise SystemExit(_main())
