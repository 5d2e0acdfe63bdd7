"""A real worker process that copies by itself: `python -m tests.fakes.copying_worker URL ID`.

Commanded like `worker_process`, whose parent side starts it. A prompt's chunks have bytes that
follow from the prompt, so that whoever reads them can check them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from lmcache_worker.client import WorkerClient
from lmcache_worker.engine_driven import EngineDrivenClient, MappedPool
from lmcache_worker.wire import CacheKey, ChunkDescription, PoolSlot, StorePlan
from tests.fakes.worker_process import CHUNK_TOKENS, MODEL, WorkerProcess, serve
from tests.polling import PATIENCE_SECONDS

BLOCK_TOKENS, LAYERS, HIDDEN = 16, 2, 16
CHUNK_BYTES = 2 * LAYERS * CHUNK_TOKENS * HIDDEN * 2
FIRST_ID = 1 << 40
"""vLLM's workers draw large ids."""


def content(prompt: int, chunk: int) -> bytes:
    """The bytes of one chunk of a prompt."""
    seed = prompt * 257 + chunk * 31 + 7
    return bytes((seed * 11 + at * 13 + (at >> 8) * 5) % 251 for at in range(4096)) * (
        CHUNK_BYTES // 4096
    )


class CopyingWorker:
    """One client, the pool it maps, and what it is told to do."""

    def __init__(self, url: str, instance_id: int) -> None:
        self._instance_id = instance_id
        self._client = WorkerClient(url, timeout_seconds=PATIENCE_SECONDS)
        self._client.__enter__()
        self._transfers = EngineDrivenClient(self._client, instance_id)
        self._pool: MappedPool | None = None
        self._plans: dict[int, StorePlan | None] = {}
        self._reading: list[PoolSlot] = []

    def register(self) -> bool:
        """Register and map the pool; False if none was offered."""
        name, size = self._transfers.register(
            ChunkDescription(
                instance_id=self._instance_id,
                model_name=MODEL,
                world_size=1,
                block_size=BLOCK_TOKENS,
                num_layers=LAYERS,
                hidden_dim_size=HIDDEN,
                dtype_str="float16",
                use_mla=False,
                num_physical_slots=CHUNK_TOKENS,
            )
        )
        self._pool = MappedPool.open(name, size) if name else None
        return self._pool is not None

    def unregister(self) -> None:
        """Say goodbye."""
        self._transfers.unregister()

    def ping(self) -> bool:
        """Give a sign of life."""
        return self._client.ping(self._instance_id)

    def prepare(self, prompt: int, chunks: int = 2) -> list[int] | None:
        """Ask where to write; return the chunks that are missing, None if nothing was said."""
        plan = self._plans[prompt] = self._transfers.prepare_store(self._key(prompt, chunks))
        return None if plan is None else list(plan.chunk_indices)

    def write(self, prompt: int, much: str = "all") -> None:
        """Write to where it was told to: `all` of each slot, or the first `half`."""
        plan = self._plans[prompt]
        assert plan is not None
        assert self._pool is not None
        for slot, index in zip(plan.slots, plan.chunk_indices, strict=True):
            end = slot.length // 2 if much == "half" else slot.length
            self._pool.slot(slot)[:end] = content(prompt, index)[:end]

    def commit(self, prompt: int, chunks: int = 2) -> bool:
        """Say that it is written."""
        return self._transfers.commit_store(self._key(prompt, chunks))

    def store(self, prompt: int, chunks: int = 2) -> bool:
        """Store as stock workers do."""
        missing = self.prepare(prompt, chunks)
        if missing == []:
            return True
        if missing is not None:
            self.write(prompt)
        return self.commit(prompt, chunks)

    def lookup(self, prompt: int, chunks: int = 2) -> int:
        """Return how many chunks are cached; they are pinned until the session ends."""
        key = self._key(prompt, chunks, worker_id=None)
        found = self._client.hit_chunks(key)
        self._client.end_session(key.request_id)
        return found

    def start_reading(self, prompt: int, chunks: int = 2) -> bool:
        """Ask where to read, and read nothing yet; False for a miss."""
        found = self._transfers.prepare_retrieve(self._key(prompt, chunks))
        self._reading = [] if found is None or isinstance(found, bytes) else list(found)
        return found is not None

    def finish_reading(self, prompt: int, chunks: int = 2) -> bool:
        """Read what was told, and say so; True if it is what the prompt has."""
        assert self._pool is not None
        found = [bytes(self._pool.slot(slot)) for slot in self._reading]
        self._transfers.commit_retrieve(self._key(prompt, chunks))
        return found == [content(prompt, index) for index in range(chunks)]

    def load(self, prompt: int, chunks: int = 2) -> bool | None:
        """Load as stock workers do: None for a miss, True for the right bytes."""
        if self.start_reading(prompt, chunks):
            return self.finish_reading(prompt, chunks)
        self._transfers.commit_retrieve(self._key(prompt, chunks))
        return None

    def close(self) -> None:
        """Disconnect without a goodbye."""
        self._client.close()
        if self._pool is not None:
            self._pool.close()

    @staticmethod
    def _key(prompt: int, chunks: int, worker_id: int | None = 0) -> CacheKey:
        tokens = [prompt * 100_000 + position for position in range(chunks * CHUNK_TOKENS)]
        return CacheKey(MODEL, 1, worker_id, tokens, 0, len(tokens), f"request-{prompt}")


class CopyingWorkerProcess(WorkerProcess):
    """The parent's side."""

    def __init__(self, url: str, number: int = 0, wrapper: Sequence[str] = ()) -> None:
        super().__init__(url, FIRST_ID + number, wrapper, "tests.fakes.copying_worker")


def _main() -> None:
    url, instance_id = sys.argv[1:]
    serve(CopyingWorker(url, int(instance_id)), [])


if __name__ == "__main__":
    _main()
