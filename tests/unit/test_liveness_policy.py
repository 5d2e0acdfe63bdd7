"""Who is dead: each rule of the policy, one by one."""

from __future__ import annotations

import pytest

from lmcache_nodeagent.liveness.evidence import CloseKind, Surroundings
from lmcache_nodeagent.liveness.policy import Reason, State, Window, is_mass_silence, judge
from lmcache_nodeagent.liveness.stalls import Stalls
from lmcache_nodeagent.liveness.testimony import Hint
from lmcache_nodeagent.liveness.windows import (
    LivenessSettings,
    fell_silent,
    heartbeat_is_mismatched,
)
from tests.fakes.judged import (
    CLOSE,
    GRACE,
    NEVER,
    SETTINGS,
    T,
    assert_ends,
    candidate,
    closed_entry,
    gone,
    verdict,
)
from tests.fakes.liveness_parts import close, connection, entry

# Silence


def test_one_that_has_pinged_is_judged_on_the_reap_timeout() -> None:
    """Not a moment before T, and from then on."""
    pinged = entry(at=100.0)
    assert_ends(verdict(pinged, 219.999), Window.HEARTBEAT_TIMEOUT, 220.0)
    assert verdict(pinged, 220.0).reason is Reason.HEARTBEAT_TIMEOUT


def test_one_that_never_pinged_is_judged_on_the_grace_once_its_connection_is_gone() -> None:
    """Silence alone judges a close that is not the worker's doing: an hour by default."""
    silent = closed_entry(100.0, CloseKind.TIMED_OUT, pinged=False)
    assert_ends(verdict(silent, 3699.9), Window.REGISTRATION_GRACE, 3700.0)
    assert verdict(silent, 3700.0).reason is Reason.REGISTRATION_GRACE


def test_an_idle_worker_with_an_open_connection_is_never_reaped_but_shown() -> None:
    """Stock workers ping only after their first transfer."""
    idle = verdict(entry(pinged=False), NEVER)
    assert (idle.state, idle.window, idle.reason) == (State.IDLE, Window.NONE, None)
    assert idle.held_by == "open connection"
    assert idle.deadline is None


def test_the_flag_restores_the_plain_grace_for_idle_workers() -> None:
    """`--reap-idle-connected`: grace and hints act although the connection is open."""
    settings = LivenessSettings(reap_idle_connected=True)
    idle = entry(pinged=False)
    assert_ends(verdict(idle, 3599.0, settings=settings), Window.REGISTRATION_GRACE, GRACE)
    assert verdict(idle, GRACE, settings=settings).reason is Reason.REGISTRATION_GRACE
    idle.hints.append(Hint("pod_deleted", 10.0))
    assert verdict(idle, 25.0, settings=settings).reason is Reason.POD_HINT


def test_with_the_flag_a_candidate_does_not_stop_the_grace() -> None:
    """The seed's behaviour knows no candidates."""
    settings = LivenessSettings(reap_idle_connected=True)
    silent = closed_entry(pinged=False)
    assert verdict(silent, GRACE, candidate(), settings=settings).reason is (
        Reason.REGISTRATION_GRACE
    )


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (CloseKind.PEER, Reason.CONNECTION_CLOSED),
        (CloseKind.TIMED_OUT, Reason.REGISTRATION_GRACE),
    ],
)
def test_an_idle_worker_that_is_older_than_the_grace_may_reconnect(
    kind: CloseKind, reason: Reason
) -> None:
    """Its open connection spoke for it till then: the grace does not fall due with the close."""
    link = connection(serial=1)
    old = entry(link, pinged=False)
    assert verdict(old, NEVER).reason is None
    close(link, NEVER, kind)
    assert verdict(old, NEVER + CLOSE - 0.1).reason is None
    assert verdict(old, NEVER + CLOSE).reason is reason
    assert verdict(old, NEVER + 15.0, gone=(gone(NEVER + 6.0),)).reason is None


def test_an_open_connection_holds_nobody_who_has_pinged() -> None:
    """A frozen or cut-off worker is live until T ends, and no longer."""
    assert verdict(entry(), T).held_by is None
    assert verdict(entry(), T).reason is Reason.HEARTBEAT_TIMEOUT


# Proof


