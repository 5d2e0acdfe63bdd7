"""A process of the stock environment with the LMCache adapters in it, and its commands."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.leaks import made_for_us
from tests.polling import PATIENCE_SECONDS
from tests.process_log import ProcessLog

_ROOT = Path(__file__).parents[2]
STOCK_PYTHON = _ROOT / ".venvs/stock/bin/python"
_QUIET = {"DO_NOT_TRACK": "1", "LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1"}
_LOG_TAIL = 4000


class StockFailed(AssertionError):
    """What a command raised in the stock process."""


class StockProcess:
    """Starts `stock_client.py`; its commands are the methods of `StockClient`."""

    def __init__(self) -> None:
        self._log = ProcessLog()
        self._process = subprocess.Popen(
            [STOCK_PYTHON, "-m", "tests.conformance.stock_client"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log.fileno(),
            text=True,
            env={**os.environ, **_QUIET},
            cwd=_ROOT,
        )
        self.pid = self._process.pid
        made_for_us(f"lmcache_kv_{self.pid}")
        try:
            assert int(self._read()) == self.pid
        except BaseException:
            self.close()
            raise

    def ask(self, command: str, *arguments: object, **options: object) -> Any:  # noqa: ANN401  # JSON
        """Send a command and return its result; an exception there is raised here as text."""
        self.tell(command, *arguments, **options)
        return self.result()

    def tell(self, command: str, *arguments: object, **options: object) -> None:
        """Send a command without waiting for its result."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([command, arguments, options]) + "\n")
        self._process.stdin.flush()

    def result(self) -> Any:  # noqa: ANN401  # JSON
        """Return the result of the oldest command that was told."""
        result = json.loads(self._read())
        if isinstance(result, dict) and set(result) == {"error"}:
            raise StockFailed(result["error"])
        return result

    def log_text(self) -> str:
        """Return what the stock code logged so far."""
        return self._log.text()

    def leave(self) -> None:
        """Have it end by itself, as a program that is done, and wait."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(PATIENCE_SECONDS)

    def kill(self) -> None:
        """SIGKILL, and wait."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(PATIENCE_SECONDS)

    def close(self) -> None:
        """End it and remove the KV memory that a killed one left."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait(PATIENCE_SECONDS)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._log.close()
        for left in Path("/dev/shm").glob(f"lmcache_kv_{self.pid}_*"):
            left.unlink()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait(PATIENCE_SECONDS)
            raise StockFailed(f"ended with {code}: {self.log_text()[-_LOG_TAIL:]}")
        return line
