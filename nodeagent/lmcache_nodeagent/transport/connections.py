"""Which connection a message came over, and when it ended. Thread: zmq-router, all of it.

A connection is known by its routing id, which libzmq makes anew for each. Descriptors are reused
while old messages are still unread, so the pair (routing id, descriptor) of a first message proves
nothing; it is kept only if the routing id is still routable after the monitor's queue was read to
its end. The first reply proves that. From then on the monitor's word on that descriptor is about
this connection, until it says that it ended.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import zmq

from lmcache_nodeagent.events import MalformedMessage
from lmcache_nodeagent.ids import RoutingId
from lmcache_nodeagent.liveness.evidence import (
    UNKNOWN_PEER,
    CloseKind,
    Connection,
    Link,
    Peer,
)
from lmcache_nodeagent.liveness.slots import NO_SLOT
from lmcache_nodeagent.transport.callers import Callers
from lmcache_nodeagent.transport.exits import ExitWatch
from lmcache_nodeagent.transport.monitor import Accepted, Disconnected
from lmcache_nodeagent.transport.peers import (
    PeerSocket,
    has_sent_a_message,
    metadata,
    tcp_peer,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lmcache_nodeagent.clock import Now
    from lmcache_nodeagent.events import Publish
    from lmcache_nodeagent.liveness.evidence import ConnectionLedger
    from lmcache_nodeagent.liveness.slots import SlotBook
    from lmcache_nodeagent.transport.monitor import SocketMonitor
    from lmcache_nodeagent.transport.slot_sockets import SlotSockets

_CHOSEN_BY_LIBZMQ = b"\0"
"""First byte of the routing ids that libzmq makes; clients cannot choose such a one."""

_FORGET_CLOSED_SECONDS = 5.0
"""A closed connection's messages may still be unread; after this nothing of it is left."""

_GIVEN_UP_SECONDS = 0.1
"""libzmq gives a routing id up 1.5 to 4 ms after the monitor's word, as measured."""

_TIDY_SECONDS = 1.0

_SUSPECT_SECONDS = 1.0
"""libzmq gives a routing id up a moment after the monitor's word; one that lasts longer lives."""

SUSPECT_CHECK_SECONDS = 0.02


