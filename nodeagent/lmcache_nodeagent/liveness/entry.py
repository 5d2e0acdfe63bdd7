"""What is remembered of one registered instance to judge whether it lives."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from lmcache_nodeagent.liveness.evidence import all_closed
from lmcache_nodeagent.liveness.testimony import (
    NOT_NUMBERED,
    NOTHING_CANCELLED,
    Cancelled,
    Hint,
    Registered,
)

if TYPE_CHECKING:
    from lmcache_nodeagent.ids import InstanceId
    from lmcache_nodeagent.liveness.evidence import Connection
    from lmcache_nodeagent.liveness.slots import SlotRun

PING_INTERVALS_KEPT = 3
"""The longest of the last three intervals counts: one late ping widens a window for a while."""

_MIN_INTERVAL_SECONDS = 0.5
"""Shorter gaps are queued pings read in one go after an outage, not an interval."""

_HINTS_KEPT = 16
_EVIDENCE_IDS_KEPT = 64


class Speaker(Enum):
    """What a message for an instance is worth, given the connection it came over."""

    RIGHTFUL = "rightful"
    STRANGER = "stranger"
    UNKNOWN_INSTANCE = "unknown_instance"


@dataclass(slots=True, eq=False)
class LivenessEntry:
    """Liveness of one instance. Guarded by the lock of the transfer module that holds it.

    Seed: worker-liveness design, section 5.1. `last_seen` and `registered_at` are monotonic
    seconds. `connections` are those that have rightfully spoken for the instance and are worth
    remembering; `registrant` is the one that registered it last; `superseded` ones spoke for a
    context that a later registration replaced, and have no say while the registrant is open.
    `hints` is what the operator said and no sign of life has refuted, `evidence_seen` the ids of
    all that it said about this registration and that was taken.
    """

    instance_id: InstanceId
    engine_type: str
    registered_at: float
    last_seen: float
    registrant: Connection
    has_liveness_signal: bool = False
    connections: list[Connection] = field(default_factory=list)
    superseded: list[Connection] = field(default_factory=list)
    registered: Registered = NOT_NUMBERED
    hints: list[Hint] = field(default_factory=list)
    evidence_seen: list[str] = field(default_factory=list)
    ping_intervals: list[float] = field(default_factory=list)
    last_ping_at: float | None = None
    mismatch_reported: bool = False
    would_reap_reported: bool = False

    def __post_init__(self) -> None:
        """Bind the registrant."""
        if not self.connections:
            self.connections.append(self.registrant)

    @property
    def observed_interval_seconds(self) -> float:
        """Longest of the last ping intervals; 0 before the second ping."""
        return max(self.ping_intervals, default=0.0)

    @property
    def slot(self) -> SlotRun:
        """The run of a container that it registered from; falsy elsewhere."""
        return self.registrant.slot

    @property
    def last_connection(self) -> Connection:
        """The connection the instance was last bound to."""
        return self.connections[-1]

    def speaker(self, connection: Connection) -> Speaker:
        """Tell whether `connection` may speak for this instance (design, "Who may speak").

        A slot is one peer, whichever of its processes speaks; nobody else ever speaks for it.
        """
        if connection in self.connections:
            return Speaker.RIGHTFUL
        if not self.slot.may_be_continued_by(connection.slot):
            return Speaker.STRANGER
        if connection in self.superseded and self.registrant.is_open:
            return Speaker.STRANGER
        if self.slot or all_closed(self.connections):
            return Speaker.RIGHTFUL
        if any(map(connection.same_peer, self.connections)):
            return Speaker.RIGHTFUL
        return Speaker.STRANGER

    def may_unregister(self, connection: Connection) -> bool:
        """An earlier owner's late goodbye must not take the context of the present one."""
        if connection is self.registrant:
            return True
        return not self.registrant.is_open and self.speaker(connection) is Speaker.RIGHTFUL

    def bind(self, connection: Connection) -> None:
        """Remember a rightful speaker; the closed ones before it are forgotten."""
        if connection is self.last_connection:
            return
        self.connections = [c for c in self.connections if c.is_open and c is not connection]
        self.connections.append(connection)

    def seen(self, connection: Connection, now: float) -> Cancelled:
        """Take a sign of life of a rightful speaker; return what it cancelled.

        A message read after its connection was found closed was sent before the close: it says
        nothing about the time since.
        """
        if connection.closed_at is not None:
            self.last_seen = max(self.last_seen, min(now, connection.closed_at))
            return NOTHING_CANCELLED
        window = "close" if all_closed(self.connections) else ""
        refuted = tuple(hint for hint in self.hints if not hint.survives(now))
        if refuted:
            window = "hint" if all(hint.ended_at is None for hint in refuted) else "proof"
            self.hints = [hint for hint in self.hints if hint.survives(now)]
        silent_seconds = max(0.0, now - self.last_seen)
        self.bind(connection)
        self.last_seen = max(self.last_seen, now)
        self.would_reap_reported = False
        return Cancelled(window, refuted, silent_seconds) if window else NOTHING_CANCELLED

    def registered_again(self, connection: Connection, now: float, registered: Registered) -> None:
        """Take a registration with the content that is in force.

        What the operator said was about the one before, and may have been about another process.
        """
        self.seen(connection, now)
        self.registrant = connection
        self.registered = registered
        self.hints, self.evidence_seen = [], []

    def take_hint(self, hint: Hint, evidence_id: str) -> None:
        """Keep a piece of evidence, and its id so that a repeat has no effect."""
        self.hints = [*self.hints, hint][-_HINTS_KEPT:]
        self.evidence_seen = [*self.evidence_seen, evidence_id][-_EVIDENCE_IDS_KEPT:]

    def inherit(self, earlier: LivenessEntry) -> None:
        """Take over what an earlier entry of the same id taught about its heartbeat."""
        self.has_liveness_signal = earlier.has_liveness_signal
        self.ping_intervals = list(earlier.ping_intervals)
        self.last_ping_at = earlier.last_ping_at

    def pinged(self, now: float) -> None:
        """Latch the liveness signal and measure the interval. Only PING does this."""
        self.has_liveness_signal = True
        if self.last_ping_at is not None and now - self.last_ping_at >= _MIN_INTERVAL_SECONDS:
            self.ping_intervals = [*self.ping_intervals, now - self.last_ping_at][
                -PING_INTERVALS_KEPT:
            ]
        self.last_ping_at = now
