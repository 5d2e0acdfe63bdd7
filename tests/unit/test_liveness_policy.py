"""Who is dead: each rule of the policy, one by one."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_nodeagent.liveness.entry import Hint, LivenessEntry
from lmcache_nodeagent.liveness.evidence import CloseKind, Connection, Link, Surroundings
from lmcache_nodeagent.liveness.policy import (
    LivenessSettings,
    Reason,
    State,
    Verdict,
    Window,
    fell_silent,
    heartbeat_is_mismatched,
    is_mass_silence,
    judge,
)
from lmcache_nodeagent.liveness.stalls import Stalls
from tests.fakes.liveness_parts import close, connection, entry

T, GRACE, CONFIRM, CLOSE = 120.0, 3600.0, 15.0, 10.0
SETTINGS = LivenessSettings()
NEVER = 10_000_000.0


def verdict(
    of: LivenessEntry,
    now: float,
    *links: Link,
    gone: tuple[Link, ...] = (),
    closes: tuple[tuple[str, float], ...] = (),
    stall_ended_at: float | None = None,
    settings: LivenessSettings = SETTINGS,
    stalls: Stalls | None = None,
) -> Verdict:
    """Judge at `now`, with these links open."""
    around = Surroundings(links, gone, closes, stall_ended_at)
    return judge(of, now, settings, around, stalls or Stalls())


def assert_ends(judged: Verdict, window: Window, deadline: float) -> None:
    """A window runs out at `deadline`, and nothing has yet."""
    assert (judged.window, judged.deadline, judged.reason) == (window, deadline, None)


def candidate(serial: int = 2, speaker: Connection | None = None) -> Link:
    """An open link accepted after that of the entry's connection (serial 1)."""
    link = Link(serial=serial, descriptor=serial, accepted_at=1.0, connection=speaker)
    if speaker is not None:
        speaker.link = link
    return link


def gone(at: float, serial: int = 2, speaker: Connection | None = None) -> Link:
    """A link that closed at `at`."""
    link = candidate(serial, speaker)
    link.closed_at = at
    return link


def closed_entry(
    at: float = 0.0,
    kind: CloseKind = CloseKind.PEER,
    *,
    pinged: bool = True,
    engine: str = "vllm",
) -> LivenessEntry:
    """An instance heard last at `at`, when its connection closed."""
    link = connection(serial=1)
    made = entry(link, at=at, pinged=pinged, engine=engine)
    close(link, at, kind)
    return made


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
    idle.hints.append(Hint("pod_deleted", 10.0, NEVER))
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


# Closed connections


@pytest.mark.parametrize("pinged", [True, False])
def test_a_closed_connection_shortens_the_window(*, pinged: bool) -> None:
    """Also of one that never pinged: a crash in warm-up does not hold memory for an hour."""
    gone_silent = closed_entry(50.0, pinged=pinged)
    assert_ends(verdict(gone_silent, 59.9), Window.CLOSE, 60.0)
    assert verdict(gone_silent, 60.0).reason is Reason.CONNECTION_CLOSED


@pytest.mark.parametrize("kind", [CloseKind.TIMED_OUT, CloseKind.OURSELVES])
def test_a_close_by_keepalive_or_by_ourselves_is_silence(kind: CloseKind) -> None:
    """Never a close hint."""
    assert_ends(verdict(closed_entry(0.0, kind), 60.0), Window.HEARTBEAT_TIMEOUT, T)


def test_one_open_connection_of_several_means_not_closed() -> None:
    """The window starts when the last of them has closed."""
    first, second = connection(serial=1), connection(serial=2)
    both = entry(first)
    both.bind(second)
    close(second, 5.0)
    assert verdict(both, 30.0).window is Window.HEARTBEAT_TIMEOUT
    close(first, 20.0)
    assert_ends(verdict(both, 29.0), Window.CLOSE, 30.0)


@pytest.mark.parametrize("engine", ["sglang", "atom", "trtllm", "mock"])
def test_other_engines_are_judged_by_silence_and_proof_alone(engine: str) -> None:
    """Their connectors reconnect and restart in ways that are not known."""
    other = closed_entry(engine=engine)
    other.hints.append(Hint("pod_gone", 0.0, NEVER))
    assert_ends(verdict(other, 60.0), Window.HEARTBEAT_TIMEOUT, T)


# Candidates


def test_a_silent_candidate_holds_the_entry() -> None:
    """It might be the same worker come back, from whatever address: its word may take an hour."""
    held = verdict(closed_entry(pinged=False), NEVER, candidate())
    assert (held.reason, held.window) == (None, Window.NONE)
    assert held.held_by == "1 candidate connection(s)"
    assert held.state is State.CLOSED


def test_a_candidate_does_not_hold_silence() -> None:
    """Whoever has pinged and is silent for T is dead, whatever connected since."""
    held = verdict(closed_entry(), 60.0, candidate())
    assert_ends(held, Window.HEARTBEAT_TIMEOUT, T)
    assert verdict(closed_entry(), T, candidate()).reason is Reason.HEARTBEAT_TIMEOUT


