"""An engine worker that lives as stock ones do: `python -m tests.cluster.story_worker URL ID`.

It registers, pings on a schedule, and registers again whenever it is told that it is not known.
It ends only by a signal. The parent side is `LivingWorker`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from lmcache_worker.wire import NoReply, RequestRefused
from tests.fakes.worker_process import Worker
from tests.leaks import made_for_us
from tests.polling import PATIENCE_SECONDS

PING_SECONDS = 0.5
_NEVER = 3600.0
_REPLY_SECONDS = 1.0
_SHARED_MEMORY = Path("/dev/shm")


class LivingWorker:
    """The parent's side. Making one starts it; it has registered by `wait_registered`."""

    def __init__(
        self,
        url: str,
        instance_id: int,
        *,
        ping_seconds: float | None = PING_SECONDS,
        wrapper: Sequence[str] = (),
    ) -> None:
        """Start a process.

        Args:
            url: where to connect, and from where: `tcp://127.0.1.5:0;127.0.0.1:PORT`.
            instance_id: its id.
            ping_seconds: time between pings; None for a worker that never pings.
            wrapper: goes before the command.
        """
        self.instance_id = instance_id
        pause = _NEVER if ping_seconds is None else ping_seconds
        module = "tests.cluster.story_worker"
        command = [sys.executable, "-m", module, url, str(instance_id), str(pause)]
        self._process = subprocess.Popen(
            [*wrapper, *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        self._pid = 0

    def wait_registered(self) -> Self:
        """Wait until it is registered for the first time."""
        if not self._pid:
            assert self._process.stdout is not None
            line = self._process.stdout.readline()
            assert line, f"worker {self.instance_id} ended with {self._process.poll()}"
            self._pid = int(line)
            made_for_us(f"lmcache_kv_{self._pid}")
        return self

    @property
    def pid(self) -> int:
        """Its own process id, which a wrapper's is not."""
        return self._pid or self._process.pid

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the worker itself."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL, wait, and remove the names of its memory, which nobody else will."""
        if self._process.poll() is None:
            self.signal(signal.SIGKILL)
        self._process.wait(PATIENCE_SECONDS)
        for file in _SHARED_MEMORY.glob(f"lmcache_kv_{self.pid}_*"):
            file.unlink(missing_ok=True)

    def close(self) -> None:
        """Kill it if that was not done."""
        self.kill()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _main() -> None:
    url, instance_id, ping_seconds = sys.argv[1:]
    with Worker(url, int(instance_id)) as worker:
        _register(worker)
        print(os.getpid(), flush=True)  # noqa: T201
        was_away = False  # a stock worker registers again when an agent answers that did not
        while True:
            time.sleep(float(ping_seconds))
            try:
                is_known = worker.ping()
            except NoReply:
                was_away = True
                continue
            if was_away or not is_known:
                _register(worker)
                was_away = False


def _ping(worker: Worker) -> bool:
    """Ping; a reply that an agent took to its grave is not waited for long."""
    uid = worker.client.send("ping", worker.instance_id)
    return worker.client.receive(uid, _REPLY_SECONDS).result() is True


def _register(worker: Worker) -> None:
    """Register, as often as it takes: a stock worker also tries again with its next ping."""
    while True:
        try:
            worker.register()
        except (NoReply, RequestRefused):
            time.sleep(PING_SECONDS)
        else:
            return


if __name__ == "__main__":
    _main()
