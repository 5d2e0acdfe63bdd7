"""Who may connect: no peer has more than half of all connections."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from lmcache_nodeagent.events import ConnectionTurnedAway, Event
from lmcache_nodeagent.liveness.evidence import UNKNOWN_PEER
from lmcache_nodeagent.transport.callers import Callers
from tests.polling import poll_until


class Port:
    """A port at which everybody is accepted, and the books about them."""

    def __init__(self, max_links: int) -> None:
        self.told: list[Event] = []
        self.callers = Callers(max_links, self.told.append)
        self._stack = ExitStack()
        self._server = self._stack.enter_context(socket.create_server(("127.0.0.1", 0)))

    def connect(self, address: str = "127.0.0.1") -> tuple[socket.socket, socket.socket]:
        """Connect from an address; return the caller's end and ours, of which nobody knows yet."""
        to = self._server.getsockname()
        theirs = self._stack.enter_context(
            socket.create_connection(to, source_address=(address, 0))
        )
        ours, _ = self._server.accept()
        return theirs, self._stack.enter_context(ours)

    def call(self, address: str = "127.0.0.1", slot: str = "") -> tuple[socket.socket, int]:
        """Let one be accepted; return its end, and the descriptor of ours."""
        theirs, ours = self.connect(address)
        self.callers.called(ours.fileno(), slot)
        self.callers.turn_away()
        return theirs, ours.fileno()

    def reasons(self) -> list[str]:
        """Why connections were turned away."""
        return [said.reason for said in self.told if isinstance(said, ConnectionTurnedAway)]

    def close(self) -> None:
        """Close all ends."""
        self._stack.close()


@pytest.fixture
def port() -> Iterator[Port]:
    """A port with room for four."""
    made = Port(4)
    yield made
    made.close()


def ended(end: socket.socket) -> bool:
    """Whether the other end was shut down by now."""
    end.settimeout(0)
    try:
        return end.recv(1) == b""
    except BlockingIOError:
        return False


def test_no_peer_gets_more_than_half(port: Port) -> None:
    """However often it comes; a worker at another address can come back all the time."""
    bad = [port.call("127.0.0.9")[0] for _ in range(50)]
    good = [port.call("127.0.0.2")[0] for _ in range(2)]
    for end in bad[2:]:
        poll_until(lambda end=end: ended(end))  # type: ignore[misc]  # called in this turn
    assert not any(map(ended, [*bad[:2], *good]))
    assert port.reasons() == ["peer"] * 48


def test_all_together_get_no_more_than_there_are(port: Port) -> None:
    """Those that are turned away take no place, though they are open for a moment."""
    for address in ("127.0.0.9", "127.0.0.8"):
        for _ in range(2):
            port.call(address)
    port.call("127.0.0.2")
    assert port.reasons() == ["all"]


def test_whoever_gives_one_up_may_have_another(port: Port) -> None:
    """But not for one that was turned away."""
    first, _, third = (port.call()[1] for _ in range(3))
    assert port.callers.gone(third) is None
    port.call()
    assert port.reasons() == ["peer"] * 2
    name = port.callers.gone(first)
    assert name is not None
    assert name.startswith("127.0.0.1:")
    assert not ended(port.call()[0])
    assert port.reasons() == ["peer"] * 2


def test_a_container_is_one_peer_by_its_slot(port: Port) -> None:
    """Whatever process of it calls: their numbers may mean nothing here."""
    for _ in range(3):
        port.call(slot="a")
    port.call(slot="b")
    assert port.reasons() == ["peer"]


def test_callers_that_cannot_be_told_are_not_one_peer(port: Port) -> None:
    """They left before they were looked at; their descriptors are closed."""
    read, write = os.pipe()
    os.close(write)
    os.close(read)
    for descriptor in (read, write, read):
        port.callers.called(descriptor, "")
    assert port.reasons() == []
    assert port.callers.gone(read) == UNKNOWN_PEER.text
    assert port.callers.gone(read) == UNKNOWN_PEER.text


def test_connections_are_turned_away_when_no_descriptor_is_left(port: Port) -> None:
    """Then above all: they are what has used them up."""
    for _ in range(2):
        port.call()
    theirs, ours = port.connect()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        port.callers.called(ours.fileno(), "")
        port.callers.turn_away()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    poll_until(lambda: ended(theirs))
    assert port.reasons() == ["peer"]


def test_some_are_turned_away_at_a_time(port: Port) -> None:
    """Not the one that has left meanwhile: its descriptor may be somebody else's."""
    for _ in range(2):
        port.call()
    waiting = [port.connect() for _ in range(100)]
    for _, ours in waiting:
        port.callers.called(ours.fileno(), "")
    assert port.reasons() == []
    assert port.callers.gone(waiting[0][1].fileno()) is None
    for expected in (64, 99):
        port.callers.turn_away()
        assert len(port.reasons()) == expected
        assert port.callers.has_unwelcome is (expected < 99)
    assert not ended(waiting[0][0])
