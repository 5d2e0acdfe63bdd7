"""The start of a container waits for memory of what ran in its slot before, and not for ever."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event

import pytest

from lmcache_nodeagent.device_plugin.gate import StartGate
from lmcache_nodeagent.events import ContainerStarted
from lmcache_nodeagent.events import Event as Fact
from lmcache_nodeagent.liveness.journal import Journal
from lmcache_nodeagent.liveness.slots import SlotRun
from lmcache_nodeagent.liveness.windows import LivenessSettings
from tests.fakes.liveness_parts import FakeClock, FakeEntry, FakeTarget, connection, entry

NEXT = (SlotRun("3", 2),)


class _Waits(Event):
    """Lets time pass where a thread would wait, and something happen meanwhile."""

    def __init__(self, now: FakeClock, meanwhile: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self._now = now
        self._meanwhile = meanwhile

    def wait(self, timeout: float | None = None) -> bool:
        """Wait."""
        self._now.advance(timeout or 0.0)
        self._meanwhile()
        return self.is_set()


class _Target(FakeTarget):
    """Holds entries that leave, too."""

    def __init__(self, now: FakeClock) -> None:
        super().__init__(now)
        self.leaving: list[FakeEntry] = []

    def leaving_entries(self) -> list[FakeEntry]:
        """Those."""
        return self.leaving


class Bench:
    """A gate that opens after 20 s."""

    def __init__(self, *, enforce: bool = True) -> None:
        self.now = FakeClock(100.0)
        self.target = _Target(self.now)
        self.journal = Journal("boot")
        self.facts: list[Fact] = []
        settings = LivenessSettings(enforce=enforce)
        self.gate = StartGate(
            [self.target], lambda: settings, self.journal, self.facts.append, self.now, 20.0
        )

    def earlier(self, slot: str = "3", run: int = 1) -> FakeEntry:
        """An instance of a run."""
        made = connection("1", local=True)
        made.slot = SlotRun(slot, run)
        return entry(made)

    def kinds(self) -> list[tuple[str, str]]:
        """What the journal says."""
        return [
            (numbered.entry.kind, numbered.entry.reason)
            for numbered in self.journal.unacknowledged()
        ]


@pytest.fixture
def bench() -> Bench:
    """With reaping."""
    return Bench()


def test_nothing_to_wait_for(bench: Bench) -> None:
    """The start goes on at once; other slots and later runs are none of its business."""
    bench.target.add(bench.earlier("4"), bench.earlier(run=2), entry())
    bench.target.leaving = [bench.earlier("4")]
    assert bench.gate.wait(NEXT, _Waits(bench.now)) == "at_once"
    assert bench.facts == [ContainerStarted(("3",), "at_once", 0.0, ())]
    assert bench.kinds() == []


@pytest.mark.parametrize("leaving", [False, True])
def test_it_waits_until_memory_is_back(bench: Bench, *, leaving: bool) -> None:
    """Of instances that are not reaped yet, and of those that are being released."""
    held = bench.earlier()
    bench.target.add(*([] if leaving else [held]))
    bench.target.leaving = [held] if leaving else []

    def release() -> None:
        if bench.now() > 102.0:
            bench.target.entries.clear()
            bench.target.leaving = []

    assert bench.gate.wait(NEXT, _Waits(bench.now, release)) == "released"
    (fact,) = bench.facts
    assert isinstance(fact, ContainerStarted)
    assert (fact.outcome, fact.instances) == ("released", ("1",))
    assert 2.0 < fact.seconds < 2.1
    (numbered,) = bench.journal.unacknowledged()
    assert (numbered.entry.kind, numbered.entry.reason) == ("start_held", "released")
    assert numbered.entry.waiting_slot == NEXT[0]
    assert numbered.entry.subject.slot == SlotRun("3", 1)


def test_a_short_wait_is_not_worth_an_event(bench: Bench) -> None:
    """It is counted."""
    bench.target.add(bench.earlier())
    assert bench.gate.wait(NEXT, _Waits(bench.now, bench.target.entries.clear)) == "released"
    assert bench.kinds() == []


def test_it_fails_open(bench: Bench) -> None:
    """After its time the container starts, and people are told."""
    bench.target.add(bench.earlier())
    assert bench.gate.wait(NEXT, _Waits(bench.now)) == "gave_up"
    assert bench.kinds() == [("start_held", "gave_up")]
    assert 20.0 <= bench.now() - 100.0 < 20.1


def test_an_agent_that_stops_holds_nobody(bench: Bench) -> None:
    """Its end gives all memory back."""
    bench.target.add(bench.earlier())
    stopping = _Waits(bench.now)
    stopping.set()
    assert bench.gate.wait(NEXT, stopping) == "gave_up"
    assert bench.now() < 100.1


def test_what_nobody_reaps_is_not_waited_for() -> None:
    """In observe mode every restart would wait in vain."""
    bench = Bench(enforce=False)
    bench.target.add(bench.earlier())
    assert bench.gate.wait(NEXT, _Waits(bench.now)) == "at_once"
