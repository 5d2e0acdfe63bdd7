"""The whole cache against a model: a load gives exactly what was stored under its key, or nothing.

Two workers whose memory the agent maps and two that copy themselves share one small L1. They store,
look up, load, fail half-way, vanish, thaw and come back in any order; L1 evicts and is cleared.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from lmcache_nodeagent.errors import LmcacheKubeError, NotRegistered, TransferOverdue
from lmcache_nodeagent.modules.calls import Call, Cancellation
from lmcache_nodeagent.protocol.messages import PoolSlot, SlotContext
from lmcache_nodeagent.protocol.pickled_tensors import read_tensors, write_tensors
from tests.fakes.copying_engine import DTYPE, CopyingEngine
from tests.fakes.copying_engine import SHAPE as CHUNK_SHAPE
from tests.fakes.liveness_parts import close, connection
from tests.fakes.module_bench import (
    CLOSE_CONFIRM,
    PER_CHUNK,
    PIN_TTL,
    SHAPE,
    Engine,
    ModuleBench,
    blocks,
)

OBJECTS = 14
AT_MOST = 2
"""Of what holds room of L1 at a time: without a bound it fills up and nothing happens any more."""

MAPPED_MODEL, COPYING_MODEL = "demo/mapped", "demo/copying"
BLOCK_BYTES = 32
PLANE_BYTES = SHAPE[1] * BLOCK_BYTES
CHUNK_BYTES = 2 * PER_CHUNK * BLOCK_BYTES
STORE_AT, LOAD_AT = 0, 4
"""Where in a mapped worker's memory, in chunks."""

Place = tuple[int, int, int, str]
"""Prompt, first and last chunk, salt."""

places = st.builds(
    lambda prompt, start, length, salt: (prompt, start, start + length, salt),
    st.integers(0, 1),
    st.sampled_from([0, 0, 1]),
    st.integers(1, 3),
    st.sampled_from(["", "", "salt"]),
)
workers = st.integers(0, 1)


def _in(place: Place, request: str) -> dict[str, Any]:
    """The place as arguments of the engines' methods."""
    prompt, start, end, salt = place
    return {"prompt": prompt, "start": start, "end": end, "salt": salt, "request": request}


