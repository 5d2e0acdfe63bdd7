"""Ping, the small questions, clear; late answers; heartbeats of the absent."""

from __future__ import annotations

import pytest

from lmcache_nodeagent.events import Event, HintCancelled, UnknownInstanceTold
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
from tests.fakes.liveness_parts import FakeTarget, connection, entry
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
            lambda _: None,
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
    stranger = bench.management.hear(SEVEN, connection("10.0.0.2"), ping=True)
    assert stranger.speaker is Speaker.STRANGER
    unknown = bench.management.hear(InstanceId(9), link, ping=True)
    assert unknown.speaker is Speaker.UNKNOWN_INSTANCE


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
