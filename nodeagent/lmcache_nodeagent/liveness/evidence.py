"""What the transport saw of the workers' connections, in a form that can be judged.

The router thread writes these records, everyone may read them: each field is written by that one
thread and holds an immutable value, so a reader sees the old or the new one, never half of it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from threading import Lock
from typing import TYPE_CHECKING

from lmcache_nodeagent.liveness.slots import NO_SLOT, SlotRun, SlotWord

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from lmcache_nodeagent.ids import InstanceId, RoutingId

_GONE_LINKS_KEPT = 256
_CLOSES_KEPT = 256


class CloseKind(Enum):
    """Who ended a connection. Only `PEER` says something about the peer's life."""

    PEER = "peer"
    TIMED_OUT = "timed_out"  # TCP keepalive or retransmission gave up: silence, not a close
    OURSELVES = "ourselves"  # oversize frame, protocol error, limits


@dataclass(frozen=True, slots=True)
class Peer:
    """Who is at the other end, as the kernel tells it.

    `identity` is what two connections of one peer share: the IP address over TCP (an IPv4-mapped
    IPv6 address counts as the IPv4 one), the process over a Unix socket. `text` is for people.
    """

    identity: str
    text: str
    local: bool = False


UNKNOWN_PEER = Peer(identity="", text="unknown")
"""A peer that libzmq tells nothing about (the oldest ZMTP framing). It equals nobody."""


@dataclass(slots=True, eq=False)
class Link:
    """One accepted connection as the socket monitor saw it, before it says who it is.

    `serial` numbers links in the order they were accepted, over the life of the agent. `slot` is
    that of the socket which accepted it, empty elsewhere.
    """

    serial: int
    descriptor: int
    accepted_at: float
    slot: str = ""
    closed_at: float | None = None
    connection: Connection | None = None
    speaks_zmtp: bool | None = None  # None: not known yet


@dataclass(slots=True, eq=False)
class Connection:
    """One connection that has spoken, known by its ROUTER routing id.

    `link` is known only if the connection was still routable after its descriptor was read; without
    it the accept order is unknown and counts as the earliest. `process_gone` is set by the pidfd.
    `slot` is the run of a container that it belongs to, and never changes. `last_uid` is the frame
    of the latest request; as clients count, the next one that they sent has the next number.
    """

    routing_id: RoutingId
    peer: Peer
    opened_at: float
    slot: SlotRun = NO_SLOT
    first_uid: int | None = None
    last_uid: bytes = b""
    link: Link | None = None
    closed_at: float | None = None
    close_kind: CloseKind | None = None
    process_gone: bool = False
    spoke_for: frozenset[InstanceId] = frozenset()
    asked_lookups: bool = False
    replies_dropped: int = 0

    @property
    def is_open(self) -> bool:
        """Not yet found closed. Threads: any."""
        return self.closed_at is None

    @property
    def ended_by_its_peer(self) -> bool:
        """Closed from the other end, or the process there is gone. Threads: any."""
        return self.process_gone or self.close_kind is CloseKind.PEER

    @property
    def pod_identity(self) -> str:
        """What all connections of one pod share, as far as it can be told. Threads: any."""
        return f"slot:{self.slot.slot}" if self.slot else self.peer.identity

    @property
    def accept_serial(self) -> int:
        """Place in the accept order, 0 if unknown."""
        return self.link.serial if self.link else 0

    def same_peer(self, other: Connection) -> bool:
        """Tell whether both are of one peer; an unknown peer equals nobody."""
        return self.peer.identity != "" and self.peer.identity == other.peer.identity


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the policy needs to know beside the entry itself, frozen at one moment.

    Attributes:
        links: every open link.
        gone: recently closed links, without those that never got as far as the ZMTP handshake.
        peer_closes: (peer identity, moment) of recent closes by peers.
        router_stall_ended_at: end of the last router stall longer than a second, or None.
        slots: what the kubelet said about each slot that it said anything about.
    """

    links: tuple[Link, ...] = ()
    gone: tuple[Link, ...] = ()
    peer_closes: tuple[tuple[str, float], ...] = ()
    router_stall_ended_at: float | None = None
    slots: Mapping[str, SlotWord] = field(default_factory=dict)


@dataclass(slots=True)
class _Books:
    links: dict[int, Link] = field(default_factory=dict)
    gone: deque[Link] = field(default_factory=lambda: deque(maxlen=_GONE_LINKS_KEPT))
    closes: deque[tuple[str, float]] = field(default_factory=lambda: deque(maxlen=_CLOSES_KEPT))
    stall_ended_at: float | None = None


class ConnectionLedger:
    """All links and recent closes. Written by `zmq-router`, read by the reaper and by status."""

    def __init__(self, slot_words: Callable[[], Mapping[str, SlotWord]] = dict) -> None:
        self._lock = Lock()  # guards: _books
        self._books = _Books()
        self._slot_words = slot_words
        self._next_serial = 1  # router thread only

    def accepted(self, descriptor: int, now: float, slot: str = "") -> Link:
        """Record an accepted link. Thread: zmq-router."""
        link = Link(serial=self._next_serial, descriptor=descriptor, accepted_at=now, slot=slot)
        self._next_serial += 1
        with self._lock:
            self._books.links[descriptor] = link
        return link

    def open_link(self, descriptor: int) -> Link | None:
        """Return the link that now holds this descriptor. Thread: zmq-router."""
        return self._books.links.get(descriptor)

    def silent_links(self) -> Sequence[Link]:
        """Return the open links that nobody has spoken over. Thread: zmq-router."""
        return [link for link in self._books.links.values() if link.connection is None]

    def link_closed(
        self, descriptor: int, now: float, *, may_have_been_a_worker: bool
    ) -> Link | None:
        """Record a link's end; None if it was never seen accepted. Thread: zmq-router.

        `may_have_been_a_worker` is False for links that the peer gave up before the ZMTP
        handshake: port scans and TCP probes, not a worker that came back. Nor is a new process's:
        however many come and go, they push nothing out that counts.
        """
        with self._lock:
            link = self._books.links.pop(descriptor, None)
            if link is None:
                return None
            link.closed_at = now
            new_process = link.connection is not None and link.connection.first_uid == 0
            if may_have_been_a_worker and not new_process:
                self._books.gone.append(link)
        return link

    def connection_closed(self, connection: Connection, now: float, kind: CloseKind) -> None:
        """Record that a connection is closed, once. Thread: zmq-router."""
        if connection.closed_at is not None:
            return
        connection.close_kind = kind
        connection.closed_at = now
        if kind is CloseKind.PEER and connection.spoke_for and not connection.peer.local:
            with self._lock:
                self._books.closes.append((connection.peer.identity, now))

    def router_stalled(self, ended_at: float) -> None:
        """Record a router stall longer than a second. Thread: zmq-router."""
        with self._lock:
            self._books.stall_ended_at = ended_at

    def surroundings(self) -> Surroundings:
        """Freeze what is known now. Threads: any."""
        slots = self._slot_words()
        with self._lock:
            books = self._books
            return Surroundings(
                links=tuple(books.links.values()),
                gone=tuple(books.gone),
                peer_closes=tuple(books.closes),
                router_stall_ended_at=books.stall_ended_at,
                slots=slots,
            )


def all_closed(connections: Iterable[Connection]) -> bool:
    """Tell whether there is at least one connection and none is open."""
    states = [connection.is_open for connection in connections]
    return bool(states) and not any(states)
