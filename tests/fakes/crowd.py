"""Many workers in one process, each with a connection: `python -m tests.fakes.crowd URL FIRST N`.

Each registers and pings once; then the process says `true` and waits for its standard input to end.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from lmcache_worker.client import WorkerClient
from lmcache_worker.shared_memory import SharedKvCache
from tests.polling import PATIENCE_SECONDS


class Crowd:
    """The parent's side. Entered, all are registered."""

    def __init__(self, url: str, instance_ids: range, wrapper: Sequence[str] = ()) -> None:
        numbers = (str(instance_ids.start), str(len(instance_ids)))
        self._command = [*wrapper, sys.executable, "-m", "tests.fakes.crowd", url, *numbers]

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the crowd ended with {self._process.wait()}"
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(PATIENCE_SECONDS)


def _main() -> None:
    url, first, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    with ExitStack() as stack:
        cache = stack.enter_context(SharedKvCache.create([2, 16, 16, 1, 8]))
        for instance_id in range(first, first + count):
            client = stack.enter_context(WorkerClient(url))
            client.register_kv_cache(instance_id, [cache.tensor], "demo/crowd")
            assert client.ping(instance_id)
        print("true", flush=True)  # noqa: T201
        sys.stdin.read()


if __name__ == "__main__":
    _main()
