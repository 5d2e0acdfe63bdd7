"""The reaper: when it looks, what it takes out, what makes it wait."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from threading import Event as Woken

import pytest

from lmcache_nodeagent.events import (
    Event,
    HeartbeatMismatch,
    InstanceReaped,
    InstanceReleased,
    InstanceWouldBeReaped,
    ReleaseStuck,
    SilenceBrakeApplied,
)
from lmcache_nodeagent.liveness.evidence import CloseKind, ConnectionLedger
from lmcache_nodeagent.liveness.journal import ReapJournal
from lmcache_nodeagent.liveness.policy import LivenessSettings
from lmcache_nodeagent.liveness.reaper import Reaper
from lmcache_nodeagent.liveness.release import Releaser
from lmcache_nodeagent.liveness.stalls import Stalls
from tests.fakes.liveness_parts import (
    FakeClock,
    FakeEntry,
    FakeRouter,
    FakeTarget,
    ThreadsByHand,
    close,
    connection,
    entry,
)

T = 120.0


@dataclass
class SleepByHand(Woken):
    """Stands for the event the reaper sleeps on: `wait` lets time pass instead."""

    now: FakeClock
    oversleeps: float = 0.0
    slept: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Make the real event's parts."""
        super().__init__()

    def wait(self, timeout: float | None = None) -> bool:
        """Sleep, too long if told."""
        assert timeout is not None
        self.slept.append(timeout)
        self.now.advance(timeout + self.oversleeps)
        return False


class Bench:
    """A reaper with everything around it by hand."""

    def __init__(self, **settings: object) -> None:
        self.now = FakeClock(1000.0)
        self.settings = replace(LivenessSettings(), **settings)  # type: ignore[arg-type]  # test's own
        self.facts: list[Event] = []
        self.target = FakeTarget(self.now)
        self.router = FakeRouter(read_at=1000.0)
        self.ledger = ConnectionLedger()
        self.stalls = Stalls()
        self.journal = ReapJournal("boot")
        self.threads = ThreadsByHand()
        self.housekeeping: Callable[[float], None] = lambda _: None
        self.releaser = Releaser(
            self.threads,
            self.facts.append,
            self.now,
            self.target.drop_instance_state,
            30.0,
            lambda: None,
        )
        self.reaper = Reaper(
            [self.target],
            self.ledger,
            self.stalls,
            lambda: self.settings,
            self.releaser,
            self.journal,
            self.facts.append,
            self.now,
            self.keep_house,
        )
        self.reaper.watch(self.router)

    def keep_house(self, now: float) -> None:
        """Do what the test has put there."""
        self.housekeeping(now)

    def register(self, number: int, address: str = "", *, at: float = 1000.0) -> FakeEntry:
        """Add an instance that pinged at `at`, on a peer of its own unless told."""
        link = connection(address or f"10.0.0.{number}", serial=number)
        made = entry(link, number=number, at=at)
        self.target.add(made)
        return made

    def told(self, kind: type[Event]) -> list[Event]:
        """What was published of one kind."""
        return [fact for fact in self.facts if isinstance(fact, kind)]

    def journalled(self) -> list[tuple[object, object, object]]:
        """Reason, seconds and bytes of each reap in the journal."""
        reaps = self.journal.since(0)["reaps"]
        assert isinstance(reaps, list)
        return [(reap["reason"], reap["release_seconds"], reap["bytes"]) for reap in reaps]

    def brake(self) -> float | None:
        """Until when silence reaps wait."""
        return self.reaper.brake_until

    def ids(self) -> list[int]:
        """Who is registered."""
        return list(self.target.entries)


def test_nothing_to_judge_means_to_look_again_after_a_while() -> None:
    """A quarter of T, and half a minute at most; the housekeeping is done every time."""
    for timeout, seconds in [(30.0, 7.5), (60.0, 15.0), (1000.0, 30.0), (0.0, 30.0)]:
        bench = Bench(reap_timeout_seconds=timeout)
        kept = list[float]()
        bench.housekeeping = kept.append
        assert bench.reaper.scan() == 1000.0 + seconds
        assert kept == [1000.0]


