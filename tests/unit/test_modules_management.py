"""Ping, the small questions, clear; late answers; heartbeats of the absent."""

from __future__ import annotations

import math

import pytest

from lmcache_nodeagent.events import Event, FalseReap, HintCancelled, UnknownInstanceTold
from lmcache_nodeagent.ids import InstanceId
from lmcache_nodeagent.liveness.entry import Speaker
from lmcache_nodeagent.liveness.evidence import ConnectionLedger
from lmcache_nodeagent.liveness.reaper import Reaper
from lmcache_nodeagent.liveness.stalls import Stalls
from lmcache_nodeagent.liveness.targets import Touched
from lmcache_nodeagent.liveness.testimony import Hint
from lmcache_nodeagent.liveness.windows import LivenessSettings
from lmcache_nodeagent.modules.absent_pings import AbsentPings
from lmcache_nodeagent.modules.calls import Call, Pending
from lmcache_nodeagent.modules.management import ManagementFigures, ManagementModule
from lmcache_nodeagent.protocol.messages import BlockAllocationRecord
from tests.fakes.liveness_parts import FakeTarget, close, connection, entry
from tests.fakes.module_bench import Engine, ModuleBench

SEVEN = InstanceId(7)
RIGHTFUL = Touched(Speaker.RIGHTFUL)


class Bench(ModuleBench):
    """The module with two holders of instance state: the real one, and a fake second."""

    def __init__(self) -> None:
        super().__init__()
        self.other = FakeTarget(self.now)
        self.told: list[Event] = []
        reaper = Reaper(
            [self.transfer, self.other],
            ConnectionLedger(),
            Stalls(),
            LivenessSettings,
            self.releaser,
            self.journal,
            self.reaped_lately,
            self.told.append,
            self.now,
            lambda _: math.inf,
        )
        self.management = ManagementModule(
            [self.transfer, self.other],
            reaper,
            self.store_,
            self.absent,
            self.reaped_lately,
            self.journal,
            16,
            self.told.append,
            self.now,
        )

    def ping(self, touched: Touched | None = None, number: InstanceId | None = SEVEN) -> bool:
        """Answer a ping, given what the router found."""
        link = connection()
        call = Call(link) if touched is None else Call(link, touched)
        return self.management.ping(call, number)


# Ping


def test_a_ping_of_a_registered_instance_is_true() -> None:
    """And so is one of somebody else's id, which refreshes nothing, and one of nobody's."""
    bench = Bench()
    assert bench.ping(RIGHTFUL)
    assert bench.ping(Touched(Speaker.STRANGER))
    assert bench.ping(number=None)
    assert bench.told == []


def test_an_instance_that_is_gone_is_told_once() -> None:
    """By one false: stock clients then register again at their next ping."""
    bench = Bench()
    assert [bench.ping() for _ in range(3)] == [False, True, True]
    assert bench.told == [UnknownInstanceTold(SEVEN, "10.0.0.1")]
    assert not bench.ping(number=InstanceId(8))


def test_after_a_registration_it_is_told_again() -> None:
    """Reaped twice, told twice."""
    bench = Bench()
    assert not bench.ping()
    Engine(bench, 7)
    assert bench.ping(RIGHTFUL)
    assert not bench.ping()


def test_signs_of_life_find_the_holder_of_the_instance() -> None:
    """The first that knows it decides; a cancelled window is told."""
    bench = Bench()
    link = connection()
    held = entry(link, number=7, pinged=False)
    bench.other.add(held)
    assert bench.management.hear(SEVEN, link, ping=True).speaker is Speaker.RIGHTFUL
    assert held.has_liveness_signal
    assert bench.told == []
    held.hints.append(Hint("pod_gone", 0.0))
    bench.management.hear(SEVEN, link, ping=False)
    assert bench.told == [HintCancelled(SEVEN, "hint", "pod_gone")]
    (numbered,) = bench.journal.unacknowledged()
    cancelled = numbered.entry
    assert (cancelled.kind, cancelled.reason, cancelled.trigger) == (
        "cancelled",
        "hint",
        "pod_gone",
    )
    assert cancelled.evidence == ("pod_gone, then heard",)
    stranger = bench.management.hear(SEVEN, connection("10.0.0.2"), ping=True)
    assert stranger.speaker is Speaker.STRANGER
    unknown = bench.management.hear(InstanceId(9), link, ping=True)
    assert unknown.speaker is Speaker.UNKNOWN_INSTANCE


def test_a_connection_that_came_back_is_nothing_for_the_operator() -> None:
    """Networks cut connections; the operator had no word in it."""
    bench = Bench()
    old, new = connection(), connection()
    held = entry(old, number=7)
    bench.other.add(held)
    close(old, bench.now())
    bench.management.hear(SEVEN, new, ping=True)
    assert bench.told == [HintCancelled(SEVEN, "close")]
    assert bench.journal.unacknowledged() == ()


