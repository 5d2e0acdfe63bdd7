"""Giving memory back: drained, closed, told, and never in anybody's way."""

from __future__ import annotations

from lmcache_nodeagent.events import Event, InstanceReleased, ReleaseFailed, ReleaseStuck
from lmcache_nodeagent.ids import InstanceId
from lmcache_nodeagent.liveness.release import Releaser
from tests.fakes.liveness_parts import FakeClock, ThreadsByHand, entry

DEADLINE = 30.0


class Bench:
    """A releaser with everything around it by hand."""

    def __init__(self) -> None:
        self.now = FakeClock(100.0)
        self.threads = ThreadsByHand()
        self.facts: list[Event] = []
        self.dropped: list[InstanceId] = []
        self.wakes = 0
        self.told: list[float | None] = []
        self.answers: list[float] = []
        self.releaser = Releaser(
            self.threads, self.facts.append, self.now, self.dropped.append, DEADLINE, self.wake
        )

    def wake(self) -> None:
        """Count."""
        self.wakes += 1

    def answer(self) -> None:
        """Note when."""
        self.answers.append(self.now())


def test_a_release_drains_closes_drops_state_and_tells() -> None:
    """In this order, on a thread that is named after the instance."""
    bench, steps = Bench(), list[str]()
    leaving = entry(number=7)
    leaving.on_drain = lambda: steps.append("drain")
    leaving.on_close = lambda: steps.append("close")
    bench.releaser.start(leaving, bench.told.append, bench.answer)
    assert bench.wakes == 1
    assert [name for name, _ in bench.threads.started] == ["release-7"]
    assert [release.entry for release in bench.releaser.in_progress()] == [leaving]
    bench.now.advance(0.5)
    bench.threads.run_all()
    assert steps == ["drain", "close"]
    assert bench.dropped == [7]
    assert bench.facts == [InstanceReleased(InstanceId(7), 4096, 0.5)]
    assert (bench.told, bench.answers) == ([0.5], [100.5])
    assert bench.releaser.in_progress() == ()


def test_nobody_need_listen() -> None:
    """Replaced contexts are released too."""
    bench = Bench()
    bench.releaser.start(entry())
    bench.now.advance(DEADLINE)
    bench.releaser.report_overdue()
    bench.threads.run_all()
    assert bench.releaser.in_progress() == ()


def test_a_close_that_raises_loses_no_bookkeeping() -> None:
    """The id may register again; that memory may stay mapped is said."""
    bench = Bench()
    broken = entry(number=7)

    def refuse() -> None:
        raise OSError("no")

    broken.on_close = refuse
    bench.releaser.start(broken, bench.told.append, bench.answer)
    bench.threads.run_all()
    assert bench.facts == [ReleaseFailed(InstanceId(7), "OSError('no')")]
    assert (bench.dropped, bench.told, bench.answers) == ([7], [None], [100.0])
    assert bench.releaser.in_progress() == ()


def test_callers_are_answered_soon_stuck_releases_reported_once() -> None:
    """And a stuck one that ends after all is told as an end, to nobody twice."""
    bench = Bench()
    bench.releaser.start(entry(number=7), bench.told.append, bench.answer)
    (release,) = bench.releaser.in_progress()
    assert bench.releaser.report_overdue() == 101.5
    bench.now.seconds = 101.5
    assert bench.releaser.report_overdue() == 130.0
    assert (bench.answers, bench.told) == ([101.5], [])
    assert not bench.releaser.is_stuck(release)
    bench.now.seconds = 130.0
    assert bench.releaser.report_overdue() is None
    assert bench.facts == [ReleaseStuck(InstanceId(7), DEADLINE, 0)]
    assert bench.told == [None]
    bench.now.seconds = 131.0
    assert bench.releaser.is_stuck(release)
    assert bench.releaser.report_overdue() is None
    bench.threads.run_all()
    assert bench.facts[1:] == [InstanceReleased(InstanceId(7), 4096, 31.0)]
    assert (bench.told, bench.answers) == ([None], [101.5])


def test_a_stuck_release_blocks_no_other() -> None:
    """Each has a thread of its own."""
    bench = Bench()
    bench.releaser.start(entry(number=1))
    (stuck,) = bench.threads.started
    bench.threads.started.clear()
    bench.releaser.start(entry(number=2), bench.told.append)
    bench.threads.run_all()
    assert bench.told == [0.0]
    assert [release.entry.instance_id for release in bench.releaser.in_progress()] == [1]
    stuck[1]()


def test_a_thread_that_cannot_start_is_tried_again() -> None:
    """A machine out of threads must not orphan the memory, nor fail whoever let it go."""
    bench = Bench()
    bench.threads.left = 0
    bench.releaser.start(entry(number=7), bench.told.append, bench.answer)
    assert bench.threads.started == []
    bench.threads.left = 1
    assert bench.releaser.report_overdue() == 101.0
    assert bench.threads.started == []
    bench.now.advance(1.0)
    bench.releaser.report_overdue()
    bench.threads.run_all()
    assert bench.told == [1.0]
    assert bench.releaser.in_progress() == ()
