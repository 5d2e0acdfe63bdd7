"""The kubelet's word as proof: when it acts, and what holds it."""

from __future__ import annotations

import pytest

from lmcache_nodeagent.liveness.entry import LivenessEntry
from lmcache_nodeagent.liveness.evidence import CloseKind, Link
from lmcache_nodeagent.liveness.policy import Reason, State, Window
from lmcache_nodeagent.liveness.stalls import Stalls
from lmcache_nodeagent.liveness.testimony import Hint, PodRun, Registered
from lmcache_nodeagent.liveness.windows import LivenessSettings
from tests.fakes.judged import CLOSE, CONFIRM, NEVER, T, assert_ends, candidate, verdict
from tests.fakes.liveness_parts import close, connection, entry

ENDED = 100.0
POD = PodRun("default", "engine-0", "uid-1", "engine")


def proof(trigger: str = "container_terminated", told_at: float = 101.0) -> Hint:
    """The kubelet says that the run ended at 100, and the agent hears of it a second later."""
    return Hint(trigger, told_at, ENDED, ENDED + 2.0)


def proven(
    closed_at: float | None,
    *,
    pinged: bool = True,
    engine: str = "vllm",
    kind: CloseKind = CloseKind.PEER,
) -> LivenessEntry:
    """An instance heard last at 99, of which that is known."""
    link = connection(serial=1)
    made = entry(link, at=99.0, pinged=pinged, engine=engine)
    if closed_at is not None:
        close(link, closed_at, kind)
    made.hints.append(proof())
    return made


@pytest.mark.parametrize("kind", CloseKind)
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("pinged", [True, False])
def test_proof_acts_at_once_when_the_connections_are_closed(
    kind: CloseKind, engine: str, *, pinged: bool
) -> None:
    """Whatever engine, whoever closed, and although the next run's worker has connected."""
    dead = proven(100.3, pinged=pinged, engine=engine, kind=kind)
    judged = verdict(dead, 101.0, candidate(at=101.0))
    assert (judged.reason, judged.window) == (Reason.CONTAINER_TERMINATED, Window.NONE)
    assert (judged.trigger, judged.since) == ("container_terminated", 100.3)


def test_the_reason_is_what_the_operator_saw() -> None:
    """A pod's end is another reason than a container's."""
    dead = proven(100.3)
    dead.hints = [proof("pod_terminated")]
    assert verdict(dead, 101.0).reason is Reason.POD_TERMINATED


def test_a_close_long_before_the_end_is_no_contradiction() -> None:
    """The worker was cut off, and then its container ended."""
    dead = proven(40.0)
    judged = verdict(dead, 101.0)
    assert (judged.reason, judged.since) == (Reason.CONTAINER_TERMINATED, ENDED)


@pytest.mark.parametrize("pinged", [True, False])
@pytest.mark.parametrize("accepted_at", [40.1, 100.9])
def test_one_that_has_come_back_before_the_end_is_not_reaped(
    accepted_at: float, *, pinged: bool
) -> None:
    """Of two engines in a pod one ended. The other, idle and cut off earlier, is here again.

    Which container an instance runs in may have been taken wrong; what ended is not connected.
    """
    other = proven(40.0, pinged=pinged)
    judged = verdict(other, 101.0, candidate(at=accepted_at))
    assert (judged.reason, judged.held_by) == (None, "1 candidate connection(s)")
    if not pinged:
        assert verdict(other, NEVER, candidate(at=accepted_at)).reason is None


@pytest.mark.parametrize(
    "stranger",
    [
        candidate(at=30.0),
        candidate(at=101.0),
        candidate(2, connection("10.0.0.2", first_uid=0), at=40.1),
        candidate(2, connection("10.0.0.2", first_uid=0), at=100.5),
    ],
    ids=["before the close", "after the end", "a new process", "another new process"],
)
def test_others_that_are_connected_hold_no_proof(stranger: Link) -> None:
    """Nobody else's connection keeps a dead worker's memory."""
    assert verdict(proven(40.0), 101.0, stranger).reason is Reason.CONTAINER_TERMINATED


@pytest.mark.parametrize("kind", [CloseKind.TIMED_OUT, CloseKind.OURSELVES])
def test_a_close_that_the_worker_did_not_make_is_found_late(kind: CloseKind) -> None:
    """It may have been back for minutes by then."""
    other = proven(40.0, pinged=False, kind=kind)
    assert verdict(other, 101.0, candidate(at=5.0)).reason is None
    assert verdict(other, 101.0).reason is Reason.CONTAINER_TERMINATED


def test_an_open_connection_contradicts_proof_until_it_closes() -> None:
    """The kubelet's word may overtake the close, but a living worker's connection is open too."""
    late = proven(None)
    judged = verdict(late, 101.5)
    assert (judged.reason, judged.state, judged.window) == (None, State.SUSPECT, Window.HINT)
    close(late.last_connection, 101.9)
    assert verdict(late, 101.9).reason is Reason.CONTAINER_TERMINATED


