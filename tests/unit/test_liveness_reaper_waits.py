"""What makes the reaper wait: the brake on mass silence, and its own lateness."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lmcache_nodeagent.events import (
    SilenceBrakeApplied,
)
from tests.fakes.liveness_parts import (
    close,
    connection,
    entry,
)
from tests.fakes.reaper_bench import ReaperBench, SleepByHand, T

# The brake


def _fall_silent(bench: ReaperBench, peers: int) -> None:
    """Register peers whose heartbeats come one second apart, and read nothing after the last."""
    for number in range(1, peers + 1):
        bench.register(number, at=1000.0 - peers + number)


def test_mass_silence_that_may_be_our_fault_waits_for_one_further_t() -> None:
    """Heartbeats are staggered: the first one due finds the others silent, too."""
    bench = ReaperBench()
    _fall_silent(bench, 3)
    bench.now.seconds = 998.0 + T
    assert bench.reaper.scan() <= 998.0 + 2 * T
    assert bench.told(SilenceBrakeApplied) == [SilenceBrakeApplied(3, 3, T)]
    assert bench.brake() == 998.0 + 2 * T
    bench.now.seconds = 998.0 + 2 * T - 0.1
    assert bench.reaper.scan() == 998.0 + 2 * T
    assert bench.ids() == [1, 2, 3]
    bench.now.seconds = 998.0 + 2 * T
    bench.reaper.scan()
    assert bench.ids() == []
    assert len(bench.told(SilenceBrakeApplied)) == 1


def test_the_brake_holds_again_at_the_next_mass_silence() -> None:
    """What it held is forgotten with its end, whether reaped or come back."""
    bench = ReaperBench()
    _fall_silent(bench, 3)
    bench.now.seconds = 1000.0 + T
    bench.reaper.scan()
    for found in bench.target.entries.values():
        bench.target.touch_instance(found.instance_id, found.last_connection, ping=True)
        found.ping_intervals = []
    bench.router.read_at = bench.now()
    bench.reaper.scan()
    assert bench.brake() is None
    bench.now.advance(T)
    bench.reaper.scan()
    assert bench.brake() == bench.now() + T
    bench.now.advance(T)
    bench.reaper.scan()
    bench.reaper.scan()
    assert (bench.ids(), bench.brake()) == ([], None)
    assert len(bench.told(SilenceBrakeApplied)) == 2


def test_mass_silence_without_a_sign_of_our_fault_is_the_workers() -> None:
    """Messages came in all the time, and no scan was late: they are dead."""
    bench = ReaperBench()
    _fall_silent(bench, 3)
    bench.now.seconds = 1000.0 + T
    bench.router.read_at = bench.now() - T / 2
    bench.reaper.scan()
    assert bench.ids() == []


def test_scans_that_overslept_are_a_sign_of_our_fault() -> None:
    """Although the router read what there was."""
    bench = ReaperBench()
    _fall_silent(bench, 3)
    bench.stalls.record(980.0, 990.0)
    bench.now.seconds = 1000.0 + T
    bench.router.read_at = bench.now()
    bench.reaper.scan()
    assert bench.brake() is not None
    assert bench.ids() == [1, 2, 3]


@pytest.mark.parametrize(("silent", "others"), [(2, 0), (3, 2)])
def test_few_silent_peers_are_reaped_as_usual(silent: int, others: int) -> None:
    """Fewer than three, or not more than 60 per cent."""
    bench = ReaperBench()
    for number in range(1, silent + 1):
        bench.register(number)
    bench.now.advance(T)
    for number in range(11, 11 + others):
        bench.register(number, at=bench.now())
    bench.reaper.scan()
    assert len(bench.ids()) == others


def test_peers_are_pods_not_ranks() -> None:
    """Eight silent ranks of one pod are one; a pod of which one rank speaks is not silent."""
    bench = ReaperBench()
    for number in range(1, 9):
        bench.register(number, "10.0.0.1")
    bench.register(9)
    bench.register(10)
    bench.now.advance(T)
    bench.register(11, "10.0.0.9", at=bench.now())
    bench.register(12, "10.0.0.10", at=bench.now())
    bench.reaper.scan()
    assert bench.ids() == [11, 12]


def test_workers_that_never_ping_are_left_out_of_the_share() -> None:
    """They cannot fall silent."""
    bench = ReaperBench()
    _fall_silent(bench, 3)
    for number in range(20, 30):
        bench.target.add(entry(connection(f"10.0.1.{number}"), number=number, pinged=False))
    bench.now.seconds = 1000.0 + T
    bench.reaper.scan()
    assert len(bench.ids()) == 13


def test_the_brake_holds_silence_alone() -> None:
    """Closed connections and proof act as ever."""
    bench = ReaperBench()
    _fall_silent(bench, 4)
    first = next(iter(bench.target.entries.values()))
    close(first.last_connection, 1000.0)
    bench.now.seconds = 1000.0 + T
    bench.reaper.scan()
    assert bench.ids() == [2, 3, 4]
    assert bench.brake() is not None


# The loop


def test_the_loop_sleeps_as_planned_until_it_is_stopped() -> None:
    """A scan per sleep; a stop ends it."""
    bench = ReaperBench()
    sleep = SleepByHand(bench.now)
    bench.reaper._woken = sleep
    _stop_after(bench, 3)
    bench.reaper.run()
    assert sleep.slept == [30.0, 30.0, 30.0]
    assert bench.stalls.delay_since(0.0) == 0.0


def _stop_after(bench: ReaperBench, scans: int, each: Callable[[], None] = lambda: None) -> None:
    """Let the loop end after a number of scans; `each` runs in each of them."""
    left = [scans]

    def housekeeping(now: float) -> None:
        del now
        each()
        left[0] -= 1
        if not left[0]:
            bench.reaper.stop()

    bench.housekeeping = housekeeping


def test_a_wake_up_cuts_the_sleep_short() -> None:
    """New evidence is looked at now. A stop wakes as well, or this would take half a minute."""
    bench = ReaperBench()
    _stop_after(bench, 3, bench.reaper.wake)
    bench.reaper.run()
    assert bench.reaper._stopping.is_set()


@pytest.mark.parametrize(("late", "counted"), [(0.9, 0.0), (50.0, 50.0)])
def test_an_overslept_scan_is_lateness(late: float, counted: float) -> None:
    """It puts off every deadline that began before. Up to a second is noise."""
    bench = ReaperBench()
    bench.reaper._woken = SleepByHand(bench.now, oversleeps=late)
    _stop_after(bench, 1)
    bench.reaper.run()
    assert bench.stalls.delay_since(0.0) == pytest.approx(counted)


def test_a_scan_that_takes_long_makes_the_next_one_late() -> None:
    """A process stopped in the middle of one is as late as one stopped between two."""
    bench = ReaperBench()
    sleep = SleepByHand(bench.now)
    bench.reaper._woken = sleep
    _stop_after(bench, 1, lambda: bench.now.advance(200.0))
    bench.reaper.run()
    assert sleep.slept == [0.01]
    assert bench.stalls.delay_since(1000.0) == pytest.approx(170.01)


def test_a_clock_that_jumps_condemns_nobody() -> None:
    """A suspended machine: afterwards everybody has the time left that there was before."""
    bench = ReaperBench()
    bench.register(1)
    bench.reaper._woken = SleepByHand(bench.now, oversleeps=10_000.0)
    _stop_after(bench, 1)
    bench.reaper.run()
    bench.reaper.scan()
    assert bench.ids() == [1]
    ((_, verdict, _),) = bench.reaper.verdicts()
    assert verdict.deadline == pytest.approx(1000.0 + T + 10_000.0)
