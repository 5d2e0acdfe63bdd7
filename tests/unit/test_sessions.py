"""Sessions: whose pins are whose, and when they end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lmcache_nodeagent import sessions as module
from lmcache_nodeagent.errors import Overloaded
from lmcache_nodeagent.sessions import Lease, Pins, SessionTable

TTL, LEASE = 600.0, 300.0


@dataclass(eq=False)
class FakeOwner:
    """A connection."""

    is_open: bool = True


A, B = FakeOwner(), FakeOwner()


def table() -> SessionTable:
    """An empty table."""
    return SessionTable(TTL, LEASE, lambda: 0.0)


def started(*, hit: int = 2, now: float = 0.0) -> SessionTable:
    """A table where connection A of peer "a" has looked up r1 and pinned x and y."""
    made = table()
    assert made.start(A, "a", "r1", hit, {"x": 1, "y": 1}, now) == {}
    return made


def test_a_status_is_given_once() -> None:
    """Upstream forgets a finished job when it is asked for; unknown is 0."""
    sessions = started()
    assert sessions.take_status(A, "a", "r1") == 2
    assert sessions.take_status(A, "a", "r1") == 0
    assert sessions.take_status(A, "a", "r2") == 0


def test_two_engines_may_use_one_request_id() -> None:
    """Each has its own status, end and pins."""
    sessions = started()
    sessions.start(B, "b", "r1", 5, {"x": 1}, 0.0)
    assert sessions.take_status(B, "b", "r1") == 5
    assert sessions.take_status(A, "a", "r1") == 2
    settle = sessions.end(B, "b", "r1")
    assert settle is not None
    assert settle() == {"x": 1}
    assert len(sessions) == 1
    assert sessions.release(A, "a", "r1", ["x"], 1) == {"x": 1}


def test_another_peers_session_is_not_found() -> None:
    """Neither its status nor its pins nor its end."""
    sessions = started()
    assert sessions.take_status(B, "b", "r1") == 0
    assert sessions.release(B, "b", "r1", ["x"], 1) == {}
    assert sessions.end(B, "b", "r1") is None
    assert sessions.take_status(B, "", "r1") == 0


def test_a_client_that_reconnected_goes_on_with_its_session() -> None:
    """Another connection, the same peer, the first one closed; its own session comes first."""
    sessions, gone = table(), FakeOwner(is_open=False)
    sessions.start(gone, "a", "r1", 2, {"x": 1}, 0.0)
    assert sessions.take_status(B, "a", "r1") == 2
    sessions.start(B, "a", "r1", 7, {}, 0.0)
    assert sessions.take_status(B, "a", "r1") == 7


def test_engines_behind_one_address_do_not_meet() -> None:
    """What another open connection of the peer looked up is not there, in any operation.

    An engine may end a request twice, or ask for one that it never looked up.
    """
    sessions = started()
    assert sessions.end(B, "a", "r1") is None
    assert sessions.release(B, "a", "r1", ["x"], 1) == {}
    assert sessions.take_status(B, "a", "r1") == 0
    assert sessions.wait_status(B, "a", "r1", lambda _: None) == 0
    assert sessions.take_status(A, "a", "r1") == 2
    assert sessions.release(A, "a", "r1", ["x", "y"], 1) == {"x": 1, "y": 1}


def test_a_reused_request_id_starts_anew() -> None:
    """The pins of the replaced session are the caller's to unpin."""
    sessions = started()
    assert sessions.start(A, "a", "r1", 1, {"z": 3}, 1.0) == {"x": 1, "y": 1}
    assert sessions.take_status(A, "a", "r1") == 1
    assert sessions.consume("a", "r1", ["x"], 1) == {}
    assert len(sessions) == 1


def test_a_release_takes_what_is_there_and_no_more() -> None:
    """Pins are counted: free with too large a number frees one's own alone."""
    sessions = table()
    sessions.start(A, "a", "r1", 2, {"x": 2, "y": 1}, 0.0)
    assert sessions.release(A, "a", "r1", ["x", "y", "z"], 1) == {"x": 1, "y": 1}
    assert sessions.release(A, "a", "r1", ["x", "y"], 5) == {"x": 1}
    assert sessions.release(A, "a", "r1", ["x", "y"], 1) == {}


def test_a_release_consumes_an_unasked_status() -> None:
    """As upstream: the job is over."""
    sessions = started()
    sessions.release(A, "a", "r1", [], 1)
    assert sessions.take_status(A, "a", "r1") == 0