def test_it_sleeps_until_the_earliest_deadline() -> None:
    """Not until the next quarter of T."""
    bench = Bench()
    bench.register(1)
    dying = bench.register(2)
    close(dying.last_connection, 1000.0)
    assert bench.reaper.scan() == 1010.0


def test_a_reap_is_taken_out_told_released_and_journalled() -> None:
    """Fence first; the journal entry comes with the bytes."""
    bench = Bench()
    dead = bench.register(7)
    bench.now.advance(T)
    bench.reaper.scan()
    assert bench.ids() == []
    (reaped,) = bench.told(InstanceReaped)
    assert isinstance(reaped, InstanceReaped)
    assert (reaped.instance_id, reaped.reason, reaped.silent_seconds) == (
        7,
        "heartbeat_timeout",
        T,
    )
    assert reaped.mapped_bytes == 4096
    assert "has pinged" in reaped.evidence
    assert bench.journalled() == []
    bench.now.advance(0.25)
    bench.threads.run_all()
    assert dead.closes == 1
    assert bench.target.dropped == [7]
    assert len(bench.told(InstanceReleased)) == 1
    assert bench.journalled() == [("heartbeat_timeout", 0.25, 4096)]


def test_a_stuck_release_is_journalled_without_bytes() -> None:
    """And reported at its deadline, to which the reaper wakes."""
    bench = Bench()
    bench.register(7)
    bench.now.advance(T)
    bench.reaper.scan()
    bench.now.advance(2.0)
    assert bench.reaper.scan() == 1000.0 + T + 30.0
    bench.now.seconds = 1000.0 + T + 30.0
    bench.reaper.scan()
    assert len(bench.told(ReleaseStuck)) == 1
    assert bench.journalled() == [("heartbeat_timeout", None, 0)]
    bench.threads.run_all()
    assert len(bench.told(ReleaseStuck)) == 1


def test_one_scan_takes_out_all_who_are_due() -> None:
    """Each with its own reason."""
    bench = Bench()
    gone, exited = bench.register(1), bench.register(2)
    close(gone.last_connection, 1000.0)
    bench.now.advance(10.0)
    close(exited.last_connection, 1010.0)
    exited.last_connection.process_gone = True
    bench.register(3)
    bench.reaper.scan()
    reasons = [fact.reason for fact in bench.facts if isinstance(fact, InstanceReaped)]
    assert (reasons, bench.ids()) == (["connection_closed", "process_exit"], [3])


# The caught-up mark


def test_nobody_is_reaped_before_the_router_has_caught_up() -> None:
    """What says that the worker lives may still be unread."""
    bench = Bench()
    bench.register(1)
    bench.router.catches_up = False
    bench.now.advance(T)
    assert bench.reaper.scan() == pytest.approx(bench.now() + 0.1)
    assert bench.ids() == [1]
    bench.router.catches_up = True
    bench.reaper.scan()
    assert bench.ids() == []


def test_the_router_is_asked_only_if_somebody_is_due() -> None:
    """Every scan of a healthy node would disturb it."""
    bench = Bench()
    bench.register(1)
    bench.reaper.scan()
    assert bench.router.asked == 0


def test_what_the_router_reads_meanwhile_counts() -> None:
    """The entry is judged again with it, and its new deadline is kept."""
    bench = Bench(reap_timeout_seconds=30.0)
    alive = bench.register(1)
    bench.now.advance(30.0)
    link = alive.last_connection

    def read() -> None:
        bench.target.touch_instance(alive.instance_id, link, ping=True)
        bench.router.read_at = bench.now()

    bench.router.on_caught_up = read
    bench.reaper.scan()
    assert bench.ids() == [1]
    close(link, bench.now())
    bench.now.advance(10.0)

    def reconnect() -> None:
        while bench.ledger.accepted(50, bench.now()).serial <= 1:
            pass  # serial 1 is the entry's own

    bench.router.on_caught_up = reconnect
    assert bench.reaper.scan() == pytest.approx(bench.now() + 7.5)
    assert bench.ids() == [1]


