"""A real worker process that a test commands: `python -m tests.fakes.worker_process URL ID`.

One JSON array per line on standard input, [command, argument...], one JSON value back. The parent
side is `WorkerProcess`. The worker's memory is filled from its id, so that bytes can be checked.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import zmq

from lmcache_worker.client import HOST_EVENT, WorkerClient
from lmcache_worker.shared_memory import SharedKvCache
from lmcache_worker.wire import CacheKey
from tests.leaks import made_for_us
from tests.polling import PATIENCE_SECONDS

BLOCKS, BLOCK_TOKENS, LAYERS = 64, 16, 2
MODEL = "demo/model"
CHUNK_TOKENS = 256
BLOCKS_PER_CHUNK = CHUNK_TOKENS // BLOCK_TOKENS


class Worker:
    """One client, its memory, and what it is told to do; the child's side, and of use by itself.

    `url` may name the address to come from: `tcp://127.0.0.2:0;127.0.0.1:PORT`.
    """

    def __init__(self, url: str, instance_id: int) -> None:
        self.instance_id = instance_id
        self._client = WorkerClient(url, timeout_seconds=PATIENCE_SECONDS)
        self._caches = [
            SharedKvCache.create([2, BLOCKS, BLOCK_TOKENS, 2, 8]) for _ in range(LAYERS)
        ]
        self._own_caches = list(self._caches)
        noise = np.random.default_rng(instance_id)
        for cache in self._caches:
            cache.array[...] = noise.integers(0, 1 << 16, cache.array.shape, dtype=np.uint16)
        self._client.__enter__()

    @property
    def client(self) -> WorkerClient:
        """For requests of other kinds."""
        return self._client

    @property
    def segments(self) -> list[str]:
        """Names of the memory's files."""
        return [cache.tensor.shm_name for cache in self._caches]

    def register(self, model: str = MODEL) -> None:
        """Let the agent map the memory."""
        tensors = [cache.tensor for cache in self._caches]
        self._client.register_kv_cache(self.instance_id, tensors, model)

    def ping(self) -> bool:
        """Give a sign of life; False asks to register again."""
        return self._client.ping(self.instance_id)

    def ping_nil(self) -> bool:
        """Ping for nobody, as a scheduler does."""
        return self._client.ping(None)

    def store(self, seed: int, chunks: int = 2, first_block: int = 1) -> bool:
        """Store the blocks under the prompt that `seed` stands for."""
        return self._client.store(
            self._key(seed, chunks, "store"),
            self.instance_id,
            [list(range(first_block, first_block + chunks * BLOCKS_PER_CHUNK))],
        )[1]

    def lookup(self, seed: int, chunks: int = 2) -> int:
        """Return how many chunks of that prompt are cached; they are pinned now."""
        key = self._key(seed, chunks, "load", worker_id=None)
        return self._client.hit_chunks(key)

    def retrieve(self, seed: int, chunks: int = 2, first_block: int = 32) -> bool:
        """Load the prompt into the blocks."""
        return self._client.retrieve(
            self._key(seed, chunks, "load"),
            self.instance_id,
            [list(range(first_block, first_block + chunks * BLOCKS_PER_CHUNK))],
        )[1]

    def begin_retrieve(self, seed: int, chunks: int = 2, first_block: int = 32) -> int:
        """Ask to load the prompt, without waiting; return the uid of the request."""
        ids = [list(range(first_block, first_block + chunks * BLOCKS_PER_CHUNK))]
        key = self._key(seed, chunks, "load")
        return self._client.send("retrieve", key, self.instance_id, ids, HOST_EVENT, 0)

    def begin_store(self, seed: int, chunks: int = 2, first_block: int = 1) -> int:
        """Ask to store the blocks, without waiting; return the uid of the request."""
        ids = [list(range(first_block, first_block + chunks * BLOCKS_PER_CHUNK))]
        key = self._key(seed, chunks, "store")
        return self._client.send("store", key, self.instance_id, ids, HOST_EVENT)

    def end_session(self, seed: int) -> None:
        """Give up what a lookup pinned."""
        self._client.end_session(f"load-{seed}")

    def unregister(self) -> None:
        """Say goodbye."""
        self._client.unregister(self.instance_id)

    def digest(self, first_block: int, chunks: int = 2) -> str:
        """Hash the bytes of some blocks, all layers."""
        blocks = slice(first_block, first_block + chunks * BLOCKS_PER_CHUNK)
        seen = hashlib.sha256()
        for cache in self._caches:
            seen.update(np.ascontiguousarray(cache.array[:, blocks]).tobytes())
        return seen.hexdigest()

    def zero(self, first_block: int, chunks: int = 2) -> None:
        """Forget the bytes of some blocks, all layers."""
        for cache in self._caches:
            cache.array[:, first_block : first_block + chunks * BLOCKS_PER_CHUNK] = 0

    def flood(self, count: int) -> None:
        """Send pings and read none of the replies."""
        sent = 0
        while sent < count:
            try:
                self._client.send("ping", self.instance_id)
            except zmq.Again:  # the agent reads more slowly than we write
                time.sleep(0.001)
            else:
                sent += 1

    def heartbeat(self, interval: float, seconds: float) -> int:
        """Ping on a schedule; return how many were answered true."""
        end, answered = time.monotonic() + seconds, 0
        while time.monotonic() < end:
            answered += self.ping()
            time.sleep(interval)
        return answered

    def close(self) -> None:
        """Disconnect without a goodbye, and remove the memory."""
        self._client.close()
        for cache in self._own_caches:
            cache.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def replace_memory(self, caches: Sequence[SharedKvCache]) -> None:
        """Have other memory from now on, which stays the caller's to close."""
        for cache in self._own_caches:
            cache.close()
        self._caches = list(caches)

    def borrow_memory(self, other: Worker) -> None:
        """Have the very memory of another worker from now on."""
        self.replace_memory(other._caches)

    @staticmethod
    def _key(seed: int, chunks: int, purpose: str, worker_id: int | None = 0) -> CacheKey:
        tokens = [seed * 100_000 + position for position in range(chunks * CHUNK_TOKENS)]
        request = f"{purpose}-{seed}"
        return CacheKey(MODEL, 1, worker_id, tokens, 0, len(tokens), request)


