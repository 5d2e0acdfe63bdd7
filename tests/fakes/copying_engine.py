"""An engine whose worker copies by itself, around a `ModuleBench`: no memory but L1's own."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import msgspec

from lmcache_nodeagent.ids import InstanceId
from lmcache_nodeagent.liveness.evidence import Connection
from lmcache_nodeagent.modules.calls import Call
from lmcache_nodeagent.modules.engine_driven_entry import EngineDrivenContextEntry
from lmcache_nodeagent.protocol.messages import (
    CacheKey,
    EncodedReply,
    EngineDrivenRegistration,
    PoolSlot,
    PrepareRetrieveReply,
    SharedPoolInfo,
    SlotContext,
)
from lmcache_nodeagent.protocol.pickled_tensors import write_tensors
from tests.fakes.liveness_parts import connection
from tests.fakes.module_bench import BLOCK, CHUNK, MODEL, ModuleBench, key

SHAPE = (2, 1, CHUNK, 4)
DTYPE = "float16"
CHUNK_BYTES = 2 * CHUNK * 4 * 2
WORKER_NUMBER = 1 << 40
"""vLLM's workers draw large ids."""


@cache
def content(prompt: int, chunk: int) -> bytes:
    """The bytes of one chunk: each differs from all others in every place."""
    return bytes((at * 7 + prompt * 31 + chunk * 101 + 1) % 251 for at in range(CHUNK_BYTES))


class CopyingEngine:
    """One scheduler and one worker, each with a connection of its own."""

    def __init__(
        self,
        bench: ModuleBench,
        number: int = WORKER_NUMBER,
        *,
        rank: int = 0,
        world: int = 1,
        address: str = "10.0.0.1",
        register: bool = True,
    ) -> None:
        self.bench, self.rank, self.world = bench, rank, world
        self.instance_id = InstanceId(number)
        self.worker, self.scheduler = connection(address), connection(address)
        self.pool = SharedPoolInfo()
        if register:
            self.register()

    @property
    def entry(self) -> EngineDrivenContextEntry:
        """Its entry."""
        entries = self.bench.engine_driven.context_entries_snapshot()
        return next(entry for entry in entries if entry.instance_id == self.instance_id)

    def registration(self, **changes: object) -> EngineDrivenRegistration:
        """What it registers, but for `changes`."""
        fields: dict[str, object] = {
            "instance_id": self.instance_id,
            "model_name": MODEL,
            "world_size": self.world,
            "block_size": BLOCK,
            "num_layers": 1,
            "hidden_dim_size": 4,
            "dtype_str": DTYPE,
            "use_mla": False,
            "num_physical_slots": CHUNK,
        }
        return EngineDrivenRegistration(**{**fields, **changes})  # type: ignore[arg-type]  # of its fields

    def register(self, by: Connection | None = None, **changes: object) -> SharedPoolInfo:
        """Register; return where the pool is."""
        registration = self.registration(**changes)
        call = Call(by or self.worker)
        self.pool = self.bench.engine_driven.register_context(call, registration)
        return self.pool

    def call(self, by: Connection | None = None) -> Call:
        """A request as the router hands it on: with the entry that it found."""
        who = by or self.worker
        module = self.bench.engine_driven
        return Call(who, module.touch_instance(self.instance_id, who, ping=False))

    def key(self, **changes: object) -> CacheKey:
        """A key of this worker."""
        return key(**{"rank": self.rank, "world": self.world, **changes})  # type: ignore[arg-type]  # as of `key`

    def prepare_store(self, **changes: object) -> SlotContext:
        """Ask where to write."""
        made = self.key(**changes)
        return self.bench.engine_driven.prepare_store(self.call(), made, self.instance_id).context

    def commit_store(self, data: bytes = b"", **changes: object) -> bool:
        """Say that it is written, or send it."""
        made = self.key(**changes)
        return self.bench.engine_driven.commit_store(self.call(), made, self.instance_id, data)

    def write(self, context: SlotContext, prompt: int = 0, start: int = 0) -> None:
        """Write to the slots what the chunks have."""
        assert context.slots is not None
        assert context.chunk_indices is not None
        for slot, index in zip(context.slots, context.chunk_indices, strict=True):
            self.bytes_of(slot)[:] = content(prompt, start + index)

    def bytes_of(self, slot: PoolSlot) -> memoryview:
        """The slot, mapped."""
        return self.bench.region[slot.offset : slot.offset + slot.length]

    def store(self, *, prompt: int = 0, start: int = 0, end: int = 8, **changes: object) -> bool:
        """Store as stock workers do with a pool."""
        place: dict[str, Any] = {"prompt": prompt, "start": start, "end": end, **changes}
        context = self.prepare_store(**place)
        if context.slots is None:
            return self.commit_store(**place)
        if not context.slots:
            return True
        self.write(context, prompt, start)
        return self.commit_store(**place)

    def send(self, *, prompt: int = 0, start: int = 0, end: int = 8, **changes: object) -> bool:
        """Store as stock workers do without one."""
        place: dict[str, Any] = {"prompt": prompt, "start": start, "end": end, **changes}
        self.prepare_store(**place)
        return self.commit_store(self.pickled(prompt, range(start, end)), **place)

    @staticmethod
    def pickled(prompt: int, chunks: Sequence[int]) -> bytes:
        """The chunks as a payload."""
        contents = [memoryview(content(prompt, chunk)) for chunk in chunks]
        return b"".join(write_tensors(DTYPE, SHAPE, contents))

    def prepare_retrieve(self, **changes: object) -> PrepareRetrieveReply:
        """Ask where to read."""
        made = self.key(**changes)
        reply = self.bench.engine_driven.prepare_retrieve(self.call(), made, self.instance_id)
        if isinstance(reply, EncodedReply):
            decoder = msgspec.msgpack.Decoder(PrepareRetrieveReply)
            return decoder.decode(reply.document)
        return reply

    def commit_retrieve(self, **changes: object) -> bool:
        """Say that it is read."""
        made = self.key(**changes)
        return self.bench.engine_driven.commit_retrieve(self.call(), made, self.instance_id)

    def retrieve(self, **changes: object) -> list[bytes] | None:
        """Load through the pool: the bytes of the chunks, or None for a miss."""
        reply = self.prepare_retrieve(**changes)
        found = None
        if reply.success:
            assert reply.context.slots is not None
            found = [bytes(self.bytes_of(slot)) for slot in reply.context.slots]
        assert self.commit_retrieve(**changes)
        return found

    def lookup(self, **changes: object) -> int:
        """Look up and ask for the status, as the scheduler does."""
        call = Call(self.scheduler)
        made = self.key(**{"rank": None, **changes})
        self.bench.lookups.lookup(call, made, self.world)
        hit = self.bench.lookups.query_prefetch_status(call, made.request_id)
        assert hit is not None, "nothing runs beside it"
        return hit

    def end(self, request: str = "r1") -> None:
        """End the session."""
        self.bench.lookups.end_session(Call(self.scheduler), request)

    def unregister(self) -> object:
        """Say goodbye."""
        module = self.bench.engine_driven
        return module.unregister_context(Call(self.worker), self.instance_id)

    def reap(self) -> None:
        """Be found dead, and released."""
        condemned = self.bench.engine_driven.reap_stale_instances(
            lambda entry: entry.instance_id == self.instance_id
        )
        for entry in condemned:
            self.bench.releaser.start(entry)
        self.bench.threads.run_all()
