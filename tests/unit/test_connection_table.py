"""Which connection ended: what the monitor says, and what libzmq still routes to."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import pytest
import zmq

from lmcache_nodeagent.events import ConnectionTurnedAway, Event, MalformedMessage
from lmcache_nodeagent.ids import InstanceId, RoutingId
from lmcache_nodeagent.liveness.evidence import CloseKind, Connection, ConnectionLedger
from lmcache_nodeagent.transport.connections import ConnectionTable
from lmcache_nodeagent.transport.monitor import Accepted, Disconnected, SocketMonitor

NO_SUCH_DESCRIPTOR = 1 << 20
WORKER = RoutingId(b"\0\0\0\0\1")


class Frame:
    """The first frame of a message; the oldest framing gives it no descriptor."""

    def __init__(self, routing_id: bytes, descriptor: int | None) -> None:
        self.bytes = routing_id
        self._descriptor = descriptor

    def get(self, name: int | str) -> int | str:
        """Return metadata as libzmq does."""
        if self._descriptor is None:
            raise zmq.ZMQError(zmq.EINVAL)
        return self._descriptor if name == zmq.SRCFD else "192.0.2.7"


class Scene:
    """A table whose monitor, routes and clock are the test's."""

    def __init__(self) -> None:
        self.queue: list[Accepted | Disconnected] = []
        self.routable = {WORKER}
        self.time = 1000.0
        self.published: list[Event] = []
        self.changes = 0
        self.on_probe: Callable[[], None] = lambda: None
        self.table = ConnectionTable(
            monitor=cast("SocketMonitor", self),
            ledger=ConnectionLedger(),
            is_routable=self._probe,
            handshake_seconds=10,
            keepalive_silence_seconds=60,
            half_open_seconds=120,
            max_links=1000,
            on_change=self._changed,
            publish=self.published.append,
            now=lambda: self.time,
        )

    def _probe(self, routing_id: RoutingId) -> bool:
        self.on_probe()
        return routing_id in self.routable

    def _changed(self) -> None:
        self.changes += 1

    def events(self) -> Iterator[Accepted | Disconnected]:
        """Be the monitor."""
        while self.queue:
            yield self.queue.pop(0)

    def happens(self, *events: Accepted | Disconnected) -> None:
        """Let the monitor tell these."""
        self.queue += events
        self.table.read_monitor()

    def later(self, seconds: float) -> None:
        """Let time pass and the router come round."""
        self.time += seconds
        self.table.tidy(all_read=True)

    def reasons(self) -> list[str]:
        """Return what was found malformed."""
        return [event.reason for event in self.published if isinstance(event, MalformedMessage)]


@pytest.fixture
def scene() -> Iterator[Scene]:
    """Make a table and close it."""
    made = Scene()
    yield made
    made.table.close()


def frame(descriptor: int | None = NO_SUCH_DESCRIPTOR) -> zmq.Frame:
    """Return the first frame of the worker's message."""
    return cast("zmq.Frame", Frame(WORKER, descriptor))


def test_an_end_that_libzmq_learns_of_a_moment_later_is_not_missed(scene: Scene) -> None:
    """The monitor speaks before the routing id is given up: it is asked again until it is."""
    scene.happens(Accepted(NO_SUCH_DESCRIPTOR))
    worker = scene.table.of_message(frame())
    scene.happens(Disconnected(NO_SUCH_DESCRIPTOR, handshake_failed=False))
    assert worker.is_open
    assert scene.table.has_suspects
    scene.routable.clear()
    changes = scene.changes
    scene.later(0.021)
    assert worker.closed_at is not None
    assert worker.close_kind is CloseKind.PEER
    assert scene.changes > changes
    assert not scene.table.has_suspects


def test_one_that_stays_routable_was_on_another_link(scene: Scene) -> None:
    """The end was that of an earlier or later owner of the descriptor: the asking stops."""
    scene.happens(Accepted(NO_SUCH_DESCRIPTOR))
    worker = scene.table.of_message(frame())
    scene.happens(Disconnected(NO_SUCH_DESCRIPTOR, handshake_failed=False))
    scene.later(1.0)
    assert worker.is_open
    assert not scene.table.has_suspects


def test_a_link_that_ends_without_a_message_is_reported_once(scene: Scene) -> None:
    """A scan, a probe, HTTP; only after everything that was queued has been read."""
    scene.happens(Accepted(NO_SUCH_DESCRIPTOR))
    scene.happens(Disconnected(NO_SUCH_DESCRIPTOR, handshake_failed=True))
    scene.table.tidy(all_read=False)
    assert scene.reasons() == []
    scene.later(0.1)
    scene.later(0.1)
    assert scene.reasons() == ["no_message"]


def test_a_link_whose_message_was_still_unread_is_not_reported(scene: Scene) -> None:
    """A client may say one thing and leave at once."""
    scene.happens(Accepted(NO_SUCH_DESCRIPTOR))
    scene.happens(Disconnected(NO_SUCH_DESCRIPTOR, handshake_failed=False))
    scene.table.of_message(frame())
    scene.later(0.1)
    assert scene.reasons() == []