def test_a_verdict_is_about_the_moment_up_to_which_everything_was_read() -> None:
    """A process that is stopped between the mark and the judgement condemns nobody."""
    bench = Bench()
    bench.register(1, at=1000.0)
    dead = bench.register(2, at=999.0)
    bench.now.advance(T - 0.5)
    bench.router.on_caught_up = lambda: bench.now.advance(500.0)
    bench.reaper.scan()
    assert bench.ids() == [1]
    assert dead.instance_id not in bench.target.entries


def test_a_reaper_without_a_router_trusts_the_clock() -> None:
    """Tools and tests have none."""
    bench = Bench()
    bench.reaper._router = None
    bench.register(1)
    bench.now.advance(T)
    bench.reaper.scan()
    assert bench.ids() == []


# Observe


@pytest.mark.parametrize("settings", [{"enforce": False}, {"reap_timeout_seconds": 0.0}])
def test_observing_reports_once_per_silence_and_reaps_nobody(settings: dict[str, object]) -> None:
    """Also with T = 0: what would have been is told."""
    bench = Bench(**settings)
    watched = bench.register(1)
    close(watched.last_connection, 1000.0)
    for seconds in (10.0, 1.0, 4000.0):
        bench.now.advance(seconds)
        bench.reaper.scan()
    (would,) = bench.told(InstanceWouldBeReaped)
    assert isinstance(would, InstanceWouldBeReaped)
    assert (would.reason, would.silent_seconds) == ("connection_closed", 10.0)
    assert would.evidence
    assert (bench.ids(), bench.router.asked) == ([1], 0)
    back = connection("10.0.0.1", serial=9)
    bench.target.touch_instance(watched.instance_id, back, ping=True)
    close(back, bench.now())
    bench.now.advance(10.0)
    bench.reaper.scan()
    assert len(bench.told(InstanceWouldBeReaped)) == 2
    assert not bench.told(InstanceReaped)


def test_a_change_of_mind_about_the_reason_is_no_new_report() -> None:
    """One silence, one report."""
    bench = Bench(enforce=False)
    watched = bench.register(1)
    bench.now.advance(T)
    bench.reaper.scan()
    close(watched.last_connection, bench.now())
    bench.now.advance(20.0)
    bench.reaper.scan()
    assert len(bench.told(InstanceWouldBeReaped)) == 1


# Heartbeats that do not fit


def test_a_slow_heartbeat_is_reported_once_and_its_window_is_wider() -> None:
    """60 s with T = 30: living workers of an old configuration stay."""
    bench = Bench(reap_timeout_seconds=30.0)
    slow = bench.register(1, at=940.0)
    link = slow.last_connection
    bench.target.touch_instance(slow.instance_id, link, ping=True)
    bench.reaper.scan()
    bench.now.advance(179.0)
    bench.reaper.scan()
    assert bench.told(HeartbeatMismatch) == [HeartbeatMismatch(slow.instance_id, 60.0, 180.0)]
    assert slow.mismatch_reported
    bench.now.advance(1.0)
    bench.reaper.scan()
    assert bench.ids() == []


def test_a_heartbeat_that_fits_again_may_be_reported_again() -> None:
    """The gauge follows the present."""
    bench = Bench(reap_timeout_seconds=30.0)
    slow = bench.register(1)
    slow.ping_intervals = [60.0]
    bench.reaper.scan()
    slow.ping_intervals = [10.0]
    bench.reaper.scan()
    assert not slow.mismatch_reported
    slow.ping_intervals = [60.0]
    bench.reaper.scan()
    assert len(bench.told(HeartbeatMismatch)) == 2


# The brake


def _fall_silent(bench: Bench, peers: int) -> None:
    """Register peers whose heartbeats come one second apart, and read nothing after the last."""
    for number in range(1, peers + 1):
        bench.register(number, at=1000.0 - peers + number)