def test_a_retrieve_consumes_one_pin_of_each_key() -> None:
    """Twice with one pin is once."""
    sessions = table()
    sessions.start(A, "a", "r1", 2, {"x": 2, "y": 1}, 0.0)
    assert sessions.consume("a", "r1", ["x", "y", "z"], 1) == {"x": 1, "y": 1}
    assert sessions.consume("a", "r1", ["x", "y"], 2) == {"x": 1}
    assert sessions.consume("a", "r1", ["x", "y"], 3) == {}
    assert sessions.consume("a", "r2", ["x"], 1) == {}


def test_a_reader_takes_one_pin_however_often_it_asks() -> None:
    """The ranks of a latent cache share each object: one that retries takes no other one's pin."""
    sessions = table()
    sessions.start(A, "a", "r1", 1, {"x": 3}, 0.0)
    assert sessions.consume("a", "r1", ["x"], 1) == {"x": 1}
    assert sessions.consume("a", "r1", ["x"], 1) == {}
    assert sessions.consume("a", "r1", ["x"], 2) == {"x": 1}
    assert sessions.consume("a", "r1", ["x"], 2) == {}
    assert sessions.consume("a", "r1", ["x"], 3) == {"x": 1}
    sessions.start(A, "a", "r1", 1, {"x": 2}, 0.0)
    assert sessions.consume("a", "r1", ["x"], 1) == {"x": 1}


def test_a_retrieve_takes_from_its_own_peer_first() -> None:
    """Workers and scheduler of one engine share a peer; those of two nodes do not."""
    sessions = started()
    sessions.start(B, "b", "r1", 2, {"x": 1}, 0.0)
    assert sessions.consume("b", "r1", ["x"], 1) == {"x": 1}
    settle = sessions.end(B, "b", "r1")
    assert settle is not None
    assert settle() == {}
    assert sessions.release(A, "a", "r1", ["x"], 1) == {"x": 1}


def test_a_retrieve_takes_one_pin_of_a_key_even_from_two_sessions() -> None:
    """One reader, one pin."""
    sessions = started()
    sessions.start(B, "a", "r1", 2, {"x": 1}, 0.0)
    assert sessions.consume("a", "r1", ["x"], 1) == {"x": 1}
    assert sessions.consume("a", "r1", ["x"], 1) == {"x": 1}


def test_an_ended_session_keeps_its_pins_until_it_is_settled() -> None:
    """A retrieve that is under way still finds them; what it took is not given back twice."""
    sessions = started()
    settle = sessions.end(A, "a", "r1")
    assert settle is not None
    assert sessions.take_status(A, "a", "r1") == 0
    assert sessions.release(A, "a", "r1", ["x"], 1) == {}
    assert sessions.consume("a", "r1", ["x"], 1) == {"x": 1}
    assert settle() == {"y": 1}
    assert settle() == {}
    assert len(sessions) == 0


def test_ending_twice_or_never_begun_is_fine() -> None:
    """Abort paths do both."""
    sessions = started()
    assert sessions.end(A, "a", "r9") is None
    assert sessions.end(A, "a", "r1") is not None
    assert sessions.end(A, "a", "r1") is None


def test_a_look_up_after_the_end_is_a_new_session() -> None:
    """And the old one's settlement does not touch it."""
    sessions = started()
    settle = sessions.end(A, "a", "r1")
    assert sessions.start(A, "a", "r1", 9, {"x": 1}, 1.0) == {}
    assert settle is not None
    assert settle() == {"x": 1, "y": 1}
    assert sessions.take_status(A, "a", "r1") == 9
    assert len(sessions) == 1


def test_pins_end_with_their_lease_the_session_with_its_age() -> None:
    """A session without pins still knows its status."""
    sessions = started()
    assert list(sessions.expire(LEASE - 2)) == []
    assert list(sessions.expire(LEASE)) == [{"x": 1, "y": 1}]
    assert sessions.consume("a", "r1", ["x"], 1) == {}
    assert sessions.take_status(A, "a", "r1") == 2
    assert all(not pins for pins in sessions.expire(LEASE + 10))
    sessions.expire(TTL)
    assert len(sessions) == 0
    assert sessions.end(A, "a", "r1") is None


def test_a_session_ages_from_its_last_use() -> None:
    """A long request keeps its own; upstream counts from the lookup. Pins keep their lease."""
    for use in ("status", "release", "consume"):
        moment = [0.0]
        sessions = SessionTable(TTL, TTL + LEASE, lambda moment=moment: moment[0])  # type: ignore[misc]
        sessions.start(A, "a", "r1", 2, {"x": 2}, 0.0)
        moment[0] = TTL - 1
        if use == "status":
            assert sessions.take_status(A, "a", "r1") == 2
        elif use == "release":
            assert sessions.release(A, "a", "r1", ["x"], 1) == {"x": 1}
        else:
            assert sessions.consume("a", "r1", ["x"], 1) == {"x": 1}
        sessions.expire(TTL)
        assert len(sessions) == 1
        sessions.expire(2 * TTL - 1)
        assert len(sessions) == 0