class ConnectionTable:
    """Routing ids, links and their ends. Tells `on_change` whenever there is new evidence."""

    def __init__(
        self,
        monitor: SocketMonitor,
        ledger: ConnectionLedger,
        is_routable: Callable[[RoutingId], bool],
        handshake_seconds: float,
        keepalive_silence_seconds: float,
        half_open_seconds: float,
        max_links: int,
        on_change: Callable[[], None],
        publish: Publish,
        now: Now,
        slots: SlotSockets | None = None,
        slot_book: SlotBook | None = None,
    ) -> None:
        self._slots = slots
        self._slot_book = slot_book
        self._monitor = monitor
        self._ledger = ledger
        self._is_routable = is_routable
        self._handshake_seconds = handshake_seconds
        self._keepalive_silence_seconds = keepalive_silence_seconds
        self._half_open_seconds = half_open_seconds
        self._on_change = on_change
        self._publish = publish
        self._now = now
        self._suspects: dict[RoutingId, float] = {}  # may have ended; moment of the last check
        self._suspects_checked_at = now()
        self._freed: dict[int, float] = {}  # descriptor -> end of the last link it had
        self._callers = Callers(max_links, publish)
        self._turned_away_at = -math.inf
        self._unheard: list[tuple[int, str]] = []  # links that ended before we read a message
        self._anonymous: set[RoutingId] = set()  # open, but libzmq tells no descriptor
        self._anonymous_checked_at = now()
        self._connections: dict[RoutingId, Connection] = {}
        self._unproven: dict[RoutingId, int] = {}  # descriptor of the first message
        self._have_sent: set[Link] = set()  # open ones that somebody unproven has spoken over
        self._sockets: dict[RoutingId, PeerSocket] = {}
        self._next_tidy = 0.0
        self._closed: list[tuple[float, Connection]] = []
        self.exits = ExitWatch()

    def of_message(self, frame: zmq.Frame) -> Connection:
        """Return the connection of a message, given its first frame (the routing id)."""
        routing_id = RoutingId(frame.bytes)
        known = self._connections.get(routing_id)
        if known is None:
            return self._first_message(routing_id, frame)
        if routing_id[:1] != _CHOSEN_BY_LIBZMQ and self._was_taken_over(known, frame):
            self._ended(known, CloseKind.OURSELVES)
            return self._first_message(routing_id, frame)
        return known

    def _first_message(self, routing_id: RoutingId, frame: zmq.Frame) -> Connection:
        peer = tcp_peer(str(metadata(frame, "Peer-Address") or ""))
        slot = self._slots.slot_run(metadata(frame, "User-Id")) if self._slots else NO_SLOT
        if slot:
            peer = Peer(identity="", text=slot.words, local=True)
        connection = Connection(routing_id, peer, self._now(), slot)
        self._connections[routing_id] = connection
        descriptor = metadata(frame, zmq.SRCFD)
        if isinstance(descriptor, int):
            self._unproven[routing_id] = descriptor
            heard = next((entry for entry in self._unheard if entry[0] == descriptor), None)
            if heard is not None:
                self._unheard.remove(heard)
        else:
            self._anonymous.add(routing_id)
        return connection

    def _was_taken_over(self, known: Connection, frame: zmq.Frame) -> bool:
        """A client that chose its routing id may return with it while its old link is half open."""
        if not known.is_open:
            return True
        descriptor = metadata(frame, zmq.SRCFD)
        expected = known.link.descriptor if known.link else self._unproven.get(known.routing_id)
        return isinstance(descriptor, int) and expected is not None and descriptor != expected

    def replied(self, connection: Connection) -> None:
        """A reply was accepted for this connection: prove its link, if that is not done yet.

        Not while an earlier owner of the descriptor may still be routable: libzmq gives a routing
        id up a moment after the descriptor is free. The next reply tries again.
        """
        descriptor = self._unproven.get(connection.routing_id)
        if descriptor is None:
            return
        self.read_monitor()
        link = self._ledger.open_link(descriptor)
        freed_at = self._freed.get(descriptor)
        if link is None or link.connection is not None:
            return
        if freed_at is not None and self._now() - freed_at < _GIVEN_UP_SECONDS:
            return
        copy = PeerSocket.duplicate(descriptor)
        if copy is None:
            return
        self.read_monitor()  # the end of the link that was duplicated would be there by now
        if self._ledger.open_link(descriptor) is link and connection.is_open:
            del self._unproven[connection.routing_id]
            self._prove(connection, link, copy)
        else:
            copy.close()

    def _prove_those_at_unix_sockets(self) -> None:
        """Prove what the first reply could not, for the sake of the pidfd, by a probe."""
        for routing_id in tuple(self._unproven):
            connection = self._connections[routing_id]
            at_unix_socket = connection.peer is UNKNOWN_PEER or connection.peer.local
            if at_unix_socket and self._is_routable(routing_id):
                self.replied(connection)

    def _prove_those_that_had_to_wait(self) -> None:
        """Prove who was answered while its descriptor was too new, and has been silent since.

        A peer that had sent a message by the last time is among the unproven ones, all being read,
        and of those that named its descriptor it is the last: libzmq counts its routing ids up.
        """
        had_sent, self._have_sent = self._have_sent, set()
        last = {descriptor: routing_id for routing_id, descriptor in sorted(self._unproven.items())}
        for descriptor, routing_id in last.items():
            link = self._ledger.open_link(descriptor)
            if link in had_sent:
                self.replied(self._connections[routing_id])
            elif link is not None and has_sent_a_message(descriptor):
                self._have_sent.add(link)

    def _prove(self, connection: Connection, link: Link, copy: PeerSocket) -> None:
        connection.link = link
        link.connection = connection
        peer = copy.peer()
        if peer is not None:
            where = f"{connection.slot.words}, " if connection.slot else ""
            connection.peer = replace(peer, text=where + peer.text)
        self._sockets[connection.routing_id] = copy
        if copy.pidfd is not None:
            self.exits.add(copy.pidfd, connection)
            copy.pidfd = None
        self._on_change()

    def read_monitor(self) -> None:
        """Take in everything that the monitor has queued."""
        for event in self._monitor.events():
            match event:
                case Accepted(descriptor, address):
                    slot = self._slots.slot_of_address(address) if self._slots else ""
                    self._ledger.accepted(descriptor, self._now(), slot)
                    self._callers.called(descriptor, slot)
                case Disconnected(descriptor, handshake_failed):
                    self._disconnected(descriptor, handshake_failed=handshake_failed)

    def _disconnected(self, descriptor: int, *, handshake_failed: bool) -> None:
        now = self._now()
        caller = self._callers.gone(descriptor)
        self._freed[descriptor] = now
        link = self._ledger.open_link(descriptor)
        if link is not None:
            # Closed by its own side before it spoke ZMTP: a scan or probe, no worker come back.
            peer_gave_up = handshake_failed and now - link.accepted_at < self._handshake_seconds
            may_have_been = not peer_gave_up and link.speaks_zmtp is not False
            self._ledger.link_closed(descriptor, now, may_have_been_a_worker=may_have_been)
            if link.connection is not None:
                self._link_ended(link.connection)
            elif caller is not None and descriptor not in self._unproven.values():
                self._unheard.append((descriptor, caller))
        self._check_unproven(descriptor)
        self._on_change()

    def _link_ended(self, connection: Connection) -> None:
        kind = self._close_kind(connection)
        wanted = connection.routing_id[:1] != _CHOSEN_BY_LIBZMQ  # it was handed over
        copy = self._sockets.get(connection.routing_id)
        wanted |= copy is not None and copy.ended_by_us
        if connection.is_open and kind is CloseKind.OURSELVES and not wanted:
            detail = "libzmq closed the connection: a frame beyond the size limit, or broken ZMTP"
            self._publish(MalformedMessage("zmtp", connection.peer.text, detail))
        self._ended(connection, kind)

    def _close_kind(self, connection: Connection) -> CloseKind:
        copy = self._sockets.get(connection.routing_id)
        return copy.close_kind(self._keepalive_silence_seconds) if copy else CloseKind.PEER

    def _check_unproven(self, descriptor: int) -> None:
        """Ask libzmq about the connections that may have been on this descriptor."""
        until = self._now() + _SUSPECT_SECONDS
        for routing_id, expected in self._unproven.items():
            if expected == descriptor:
                self._suspects[routing_id] = until
        self._check_suspects()

    def _check_suspects(self) -> None:
        self._suspects_checked_at = self._now()
        for routing_id, until in tuple(self._suspects.items()):
            if not self._is_routable(routing_id):
                self._ended(self._connections[routing_id], CloseKind.PEER)
                self._on_change()
            elif self._suspects_checked_at >= until:
                del self._suspects[routing_id]

    @property
    def has_suspects(self) -> bool:
        """Tell whether `tidy` should come again within `SUSPECT_CHECK_SECONDS`."""
        return bool(self._suspects) or self._callers.has_unwelcome

    def unroutable(self, connection: Connection) -> None:
        """A reply found the peer gone; the monitor's word, which knows more, comes first."""
        self.read_monitor()
        if connection.is_open:
            self._ended(connection, self._close_kind(connection))
            self._on_change()

    def _ended(self, connection: Connection, kind: CloseKind) -> None:
        now = self._now()
        if not connection.is_open:
            return
        self._ledger.connection_closed(connection, now, kind)
        self._unproven.pop(connection.routing_id, None)
        self._anonymous.discard(connection.routing_id)
        self._suspects.pop(connection.routing_id, None)
        self._closed.append((now, connection))
        copy = self._sockets.pop(connection.routing_id, None)
        if copy is None:
            return
        self.exits.closed(connection)
        copy.close()

    def read_exits(self) -> None:
        """Note the processes that have exited."""
        if self.exits.read():
            self._on_change()

    def tidy(self, *, all_read: bool) -> None:
        """End half-open links; forget closed ones once nothing of them can be unread any more.

        Args:
            all_read: No message was left unread after the monitor was read.
        """
        now = self._now()
        if now - self._turned_away_at >= SUSPECT_CHECK_SECONDS:
            self._turned_away_at = now
            self._callers.turn_away()
        if all_read:
            self._report_unheard()
        if self._suspects and now - self._suspects_checked_at >= SUSPECT_CHECK_SECONDS:
            self._check_suspects()
        if now - self._anonymous_checked_at >= _FORGET_CLOSED_SECONDS:
            self._anonymous_checked_at = now
            self._check_anonymous()
        if now < self._next_tidy:
            return
        self._next_tidy = now + _TIDY_SECONDS
        for copy in self._sockets.values():
            copy.give_up_if_silent(self._half_open_seconds)
        self._end_strangers_to_zmtp(now)
        self.end_those_of_earlier_runs()
        self._prove_those_at_unix_sockets()
        if all_read:
            self._prove_those_that_had_to_wait()
        self._forget_closed(now)

    def _end_strangers_to_zmtp(self, now: float) -> None:
        """End links that never shook hands and that libzmq keeps: HTTP, TLS, the oldest framing.

        They could not be a worker come back, and must not hold a dead one's memory as if they were.
        """
        for link in self._ledger.silent_links():
            if link.speaks_zmtp or now - link.accepted_at < self._handshake_seconds + 1:
                continue
            copy = PeerSocket.duplicate(link.descriptor)
            if copy is None:
                continue
            link_speaks_zmtp = copy.shook_hands()
            self.read_monitor()
            if self._ledger.open_link(link.descriptor) is link:
                link.speaks_zmtp = link_speaks_zmtp
                if not link_speaks_zmtp:
                    copy.end()
            copy.close()

    def end_those_of_earlier_runs(self) -> None:
        """End connections of containers that have ended, whoever still holds them.

        What they say is refused meanwhile.
        """
        if self._slot_book is None:
            return
        for connection in self._connections.values():
            copy = self._sockets.get(connection.routing_id)
            if copy is not None and connection.slot and self._slot_book.is_over(connection.slot):
                copy.end()

    def _forget_closed(self, now: float) -> None:
        kept = []
        for closed_at, connection in self._closed:
            if now - closed_at < _FORGET_CLOSED_SECONDS:
                kept.append((closed_at, connection))
            elif self._connections.get(connection.routing_id) is connection:
                del self._connections[connection.routing_id]
        self._closed = kept
        self.exits.tidy(now)

    def _report_unheard(self) -> None:
        """Report who spoke no ZMTP, or nothing: scans, probes, HTTP, frames that are too big."""
        unheard, self._unheard = self._unheard, []
        for _, caller in unheard:
            detail = "the connection ended before a message came"
            self._publish(MalformedMessage("no_message", caller, detail))

    def _check_anonymous(self) -> None:
        """Ask libzmq about connections whose end the monitor tells by a descriptor we know not."""
        for routing_id in tuple(self._anonymous):
            if not self._is_routable(routing_id):
                self._ended(self._connections[routing_id], CloseKind.PEER)
                self._on_change()

    def __iter__(self) -> Iterator[Connection]:
        """Iterate over the connections that have spoken."""
        return iter(tuple(self._connections.values()))

    def close(self) -> None:
        """Close every duplicate."""
        for copy in self._sockets.values():
            copy.close()
        self._sockets.clear()
        self.exits.close()