@pytest.mark.parametrize("pinged", [True, False])
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_exited_process_whose_connection_closed_is_reaped_at_once(
    engine: str, *, pinged: bool
) -> None:
    """Proof needs both, and then no candidate and no engine matters."""
    exited = closed_entry(5.0, pinged=pinged, engine=engine)
    exited.last_connection.process_gone = True
    assert verdict(exited, 5.0, candidate()).reason is Reason.PROCESS_EXIT


def test_an_exited_process_with_an_open_connection_proves_nothing() -> None:
    """A child may have the connection: then something lives that speaks for the instance."""
    inherited = entry()
    inherited.last_connection.process_gone = True
    judged = verdict(inherited, 1.0)
    assert judged.reason is None
    assert "process exited (pidfd)" in judged.evidence


# Hints


def test_a_hint_shortens_the_window_of_a_worker_that_is_connected() -> None:
    """The pod is gone as far as the API knows: 15 s of silence are enough then."""
    hinted = entry(at=100.0)
    hinted.hints.append(Hint("pod_gone", 110.0))
    assert_ends(verdict(hinted, 124.9), Window.HINT, 125.0)
    reaped = verdict(hinted, 125.0)
    assert (reaped.reason, reaped.state) == (Reason.POD_HINT, State.SUSPECT)
    assert (reaped.since, reaped.trigger) == (110.0, "pod_gone")
    assert "hint: pod_gone, told 15.0 s ago" in reaped.evidence


def test_a_hint_does_nothing_to_an_idle_worker_that_is_connected() -> None:
    """Only proof acts on an open connection that never pinged."""
    hinted = entry(pinged=False)
    hinted.hints.append(Hint("pod_gone", 0.0))
    assert verdict(hinted, NEVER - 1).reason is None


def test_hints_expire() -> None:
    """A minute after their window: what held the worker may end by itself, and is judged anew."""
    link = connection(serial=1)
    held = entry(link, at=100.0, pinged=False)
    held.hints.append(Hint("pod_gone", 100.0))
    assert verdict(held, 174.9).state is State.SUSPECT
    expired = verdict(held, 175.0)
    assert expired.state is State.IDLE
    assert not any("pod_gone" in line for line in expired.evidence)
    close(link, 175.0)
    assert_ends(verdict(held, 184.9), Window.CLOSE, 185.0)


@pytest.mark.parametrize("kind", CloseKind)
def test_a_hint_leaves_a_connection_that_just_closed_time_to_come_back(kind: CloseKind) -> None:
    """The open connection held it till then; the hint's own window is over."""
    link = connection(serial=1)
    held = entry(link, at=100.0, pinged=False)
    held.hints.append(Hint("pod_gone", 100.0))
    assert verdict(held, 120.0).held_by == "open connection"
    close(link, 120.0, kind)
    assert verdict(held, 129.9).reason is None
    assert verdict(held, 129.9, candidate()).window is Window.NONE
    assert verdict(held, 130.0).reason is Reason.POD_HINT


# Relation of windows


@pytest.mark.parametrize(
    ("interval", "timeout", "window"),
    [(0, 30, 30), (10, 30, 30), (60, 30, 180), (60, 120, 180), (5000, 30, 3600)],
)
def test_the_silence_window_follows_the_observed_interval(
    interval: float, timeout: float, window: float
) -> None:
    """Running pods keep the interval they started with: max(T, 3 x observed), at most the grace."""
    slow = entry()
    slow.ping_intervals = [interval] if interval else []
    settings = LivenessSettings(reap_timeout_seconds=timeout)
    assert verdict(slow, window - 0.1, settings=settings).reason is None
    assert verdict(slow, window, settings=settings).reason is Reason.HEARTBEAT_TIMEOUT


@pytest.mark.parametrize(("interval", "window"), [(10, 15), (60, 90), (90, 120)])
def test_the_hint_window_follows_the_observed_interval(interval: float, window: float) -> None:
    """max(confirm, 1.5 x observed); and never beyond what silence would have given."""
    slow = entry()
    slow.ping_intervals = [interval]
    slow.hints.append(Hint("pod_gone", 0.0))
    settings = LivenessSettings(reap_timeout_seconds=120, registration_grace_seconds=120)
    judged = verdict(slow, window, settings=settings)
    assert judged.deadline == window
    assert judged.reason is not None