def test_a_candidate_holds_hints_as_well() -> None:
    """The entry is held, not one of its windows."""
    hinted = closed_entry()
    hinted.hints.append(Hint("pod_gone", 0.0, NEVER))
    assert verdict(hinted, 60.0, candidate()).window is Window.HEARTBEAT_TIMEOUT


def test_links_accepted_before_are_no_candidates() -> None:
    """A worker comes back on a connection that is newer than the one it had."""
    old = entry(link := connection(serial=3), pinged=False)
    close(link, 0.0)
    assert verdict(old, CLOSE, candidate(2)).reason is Reason.CONNECTION_CLOSED
    assert verdict(old, CLOSE, candidate(4)).reason is None


def test_without_a_known_link_every_other_link_is_a_candidate() -> None:
    """Unknown accept order counts as the earliest: it only delays."""
    unknown = entry(link := connection(), pinged=False)
    close(link, 0.0)
    assert verdict(unknown, NEVER, candidate(1)).reason is None


def _spoke(**changes: object) -> Connection:
    """A connection that has spoken, as told."""
    speaker = connection("10.0.0.9")
    for name, value in changes.items():
        setattr(speaker, name, value)
    return speaker


@pytest.mark.parametrize(
    ("speaker", "excluded"),
    [
        (_spoke(spoke_for=frozenset({2})), True),
        (_spoke(spoke_for=frozenset({1, 2})), True),
        (_spoke(first_uid=0), True),
        (_spoke(asked_lookups=True), True),
        (_spoke(spoke_for=frozenset({1})), False),
        (_spoke(first_uid=-1), False),
        (_spoke(), False),
    ],
)
def test_a_candidate_is_excluded_by_what_it_says(speaker: Connection, *, excluded: bool) -> None:
    """Another's id, uid 0 (clients count on over a reconnect), or look-ups out of character."""
    judged = verdict(closed_entry(), CLOSE, candidate(2, speaker))
    assert (judged.reason is Reason.CONNECTION_CLOSED) is excluded
    assert (judged.held_by is None) is excluded


def test_look_ups_do_not_exclude_where_the_old_connection_made_some() -> None:
    """A client with one connection for everything goes on as it did."""
    both = closed_entry()
    both.last_connection.asked_lookups = True
    assert verdict(both, CLOSE, candidate(2, _spoke(asked_lookups=True))).reason is None


def test_a_gone_candidate_restarts_the_window() -> None:
    """A worker may need several attempts; each could have been its own."""
    retried = closed_entry()
    assert_ends(verdict(retried, 18.9, gone=(gone(9.0),)), Window.CLOSE, 19.0)
    assert verdict(retried, 19.0, gone=(gone(9.0),)).reason is Reason.CONNECTION_CLOSED
    assert verdict(retried, CLOSE, gone=(gone(9.0, serial=1),)).reason is not None


@pytest.mark.parametrize(
    "speaker", [_spoke(first_uid=0), _spoke(spoke_for=frozenset({2})), _spoke(asked_lookups=True)]
)
def test_others_that_come_and_go_do_not_delay_anything(speaker: Connection) -> None:
    """A prober that connects every few seconds must not keep dead workers' memory."""
    assert verdict(closed_entry(), CLOSE, gone=(gone(9.0, speaker=speaker),)).reason is (
        Reason.CONNECTION_CLOSED
    )


def test_the_window_starts_again_after_a_router_stall() -> None:
    """What came in meanwhile was not read; the stall itself is not counted twice."""
    stalls = Stalls()
    stalls.record(2.0, 30.0)
    judged = verdict(closed_entry(), 39.0, stall_ended_at=30.0, stalls=stalls)
    assert_ends(judged, Window.CLOSE, 40.0)
    earlier = verdict(closed_entry(50.0), 59.0, stall_ended_at=30.0, stalls=stalls)
    assert_ends(earlier, Window.CLOSE, 60.0)


@pytest.mark.parametrize(("moment", "seconds"), [(2.0, CONFIRM), (-2.0, CONFIRM), (2.1, CLOSE)])
def test_closes_of_two_peers_within_two_seconds_are_a_network_event(
    moment: float, seconds: float
) -> None:
    """Then the window is the confirm time: a network comes back in seconds, a dead pod does not."""
    closes = (("ip:10.0.0.1", 100.0), ("ip:10.0.0.2", 100.0 + moment))
    assert_ends(verdict(closed_entry(100.0), 105.0, closes=closes), Window.CLOSE, 100.0 + seconds)


def test_closes_of_one_peer_are_no_network_event() -> None:
    """All ranks of a pod go down together when the pod does."""
    closes = tuple(("ip:10.0.0.1", at) for at in (99.0, 100.0, 100.5))
    assert_ends(verdict(closed_entry(100.0), 105.0, closes=closes), Window.CLOSE, 110.0)


def test_a_candidate_that_closes_in_a_network_event_counts_too() -> None:
    """It may be an idle worker, cut off for the second time, and not heard since the first."""
    closes = (("ip:10.0.0.2", 501.0),)
    cut_again = verdict(closed_entry(0.0, pinged=False), 505.0, gone=(gone(500.0),), closes=closes)
    assert_ends(cut_again, Window.CLOSE, 500.0 + CONFIRM)


