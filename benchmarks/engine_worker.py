"""Workers that copy by themselves: one maps the pool, one sends and gets pickled tensors."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import msgspec
import numpy as np
import numpy.typing as npt

from benchmarks.dealer import Dealer
from benchmarks.models import CHUNK_TOKENS, Model
from benchmarks.turns import FORCE
from benchmarks.ways import RefusedTransfer
from benchmarks.worker import Prompts, wait_visible
from lmcache_nodeagent.protocol.pickled_tensors import read_tensors, write_tensors
from lmcache_worker.engine_driven import MappedPool
from lmcache_worker.wire import CacheKey, ChunkDescription, PoolSlot

_INSTANCE_ID = 7_700_000_000_300

_Bytes = npt.NDArray[np.uint8]


class _Slot(msgspec.Struct):
    offset: int
    length: int


class _Context(msgspec.Struct):
    slots: list[_Slot] | None = None


class _Prepared(msgspec.Struct):
    """A reply to a prepare; `data` is a view of the message."""

    context: _Context
    success: bool = True
    data: memoryview = memoryview(b"")


_prepared = msgspec.msgpack.Decoder(_Prepared)


@dataclass(frozen=True, slots=True)
class Asked:
    """What a store or a retrieve took: its requests, and the worker's own copy between them."""

    seconds: float
    copy_seconds: float = 0.0


class _EngineWorker:
    """Chunks of a model in private memory, and the requests around them."""

    def __init__(self, dealer: Dealer, model: Model, chunks: int) -> None:
        self._dealer = dealer
        self._model = model
        self._chunks = chunks
        self.nbytes = chunks * model.chunk_bytes
        shape = (chunks, model.chunk_bytes)
        self._source: _Bytes = (np.arange(self.nbytes, dtype=np.uint32) % 251).astype(np.uint8)
        self._source = self._source.reshape(shape)
        self._instance_id = _INSTANCE_ID + len(model.layers)
        layers, (planes, _, _, heads, head_size) = len(model.layers), model.layers[0].shape
        self._shape = [planes, layers, CHUNK_TOKENS, heads * head_size]
        description = ChunkDescription(
            instance_id=self._instance_id,
            model_name=model.name,
            world_size=1,
            block_size=16,
            num_layers=layers,
            hidden_dim_size=heads * head_size,
            dtype_str="bfloat16",
            use_mla=False,
            num_physical_slots=CHUNK_TOKENS,
        )
        self._offered = dealer.call("register_kv_cache_engine_driven_context", description)

    def check(self, prompts: Prompts) -> None:
        """Store and retrieve once, and compare the bytes.

        Raises:
            RefusedTransfer: They are not the same.
        """
        self.transfer(prompts)
        if not np.array_equal(self._source, self._loaded()):
            raise RefusedTransfer("what comes back is not what was stored")

    def transfer(self, prompts: Prompts) -> tuple[Asked, Asked]:
        """Store a new prompt, retrieve it, and empty the cache."""
        tokens = prompts.tokens(self._chunks * CHUNK_TOKENS)
        storing, loading = (self._key(tokens, prompts.request_id()) for _ in range(2))
        stored = self._store(storing)
        wait_visible(self._dealer, self._key(tokens, loading.request_id, shard=None))
        retrieved = self._retrieve(loading)
        for key in (storing, loading):
            self._dealer.call("end_session", key.request_id)
        self._dealer.call("clear", FORCE)
        return stored, retrieved

    def _store(self, key: CacheKey) -> Asked:
        raise NotImplementedError

    def _retrieve(self, key: CacheKey) -> Asked:
        raise NotImplementedError

    def _loaded(self) -> _Bytes:
        """What the last retrieve brought, by chunk."""
        raise NotImplementedError

    def _key(self, tokens: Sequence[int], request_id: str, shard: int | None = 0) -> CacheKey:
        return CacheKey(self._model.name, 1, shard, tokens, 0, len(tokens), request_id)

    def _commit_seconds(self, operation: str, key: CacheKey, *data: bytes) -> float:
        frames = self._dealer.request(operation, key, self._instance_id, *data)
        seconds, reply = self._dealer.timed(frames)
        if bytes(reply) != b"\xc3":  # msgpack true
            raise RefusedTransfer(f"answers {operation} with false")
        return seconds

    def _prepare(self, operation: str, key: CacheKey) -> tuple[float, _Prepared]:
        frames = self._dealer.request(operation, key, self._instance_id)
        seconds, reply = self._dealer.timed(frames)
        prepared = _prepared.decode(reply)
        if not prepared.success:
            raise RefusedTransfer(f"answers {operation} without success")
        return seconds, prepared


class PickleWorker(_EngineWorker):
    """Its tensors are pickled before the clock runs, and not read before it has stopped."""

    def __init__(self, dealer: Dealer, model: Model, chunks: int) -> None:
        super().__init__(dealer, model, chunks)
        parts = [memoryview(chunk) for chunk in self._source]
        self._pickled = b"".join(write_tensors("bfloat16", self._shape, parts))
        self._reply = memoryview(b"")

    def _store(self, key: CacheKey) -> Asked:
        seconds, _ = self._prepare("prepare_store", key)
        return Asked(seconds + self._commit_seconds("commit_store", key, self._pickled))

    def _retrieve(self, key: CacheKey) -> Asked:
        self._reply = memoryview(b"")
        seconds, prepared = self._prepare("prepare_retrieve", key)
        self._reply = prepared.data
        return Asked(seconds + self._commit_seconds("commit_retrieve", key))

    def _loaded(self) -> _Bytes:
        tensors = read_tensors(self._reply, self._chunks)
        return np.stack([np.frombuffer(tensor.data, np.uint8) for tensor in tensors])


class PoolWorker(_EngineWorker):
    """Maps the pool, and copies as a worker would, with NumPy."""

    def __init__(self, dealer: Dealer, model: Model, chunks: int) -> None:
        super().__init__(dealer, model, chunks)
        match self._offered:
            case {"shm_name": str(name), "pool_size": int(size)} if name:
                self._pool = MappedPool.open(name, size)
            case _:
                raise RefusedTransfer("offers no pool")
        self._target: _Bytes = np.ones_like(self._source)

    def _store(self, key: CacheKey) -> Asked:
        seconds, prepared = self._prepare("prepare_store", key)
        copied = self._copy(prepared, lambda chunk, slot: np.copyto(slot, self._source[chunk]))
        return Asked(seconds + self._commit_seconds("commit_store", key, b""), copied)

    def _retrieve(self, key: CacheKey) -> Asked:
        seconds, prepared = self._prepare("prepare_retrieve", key)
        copied = self._copy(prepared, lambda chunk, slot: np.copyto(self._target[chunk], slot))
        return Asked(seconds + self._commit_seconds("commit_retrieve", key), copied)

    def _loaded(self) -> _Bytes:
        return self._target

    def _copy(self, prepared: _Prepared, copy: Callable[[int, _Bytes], None]) -> float:
        slots = prepared.context.slots or []
        if len(slots) != self._chunks:
            raise RefusedTransfer(f"gives {len(slots)} slots for {self._chunks} chunks")
        begin = time.perf_counter()
        for chunk, slot in enumerate(slots):
            place = PoolSlot(slot.offset, slot.length, self._shape, "bfloat16")
            copy(chunk, np.frombuffer(self._pool.slot(place), np.uint8))
        return time.perf_counter() - begin

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._pool.close()
