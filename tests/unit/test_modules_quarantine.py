"""Slots of workers that left: whoever may still use them keeps them, and nobody sees them."""

from __future__ import annotations

import contextlib
import math
import random
from dataclasses import dataclass
from typing import TypedDict

import pytest

from lmcache_nodeagent.errors import MalformedRequest, NotRegistered
from lmcache_nodeagent.events import SlotsQuarantined, SlotsRecovered
from lmcache_nodeagent.liveness.evidence import CloseKind
from lmcache_nodeagent.modules.pending_transfers import PendingTransfers, Transfer
from lmcache_nodeagent.protocol.messages import PoolSlot, SlotContext
from lmcache_nodeagent.storage.objects import ObjectKey, Reservation
from tests.fakes.copying_engine import WORKER_NUMBER, CopyingEngine, content
from tests.fakes.liveness_parts import close, connection
from tests.fakes.module_bench import CLOSE_CONFIRM, PATIENCE, ModuleBench

NOTHING = SlotContext()


def frozen_in_a_store(bench: ModuleBench) -> tuple[CopyingEngine, SlotContext]:
    """A worker that was told where to write and was reaped before it wrote."""
    engine = CopyingEngine(bench)
    context = engine.prepare_store(end=2)
    engine.reap()
    return engine, context


def staging(bench: ModuleBench) -> int:
    """Bytes that writers hold."""
    return bench.store_.stats().staging_bytes


def sweep(bench: ModuleBench) -> int:
    """What the reaper does at each scan."""
    return bench.quarantine.sweep(bench.now())


def test_a_frozen_writer_keeps_its_slots_and_nobody_sees_them() -> None:
    """Its keys are free at once, its memory is not; what it commits later is dropped."""
    bench = ModuleBench()
    engine, context = frozen_in_a_store(bench)
    other = CopyingEngine(bench, WORKER_NUMBER + 1)
    assert staging(bench) == bench.quarantine.held_bytes() == 2 * 4096
    assert SlotsQuarantined(engine.instance_id, 2 * 4096, 1) in bench.facts
    assert other.store(end=2)
    engine.write(context, prompt=5)  # it thaws
    assert other.retrieve(end=2) == [content(0, 0), content(0, 1)]
    with pytest.raises(NotRegistered):
        engine.commit_store(end=2)
    assert other.retrieve(end=2) == [content(0, 0), content(0, 1)]
    assert staging(bench) == bench.quarantine.held_bytes() == 0
    assert len(bench.quarantine) == 1
    assert sweep(bench) == 1
    assert len(bench.quarantine) == 0


def test_a_frozen_reader_keeps_what_it_reads() -> None:
    """L1 may be full meanwhile: the bytes stay until the reader says so, or is gone."""
    bench = ModuleBench(objects=2)
    engine = CopyingEngine(bench)
    assert engine.store(end=2)
    reply = engine.prepare_retrieve(end=2)
    assert engine.prepare_retrieve(end=1).success
    engine.reap()
    other = CopyingEngine(bench, WORKER_NUMBER + 1)
    assert not other.store(end=1, prompt=1)
    assert reply.context.slots is not None
    assert [bytes(engine.bytes_of(slot)) for slot in reply.context.slots] == [
        content(0, 0),
        content(0, 1),
    ]
    with pytest.raises(NotRegistered):
        engine.commit_retrieve(end=2)
    assert bench.pins() == 1
    close(engine.worker, bench.now())
    bench.now.advance(CLOSE_CONFIRM)
    assert sweep(bench) == 1
    assert bench.pins() == 0
    assert other.store(end=1, prompt=1)


@pytest.mark.parametrize(
    ("kind", "seconds"),
    [
        (CloseKind.PEER, CLOSE_CONFIRM),
        (CloseKind.TIMED_OUT, PATIENCE),
        (CloseKind.OURSELVES, PATIENCE),
    ],
)
def test_closed_connections_end_it(kind: CloseKind, seconds: float) -> None:
    """A close by the peer soon, as it may come back at once; others say little about it."""
    bench = ModuleBench()
    engine, _ = frozen_in_a_store(bench)
    assert sweep(bench) == 0
    assert bench.quarantine.sweep_due_at == math.inf
    close(engine.worker, bench.now(), kind)
    assert bench.quarantine.sweep_due_at == bench.now() + seconds
    bench.now.advance(seconds - 0.1)
    assert sweep(bench) == 0
    bench.now.advance(0.1)
    assert sweep(bench) == 1
    assert staging(bench) == 0
    assert bench.quarantine.sweep_due_at == math.inf
    (recovered,) = [fact for fact in bench.facts if isinstance(fact, SlotsRecovered)]
    assert (recovered.recovered_bytes, recovered.transfers) == (2 * 4096, 1)
    assert recovered.seconds == pytest.approx(seconds)