class WorkerProcess:
    """The parent's side."""

    def __init__(
        self,
        url: str,
        instance_id: int,
        wrapper: Sequence[str] = (),
        module: str = "tests.fakes.worker_process",
    ) -> None:
        self.instance_id = instance_id
        command = [sys.executable, "-m", module, url, str(instance_id)]
        self.process = subprocess.Popen(
            [*wrapper, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        self.pid, segments = json.loads(self._read())
        self._files = [Path("/dev/shm") / name.lstrip("/") for name in segments]
        made_for_us(*(file.name.rpartition("_")[0] for file in self._files))

    def tell(self, command: str, *arguments: object) -> None:
        """Send a command without waiting for its result."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([command, *arguments]) + "\n")
        self.process.stdin.flush()

    def ask(self, command: str, *arguments: object) -> Any:  # noqa: ANN401  # JSON
        """Send a command and return its result; a worker's exception is raised here as text."""
        self.tell(command, *arguments)
        return self.result()

    def result(self) -> Any:  # noqa: ANN401  # JSON
        """Return the result of the oldest command that was told."""
        result = json.loads(self._read())
        if isinstance(result, dict) and "error" in result:
            raise WorkerFailed(result["error"])
        return result

    def _read(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"worker {self.instance_id} ended with {self.process.poll()}"
        return line

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the worker itself, which a wrapper is not."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL, wait, and remove the names of its memory, which nobody else will."""
        self.signal(signal.SIGKILL)
        self.process.wait(PATIENCE_SECONDS)
        self._remove_files()

    def _remove_files(self) -> None:
        for file in self._files:
            file.unlink(missing_ok=True)

    def close(self) -> None:
        """End it if it still runs; remove what a killed one left."""
        if self.process.poll() is None:
            self.signal(signal.SIGCONT)
            self.signal(signal.SIGKILL)
        self.process.wait(PATIENCE_SECONDS)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
        self._remove_files()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class WorkerFailed(AssertionError):
    """What a command raised in the worker."""


def serve(worker: Any, segments: Sequence[str]) -> None:  # noqa: ANN401  # whatever has commands
    """Answer commands until standard input ends; the child's side of any `WorkerProcess`."""
    # Not getpid: in a PID namespace of its own the parent knows it by the number in its /proc.
    pid = int(os.readlink("/proc/self"))  # noqa: PTH115
    print(json.dumps([pid, segments]), flush=True)  # noqa: T201
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        try:
            result = getattr(worker, command)(*arguments)
        except Exception as error:  # noqa: BLE001  # the parent raises it
            result = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(result), flush=True)  # noqa: T201
    worker.close()


def _main() -> None:
    url, instance_id = sys.argv[1:]
    worker = Worker(url, int(instance_id))
    serve(worker, worker.segments)


if __name__ == "__main__":
    _main()
