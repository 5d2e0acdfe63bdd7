"""The reaper: when it looks, and what it takes out."""

from __future__ import annotations

import pytest

from lmcache_nodeagent.events import (
    HeartbeatMismatch,
    InstanceReaped,
    InstanceReleased,
    InstanceWouldBeReaped,
    ReleaseStuck,
)
from lmcache_nodeagent.liveness.evidence import CloseKind
from lmcache_nodeagent.liveness.testimony import Hint, Registered
from tests.fakes.liveness_parts import (
    close,
    connection,
)
from tests.fakes.reaper_bench import ReaperBench, T


def test_nothing_to_judge_means_to_look_again_after_a_while() -> None:
    """A quarter of T, and half a minute at most; the housekeeping is done every time."""
    for timeout, seconds in [(30.0, 7.5), (60.0, 15.0), (1000.0, 30.0), (0.0, 30.0)]:
        bench = ReaperBench(reap_timeout_seconds=timeout)
        kept = list[float]()
        bench.housekeeping = kept.append
        assert bench.reaper.scan() == 1000.0 + seconds
        assert kept == [1000.0]


def test_housekeeping_says_when_it_is_due_again() -> None:
    """A lease that ends sooner than a quarter of T is not held longer for that."""
    bench = ReaperBench()
    bench.housekeeping_due_at = 1002.0
    assert bench.reaper.scan() == 1002.0


def test_it_sleeps_until_the_earliest_deadline() -> None:
    """Not until the next quarter of T."""
    bench = ReaperBench()
    bench.register(1)
    dying = bench.register(2)
    close(dying.last_connection, 1000.0)
    assert bench.reaper.scan() == 1010.0


def test_a_reap_is_taken_out_told_released_and_journalled() -> None:
    """Fence first; the journal entry comes with the bytes."""
    bench = ReaperBench()
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
    bench = ReaperBench()
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
    bench = ReaperBench()
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
    bench = ReaperBench()
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
    bench = ReaperBench()
    bench.register(1)
    bench.reaper.scan()
    assert bench.router.asked == 0


def test_what_the_router_reads_meanwhile_counts() -> None:
    """The entry is judged again with it, and its new deadline is kept."""
    bench = ReaperBench(reap_timeout_seconds=30.0)
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
    bench = ReaperBench()
    bench.register(1, at=1000.0)
    dead = bench.register(2, at=999.0)
    bench.now.advance(T - 0.5)
    bench.router.on_caught_up = lambda: bench.now.advance(500.0)
    bench.reaper.scan()
    assert bench.ids() == [1]
    assert dead.instance_id not in bench.target.entries


def test_a_reaper_without_a_router_trusts_the_clock() -> None:
    """Tools and tests have none."""
    bench = ReaperBench()
    bench.reaper._router = None
    bench.register(1)
    bench.now.advance(T)
    bench.reaper.scan()
    assert bench.ids() == []


# Observe


@pytest.mark.parametrize("settings", [{"enforce": False}, {"reap_timeout_seconds": 0.0}])
def test_observing_reports_once_per_silence_and_reaps_nobody(settings: dict[str, object]) -> None:
    """Also with T = 0: what would have been is told."""
    bench = ReaperBench(**settings)
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
    bench = ReaperBench(enforce=False)
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
    bench = ReaperBench(reap_timeout_seconds=30.0)
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
    bench = ReaperBench(reap_timeout_seconds=30.0)
    slow = bench.register(1)
    slow.ping_intervals = [60.0]
    bench.reaper.scan()
    slow.ping_intervals = [10.0]
    bench.reaper.scan()
    assert not slow.mismatch_reported
    slow.ping_intervals = [60.0]
    bench.reaper.scan()
    assert len(bench.told(HeartbeatMismatch)) == 2


# For people


def test_verdicts_are_for_people_and_change_nothing() -> None:
    """With the evidence in words."""
    bench = ReaperBench()
    shown = bench.register(1)
    close(shown.last_connection, 1000.0, CloseKind.TIMED_OUT)
    bench.now.advance(5 * T)
    ((found, verdict, silent),) = bench.reaper.verdicts()
    assert (found, silent) == (shown, 5 * T)
    assert verdict.reason is not None
    assert verdict.evidence
    assert bench.ids() == [1]


# The journal


def test_observing_is_journalled_with_what_would_have_decided() -> None:
    """The operator makes an Event of it."""
    bench = ReaperBench(enforce=False)
    watched = bench.register(1)
    watched.registered = Registered(3, 5.0)
    watched.hints.append(Hint("pod_gone", 1000.0))
    bench.now.advance(15.0)
    bench.reaper.scan()
    (numbered,) = bench.journal.unacknowledged()
    entry = numbered.entry
    assert (entry.kind, entry.reason, entry.trigger) == ("would_reap", "pod_hint", "pod_gone")
    assert (entry.subject.registered.serial, entry.silent_seconds) == (3, 15.0)
    assert (entry.release_seconds, entry.latency_seconds, entry.released_bytes) == (None, None, 0)


@pytest.mark.parametrize("released_after", [0.25, 40.0])
def test_a_release_past_its_deadline_is_journalled_beside_the_reap(released_after: float) -> None:
    """Memory that is not back is news of its own."""
    bench = ReaperBench()
    bench.register(1)
    bench.now.advance(T)
    bench.reaper.scan()
    bench.now.advance(released_after)
    bench.reaper.scan()
    bench.threads.run_all()
    kinds = [numbered.entry.kind for numbered in bench.journal.unacknowledged()]
    assert kinds == (["reaped"] if released_after < 30 else ["reaped", "stuck_release"])
    (reaped, *_) = bench.journal.unacknowledged()
    latency = reaped.entry.latency_seconds
    assert latency == (T + released_after if released_after < 30 else None)


def test_who_was_reaped_is_remembered_for_a_while() -> None:
    """In case it is heard again."""
    bench = ReaperBench()
    gone = bench.register(1)
    bench.now.advance(T)
    bench.reaper.scan()
    heard = bench.reaped_lately.heard(gone.instance_id, gone.registrant, bench.now())
    assert heard is not None
    assert heard.reason == "heartbeat_timeout"
