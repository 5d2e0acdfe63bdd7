"""The whole cache against a model: a load gives exactly what was stored under its key, or nothing.

Two workers whose memory the agent maps and two that copy themselves share one small L1. They store,
look up, load, fail half-way, vanish, thaw and come back in any order; L1 evicts and is cleared.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from lmcache_nodeagent.errors import LmcacheKubeError, NotRegistered, TransferOverdue
from lmcache_nodeagent.modules.calls import Call, Cancellation
from lmcache_nodeagent.protocol.messages import SlotContext
from lmcache_nodeagent.protocol.pickled_tensors import read_tensors, write_tensors
from tests.fakes.cache_world import (
    CHUNK_BYTES,
    COPYING_MODEL,
    MAPPED_MODEL,
    OBJECTS,
    STORE_AT,
    CacheWorld,
    Place,
    Promise,
    placed,
)
from tests.fakes.copying_engine import DTYPE, CopyingEngine
from tests.fakes.copying_engine import SHAPE as CHUNK_SHAPE
from tests.fakes.liveness_parts import close
from tests.fakes.module_bench import (
    CLOSE_CONFIRM,
    PIN_TTL,
    blocks,
)

AT_MOST = 2
"""Of what holds room of L1 at a time: without a bound it fills up and nothing happens any more."""

places = st.builds(
    lambda prompt, start, length, salt: (prompt, start, start + length, salt),
    st.integers(0, 1),
    st.sampled_from([0, 0, 1]),
    st.integers(1, 3),
    st.sampled_from(["", "", "salt"]),
)
workers = st.integers(0, 1)


@dataclass(eq=False)
class Handed:
    """Slots that a copying worker was told to write, or to read with the bytes that it saw."""

    place: Place
    request: str
    context: SlotContext
    seen: list[bytes] = field(default_factory=list)


class CacheMachine(RuleBasedStateMachine):
    """Drives the modules; every load is checked against all that was ever stored under its key."""

    def __init__(self) -> None:
        super().__init__()
        self.world = CacheWorld()
        self.writes: list[list[Handed]] = [[], []]
        self.reads: list[list[Handed]] = [[], []]
        self.frozen: list[tuple[CopyingEngine, list[Handed], list[Handed]]] = []

    @rule(mapped=st.booleans(), worker=workers, shorter=st.booleans())
    def load_what_was_promised(self, worker: int, *, mapped: bool, shorter: bool) -> None:
        """As engines do: what their look-up found, or the end of it."""
        model, request = self._names(worker, mapped=mapped)
        promise = self.world.promises.get((model, worker, request))
        if promise is None or not promise.chunks:
            return
        start, end = min(promise.chunks), max(promise.chunks) + 1
        start = end - 1 if shorter else start
        place = (promise.prompt, start, end, promise.salt)
        if mapped:
            self._load_as_promised(worker, place, request)
        else:
            self._prepare_as_promised(worker, place, request)

    # Workers whose memory the agent maps

    @rule(worker=workers, place=places, fate=st.sampled_from(["ok", "ok", "raises", "overdue"]))
    def store_mapped(self, worker: int, place: Place, fate: str) -> None:
        """Whole, or not at all; one that says yes can be loaded at once."""
        engine, request = self.world.mapped[worker], f"store-{next(self.world.numbers)}"
        contents = self.world.fresh(MAPPED_MODEL, place)
        for position, content in enumerate(contents, STORE_AT):
            self.world.put(engine, position, content)
        cancellation = Cancellation()
        if fate == "raises":
            self.world.bench.hooks.before_gather = _fail
        elif fate == "overdue":
            self.world.bench.hooks.before_gather = cancellation.cancel
        else:
            self.world.note(MAPPED_MODEL, place, contents)
        made = engine.key(model=MAPPED_MODEL, **placed(place, request))
        call = Call(engine.worker, cancellation=cancellation)
        ids = blocks(STORE_AT, len(contents))
        stored = False
        with suppress(ZeroDivisionError, TransferOverdue, NotRegistered):
            _, stored = self.world.bench.transfer.store(call, made, engine.instance_id, ids, b"")
        self.world.bench.hooks.before_gather = _nothing
        if stored:
            assert self.world.load_mapped(engine, place, request)

    @rule(worker=workers, place=places, known=st.booleans())
    def load_mapped(self, worker: int, place: Place, *, known: bool) -> None:
        """By a request that looked up, or by none that anybody knows."""
        self._load_as_promised(worker, place, f"mapped-{worker}" if known else "unknown")

    def _load_as_promised(self, worker: int, place: Place, request: str) -> None:
        engine = self.world.mapped[worker]
        promise = self.world.take_promise(MAPPED_MODEL, worker, request, place)
        found = self.world.load_mapped(engine, place, request)
        assert found or not promise or found is None

    @rule(worker=workers, reaped=st.booleans(), comes_back=st.sampled_from([True, True, False]))
    def mapped_worker_goes(self, worker: int, *, reaped: bool, comes_back: bool) -> None:
        """By itself or found dead; its memory is released."""
        engine = self.world.mapped[worker]
        if reaped:
            for entry in self.world.bench.transfer.reap_stale_instances(
                lambda entry: entry.instance_id == engine.instance_id
            ):
                self.world.bench.releaser.start(entry)
        else:
            engine.unregister()
        self.world.bench.threads.run_all()
        if comes_back:
            self.world.register_mapped(worker)

    @rule(worker=workers)
    def mapped_worker_comes(self, worker: int) -> None:
        """Again, or for the first time since it went."""
        self.world.register_mapped(worker)
        self.world.bench.threads.run_all()

    # Workers that copy themselves

    @rule(worker=workers, place=places)
    def prepare_store(self, worker: int, place: Place) -> None:
        """Be told where to write; nothing is to be seen of it yet."""
        engine, request = self.world.copying[worker], f"store-{next(self.world.numbers)}"
        if len(self.writes[worker]) == AT_MOST:
            return
        with suppress(NotRegistered):
            context = engine.prepare_store(model=COPYING_MODEL, **placed(place, request))
            if context.slots:
                self.writes[worker].append(Handed(place, request, context))

    @rule(worker=workers, data=st.data(), written=st.sampled_from(["all", "all", "some", "none"]))
    def commit_store(self, worker: int, data: st.DataObject, written: str) -> None:
        """Say that it is written, be it true or not."""
        if not self.writes[worker]:
            return
        handed = data.draw(st.sampled_from(self.writes[worker]))
        self.writes[worker].remove(handed)
        self._commit(worker, handed, written)

    def _commit(self, worker: int, handed: Handed, written: str) -> None:
        engine, place = self.world.copying[worker], handed.place
        slots, indices = handed.context.slots or [], handed.context.chunk_indices or []
        count = {"all": len(slots), "some": len(slots) // 2, "none": 0}[written]
        fresh = self.world.fresh(COPYING_MODEL, place)
        prompt, start, _, salt = place
        for slot, index in zip(slots[:count], indices, strict=False):
            engine.bytes_of(slot)[:] = fresh[index]
            self.world.stored[COPYING_MODEL, prompt, start + index, salt].add(fresh[index])
        done = False
        with suppress(LmcacheKubeError):
            done = engine.commit_store(model=COPYING_MODEL, **placed(place, handed.request))
        assert count == len(slots) or not done
        if done:
            assert self.world.load_copying(engine, place, handed.request)

    @rule(worker=workers, place=places)
    def store_copying(self, worker: int, place: Place) -> None:
        """From prepare to commit, by a worker that maps the pool."""
        self._map_again(worker)
        before = len(self.writes[worker])
        self.prepare_store(worker, place)
        for handed in self.writes[worker][before:]:
            self.writes[worker].remove(handed)
            self._commit(worker, handed, "all")

    def _map_again(self, worker: int) -> None:
        """Register anew: one that has sent bytes is taken for one that cannot map the pool."""
        engine = self.world.copying[worker]
        if self.world.is_registered(engine):
            engine.register(model_name=COPYING_MODEL)

    @rule(worker=workers, place=places)
    def send(self, worker: int, place: Place) -> None:
        """Store by message."""
        engine, request = self.world.copying[worker], f"send-{next(self.world.numbers)}"
        contents = self.world.fresh(COPYING_MODEL, place)
        chunks = [memoryview(content) for content in contents]
        payload = b"".join(write_tensors(DTYPE, CHUNK_SHAPE, chunks))
        assert [bytes(tensor.data) for tensor in read_tensors(payload, len(contents))] == contents
        self.world.note(COPYING_MODEL, place, contents)
        with suppress(LmcacheKubeError):
            if engine.commit_store(payload, model=COPYING_MODEL, **placed(place, request)):
                assert self.world.load_copying(engine, place, request)

    @rule(worker=workers, place=places, known=st.booleans())
    def prepare_retrieve(self, worker: int, place: Place, *, known: bool) -> None:
        """Be told where to read, and read at leisure: `chunks_in_use_do_not_change`."""
        unknown = f"unknown-{next(self.world.numbers)}"
        self._prepare_as_promised(worker, place, f"copying-{worker}" if known else unknown)

    def _prepare_as_promised(self, worker: int, place: Place, request: str) -> None:
        engine = self.world.copying[worker]
        if len(self.reads[worker]) == AT_MOST:
            return
        promise = self.world.take_promise(COPYING_MODEL, worker, request, place)
        try:
            reply = engine.prepare_retrieve(model=COPYING_MODEL, **placed(place, request))
        except NotRegistered:
            return
        assert reply.success or not promise
        if not reply.success:
            return
        if reply.data:
            tensors = read_tensors(reply.data, place[2] - place[1])
            self.world.check(COPYING_MODEL, place, [bytes(tensor.data) for tensor in tensors])
            return
        seen = self.world.bytes_of(engine, reply.context.slots or [])
        self.world.check(COPYING_MODEL, place, seen)
        self.reads[worker].append(Handed(place, request, reply.context, seen))

    @rule(worker=workers, data=st.data())
    def commit_retrieve(self, worker: int, data: st.DataObject) -> None:
        """Say that it is read."""
        if self.reads[worker]:
            handed = data.draw(st.sampled_from(self.reads[worker]))
            self.reads[worker].remove(handed)
            self.world.copying[worker].commit_retrieve(
                model=COPYING_MODEL, **placed(handed.place, handed.request)
            )

    @rule(worker=workers, reaped=st.booleans(), comes_back=st.sampled_from([True, True, False]))
    def copying_worker_goes(self, worker: int, *, reaped: bool, comes_back: bool) -> None:
        """What it was told stays its own while its process may live."""
        engine = self.world.copying[worker]
        if not self.world.is_registered(engine):
            return  # it has gone, and is frozen or dead
        if reaped:
            engine.reap()
        else:
            engine.unregister()
            self.world.bench.threads.run_all()
        left = CopyingEngine(self.world.bench, engine.instance_id, register=False)
        left.worker = engine.worker
        self.frozen.append((left, self.writes[worker], self.reads[worker]))
        self.writes[worker], self.reads[worker] = [], []
        if len(self.frozen) > AT_MOST:
            self._die(self.frozen[0])
        if comes_back:
            self.copying_worker_comes(worker)

    @rule(worker=workers)
    def copying_worker_comes(self, worker: int) -> None:
        """A new process under the same id; the old one has to have gone from the table before."""
        if not self.world.is_registered(self.world.copying[worker]):
            self.world.register_copying(worker)

    @rule(data=st.data())
    def a_frozen_worker_thaws(self, data: st.DataObject) -> None:
        """It writes where it was told to, long after everybody gave it up."""
        if self.frozen:
            engine, writes, _ = data.draw(st.sampled_from(self.frozen))
            for handed in writes:
                for slot in handed.context.slots or []:
                    engine.bytes_of(slot)[:] = b"\xdd" * CHUNK_BYTES

    @rule(data=st.data())
    def a_frozen_worker_dies(self, data: st.DataObject) -> None:
        """Its connection is closed: its slots are free after the close is confirmed."""
        if self.frozen:
            self._die(data.draw(st.sampled_from(self.frozen)))

    def _die(self, gone: tuple[CopyingEngine, list[Handed], list[Handed]]) -> None:
        self.frozen.remove(gone)
        close(gone[0].worker, self.world.bench.now())
        self.world.bench.now.advance(CLOSE_CONFIRM)
        self.world.bench.quarantine.sweep(self.world.bench.now())

    # Schedulers, and what happens to L1

    @rule(mapped=st.booleans(), worker=workers, place=places)
    def store_and_look_up(self, worker: int, place: Place, *, mapped: bool) -> None:
        """As a prompt that was served before comes back."""
        if mapped:
            self.store_mapped(worker, place, "ok")
        elif place[3]:
            self.send(worker, place)
        else:
            self.store_copying(worker, place)
        self.look_up(worker, place, mapped=mapped)

    @rule(mapped=st.booleans(), worker=workers, place=places)
    def look_up(self, worker: int, place: Place, *, mapped: bool) -> None:
        """What it finds can be loaded until its lease, its end, a forced clear."""
        model, request = self._names(worker, mapped=mapped)
        engine = self.world.mapped[worker] if mapped else self.world.copying[worker]
        prompt, _, end, salt = place
        hit = engine.lookup(model=model, **placed((prompt, 0, end, salt), request))
        self.world.promises[model, worker, request] = Promise(
            prompt, salt, set(range(hit)), self.world.bench.now() + PIN_TTL
        )

    @rule(mapped=st.booleans(), worker=workers, late=st.booleans())
    def end(self, worker: int, *, mapped: bool, late: bool) -> None:
        """Its pins go at once, or with the transfers that are under way."""
        model, request = self._names(worker, mapped=mapped)
        (self.world.mapped[worker] if mapped else self.world.copying[worker]).end(request)
        self.world.promises.pop((model, worker, request), None)
        if not late:
            self.world.bench.transfers_end()

    @rule(worker=workers)
    def others_fill_l1(self, worker: int) -> None:
        """With more than it has room for: whatever may go, goes."""
        for _ in range(OBJECTS // 3 + 1):
            self.store_mapped(worker, (0, 0, 3, f"other-{next(self.world.numbers)}"), "ok")

    @rule(force=st.booleans())
    def clear(self, *, force: bool) -> None:
        """Without force what was promised stays."""
        self.world.bench.store_.clear(force=force)
        if force:
            self.world.promises.clear()

    @rule(seconds=st.sampled_from([1.0, 100.0, 300.0, 700.0]))
    def time_passes(self, seconds: float) -> None:
        """Leases, sessions and reservations end."""
        self.world.bench.now.advance(seconds)
        self.world.bench.lookups.expire(self.world.bench.now())
        self.world.bench.quarantine.sweep(self.world.bench.now())

    @staticmethod
    def _names(worker: int, *, mapped: bool) -> tuple[str, str]:
        kind = "mapped" if mapped else "copying"
        return MAPPED_MODEL if mapped else COPYING_MODEL, f"{kind}-{worker}"

    @invariant()
    def chunks_in_use_do_not_change(self) -> None:
        """Readers that have not confirmed see what they saw, whatever became of the objects."""
        readers = [(self.world.copying[n], self.reads[n]) for n in range(2)]
        for engine, reads in [*readers, *((left, reads) for left, _, reads in self.frozen)]:
            for handed in reads:
                assert self.world.bytes_of(engine, handed.context.slots or []) == handed.seen

    @invariant()
    def promises_are_kept(self) -> None:
        """What a look-up found stays until it is loaded, or its lease, request or cache ends."""
        assert self.world.broken_promises() == []

    @invariant()
    def the_books_are_right(self) -> None:
        """No pin was taken off twice, no byte is counted twice."""
        stats = self.world.bench.store_.stats()
        assert stats.excess_unpins_total == 0
        assert stats.used_bytes <= stats.capacity_bytes

    def teardown(self) -> None:
        """When everybody has gone nothing is pinned or reserved; a clear leaves nothing."""
        for worker in range(2):
            self.mapped_worker_goes(worker, reaped=True, comes_back=False)
            self.copying_worker_goes(worker, reaped=True, comes_back=False)
        while self.frozen:
            engine, _, _ = self.frozen.pop()
            close(engine.worker, self.world.bench.now())
        self.world.bench.transfers_end()
        self.time_passes(700.0)
        stats = self.world.bench.store_.stats()
        assert (stats.pinned_bytes, stats.staging_bytes, stats.open_reservations) == (0, 0, 0)
        assert (len(self.world.bench.sessions), len(self.world.bench.quarantine)) == (0, 0)
        self.world.bench.store_.clear(force=False)
        assert self.world.bench.store_.stats().used_bytes == 0


def _nothing() -> None:
    pass


def _fail() -> None:
    raise ZeroDivisionError


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=120, stateful_step_count=100, deadline=None)