def test_mass_silence_that_may_be_our_fault_waits_for_one_further_t() -> None:
    """Heartbeats are staggered: the first one due finds the others silent, too."""
    bench = Bench()
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
    bench = Bench()
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
    bench = Bench()
    _fall_silent(bench, 3)
    bench.now.seconds = 1000.0 + T
    bench.router.read_at = bench.now() - T / 2
    bench.reaper.scan()
    assert bench.ids() == []


def test_scans_that_overslept_are_a_sign_of_our_fault() -> None:
    """Although the router read what there was."""
    bench = Bench()
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
    bench = Bench()
    for number in range(1, silent + 1):
        bench.register(number)
    bench.now.advance(T)
    for number in range(11, 11 + others):
        bench.register(number, at=bench.now())
    bench.reaper.scan()
    assert len(bench.ids()) == others


def test_peers_are_pods_not_ranks() -> None:
    """Eight silent ranks of one pod are one; a pod of which one rank speaks is not silent."""
    bench = Bench()
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
    bench = Bench()
    _fall_silent(bench, 3)
    for number in range(20, 30):
        bench.target.add(entry(connection(f"10.0.1.{number}"), number=number, pinged=False))
    bench.now.seconds = 1000.0 + T
    bench.reaper.scan()
    assert len(bench.ids()) == 13


def test_the_brake_holds_silence_alone() -> None:
    """Closed connections and proof act as ever."""
    bench = Bench()
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
    bench = Bench()
    sleep = SleepByHand(bench.now)
    bench.reaper._woken = sleep
    _stop_after(bench, 3)
    bench.reaper.run()
    assert sleep.slept == [30.0, 30.0, 30.0]
    assert bench.stalls.delay_since(0.0) == 0.0


def _stop_after(bench: Bench, scans: int, each: Callable[[], None] = lambda: None) -> None:
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
    bench = Bench()
    _stop_after(bench, 3, bench.reaper.wake)
    bench.reaper.run()
    assert bench.reaper._stopping.is_set()


@pytest.mark.parametrize(("late", "counted"), [(0.9, 0.0), (50.0, 50.0)])
def test_an_overslept_scan_is_lateness(late: float, counted: float) -> None:
    """It puts off every deadline that began before. Up to a second is noise."""
    bench = Bench()
    bench.reaper._woken = SleepByHand(bench.now, oversleeps=late)
    _stop_after(bench, 1)
    bench.reaper.run()
    assert bench.stalls.delay_since(0.0) == pytest.approx(counted)


def test_a_scan_that_takes_long_makes_the_next_one_late() -> None:
    """A process stopped in the middle of one is as late as one stopped between two."""
    bench = Bench()
    sleep = SleepByHand(bench.now)
    bench.reaper._woken = sleep
    _stop_after(bench, 1, lambda: bench.now.advance(200.0))
    bench.reaper.run()
    assert sleep.slept == [0.01]
    assert bench.stalls.delay_since(1000.0) == pytest.approx(170.01)


def test_a_clock_that_jumps_condemns_nobody() -> None:
    """A suspended machine: afterwards everybody has the time left that there was before."""
    bench = Bench()
    bench.register(1)
    bench.reaper._woken = SleepByHand(bench.now, oversleeps=10_000.0)
    _stop_after(bench, 1)
    bench.reaper.run()
    bench.reaper.scan()
    assert bench.ids() == [1]
    ((_, verdict, _),) = bench.reaper.verdicts()
    assert verdict.deadline == pytest.approx(1000.0 + T + 10_000.0)


# For people


def test_verdicts_are_for_people_and_change_nothing() -> None:
    """With the evidence in words."""
    bench = Bench()
    shown = bench.register(1)
    close(shown.last_connection, 1000.0, CloseKind.TIMED_OUT)
    bench.now.advance(5 * T)
    ((found, verdict, silent),) = bench.reaper.verdicts()
    assert (found, silent) == (shown, 5 * T)
    assert verdict.reason is not None
    assert verdict.evidence
    assert bench.ids() == [1]