# Hints


def test_a_hint_shortens_the_window_of_a_worker_that_is_connected() -> None:
    """The pod is gone as far as the API knows: 15 s of silence are enough then."""
    hinted = entry(at=100.0)
    hinted.hints.append(Hint("pod_gone", 110.0, NEVER))
    assert_ends(verdict(hinted, 124.9), Window.HINT, 125.0)
    reaped = verdict(hinted, 125.0)
    assert (reaped.reason, reaped.state) == (Reason.POD_HINT, State.SUSPECT)
    assert "hint: pod_gone" in reaped.evidence


def test_a_hint_does_nothing_to_an_idle_worker_that_is_connected() -> None:
    """Only proof acts on an open connection that never pinged."""
    hinted = entry(pinged=False)
    hinted.hints.append(Hint("pod_gone", 0.0, NEVER))
    assert verdict(hinted, NEVER - 1).reason is None


def test_hints_expire() -> None:
    """From then on it is as if they had never come."""
    hinted = entry(at=100.0)
    hinted.hints.append(Hint("pod_gone", 100.0, 110.0))
    expired = verdict(hinted, 119.0)
    assert_ends(expired, Window.HEARTBEAT_TIMEOUT, 220.0)
    assert expired.state is State.ACTIVE
    assert "hint: pod_gone" not in expired.evidence


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
    slow.hints.append(Hint("pod_gone", 0.0, NEVER))
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
    hinted.hints.append(Hint("pod_gone", 40.0, NEVER))
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


# Everything at once

seconds = st.floats(0, 500, allow_nan=False).map(lambda value: round(value, 1))
kinds = st.sampled_from(CloseKind)


@st.composite
def entries(draw: st.DrawFn) -> LivenessEntry:
    """Any entry."""
    link = connection(serial=draw(st.sampled_from([0, 3])))
    made = entry(link, at=draw(seconds), pinged=draw(st.booleans()))
    made.ping_intervals = draw(st.lists(st.sampled_from([1.0, 10.0, 60.0, 4000.0]), max_size=3))
    if draw(st.booleans()):
        close(link, draw(seconds), draw(kinds))
    return made


arounds = st.builds(
    Surroundings,
    links=st.lists(st.integers(1, 5).map(candidate), max_size=2).map(tuple),
    gone=st.lists(st.builds(gone, seconds, st.integers(1, 5)), max_size=2).map(tuple),
    peer_closes=st.lists(
        st.tuples(st.sampled_from(["ip:10.0.0.1", "ip:10.0.0.2"]), seconds), max_size=2
    ).map(tuple),
    router_stall_ended_at=st.none() | seconds,
)
stall_lists = st.lists(st.tuples(seconds, seconds), max_size=3)
hints = st.builds(Hint, st.just("pod_gone"), seconds, st.just(NEVER))
all_settings = st.builds(
    LivenessSettings,
    reap_timeout_seconds=st.sampled_from([0.0, 30.0, 120.0]),
    reap_idle_connected=st.booleans(),
)


@given(entries(), arounds, stall_lists, hints, all_settings)
def test_a_hint_never_lengthens_a_window(
    made: LivenessEntry,
    around: Surroundings,
    intervals: list[tuple[float, float]],
    hint: Hint,
    settings: LivenessSettings,
) -> None:
    """Whatever else is known, the deadline with a hint is at most the one without."""
    stalls = Stalls()
    for start, end in intervals:
        stalls.record(start, end)
    without = judge(made, 0.0, settings, around, stalls).deadline
    made.hints.append(hint)
    with_hint = judge(made, 0.0, settings, around, stalls).deadline
    assert (math.inf if with_hint is None else with_hint) <= (
        math.inf if without is None else without
    )


@given(entries(), arounds, all_settings, seconds, st.floats(1.1, 1000))
def test_a_stall_never_brings_a_deadline_forward(
    made: LivenessEntry,
    around: Surroundings,
    settings: LivenessSettings,
    start: float,
    length: float,
) -> None:
    """Nothing is reaped because the agent was late."""
    stalls = Stalls()
    before = judge(made, 0.0, settings, around, stalls).deadline
    stalls.record(start, start + length)
    after = judge(made, 0.0, settings, around, stalls).deadline
    assert (before is None) is (after is None)
    if before is not None and after is not None:
        assert after >= before


@given(entries(), arounds, all_settings, seconds, seconds)
def test_a_verdict_stands(
    made: LivenessEntry,
    around: Surroundings,
    settings: LivenessSettings,
    now: float,
    later: float,
) -> None:
    """Time alone condemns at the deadline, neither before nor only for a while."""
    judged = judge(made, now, settings, around, Stalls())
    again = judge(made, now + later, settings, around, Stalls())
    assert again.deadline == judged.deadline
    if judged.deadline is not None:
        assert (judged.reason is not None) is (now >= judged.deadline)
        assert (again.reason is not None) is (now + later >= judged.deadline)
