"""The modules of one agent around a small L1, without threads, sockets or real memory.

Chunks have 16 tokens and blocks 4; a worker has 8 chunks' worth of blocks beside the null block 0.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from lmcache_nodeagent.events import Event
from lmcache_nodeagent.hashing import ChunkHasher
from lmcache_nodeagent.ids import InstanceId
from lmcache_nodeagent.liveness.evidence import Connection
from lmcache_nodeagent.liveness.journal import Journal
from lmcache_nodeagent.liveness.reaped_lately import ReapedLately
from lmcache_nodeagent.liveness.release import Releaser
from lmcache_nodeagent.modules.absent_pings import AbsentPings
from lmcache_nodeagent.modules.calls import Call
from lmcache_nodeagent.modules.chunk_copies import ChunkCopies
from lmcache_nodeagent.modules.engine_driven_transfer import EngineDrivenTransferModule
from lmcache_nodeagent.modules.instance_holder import HolderParts
from lmcache_nodeagent.modules.kv_events import KvEventModule, TokenBindings
from lmcache_nodeagent.modules.layouts import LayoutRegistry
from lmcache_nodeagent.modules.lmcache_driven_transfer import LMCacheDrivenTransferModule
from lmcache_nodeagent.modules.lookup import LookupModule
from lmcache_nodeagent.modules.pickled_transfer import PickledTransfer
from lmcache_nodeagent.modules.shared_pool_transfer import SharedPoolTransfer
from lmcache_nodeagent.modules.slot_quarantine import SlotQuarantine
from lmcache_nodeagent.protocol.messages import (
    CacheKey,
    EngineGroupInfo,
    EngineType,
    LayoutHints,
    SharedPoolInfo,
    TensorDescriptor,
)
from lmcache_nodeagent.sessions import SessionTable
from lmcache_nodeagent.storage.allocator import ALIGNMENT_BYTES
from lmcache_nodeagent.storage.changes import ChangeLog
from lmcache_nodeagent.storage.eviction import LruPolicy
from lmcache_nodeagent.storage.objects import L1Store
from tests.fakes.liveness_parts import FakeClock, ThreadsByHand, connection
from tests.fakes.paged_memory import kv_tensor
from tests.fakes.stub_context import StubHooks, StubOpener

MODEL = "demo/model"
CHUNK, BLOCK, CHUNKS = 16, 4, 8
PER_CHUNK = CHUNK // BLOCK
SHAPE = [2, CHUNKS * PER_CHUNK + 1, BLOCK, 1, 4]

SESSION_TTL, PIN_TTL = 600.0, 300.0
CLOSE_CONFIRM, PATIENCE = 10.0, 600.0


def tokens(prompt: int = 0, chunks: int = CHUNKS) -> list[int]:
    """The tokens of a prompt; prompts differ in every token."""
    return [prompt * 1000 + position for position in range(chunks * CHUNK)]


def blocks(first: int = 0, chunks: int = CHUNKS) -> list[list[int]]:
    """Block ids of `chunks` chunks from chunk `first` of the worker's memory on."""
    return [list(range(1 + first * PER_CHUNK, 1 + (first + chunks) * PER_CHUNK))]


def key(
    *,
    prompt: int = 0,
    start: int = 0,
    end: int = CHUNKS,
    request: str = "r1",
    rank: int | None = 0,
    world: int = 1,
    readers: int = 1,
    salt: str = "",
    model: str = MODEL,
) -> CacheKey:
    """A key over chunks [start, end) of a prompt."""
    return CacheKey(
        model_name=model,
        world_size=world,
        worker_id=rank,
        token_ids=tokens(prompt),
        start=start * CHUNK,
        end=end * CHUNK,
        request_id=request,
        cache_salt=salt,
        num_kv_readers=readers,
    )


class ModuleBench:
    """Everything that serves transfers and look-ups.

    `after` holds what waits for transfers, `lost` the stores that will not arrive.
    """

    def __init__(
        self,
        objects: int = 64,
        *,
        shm: bool = True,
        max_message_bytes: int = 1 << 20,
        log_size: int = 64,
    ) -> None:
        self.now = FakeClock(1000.0)
        self.facts: list[Event] = []
        self.hooks = StubHooks()
        self.opener = StubOpener(self.hooks)
        self.threads = ThreadsByHand()
        self.after: list[Callable[[], None]] = []
        self.lost: list[tuple[InstanceId, Connection]] = []
        self.region = memoryview(bytearray(objects * ALIGNMENT_BYTES))
        self.store_ = L1Store(
            self.region,
            LruPolicy(trigger_ratio=1.0),
            now=self.now,
            changes=ChangeLog(log_size),
        )
        self.bindings = TokenBindings(log_size, CHUNK)
        self.kv_events = KvEventModule(self.store_, self.bindings, self.facts.append)
        self.sessions = SessionTable(SESSION_TTL, PIN_TTL, self.now)
        self.layouts = LayoutRegistry()
        self.absent = AbsentPings()
        self.journal, self.reaped_lately = Journal("boot"), ReapedLately()
        self.wall = FakeClock(1_800_000_000.0)
        hasher = ChunkHasher(CHUNK)
        publish = self.facts.append
        self.lookups = LookupModule(
            self.store_, self.sessions, self.layouts, hasher, self.after.append, publish, self.now
        )
        self.releaser = Releaser(
            self.threads,
            publish,
            self.now,
            self.drop_instance_state,
            30.0,
            lambda: None,
        )
        copies = ChunkCopies(
            self.store_,
            self.sessions,
            self.layouts,
            hasher,
            0,
            publish,
            self.now,
            self.bindings,
        )
        self.holder = HolderParts(
            self.layouts,
            self.releaser,
            self.absent,
            self.reaped_lately,
            itertools.count(1),
            publish,
            self.now,
            self.wall,
        )
        self.transfer = LMCacheDrivenTransferModule(self.holder, self.opener, copies, CHUNK)
        self.quarantine = SlotQuarantine(
            self.store_, lambda: CLOSE_CONFIRM, PATIENCE, publish, self.now
        )
        pool = SharedPoolInfo("pool", len(self.region)) if shm else SharedPoolInfo()
        self.engine_driven = EngineDrivenTransferModule(
            self.holder,
            pool,
            SharedPoolTransfer(self.store_, self.quarantine, publish, self.now),
            PickledTransfer(self.store_, max_message_bytes, publish, self.now),
            self.quarantine,
            self.store_,
            self.sessions,
            hasher,
            copies.give_back_share,
            self.bindings,
            lambda instance_id, link: self.lost.append((instance_id, link)),
        )
        self.lookups.longest_hit = self.engine_driven.longest_hit
        self.transfer.rivals = (self.engine_driven,)
        self.engine_driven.rivals = (self.transfer,)

    def drop_instance_state(self, instance_id: InstanceId) -> None:
        """Tell the holders of instance state."""
        self.transfer.drop_instance_state(instance_id)
        self.engine_driven.drop_instance_state(instance_id)

    def pins(self) -> int:
        """Objects that somebody has pinned; and never were more pins taken off than there were."""
        assert self.store_.stats().excess_unpins_total == 0
        return self.store_.stats().pinned_objects

    def transfers_end(self) -> None:
        """Do what waited for the transfers under way."""
        after, self.after[:] = list(self.after), []
        for callback in after:
            callback()