def test_a_process_that_is_gone_ends_it_at_once() -> None:
    """The kernel's word; nothing is quarantined at all where it comes before the reap."""
    bench = ModuleBench()
    engine, _ = frozen_in_a_store(bench)
    engine.worker.process_gone = True
    assert sweep(bench) == 1
    assert staging(bench) == 0
    killed = CopyingEngine(bench, WORKER_NUMBER + 1)
    killed.prepare_store(end=2)
    killed.worker.process_gone = True
    killed.reap()
    assert staging(bench) == len(bench.quarantine) == 0
    assert len([fact for fact in bench.facts if isinstance(fact, SlotsQuarantined)]) == 1


def test_all_connections_count() -> None:
    """Also the one of before a reconnect, and that of a registration that was replaced."""
    bench = ModuleBench()
    engine = CopyingEngine(bench)
    engine.prepare_store(end=1)
    first, engine.worker = engine.worker, connection("10.0.0.1")
    engine.register(num_layers=2)
    bench.threads.run_all()
    assert staging(bench) == 4096
    close(engine.worker, bench.now())
    bench.now.advance(CLOSE_CONFIRM)
    assert sweep(bench) == 0
    close(first, bench.now())
    bench.now.advance(CLOSE_CONFIRM)
    assert sweep(bench) == 1
    assert staging(bench) == 0


def test_a_worker_that_leaves_with_nothing_open_is_not_held() -> None:
    """Goodbyes and reaps of idle workers leave no trace."""
    bench = ModuleBench()
    engine = CopyingEngine(bench)
    assert engine.store(end=1)
    engine.unregister()
    bench.threads.run_all()
    assert len(bench.quarantine) == 0
    assert not [fact for fact in bench.facts if isinstance(fact, SlotsQuarantined | SlotsRecovered)]


def test_one_that_comes_back_cannot_confirm_its_new_slots_by_its_old_commit() -> None:
    """A thawed thread's late commit looks like that of the new store: neither shows anything."""
    bench = ModuleBench()
    engine, context = frozen_in_a_store(bench)
    engine.register()
    assert engine.prepare_store(end=2) == NOTHING
    assert not engine.commit_store(end=2)
    assert engine.lookup(end=2) == 0
    engine.write(context)
    assert not engine.commit_store(end=2)
    assert engine.lookup(end=2) == staging(bench) == 0
    assert engine.store(end=2)
    assert engine.retrieve(end=2) == [content(0, 0), content(0, 1)]


def test_a_late_end_of_a_read_unpins_the_old_one_first() -> None:
    """Each commit ends one read, whichever came first."""
    bench = ModuleBench()
    engine = CopyingEngine(bench)
    assert engine.store(end=1)
    assert engine.prepare_retrieve(end=1).success
    engine.reap()
    engine.register()
    assert engine.prepare_retrieve(end=1).success
    assert engine.commit_retrieve(end=1)
    assert bench.pins() == 1
    assert engine.commit_retrieve(end=1)
    assert bench.pins() == 0


def test_another_prepare_may_be_faster() -> None:
    """Two threads that prepare the same chunks: one has the slots, the other is counted."""
    pending = PendingTransfers()
    key = ObjectKey(b"a", "m", 1, 0, "")
    keys = Transfer("r", (key,))
    made = Reservation((key,), 1, {}, (), frozenset(), frozenset(), 0.0)
    assert pending.begin_write(keys, made, 0.0)
    assert not pending.begin_write(keys, made, 0.0)
    assert pending.end_write(keys) == (True, None)
    known, write = pending.end_write(keys)
    assert known
    assert write is not None
    assert pending.end_write(keys) == (False, None)
    assert pending.end_read(keys) is None


class Place(TypedDict):
    """The first chunks of a prompt, for one request."""

    prompt: int
    end: int
    request: str


@dataclass(frozen=True)
class Told:
    """What a worker was told about a transfer, to be acted upon at any later time."""

    engine: CopyingEngine
    place: Place
    slots: list[PoolSlot] | None = None
    indices: list[int] | None = None


def expected(prompt: int, end: int, request: str = "") -> list[bytes]:
    """The bytes of a prompt's first chunks, whoever asks."""
    del request
    return [content(prompt, n) for n in range(end)]