@dataclass(eq=False)
class Promise:
    """What a look-up found and nobody has loaded, freed or ended yet."""

    prompt: int
    salt: str
    chunks: set[int]
    until: float

    def covers(self, place: Place, now: float) -> bool:
        """Whether a load of the place cannot miss."""
        prompt, start, end, salt = place
        same = (prompt, salt) == (self.prompt, self.salt)
        return same and now < self.until and set(range(start, end)) <= self.chunks


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
        self.bench = ModuleBench(objects=OBJECTS)
        self.numbers = itertools.count(1)
        self.mapped = [
            Engine(self.bench, n + 1, address=f"10.0.0.{n}", register=False) for n in range(2)
        ]
        self.copying = [
            CopyingEngine(self.bench, (1 << 40) + n, address=f"10.0.1.{n}", register=False)
            for n in range(2)
        ]
        for worker in range(2):
            self._register_mapped(worker)
            self._register_copying(worker)
        # What was stored: whole chunks by (model, prompt, chunk, salt).
        self.stored: defaultdict[tuple[str, int, int, str], set[bytes]] = defaultdict(set)
        self.promises: dict[tuple[str, int, str], Promise] = {}
        self.writes: list[list[Handed]] = [[], []]
        self.reads: list[list[Handed]] = [[], []]
        self.frozen: list[tuple[CopyingEngine, list[Handed], list[Handed]]] = []

    def _register_mapped(self, worker: int) -> None:
        engine = self.mapped[worker]
        engine.worker = connection(engine.worker.peer.text)
        engine.register(model=MAPPED_MODEL)

    def _register_copying(self, worker: int) -> None:
        engine = self.copying[worker]
        engine.worker = connection(engine.worker.peer.text)
        engine.register(model_name=COPYING_MODEL)

    @rule(mapped=st.booleans(), worker=workers, shorter=st.booleans())
    def load_what_was_promised(self, worker: int, *, mapped: bool, shorter: bool) -> None:
        """As engines do: what their look-up found, or the end of it."""
        model, request = self._names(worker, mapped=mapped)
        promise = self.promises.get((model, worker, request))
        if promise is None or not promise.chunks:
            return
        start, end = min(promise.chunks), max(promise.chunks) + 1
        start = end - 1 if shorter else start
        place = (promise.prompt, start, end, promise.salt)
        if mapped:
            self._load_as_promised(worker, place, request)
        else:
            self._prepare_as_promised(worker, place, request)

    # What workers have in their memory

    def _fresh(self, model: str, place: Place, count: int | None = None) -> list[bytes]:
        """New bytes for each chunk: no two stores, chunks or tenants have the same."""
        prompt, start, end, salt = place
        made = []
        for chunk in range(start, end)[:count]:
            text = f"{model} {prompt} {chunk} {salt} {next(self.numbers)}".encode()
            made.append(hashlib.shake_128(text).digest(CHUNK_BYTES))
        return made

    def _note(self, model: str, place: Place, contents: list[bytes]) -> None:
        prompt, start, _, salt = place
        for chunk, content in enumerate(contents, start):
            self.stored[model, prompt, chunk, salt].add(content)

    def _check(self, model: str, place: Place, contents: list[bytes]) -> None:
        prompt, start, end, salt = place
        assert len(contents) == end - start
        for chunk, content in enumerate(contents, start):
            assert content in self.stored[model, prompt, chunk, salt]

    @staticmethod
    def _parts(position: int) -> list[slice]:
        """Where a chunk lies in a mapped worker's memory: one part for each plane."""
        first = (1 + position * PER_CHUNK) * BLOCK_BYTES
        size = PER_CHUNK * BLOCK_BYTES
        return [
            slice(plane * PLANE_BYTES + first, plane * PLANE_BYTES + first + size)
            for plane in (0, 1)
        ]

    def _put(self, engine: Engine, position: int, content: bytes) -> None:
        half = CHUNK_BYTES // 2
        for part, data in zip(self._parts(position), (content[:half], content[half:]), strict=True):
            engine.memory[part] = data

    def _get(self, engine: Engine, position: int) -> bytes:
        return b"".join(bytes(engine.memory[part]) for part in self._parts(position))

    # Workers whose memory the agent maps

    @rule(worker=workers, place=places, fate=st.sampled_from(["ok", "ok", "raises", "overdue"]))
    def store_mapped(self, worker: int, place: Place, fate: str) -> None:
        """Whole, or not at all; one that says yes can be loaded at once."""
        engine, request = self.mapped[worker], f"store-{next(self.numbers)}"
        contents = self._fresh(MAPPED_MODEL, place)
        for position, content in enumerate(contents, STORE_AT):
            self._put(engine, position, content)
        cancellation = Cancellation()
        if fate == "raises":
            self.bench.hooks.before_gather = _fail
        elif fate == "overdue":
            self.bench.hooks.before_gather = cancellation.cancel
        else:
            self._note(MAPPED_MODEL, place, contents)
        made = engine.key(model=MAPPED_MODEL, **_in(place, request))
        call = Call(engine.worker, cancellation=cancellation)
        ids = blocks(STORE_AT, len(contents))
        stored = False
        with suppress(ZeroDivisionError, TransferOverdue, NotRegistered):
            _, stored = self.bench.transfer.store(call, made, engine.instance_id, ids, b"")
        self.bench.hooks.before_gather = _nothing
        if stored:
            assert self._load_mapped(engine, place, request)

    @rule(worker=workers, place=places, known=st.booleans())
    def load_mapped(self, worker: int, place: Place, *, known: bool) -> None:
        """By a request that looked up, or by none that anybody knows."""
        self._load_as_promised(worker, place, f"mapped-{worker}" if known else "unknown")

    def _load_as_promised(self, worker: int, place: Place, request: str) -> None:
        engine = self.mapped[worker]
        promise = self._take_promise(MAPPED_MODEL, worker, request, place)
        found = self._load_mapped(engine, place, request)
        assert found or not promise or found is None

    def _load_mapped(self, engine: Engine, place: Place, request: str) -> bool | None:
        """Load and check; None for a worker that is not here."""
        chunks = place[2] - place[1]
        for position in range(LOAD_AT, LOAD_AT + chunks):
            self._put(engine, position, b"\xee" * CHUNK_BYTES)
        try:
            found = engine.retrieve(
                blocks(LOAD_AT, chunks), model=MAPPED_MODEL, **_in(place, request)
            )
        except NotRegistered:
            return None
        if found:
            loaded = [self._get(engine, LOAD_AT + chunk) for chunk in range(chunks)]
            self._check(MAPPED_MODEL, place, loaded)
        return found

    @rule(worker=workers, reaped=st.booleans(), comes_back=st.sampled_from([True, True, False]))
    def mapped_worker_goes(self, worker: int, *, reaped: bool, comes_back: bool) -> None:
        """By itself or found dead; its memory is released."""
        engine = self.mapped[worker]
        if reaped:
            for entry in self.bench.transfer.reap_stale_instances(
                lambda entry: entry.instance_id == engine.instance_id
            ):
                self.bench.releaser.start(entry)
        else:
            engine.unregister()
        self.bench.threads.run_all()
        if comes_back:
            self._register_mapped(worker)

    @rule(worker=workers)
    def mapped_worker_comes(self, worker: int) -> None:
        """Again, or for the first time since it went."""
        self._register_mapped(worker)
        self.bench.threads.run_all()

    # Workers that copy themselves

    @rule(worker=workers, place=places)
    def prepare_store(self, worker: int, place: Place) -> None:
        """Be told where to write; nothing is to be seen of it yet."""
        engine, request = self.copying[worker], f"store-{next(self.numbers)}"
        if len(self.writes[worker]) == AT_MOST:
            return
        with suppress(NotRegistered):
            context = engine.prepare_store(model=COPYING_MODEL, **_in(place, request))
            if context.slots:
                self.writes[worker].append(Handed(place, request, context))

    @rule(worker=workers, data=st.data(), written=st.sampled_from(["all", "all", "some", "none"]))
    def commit_store(self, worker: int, data: st.DataObject, written: str) -> None:
        """Say that it is written, be it true or not."""
        if not self.writes[worker]:
            return
        handed = data.draw(st.sampled_from(self.writes[worker]))
        self.writes[worker].remove(handed)
        engine, place = self.copying[worker], handed.place
        slots, indices = handed.context.slots or [], handed.context.chunk_indices or []
        count = {"all": len(slots), "some": len(slots) // 2, "none": 0}[written]
        fresh = self._fresh(COPYING_MODEL, place)
        prompt, start, _, salt = place
        for slot, index in zip(slots[:count], indices, strict=False):
            engine.bytes_of(slot)[:] = fresh[index]
            self.stored[COPYING_MODEL, prompt, start + index, salt].add(fresh[index])
        done = False
        with suppress(LmcacheKubeError):
            done = engine.commit_store(model=COPYING_MODEL, **_in(place, handed.request))
        assert count == len(slots) or not done
        if done:
            assert self._load_copying(engine, place, handed.request)

    @rule(worker=workers, place=places)
    def send(self, worker: int, place: Place) -> None:
        """Store by message."""
        engine, request = self.copying[worker], f"send-{next(self.numbers)}"
        contents = self._fresh(COPYING_MODEL, place)
        chunks = [memoryview(content) for content in contents]
        payload = b"".join(write_tensors(DTYPE, CHUNK_SHAPE, chunks))
        assert [bytes(tensor.data) for tensor in read_tensors(payload, len(contents))] == contents
        self._note(COPYING_MODEL, place, contents)
        with suppress(LmcacheKubeError):
            if engine.commit_store(payload, model=COPYING_MODEL, **_in(place, request)):
                assert self._load_copying(engine, place, request)

    @rule(worker=workers, place=places, known=st.booleans())
    def prepare_retrieve(self, worker: int, place: Place, *, known: bool) -> None:
        """Be told where to read, and read at leisure: `chunks_in_use_do_not_change`."""
        unknown = f"unknown-{next(self.numbers)}"
        self._prepare_as_promised(worker, place, f"copying-{worker}" if known else unknown)

    def _prepare_as_promised(self, worker: int, place: Place, request: str) -> None:
        engine = self.copying[worker]
        if len(self.reads[worker]) == AT_MOST:
            return
        promise = self._take_promise(COPYING_MODEL, worker, request, place)
        try:
            reply = engine.prepare_retrieve(model=COPYING_MODEL, **_in(place, request))
        except NotRegistered:
            return
        assert reply.success or not promise
        if not reply.success:
            return
        if reply.data:
            tensors = read_tensors(reply.data, place[2] - place[1])
            self._check(COPYING_MODEL, place, [bytes(tensor.data) for tensor in tensors])
            return
        seen = self._bytes(engine, reply.context.slots or [])
        self._check(COPYING_MODEL, place, seen)
        self.reads[worker].append(Handed(place, request, reply.context, seen))

    @rule(worker=workers, data=st.data())
    def commit_retrieve(self, worker: int, data: st.DataObject) -> None:
        """Say that it is read."""
        if self.reads[worker]:
            handed = data.draw(st.sampled_from(self.reads[worker]))
            self.reads[worker].remove(handed)
            self.copying[worker].commit_retrieve(
                model=COPYING_MODEL, **_in(handed.place, handed.request)
            )

    def _load_copying(self, engine: CopyingEngine, place: Place, request: str) -> bool:
        reply = engine.prepare_retrieve(model=COPYING_MODEL, **_in(place, request))
        if reply.success and reply.data:
            tensors = read_tensors(reply.data, place[2] - place[1])
            self._check(COPYING_MODEL, place, [bytes(tensor.data) for tensor in tensors])
        elif reply.success:
            self._check(COPYING_MODEL, place, self._bytes(engine, reply.context.slots or []))
        engine.commit_retrieve(model=COPYING_MODEL, **_in(place, request))
        return reply.success

    @staticmethod
    def _bytes(engine: CopyingEngine, slots: list[PoolSlot]) -> list[bytes]:
        return [bytes(engine.bytes_of(slot)) for slot in slots]

    @rule(worker=workers, reaped=st.booleans(), comes_back=st.sampled_from([True, True, False]))
    def copying_worker_goes(self, worker: int, *, reaped: bool, comes_back: bool) -> None:
        """What it was told stays its own while its process may live."""
        engine = self.copying[worker]
        if not self._is_registered(engine):
            return  # it has gone, and is frozen or dead
        if reaped:
            engine.reap()
        else:
            engine.unregister()
            self.bench.threads.run_all()
        left = CopyingEngine(self.bench, engine.instance_id, register=False)
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
        if not self._is_registered(self.copying[worker]):
            self._register_copying(worker)

    def _is_registered(self, engine: CopyingEngine) -> bool:
        entries = self.bench.engine_driven.context_entries_snapshot()
        return engine.instance_id in {entry.instance_id for entry in entries}

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
        close(gone[0].worker, self.bench.now())
        self.bench.now.advance(CLOSE_CONFIRM)
        self.bench.quarantine.sweep(self.bench.now())

    # Schedulers, and what happens to L1

    @rule(mapped=st.booleans(), worker=workers, place=places)
    def store_and_look_up(self, worker: int, place: Place, *, mapped: bool) -> None:
        """As a prompt that was served before comes back."""
        if mapped:
            self.store_mapped(worker, place, "ok")
        else:
            self.send(worker, place)
        self.look_up(worker, place, mapped=mapped)

    @rule(mapped=st.booleans(), worker=workers, place=places)
    def look_up(self, worker: int, place: Place, *, mapped: bool) -> None:
        """What it finds can be loaded until its lease, its end, a forced clear."""
        model, request = self._names(worker, mapped=mapped)
        engine = self.mapped[worker] if mapped else self.copying[worker]
        prompt, _, end, salt = place
        hit = engine.lookup(model=model, **_in((prompt, 0, end, salt), request))
        self.promises[model, worker, request] = Promise(
            prompt, salt, set(range(hit)), self.bench.now() + PIN_TTL
        )

    @rule(mapped=st.booleans(), worker=workers, late=st.booleans())
    def end(self, worker: int, *, mapped: bool, late: bool) -> None:
        """Its pins go at once, or with the transfers that are under way."""
        model, request = self._names(worker, mapped=mapped)
        (self.mapped[worker] if mapped else self.copying[worker]).end(request)
        self.promises.pop((model, worker, request), None)
        if not late:
            self.bench.transfers_end()

    @rule(force=st.booleans())
    def clear(self, *, force: bool) -> None:
        """Without force what was promised stays."""
        self.bench.store_.clear(force=force)
        if force:
            self.promises.clear()

    @rule(seconds=st.sampled_from([1.0, 100.0, 300.0, 700.0]))
    def time_passes(self, seconds: float) -> None:
        """Leases, sessions and reservations end."""
        self.bench.now.advance(seconds)
        self.bench.lookups.expire(self.bench.now())
        self.bench.quarantine.sweep(self.bench.now())

    @staticmethod
    def _names(worker: int, *, mapped: bool) -> tuple[str, str]:
        kind = "mapped" if mapped else "copying"
        return MAPPED_MODEL if mapped else COPYING_MODEL, f"{kind}-{worker}"

    def _take_promise(self, model: str, worker: int, request: str, place: Place) -> bool:
        """Whether the load cannot miss; it uses up its chunks' pins."""
        promise = self.promises.get((model, worker, request))
        if promise is None:
            return False
        kept = promise.covers(place, self.bench.now())
        prompt, start, end, salt = place
        if (prompt, salt) == (promise.prompt, promise.salt):
            promise.chunks -= set(range(start, end))
        return kept

    @invariant()
    def chunks_in_use_do_not_change(self) -> None:
        """Readers that have not confirmed see what they saw, whatever became of the objects."""
        readers = [(self.copying[n], self.reads[n]) for n in range(2)]
        for engine, reads in [*readers, *((left, reads) for left, _, reads in self.frozen)]:
            for handed in reads:
                assert self._bytes(engine, handed.context.slots or []) == handed.seen

    @invariant()
    def the_books_are_right(self) -> None:
        """No pin was taken off twice, no byte is counted twice."""
        stats = self.bench.store_.stats()
        assert stats.excess_unpins_total == 0
        assert stats.used_bytes <= stats.capacity_bytes

    def teardown(self) -> None:
        """When everybody has gone nothing is pinned or reserved; a clear leaves nothing."""
        for worker in range(2):
            self.mapped_worker_goes(worker, reaped=True, comes_back=False)
            self.copying_worker_goes(worker, reaped=True, comes_back=False)
        while self.frozen:
            engine, _, _ = self.frozen.pop()
            close(engine.worker, self.bench.now())
        self.bench.transfers_end()
        self.time_passes(700.0)
        stats = self.bench.store_.stats()
        assert (stats.pinned_bytes, stats.staging_bytes, stats.open_reservations) == (0, 0, 0)
        assert (len(self.bench.sessions), len(self.bench.quarantine)) == (0, 0)
        self.bench.store_.clear(force=False)
        assert self.bench.store_.stats().used_bytes == 0


def _nothing() -> None:
    pass


def _fail() -> None:
    raise ZeroDivisionError


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=120, stateful_step_count=100, deadline=None)
