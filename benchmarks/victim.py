"""A worker that is there to be killed: `python -m benchmarks.victim URL ID`.

It registers, stores, pings, says so on standard output, and pings every second until it is killed.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from benchmarks.dealer import Dealer
from benchmarks.models import BLOCKS_PER_CHUNK, CHUNK_TOKENS, planes_first
from benchmarks.worker import Prompts, Worker

_MODEL = planes_first("victim", layers=2, heads=1, head_size=64, blocks=64)
_PING_SECONDS = 1.0


class Victim:
    """The killer's side."""

    def __init__(self, url: str, instance_id: int) -> None:
        self.instance_id = instance_id
        command = [sys.executable, "-m", "benchmarks.victim", url, str(instance_id)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def wait_serving(self) -> None:
        """Return once it has registered, stored and pinged."""
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            raise RuntimeError(f"a worker ended with {self._process.wait()}")

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Kill it if that was not done, and remove what it left in /dev/shm."""
        self.kill()
        assert self._process.stdout is not None
        self._process.stdout.close()
        for path in Path("/dev/shm").glob(f"lmcache_kv_{self.pid}_*"):
            path.unlink()


def _main() -> None:
    url, instance_id = sys.argv[1], int(sys.argv[2])
    worker = Worker(_MODEL, instance_id)
    tokens = Prompts(instance_id).tokens(CHUNK_TOKENS)
    with Dealer(url) as dealer:
        worker.register(dealer)
        dealer.exchange(worker.store(dealer, tokens, "store", range(1, 1 + BLOCKS_PER_CHUNK)))
        dealer.call("ping", instance_id)
        print("serving", flush=True)
        while True:
            time.sleep(_PING_SECONDS)
            dealer.call("ping", instance_id)


if __name__ == "__main__":
    _main()