def test_a_lookup_that_runs_has_no_status_yet() -> None:
    """Who asks shall ask again, who waits is told at its end, and then it is consumed."""
    sessions, told = table(), list[int]()
    session, replaced = sessions.begin(A, "a", "r1", 0.0)
    assert (session.state, replaced) == ("running", {})
    assert sessions.take_status(A, "a", "r1") is None
    assert sessions.wait_status(A, "a", "r1", told.append) is None
    assert sessions.finish(session, 3, {"x": 1}) == {}
    assert (told, session.state) == ([3], "consumed")
    assert sessions.take_status(A, "a", "r1") == 0
    assert sessions.wait_status(A, "a", "r1", told.append) == 0


@pytest.mark.parametrize("fate", ["ended", "replaced", "expired"])
def test_a_lookup_that_runs_for_nobody_gives_its_pins_back(fate: str) -> None:
    """Who waits for it is told that there is nothing."""
    sessions, told = table(), list[int]()
    session, _ = sessions.begin(A, "a", "r1", 0.0)
    sessions.wait_status(A, "a", "r1", told.append)
    if fate == "ended":
        settle = sessions.end(A, "a", "r1")
        assert settle is not None
        assert (session.state, settle()) == ("running", {})
    elif fate == "replaced":
        sessions.begin(A, "a", "r1", 1.0)
    else:
        sessions.expire(TTL)
    assert told == [0]
    assert sessions.finish(session, 3, {"x": 1}) == {"x": 1}


def test_leases_tell_who_holds_what() -> None:
    """Oldest first, each with the state of its look-up."""
    sessions = SessionTable(TTL, LEASE, lambda: 10.0)
    sessions.start(B, "b", "r2", 1, {"x": 3}, 7.0)
    sessions.start(A, "a", "r1", 2, {"x": 1, "y": 1}, 4.0)
    sessions.take_status(A, "a", "r1")
    sessions.start(A, "a", "r3", 0, {}, 9.0)
    sessions.end(A, "a", "r3")
    first, second, third = sessions.leases()
    assert first == Lease("a", "r1", "consumed", 2, 2, 6.0, LEASE - 6.0)
    assert (second.request_id, second.state, second.pinned_objects, second.pins) == (
        "r2",
        "ready",
        1,
        3,
    )
    assert (third.state, third.pins) == ("ended", 0)


def test_nobody_settling_the_age_does() -> None:
    """The transfer it waited for may hang."""
    sessions = started()
    settle = sessions.end(A, "a", "r1")
    assert list(sessions.expire(TTL)) == [{"x": 1, "y": 1}]
    assert settle is not None
    assert settle() == {}
    assert len(sessions) == 0


def test_expiry_looks_once_a_second_at_most() -> None:
    """It is called with every look-up."""
    sessions = started()
    sessions.expire(LEASE - 0.5)
    assert list(sessions.expire(LEASE)) == []
    assert list(sessions.expire(LEASE + 0.5)) == [{"x": 1, "y": 1}]


def test_expiry_is_due_when_the_first_lease_or_session_ends() -> None:
    """Also of one that begins after the look at them; not sooner than the next look counts."""
    sessions = table()
    sessions.expire(10.0)
    assert sessions.expiry_due_at == 10.0 + LEASE
    sessions.start(A, "a", "r1", 2, {"x": 1}, 20.0)
    sessions.expire(30.0)
    assert sessions.expiry_due_at == 20.0 + LEASE
    assert sessions.expire(19.5 + LEASE) == []
    assert sessions.expiry_due_at == 20.5 + LEASE
    assert sessions.expire(20.5 + LEASE) == [{"x": 1}]
    assert sessions.expiry_due_at == 20.0 + TTL
    sessions.expire(20.0 + TTL)
    assert len(sessions) == 0
    assert sessions.expiry_due_at == 20.0 + TTL + LEASE


def test_ten_thousand_that_never_end_expire_by_age() -> None:
    """Their worker stays alive; their locks are freed all the same."""
    sessions = table()
    for number in range(10_000):
        sessions.start(A, "a", f"r{number}", 1, {"x": 1}, number / 100)
    assert len(sessions) == 10_000
    freed = Counter[object]()
    for moment in (LEASE + 200, TTL + 200):
        for pins in sessions.expire(moment):
            freed.update(pins)
    assert len(sessions) == 0
    assert freed == {"x": 10_000}