class Engine:
    """One engine: a scheduler and one worker, each with a connection of its own."""

    def __init__(
        self,
        bench: ModuleBench,
        number: int = 1,
        *,
        rank: int = 0,
        world: int = 1,
        address: str = "10.0.0.1",
        register: bool = True,
    ) -> None:
        self.bench, self.rank, self.world = bench, rank, world
        self.instance_id = InstanceId(number)
        self.worker = connection(address)
        self.scheduler = connection(address)
        self.segment = f"/lmcache_kv_{number}_0"
        if register:
            self.register()
            self.fill()

    @property
    def memory(self) -> bytearray:
        """The worker's paged KV memory."""
        return self.bench.opener.memory[self.segment]

    def fill(self, seed: int = 0) -> None:
        """Write bytes that differ from place to place, worker to worker and seed to seed."""
        number = self.instance_id * 37 + seed * 101
        self.memory[:] = bytes(
            (at * 31 + (at >> 8) * 7 + number) % 251 for at in range(len(self.memory))
        )

    def register(
        self,
        tensors: Sequence[TensorDescriptor] = (),
        groups: Sequence[EngineGroupInfo] = (),
        by: Connection | None = None,
        model: str = MODEL,
    ) -> None:
        """Register; one tensor of the usual shape unless told otherwise."""
        self.bench.transfer.register_kv_cache(
            Call(by or self.worker),
            self.instance_id,
            tensors or [kv_tensor(self.segment, SHAPE, dtype="float16")],
            model,
            self.world,
            EngineType.VLLM,
            LayoutHints(kv_layout="NHD"),
            groups,
        )

    def key(self, **changes: object) -> CacheKey:
        """A key of this worker."""
        return key(**{"rank": self.rank, "world": self.world, **changes})  # type: ignore[arg-type]  # as of `key`

    def store(self, ids: list[list[int]] | None = None, **changes: object) -> bool:
        """Store from blocks that lie as the chunks do, unless told otherwise."""
        made = self.key(**changes)
        first, last = made.start // CHUNK, made.end // CHUNK
        ids = blocks(first, last - first) if ids is None else ids
        event, done = self.bench.transfer.store(
            Call(self.worker), made, self.instance_id, ids, b"event"
        )
        assert event == b""
        return done

    def retrieve(
        self, ids: list[list[int]] | None = None, skip: int = 0, **changes: object
    ) -> bool:
        """Retrieve into blocks that lie as the chunks do, unless told otherwise."""
        made = self.key(**changes)
        first, last = made.start // CHUNK, made.end // CHUNK
        ids = blocks(first, last - first) if ids is None else ids
        event, done = self.bench.transfer.retrieve(
            Call(self.worker), made, self.instance_id, ids, b"event", skip
        )
        assert event == b""
        return done

    def lookup(self, by: Connection | None = None, **changes: object) -> int:
        """Look up and ask for the status, as the scheduler does."""
        call = Call(by or self.scheduler)
        made = self.key(**{"rank": None, **changes})
        self.bench.lookups.lookup(call, made, self.world)
        hit = self.bench.lookups.query_prefetch_status(call, made.request_id)
        assert hit is not None, "nothing runs beside it"
        return hit

    def free(self, by: Connection | None = None, **changes: object) -> None:
        """Give back locks."""
        made = self.key(**{"rank": None, **changes})
        self.bench.lookups.free_lookup_locks(Call(by or self.scheduler), made, self.world)

    def end(self, request: str = "r1", by: Connection | None = None) -> None:
        """End the session."""
        self.bench.lookups.end_session(Call(by or self.scheduler), request)

    def unregister(self, by: Connection | None = None) -> object:
        """Say goodbye; the memory is released when the bench's threads run."""
        return self.bench.transfer.unregister_kv_cache(Call(by or self.worker), self.instance_id)