def test_connections_without_a_descriptor_are_asked_for_from_time_to_time(scene: Scene) -> None:
    """No event of the monitor can name them."""
    oldest = scene.table.of_message(frame(None))
    scene.later(6)
    assert oldest.is_open
    scene.routable.clear()
    scene.later(6)
    assert oldest.closed_at is not None
    scene.later(6)
    assert list(scene.table) == []


def test_a_descriptor_that_was_reused_meanwhile_proves_nothing(scene: Scene) -> None:
    """Libzmq may still accept replies to a connection whose descriptor is another's by now."""
    with socket.create_server(("127.0.0.1", 0)) as reused:
        descriptor = reused.fileno()
        scene.happens(Accepted(descriptor))
        worker = scene.table.of_message(frame(descriptor))
        scene.queue += [Disconnected(descriptor, handshake_failed=False), Accepted(descriptor)]
        scene.table.replied(worker)
        assert worker.link is None
        scene.routable.clear()
        scene.later(0.021)
        assert worker.close_kind is CloseKind.PEER


def test_who_follows_at_once_on_a_descriptor_is_proven_by_a_later_reply(scene: Scene) -> None:
    """By then the one before it is no longer routable; nobody is sent what it did not ask for."""
    probes: list[None] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        descriptor = listener.fileno()
        scene.happens(Accepted(descriptor), Disconnected(descriptor, handshake_failed=False))
        scene.happens(Accepted(descriptor))
        worker = scene.table.of_message(frame(descriptor))
        scene.on_probe = lambda: probes.append(None)
        scene.table.replied(worker)
        assert worker.link is None
        scene.later(1.1)
        scene.table.replied(worker)
        assert worker.accept_serial == 2
        assert probes == []


@pytest.mark.parametrize(("sends", "proven"), [(200, True), (107, False)])
def test_who_follows_at_once_and_then_falls_silent_is_proven_by_what_it_sent(
    sends: int, *, proven: bool, scene: Scene
) -> None:
    """A handshake alone is no message: then the message was the earlier owner's, read late."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        peer = socket.create_connection(listener.getsockname())
        ours, _ = listener.accept()
        with peer, ours:
            descriptor = ours.fileno()
            scene.happens(Accepted(descriptor), Disconnected(descriptor, handshake_failed=False))
            scene.happens(Accepted(descriptor))
            worker = scene.table.of_message(frame(descriptor))
            scene.table.replied(worker)
            peer.sendall(bytes(sends))
            ours.recv(sends, socket.MSG_WAITALL)
            scene.later(1.1)
            scene.later(1.1)
            assert worker.accept_serial == (2 if proven else 0)


def test_a_descriptor_that_stays_is_proven_by_the_reply(scene: Scene) -> None:
    """From then on the monitor's word on it is about this connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        descriptor = listener.fileno()
        scene.happens(Accepted(descriptor))
        worker = scene.table.of_message(frame(descriptor))
        scene.table.replied(worker)
        assert worker.link is not None
        scene.happens(Disconnected(descriptor, handshake_failed=False))
        assert not worker.is_open


def _process_at_a_socket(scene: Scene, number: int, says: InstanceId | None) -> Connection:
    """A connection of this process over a Unix socket, proven, that ended again."""
    routing_id = RoutingId(b"\0\0\0\1" + bytes([number]))
    scene.routable.add(routing_id)
    scene.time += 1.0  # who comes at once after another is proven later
    ours, theirs = socket.socketpair()
    with ours, theirs:
        descriptor = ours.fileno()
        scene.happens(Accepted(descriptor))
        made = scene.table.of_message(cast("zmq.Frame", Frame(routing_id, descriptor)))
        scene.table.replied(made)
        assert made.link is not None
        made.spoke_for = frozenset() if says is None else frozenset({says})
    scene.happens(Disconnected(descriptor, handshake_failed=False))
    assert not made.is_open
    return made


def test_processes_that_come_and_go_at_a_unix_socket_hold_no_descriptors(scene: Scene) -> None:
    """A scheduler's exit proves nothing; of a worker's process one descriptor is enough."""
    before = len(list(Path("/proc/self/fd").iterdir()))
    for number in range(20):
        _process_at_a_socket(scene, number, None)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    for number in range(20, 40):
        _process_at_a_socket(scene, number, InstanceId(7))
    assert len(list(Path("/proc/self/fd").iterdir())) == before + 1
    scene.later(61.0)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_one_connection_too_many_is_turned_away(scene: Scene) -> None:
    """Without a descriptor left libzmq would end the process at its Unix socket."""
    scene.table._callers.max_links = 1
    pairs = [socket.socketpair() for _ in range(2)]
    try:
        for ours, _ in pairs:
            scene.happens(Accepted(ours.fileno()))
        assert scene.table.has_suspects, "it is looked after soon"
        scene.table.tidy(all_read=False)
        assert pairs[1][1].recv(1) == b""
        pairs[0][1].settimeout(0)
        with pytest.raises(BlockingIOError):
            pairs[0][1].recv(1)
        scene.happens(Disconnected(pairs[1][0].fileno(), handshake_failed=False))
        scene.table.tidy(all_read=True)
        (said,) = scene.published
        assert isinstance(said, ConnectionTurnedAway), "and nothing about a malformed message"
        assert said.reason == "all"
    finally:
        for pair in pairs:
            for end in pair:
                end.close()