def test_meanwhile_it_is_a_hint() -> None:
    """A half-open connection of a worker that has pinged holds its memory no longer than that."""
    half_open = proven(None)
    assert_ends(verdict(half_open, 110.0), Window.HINT, 101.0 + CONFIRM)
    judged = verdict(half_open, 101.0 + CONFIRM)
    assert (judged.reason, judged.trigger) == (Reason.POD_HINT, "container_terminated")


def test_an_idle_worker_with_an_open_connection_is_held_whatever_was_proven() -> None:
    """Its pod may be taken for another one's."""
    idle = proven(None, pinged=False)
    judged = verdict(idle, NEVER)
    assert (judged.reason, judged.held_by) == (None, "open connection")
    assert judged.state is State.SUSPECT


@pytest.mark.parametrize("kind", CloseKind)
def test_a_connection_that_outlived_the_end_gets_time_to_come_back(kind: CloseKind) -> None:
    """It says that the worker did not end then: the proof stands for no more than a close."""
    idle = proven(500.0, pinged=False, kind=kind)
    judged = verdict(idle, 505.0)
    assert_ends(judged, Window.CLOSE, 500.0 + CLOSE)
    assert verdict(idle, 500.0 + CLOSE).reason is Reason.CONTAINER_TERMINATED
    assert verdict(idle, NEVER, candidate()).reason is None


def test_a_close_that_was_found_late_outlived_nothing() -> None:
    """The router did not look for ten seconds."""
    stalls = Stalls()
    stalls.record(100.0, 110.0)
    dead = proven(110.0)
    assert verdict(dead, 110.0, stalls=stalls).reason is Reason.CONTAINER_TERMINATED
    assert verdict(dead, 110.0).reason is None


def test_without_the_operators_word_nothing_of_it_counts() -> None:
    """`--hints disabled`, also for what was said before."""
    deaf = LivenessSettings(operator_word=False)
    dead = proven(100.3)
    judged = verdict(dead, 101.0, settings=deaf)
    assert_ends(judged, Window.CLOSE, 100.3 + CLOSE)
    assert not any("container_terminated" in line for line in judged.evidence)
    assert verdict(proven(None), 150.0, settings=deaf).state is State.ACTIVE


def test_a_hint_says_nothing_about_other_engines_but_proof_does() -> None:
    """Connectors that are not known are judged by silence and proof."""
    other = proven(None, engine="sglang")
    assert_ends(verdict(other, 150.0), Window.HEARTBEAT_TIMEOUT, 99.0 + T)


def test_one_ping_tells_no_interval_so_the_set_one_counts() -> None:
    """A worker that is set to ping every 30 s, and has pinged once, is not dead after 15."""
    slow = LivenessSettings(heartbeat_interval_seconds=30.0)
    once = entry(at=100.0)
    once.hints.append(Hint("pod_gone", 101.0))
    assert_ends(verdict(once, 140.0, settings=slow), Window.HINT, 101.0 + 45.0)
    never = entry(connection(serial=1), at=100.0, pinged=False)
    close(never.last_connection, 100.0)
    never.hints.append(Hint("pod_gone", 101.0))
    assert verdict(never, 101.0 + CONFIRM, settings=slow).reason is not None


def test_a_sign_of_life_from_before_the_end_refutes_no_proof() -> None:
    """What the run had sent may be read a moment later."""
    late = proven(None)
    assert late.seen(late.last_connection, 101.5).window == ""
    assert len(late.hints) == 1
    cancelled = late.seen(late.last_connection, 102.1)
    assert (cancelled.window, [hint.trigger for hint in cancelled.hints]) == (
        "proof",
        ["container_terminated"],
    )
    assert late.hints == []
    close(late.last_connection, 102.2)
    assert verdict(late, 103.0).reason is None


def test_a_registration_ends_what_was_said_about_the_one_before() -> None:
    """It may be another process, with the same memory."""
    again = proven(None)
    again.evidence_seen.append("e1")
    newer = connection(serial=2)
    again.registered_again(newer, 101.0, Registered(2, 5.0))
    assert (again.hints, again.evidence_seen) == ([], [])
    assert (again.registered.serial, again.registrant) == (2, newer)


def test_what_is_said_of_one_instance_is_bounded() -> None:
    """An operator gone mad fills nothing."""
    told = entry()
    for number in range(100):
        told.take_hint(Hint("pod_gone", float(number)), str(number))
    assert (len(told.hints), len(told.evidence_seen)) == (16, 64)
    assert told.hints[-1].received_at == 99.0


def test_pod_and_proof_in_words() -> None:
    """For Events and for the journal."""
    dead = proven(100.3)
    dead.registered = Registered(3, 5.0, POD)
    assert verdict(dead, 101.5).evidence[-2:] == (
        "pod default/engine-0 (engine)",
        "proof: container_terminated, told 0.5 s ago, ended 2 s ago by the kubelet's clock",
    )