class History:
    """Three workers over one small L1 that freeze, thaw, leave, come back and are killed.

    The model is the bytes: whatever is found under a key is what that key means. Each step is one
    of `STEPS`, with `choice` to decide who and what.
    """

    def __init__(self, choice: random.Random) -> None:
        self.choice = choice
        self.bench = ModuleBench(objects=6)
        self.engines = [CopyingEngine(self.bench, WORKER_NUMBER + n) for n in range(3)]
        self.writing: list[Told] = []
        self.reading: list[Told] = []
        self.reader = CopyingEngine(self.bench, WORKER_NUMBER + 1000)

    def prepare(self) -> None:
        """Ask where to write; one that was given up registers anew first."""
        engine, place = self._registered(), self._place()
        context = engine.prepare_store(**place)
        self.writing.append(Told(engine, place, context.slots, context.chunk_indices))

    def write_and_commit(self) -> None:
        """Write to where a worker was told to, however late; confirm it, or never."""
        told = self._any_of(self.writing)
        if told is None:
            return
        engine, place = told.engine, told.place
        if told.slots:
            slots = SlotContext(slots=told.slots, chunk_indices=told.indices)
            engine.write(slots, place["prompt"])
        if told.slots == [] or self._below(12) == 0:
            return
        with contextlib.suppress(NotRegistered, MalformedRequest):
            if engine.commit_store(**place):
                assert self.reader.retrieve(**place) == expected(**place)

    def start_reading(self) -> None:
        """Ask where to read; one that was given up registers anew first."""
        engine, place = self._registered(), self._place()
        reply = engine.prepare_retrieve(**place)
        if reply.success:
            self.reading.append(Told(engine, place, reply.context.slots))

    def read_and_commit(self) -> None:
        """Read where a worker was told to, however late: its bytes are still there."""
        told = self._any_of(self.reading)
        if told is None or told.slots is None:
            return
        engine, place = told.engine, told.place
        assert [bytes(engine.bytes_of(s)) for s in told.slots] == expected(**place)
        with contextlib.suppress(NotRegistered):
            engine.commit_retrieve(**place)

    def leave(self) -> None:
        """Be silent for too long, or say goodbye, in the middle of whatever it does."""
        engine = self.choice.choice(self.engines)
        if self._below(2):
            engine.unregister()
            self.bench.threads.run_all()
        else:
            engine.reap()

    def be_killed(self) -> None:
        """One process ends, and another takes its place, which knows nothing of it."""
        at = self._below(3)
        engine = self.engines[at]
        close(engine.worker, self.bench.now())
        engine.worker.process_gone = self._below(2) == 0
        engine.reap()
        self.writing = [told for told in self.writing if told.engine is not engine]
        self.reading = [told for told in self.reading if told.engine is not engine]
        self.engines[at] = CopyingEngine(self.bench, engine.instance_id + 10)

    def let_time_pass(self) -> None:
        """The reaper scans, too."""
        self.bench.now.advance(self.choice.choice([1.0, CLOSE_CONFIRM, 700.0]))
        sweep(self.bench)

    def clear(self) -> None:
        """Drop what is cached."""
        self.bench.store_.clear(force=self._below(2) == 0)

    def look(self) -> None:
        """Whoever reads any prompt sees that prompt's bytes, or a miss."""
        for prompt in range(3):
            found = self.reader.retrieve(prompt=prompt, end=1)
            assert found in (None, expected(prompt, 1))

    def end(self) -> None:
        """Once all are dead, nothing is held."""
        for engine in self.engines:
            close(engine.worker, self.bench.now())
            engine.reap()
        self.bench.now.advance(PATIENCE)
        sweep(self.bench)
        assert staging(self.bench) == self.bench.pins() == len(self.bench.quarantine) == 0

    def _registered(self) -> CopyingEngine:
        engine = self.choice.choice(self.engines)
        engine.register()
        return engine

    def _place(self) -> Place:
        request = self.choice.choice(["a", "b"])
        return Place(prompt=self._below(3), end=1 + self._below(3), request=request)

    def _below(self, number: int) -> int:
        return self.choice.randrange(number)

    def _any_of(self, told: list[Told]) -> Told | None:
        return told.pop(self._below(len(told))) if told else None


STEPS = {
    History.prepare: 6,
    History.write_and_commit: 4,
    History.start_reading: 4,
    History.read_and_commit: 3,
    History.leave: 2,
    History.be_killed: 1,
    History.let_time_pass: 1,
    History.clear: 1,
}
"""What happens, and how often."""


@pytest.mark.parametrize("seed", range(30))
def test_no_history_shows_a_wrong_or_unwritten_byte(seed: int) -> None:
    """Whatever workers do and when, and whoever is given up meanwhile."""
    choice = random.Random(seed)  # noqa: S311  # a repeatable history, no secret
    history = History(choice)
    for step in choice.choices(list(STEPS), list(STEPS.values()), k=200):
        step(history)
        history.look()
    history.end()
