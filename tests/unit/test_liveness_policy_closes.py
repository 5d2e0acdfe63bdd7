"""Closed connections, and who might be the worker come back."""

from __future__ import annotations

import pytest

from lmcache_nodeagent.liveness.evidence import CloseKind, Connection
from lmcache_nodeagent.liveness.policy import (
    Reason,
    State,
    Window,
)
from lmcache_nodeagent.liveness.stalls import Stalls
from lmcache_nodeagent.liveness.testimony import Hint
from tests.fakes.judged import (
    CLOSE,
    CONFIRM,
    NEVER,
    T,
    assert_ends,
    candidate,
    closed_entry,
    gone,
    verdict,
)
from tests.fakes.liveness_parts import close, connection, entry

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
    other.hints.append(Hint("pod_gone", 0.0))
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
    hinted.hints.append(Hint("pod_gone", 0.0))
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