@pytest.mark.parametrize(
    ("interval", "timeout", "mismatched"),
    [(0, 30, False), (10.9, 30, False), (11.1, 30, True), (60, 30, True), (60, 0, False)],
)
def test_a_heartbeat_that_is_too_slow_for_t_is_a_mismatch(
    interval: float, timeout: float, *, mismatched: bool
) -> None:
    """Ten per cent of jitter are none; without T there is nothing to be too slow for."""
    slow = entry()
    slow.ping_intervals = [interval]
    settings = LivenessSettings(reap_timeout_seconds=timeout)
    assert heartbeat_is_mismatched(slow, settings) is mismatched


def test_without_a_timeout_silence_never_ends() -> None:
    """T = 0: no silence and no grace; what other evidence says is still told."""
    off = LivenessSettings(reap_timeout_seconds=0)
    assert not off.reaps
    assert verdict(entry(), NEVER, settings=off).reason is None
    assert verdict(entry(), NEVER, settings=off).state is State.ACTIVE
    silent = closed_entry(0.0, CloseKind.TIMED_OUT, pinged=False)
    assert verdict(silent, NEVER, settings=off).deadline is None
    assert verdict(closed_entry(), CLOSE, settings=off).reason is Reason.CONNECTION_CLOSED


def test_observing_changes_no_verdict() -> None:
    """It says what would be reaped."""
    observe = LivenessSettings(enforce=False)
    assert not observe.reaps
    assert verdict(entry(), T, settings=observe).reason is Reason.HEARTBEAT_TIMEOUT


# Time


def test_lateness_of_the_agent_puts_deadlines_off() -> None:
    """Each deadline that began before the delay, by as much of it as it has seen."""
    stalls = Stalls()
    stalls.record(50.0, 80.0)
    assert_ends(verdict(entry(), 149.0, stalls=stalls), Window.HEARTBEAT_TIMEOUT, 150.0)
    assert_ends(verdict(entry(at=60.0), 199.0, stalls=stalls), Window.HEARTBEAT_TIMEOUT, 200.0)
    assert_ends(verdict(entry(at=80.0), 199.0, stalls=stalls), Window.HEARTBEAT_TIMEOUT, 200.0)
    assert_ends(verdict(closed_entry(45.0), 80.0, stalls=stalls), Window.CLOSE, 85.0)
    hinted = entry(at=40.0)
    hinted.hints.append(Hint("pod_gone", 40.0))
    assert_ends(verdict(hinted, 80.0, stalls=stalls), Window.HINT, 85.0)


# The brake


@pytest.mark.parametrize(
    ("silent", "pinging", "mass"),
    [(2, 2, False), (3, 3, True), (3, 4, True), (3, 5, False), (4, 6, True), (0, 0, False)],
)
def test_mass_silence_is_three_peers_and_more_than_sixty_per_cent(
    silent: int, pinging: int, *, mass: bool
) -> None:
    """Peers are pods, not ranks."""
    assert is_mass_silence(silent, pinging) is mass


def test_falling_silent_is_half_a_window_without_a_word() -> None:
    """Pings are at most a third of it apart. Who never pinged cannot fall silent."""
    assert not fell_silent(entry(), 60.0, SETTINGS)
    assert fell_silent(entry(), 60.1, SETTINGS)
    assert not fell_silent(entry(pinged=False), NEVER, SETTINGS)
    assert not fell_silent(entry(), NEVER, LivenessSettings(reap_timeout_seconds=0))


# For people


def test_states_that_people_see() -> None:
    """active, idle, suspect, closed; releasing is not the policy's to say."""
    assert verdict(entry(), 60.0).state is State.ACTIVE
    assert verdict(entry(), 61.0).state is State.SUSPECT
    assert verdict(entry(pinged=False), 61.0).state is State.IDLE
    assert verdict(closed_entry(), 1.0).state is State.CLOSED


def test_evidence_in_words() -> None:
    """The journal says why, so that nobody has to guess later."""
    slow = entry()
    slow.ping_intervals = [60.0]
    assert verdict(slow, 12.0).evidence == (
        "silent for 12.0 s",
        "has pinged",
        "pings every 60.0 s",
        "connection from 10.0.0.1 open",
    )
    assert verdict(closed_entry(2.0, pinged=False), 12.0, candidate()).evidence == (
        "silent for 10.0 s",
        "never pinged",
        "connection from 10.0.0.1 closed 10.0 s ago (peer)",
        "1 connection(s) might be the worker come back",
    )


def test_evidence_is_put_into_words_only_on_request() -> None:
    """A survey of a thousand instances needs none."""
    judged = judge(entry(), 1.0, SETTINGS, Surroundings(), Stalls(), describe=False)
    assert judged.evidence == ()
