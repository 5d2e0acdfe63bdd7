"""Engine-driven transfer from the worker's side: the calls, and the shared pool.

The pool is mapped with `os` and `mmap`: Python's `SharedMemory` would have its resource tracker
remove the server's segment when this process exits.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from lmcache_worker.client import WorkerClient
from lmcache_worker.shared_memory import SHM_DIRECTORY
from lmcache_worker.wire import BadReply, CacheKey, ChunkDescription, PoolSlot, StorePlan


class MappedPool:
    """The server's L1, mapped. Thread: any; the slots say who may touch what."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory

    @classmethod
    def open(cls, name: str, size_bytes: int, directory: Path = SHM_DIRECTORY) -> Self:
        """Map the pool that a registration named.

        Raises:
            OSError: There is no such pool here, or it may not be opened.
        """
        descriptor = os.open(directory / name.lstrip("/"), os.O_RDWR | os.O_CLOEXEC)
        try:
            return cls(mmap.mmap(descriptor, size_bytes))
        finally:
            os.close(descriptor)

    def slot(self, slot: PoolSlot) -> memoryview:
        """The bytes of a slot."""
        return memoryview(self._memory)[slot.offset : slot.offset + slot.length]

    def close(self) -> None:
        """Unmap; views of slots must be gone."""
        self._memory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class EngineDrivenClient:
    """The calls of one engine-driven worker. Thread: that of its client."""

    def __init__(self, client: WorkerClient, instance_id: int) -> None:
        self._client = client
        self._instance_id = instance_id

    def register(self, description: ChunkDescription) -> tuple[str, int]:
        """Register; return the pool's name and size, an empty name where there is none."""
        match self._client.call("register_kv_cache_engine_driven_context", description):
            case {"shm_name": str(name), "pool_size": int(size)}:
                return name, size
        raise BadReply("a registration's reply without a pool")

    def unregister(self) -> None:
        """Say goodbye."""
        self._client.call("unregister_kv_cache_engine_driven_context", self._instance_id)

    def prepare_store(self, key: CacheKey) -> StorePlan | None:
        """Ask where to write the chunks of [start, end) that are missing."""
        reply = self._client.call("prepare_store", key, self._instance_id)
        match reply:
            case {"context": {"slots": list(slots), "chunk_indices": list(indices)}}:
                return StorePlan([_slot(slot) for slot in slots], indices)
            case {"context": {}}:
                return None
        raise BadReply(f"expected a context, got {reply!r}")

    def commit_store(self, key: CacheKey, data: bytes = b"") -> bool:
        """Say that the slots are written, or send pickled tensors; True if all is stored."""
        return self._client.call("commit_store", key, self._instance_id, data) is True

    def prepare_retrieve(self, key: CacheKey) -> Sequence[PoolSlot] | bytes | None:
        """Ask where the chunks are; return their slots, or pickled tensors, or None for a miss."""
        reply = self._client.call("prepare_retrieve", key, self._instance_id)
        match reply:
            case {"success": False}:
                return None
            case {"success": True, "data": bytes(data), "context": {"slots": list(slots)}}:
                return [_slot(slot) for slot in slots]
            case {"success": True, "data": bytes(data)}:
                return data
        raise BadReply(f"expected chunks, got {reply!r}")

    def commit_retrieve(self, key: CacheKey) -> None:
        """Say that the chunks are read, or were not there."""
        self._client.call("commit_retrieve", key, self._instance_id)


def _slot(value: Mapping[str, object]) -> PoolSlot:
    match value:
        case {"offset": int(offset), "length": int(length), "shape": shape, "dtype": str(dtype)}:
            if isinstance(shape, list):
                return PoolSlot(offset, length, shape, dtype)
    raise BadReply(f"expected a slot, got {value!r}")