def test_a_reaped_worker_that_pings_again_is_reported_once() -> None:
    """It had been frozen, or was never dead."""
    bench = Bench()
    gone = entry(connection(), number=7, at=bench.now() - 120.0)
    bench.reaped_lately.add(gone, "heartbeat_timeout", bench.now())
    bench.now.advance(3.0)
    assert not bench.ping()
    (false_reap, told) = bench.told
    assert isinstance(false_reap, FalseReap)
    assert (false_reap.reason, false_reap.seconds_after_reap) == ("heartbeat_timeout", 3.0)
    assert isinstance(told, UnknownInstanceTold)
    (numbered,) = bench.journal.unacknowledged()
    assert (numbered.entry.kind, numbered.entry.silent_seconds) == ("false_reap", 123.0)
    assert numbered.entry.evidence == (
        "reaped 3.0 s ago: heartbeat_timeout",
        "pinged from 10.0.0.1",
    )
    assert bench.ping()
    assert len(bench.journal.unacknowledged()) == 1


def test_an_id_that_registers_anew_is_another_worker() -> None:
    """What it says later refutes no reap."""
    bench = Bench()
    bench.reaped_lately.add(entry(number=7), "connection_closed", bench.now())
    engine = Engine(bench, 7)
    engine.unregister()
    bench.ping()
    assert bench.journal.unacknowledged() == ()


# Small questions


def test_small_questions() -> None:
    """All constant."""
    bench = Bench()
    call = Call(connection())
    handlers = bench.management.handlers()
    assert handlers["noop"](call) == "OK"
    assert handlers["get_chunk_size"](call) == 16
    assert handlers["get_experimental"](call) == []
    assert set(handlers) == {
        "ping",
        "noop",
        "get_chunk_size",
        "get_experimental",
        "clear",
        "report_block_allocation",
    }


def test_clear_keeps_what_is_pinned_unless_forced() -> None:
    """By a look-up's promise."""
    bench = Bench()
    engine = Engine(bench)
    engine.store(end=4)
    engine.lookup(end=2)
    call = Call(connection())
    bench.management.clear(call, False)  # noqa: FBT003  # the wire's
    assert bench.store_.stats().objects == 2
    bench.management.clear(call, True)  # noqa: FBT003  # the wire's
    assert bench.store_.stats().objects == 0
    assert not engine.retrieve(end=2)
    assert bench.store_.stats().used_bytes == 0


def test_block_allocations_are_counted() -> None:
    """Only metrics depend on them."""
    bench = Bench()
    record = BlockAllocationRecord("r1", [1], [2])
    bench.management.report_block_allocation(Call(connection()), 1, "demo/model", [record] * 3)
    bench.ping(RIGHTFUL)
    assert bench.management.figures() == ManagementFigures(pings=1, block_allocation_records=3)


def test_instances_of_all_holders_are_counted() -> None:
    """Each tracks its own."""
    bench = Bench()
    Engine(bench, 1)
    bench.other.add(entry(number=2), entry(number=3))
    assert bench.management.tracked_instance_count() == 3


# Absent heartbeats


def test_the_rhythm_of_an_absent_instance_is_kept() -> None:
    """The last three intervals."""
    absent = AbsentPings()
    answers = [absent.pinged(SEVEN, moment) for moment in (0.0, 60.0, 130.0, 140.0, 150.0)]
    assert answers == [True, False, False, False, False]
    assert list(absent.registered(SEVEN)) == [70.0, 10.0, 10.0]
    assert list(absent.registered(SEVEN)) == []


def test_the_memory_of_absent_instances_is_bounded() -> None:
    """Who was silent longest is forgotten, and told again."""
    absent = AbsentPings(ids_kept=2)
    for number in (1, 2):
        assert absent.pinged(InstanceId(number), 0.0)
    assert not absent.pinged(InstanceId(1), 1.0)
    assert absent.pinged(InstanceId(3), 2.0)
    assert not absent.pinged(InstanceId(1), 3.0)
    assert absent.pinged(InstanceId(2), 4.0)


# Late answers


@pytest.mark.parametrize("listens_first", [True, False])
def test_a_late_answer_reaches_its_listener_once(*, listens_first: bool) -> None:
    """Whichever comes first."""
    pending, got = Pending(), list[object]()
    if listens_first:
        pending.when_settled(got.append)
    pending.settle(None)
    pending.settle("again")
    if not listens_first:
        pending.when_settled(got.append)
    assert got == [None]