OWNERS = st.sampled_from([(A, "a"), (B, "b"), (B, "a"), (FakeOwner(is_open=False), "a")])
REQUESTS = st.sampled_from(["r1", "r2"])
KEYS = st.lists(st.sampled_from("xyz"), max_size=3, unique=True)
PINS = st.dictionaries(st.sampled_from("xyz"), st.integers(1, 3))


class SessionMachine(RuleBasedStateMachine):
    """Every pin that goes in comes out exactly once, whatever the order of events."""

    def __init__(self) -> None:
        super().__init__()
        self.sessions = table()
        self.now = 0.0
        self.held = Counter[object]()
        self.settlements: list[Callable[[], Pins]] = []

    def back(self, pins: Pins) -> None:
        """Pins come back that were held, and no others."""
        self.held.subtract(pins)
        assert all(count >= 0 for count in self.held.values())

    @rule(owner=OWNERS, request=REQUESTS, pins=PINS)
    def start(self, owner: tuple[FakeOwner, str], request: str, pins: Pins) -> None:
        """A look-up."""
        replaced = self.sessions.start(*owner, request, 1, pins, self.now)
        self.back(replaced)
        self.held.update(pins)

    @rule(owner=OWNERS, request=REQUESTS, keys=KEYS, count=st.integers(1, 3))
    def release(
        self, owner: tuple[FakeOwner, str], request: str, keys: list[str], count: int
    ) -> None:
        """The scheduler gives back."""
        self.back(self.sessions.release(*owner, request, keys, count))

    @rule(peer=st.sampled_from("ab"), request=REQUESTS, keys=KEYS, reader=st.integers(1, 3))
    def consume(self, peer: str, request: str, keys: list[str], reader: int) -> None:
        """A retrieve."""
        taken = self.sessions.consume(peer, request, keys, reader)
        assert set(taken.values()) <= {1}
        self.back(taken)

    @rule(owner=OWNERS, request=REQUESTS)
    def end(self, owner: tuple[FakeOwner, str], request: str) -> None:
        """The end, settled later."""
        settle = self.sessions.end(*owner, request)
        if settle is not None:
            self.settlements.append(settle)

    @precondition(lambda self: self.settlements)
    @rule()
    def settle(self) -> None:
        """The transfers that were under way have finished."""
        self.back(self.settlements.pop(0)())

    @rule(seconds=st.sampled_from([1.0, 100.0, 400.0]))
    def pass_time(self, seconds: float) -> None:
        """Leases and sessions end."""
        self.now += seconds
        for pins in self.sessions.expire(self.now):
            self.back(pins)

    @invariant()
    def nothing_outlives_its_session(self) -> None:
        """No session, no pins."""
        if len(self.sessions) == 0:
            assert not +self.held


TestSessionsAtRandom = SessionMachine.TestCase


def test_a_peer_has_at_most_half_of_all_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that never ends its requests leaves room for others; one that begins anew is one."""
    monkeypatch.setattr(module, "MAX_SESSIONS", 4)
    sessions = table()
    for number in range(2):
        sessions.start(A, "a", f"r{number}", 1, {}, 0.0)
    with pytest.raises(Overloaded, match="2 of this peer, at most 2; 2 in all, at most 4"):
        sessions.start(A, "a", "r2", 1, {}, 0.0)
    sessions.start(A, "a", "r1", 1, {"x": 1}, 0.0)
    for number in range(2):
        sessions.start(B, "b", f"r{number}", 1, {}, 0.0)
    with pytest.raises(Overloaded):
        sessions.start(FakeOwner(), "c", "r0", 1, {}, 0.0)
    settle = sessions.end(A, "a", "r1")
    assert settle is not None
    assert settle() == {"x": 1}
    sessions.start(A, "a", "r2", 1, {}, 0.0)
    assert len(sessions) == 4


def test_a_peer_has_at_most_half_of_what_may_be_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is free again with the session's end, and when its pins are too old."""
    monkeypatch.setattr(module, "MAX_PINNED_OBJECTS", 8)
    sessions = table()
    sessions.start(A, "a", "r1", 1, {"x": 1, "y": 5}, 0.0)
    assert sessions.has_room_for("a", 2)
    assert not sessions.has_room_for("a", 3)
    assert sessions.has_room_for("b", 4)
    sessions.start(B, "b", "r1", 1, {"v": 1, "w": 1, "x": 1, "y": 1}, 0.0)
    assert sessions.has_room_for("c", 2)
    assert not sessions.has_room_for("c", 3)
    settle = sessions.end(A, "a", "r1")
    assert settle is not None
    settle()
    assert sessions.has_room_for("a", 4)
    sessions.expire(LEASE)
    assert sessions.has_room_for("b", 4)
    assert len(sessions) == 1, "which may still say what it found"
