"""Clients that looked up and are gone, or may come back."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from lmcache_nodeagent.ids import InstanceId
from lmcache_nodeagent.liveness.departures import gone_at
from lmcache_nodeagent.liveness.evidence import CloseKind, Connection, Link, Peer, Surroundings
from lmcache_nodeagent.liveness.slots import SlotRun
from lmcache_nodeagent.liveness.windows import LivenessSettings
from tests.fakes.liveness_parts import close, connection

CLOSED = 50.0
SETTINGS = LivenessSettings()
AFTER_WINDOW = CLOSED + SETTINGS.close_confirm_seconds
WORKER = InstanceId(1 << 40)


def scheduler(kind: CloseKind | None = CloseKind.PEER) -> Connection:
    """A scheduler's connection, closed."""
    made = connection(serial=10)
    if kind is not None:
        close(made, CLOSED, kind)
    return made


def link(serial: int = 11, made: Connection | None = None, closed_at: float | None = None) -> Link:
    """Another link; its connection, if it has said who it is."""
    return Link(serial, 1000 + serial, CLOSED + 1, connection=made, closed_at=closed_at)


def moment(client: Connection, *links: Link, **around: object) -> float:
    """When it counts as gone."""
    return gone_at(client, SETTINGS, Surroundings(links=links, **around))  # type: ignore[arg-type]  # of its fields


def test_a_client_that_does_not_come_back_is_gone_after_the_close_window() -> None:
    """A living one is back by then."""
    assert moment(scheduler()) == AFTER_WINDOW


def test_a_process_that_is_gone_is_gone_at_once() -> None:
    """The kernel says so; not before its connection is closed, as more may be queued."""
    proven = scheduler()
    proven.process_gone = True
    assert moment(proven) <= CLOSED
    queued = scheduler(None)
    queued.process_gone = True
    assert moment(queued) == math.inf


@pytest.mark.parametrize("kind", [None, CloseKind.TIMED_OUT, CloseKind.OURSELVES])
def test_what_its_client_did_not_close_says_nothing(kind: CloseKind | None) -> None:
    """The client may live, cut off or not."""
    assert moment(scheduler(kind)) == math.inf


def test_who_is_not_known_may_be_anybody() -> None:
    """Its new connection would not be known for it."""
    unknown = scheduler()
    unknown.peer = Peer(identity="", text="unknown")
    assert moment(unknown) == math.inf


@pytest.mark.parametrize(
    "settings", [replace(SETTINGS, enforce=False), replace(SETTINGS, reap_timeout_seconds=0.0)]
)
def test_where_nobody_is_reaped_nobody_is_gone(settings: LivenessSettings) -> None:
    """Leases end by themselves."""
    assert gone_at(scheduler(), settings, Surroundings()) == math.inf


def test_one_that_may_have_come_back_is_waited_for() -> None:
    """A link that has said nothing so far, or goes on counting at the same address."""
    assert moment(scheduler(), link()) == math.inf
    assert moment(scheduler(), link(made=connection(first_uid=7))) == math.inf


def test_a_link_that_may_have_been_it_restarts_the_window() -> None:
    """And so does a time in which the router read nothing."""
    assert moment(scheduler(), gone=(link(closed_at=CLOSED + 7),)) == AFTER_WINDOW + 7
    assert moment(scheduler(), router_stall_ended_at=CLOSED + 4) == AFTER_WINDOW + 4
    assert moment(scheduler(), router_stall_ended_at=CLOSED - 4) == AFTER_WINDOW


def _worker() -> Connection:
    made = connection(first_uid=7)
    made.spoke_for = frozenset({WORKER})
    return made


@pytest.mark.parametrize(
    "other",
    [
        link(serial=9),
        link(made=connection(first_uid=0)),
        link(made=connection("10.0.0.2")),
        link(made=_worker()),
        Link(11, 1011, CLOSED + 1, slot="0"),
    ],
    ids=["earlier", "new process", "another address", "worker", "slot"],
)
def test_what_is_not_it_holds_nothing(other: Link) -> None:
    """Nor does its end restart the window."""
    assert moment(scheduler(), other) == AFTER_WINDOW
    other.closed_at = CLOSED + 5
    assert moment(scheduler(), gone=(other,)) == AFTER_WINDOW
    other.closed_at = None


def test_a_client_of_one_connection_may_come_back_as_a_worker() -> None:
    """Where the connection that looked up spoke for an instance as well."""
    both = scheduler()
    both.spoke_for = frozenset({WORKER})
    assert moment(both, link(made=_worker())) == math.inf


def test_a_client_at_a_slot_comes_back_through_it() -> None:
    """Nobody else does."""
    at_slot = scheduler()
    at_slot.slot = SlotRun("0", 1)
    assert moment(at_slot, Link(11, 1011, CLOSED + 1, slot="0")) == math.inf
    assert moment(at_slot, link()) == AFTER_WINDOW


def test_closes_of_several_peers_at_once_are_the_networks() -> None:
    """Its clients need longer to come back; closes of its own address are no network event."""
    own = (("ip:10.0.0.1", CLOSED),)
    assert moment(scheduler(), peer_closes=own) == AFTER_WINDOW
    late = (("ip:10.0.0.2", CLOSED + 2.1),)
    assert moment(scheduler(), peer_closes=late) == AFTER_WINDOW
    together = (("ip:10.0.0.2", CLOSED + 1.9),)
    assert moment(scheduler(), peer_closes=together) == CLOSED + SETTINGS.hint_confirm_seconds
