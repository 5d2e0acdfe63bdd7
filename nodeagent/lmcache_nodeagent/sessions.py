"""What a lookup promised, and to whom: until a retrieve, a free, the session's end or its time-out.

A session belongs to the connection that looked up, so that two engines that use one request id
never meet; once that is closed, any other of its peer may go on with it. A reused id starts anew:
chunk hashes are computed from the tokens of each request and are never remembered by id. Pins are
opaque keys here; whoever calls does the unpinning.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Protocol

from lmcache_nodeagent.clock import Now, monotonic
from lmcache_nodeagent.errors import Overloaded
from lmcache_nodeagent.shares import Shares

Pins = Mapping[Hashable, int]
"""How many pins each object has; what a method returns is the caller's to unpin."""

NO_PINS: Pins = {}

Listener = Callable[[int], None]
"""Gets a lookup's hit in chunks, once."""

MAX_SESSIONS = 65_536
"""Some 600 bytes each, and each is looked at every second. One peer gets half."""

MAX_PINNED_OBJECTS = 1 << 22
"""Of all sessions together; some 200 bytes each, whatever they pin. One peer gets half."""

_EXPIRY_SCAN_SECONDS = 1.0


class Owner(Protocol):
    """The connection that looked up; it is itself only."""

    @property
    def is_open(self) -> bool:
        """Not yet found closed."""
        ...


@dataclass(slots=True, eq=False)
class Session:
    """One request of one engine. Guarded by the table's lock.

    `owner` is the connection that looked up and `peer` what connections of one engine share.
    `hit_chunks` is the result of the lookup until it is asked for; while the lookup is `running`
    there is none yet, and `listeners` wait for it. `takers` are the readers that have taken a pin
    of an object which others may still take. Moments are monotonic seconds.
    """

    owner: Owner
    peer: str
    request_id: str
    hit_chunks: int | None
    pins: dict[Hashable, int]
    takers: dict[Hashable, set[Hashable]] = field(default_factory=dict, init=False)
    began_at: float
    expires_at: float
    pins_expire_at: float
    running: bool = False
    ended: bool = False
    charged: int = 0  # objects that it had pinned, until all it has left is taken
    listeners: list[Listener] = field(default_factory=list)

    @property
    def state(self) -> str:
        """What has become of the lookup."""
        if self.running:
            return "running"
        if self.ended:
            return "ended"
        return "consumed" if self.hit_chunks is None else "ready"


@dataclass(frozen=True, slots=True)
class Lease:
    """What one session holds, for people: who, since when, how long yet."""

    peer: str
    request_id: str
    state: str
    pinned_objects: int
    pins: int
    age_seconds: float
    seconds_left: float


class SessionTable:
    """All sessions. Threads: any."""

    def __init__(
        self, session_ttl_seconds: float, pin_ttl_seconds: float, now: Now = monotonic
    ) -> None:
        """A session's age counts from its last use, a pin's from its lookup."""
        self._now = now
        self._session_ttl_seconds = session_ttl_seconds
        self._pin_ttl_seconds = pin_ttl_seconds
        self._lock = Lock()  # guards: everything below
        self._by_request: dict[str, list[Session]] = {}
        self._sessions = Shares(MAX_SESSIONS)
        self._pinned = Shares(MAX_PINNED_OBJECTS)
        self._next_expiry_scan = 0.0
        self._expiry_due_at = 0.0

    def start(
        self, owner: Owner, peer: str, request_id: str, hit_chunks: int, pins: Pins, now: float
    ) -> Pins:
        """Begin a session with a lookup's result; return the pins of one that it replaces."""
        session, replaced = self.begin(owner, peer, request_id, now)
        self.finish(session, hit_chunks, pins)
        return replaced

    def begin(self, owner: Owner, peer: str, request_id: str, now: float) -> tuple[Session, Pins]:
        """Begin a session whose lookup runs; return it, and the pins of one that it replaces.

        Raises:
            Overloaded: there are too many, in all or of this peer.
        """
        session = Session(
            owner=owner,
            peer=peer,
            request_id=request_id,
            hit_chunks=None,
            pins={},
            began_at=now,
            expires_at=now + self._session_ttl_seconds,
            pins_expire_at=now + self._pin_ttl_seconds,
            running=True,
        )
        with self._lock:
            sessions = self._by_request.get(request_id, ())
            replaced = next((s for s in sessions if s.owner is owner and not s.ended), None)
            if replaced is not None:
                self._remove_locked(replaced)
            elif not self._sessions.has_room(peer, 1):
                raise Overloaded(f"lookup: open requests: {self._sessions.words(peer)}")
            self._by_request.setdefault(request_id, []).append(session)
            self._sessions.add(peer, 1)
            listeners = _listeners_of(replaced)
        _tell(listeners, 0)
        return session, _taken(replaced)

    def has_room_for(self, peer: str, objects: int) -> bool:
        """Tell whether a session of this peer may pin so many more objects."""
        with self._lock:
            return self._pinned.has_room(peer, objects)

    def finish(self, session: Session, hit_chunks: int, pins: Pins) -> Pins:
        """Note a lookup's result; return the pins if nobody will use them any more.

        The session may have been replaced, ended or expired while the lookup ran.
        """
        with self._lock:
            session.running = False
            here = session in self._by_request.get(session.request_id, ())
            if not here or session.ended:
                return pins
            listeners = _listeners_of(session)
            session.hit_chunks = None if listeners else hit_chunks
            session.pins = dict(pins)
            self._charge_locked(session, len(pins))
        _tell(listeners, hit_chunks)
        return NO_PINS

    def take_status(self, owner: Owner, peer: str, request_id: str) -> int | None:
        """Return the hit in chunks, once; 0 for an unknown request and after that.

        None while the lookup runs: ask again.
        """
        with self._lock:
            session = self._find_locked(owner, peer, request_id)
            if session is not None and session.running:
                return None
            if session is None or session.hit_chunks is None:
                return 0
            self._used_locked(session)
            hit_chunks, session.hit_chunks = session.hit_chunks, None
            return hit_chunks

    def wait_status(
        self, owner: Owner, peer: str, request_id: str, listener: Listener
    ) -> int | None:
        """As `take_status`; but None means that `listener` will get the result of the lookup."""
        with self._lock:
            session = self._find_locked(owner, peer, request_id)
            if session is not None and session.running:
                session.listeners.append(listener)
                return None
        return self.take_status(owner, peer, request_id)

    def release(
        self, owner: Owner, peer: str, request_id: str, keys: Iterable[Hashable], count: int
    ) -> Pins:
        """Give back up to `count` pins of each key, as far as this session has them."""
        released: dict[Hashable, int] = {}
        with self._lock:
            session = self._find_locked(owner, peer, request_id)
            if session is None:
                return NO_PINS
            self._used_locked(session)
            session.hit_chunks = None
            for key in keys:
                held = session.pins.get(key, 0)
                if held:
                    released[key] = min(held, count)
                    _reduce(session.pins, key, released[key])
        return released

    def consume(
        self, peer: str, request_id: str, keys: Sequence[Hashable], reader: Hashable
    ) -> Pins:
        """Take one pin of each key out of the sessions of this request id, as a retrieve does.

        Sessions of the same peer come first. A key without a pin is left out, and one of which
        this reader has taken its pin before: nobody else's pin is ever taken.
        """
        consumed: dict[Hashable, int] = {}
        with self._lock:
            sessions = self._by_request.get(request_id, ())
            for session in sorted(sessions, key=lambda s: s.peer != peer):
                before = len(consumed)
                for key in keys:
                    if key not in consumed and _take(session, key, reader):
                        consumed[key] = 1
                if len(consumed) > before:
                    self._used_locked(session)
        return consumed

    def end(self, owner: Owner, peer: str, request_id: str) -> Callable[[], Pins] | None:
        """End a session; None if there is none. A new lookup with its id starts anew at once.

        The answer gives the pins that are left, once, when it is called: the caller waits with
        that for the retrieves that are already under way. Nobody calling, the time-out does it.
        """
        with self._lock:
            session = self._find_locked(owner, peer, request_id)
            if session is None:
                return None
            session.ended = True
            session.hit_chunks = None
            listeners = _listeners_of(session)
        _tell(listeners, 0)
        return lambda: self._settle(session)

    def _settle(self, session: Session) -> Pins:
        with self._lock:
            self._remove_locked(session)
        return _taken(session)

    def expire(self, now: float) -> Sequence[Pins]:
        """Drop what is too old and return its pins; cheap to call often."""
        expired: list[Pins] = []
        listeners: list[Listener] = []
        with self._lock:
            if now < self._next_expiry_scan:
                return expired
            self._next_expiry_scan = now + _EXPIRY_SCAN_SECONDS
            everyone = [s for sessions in self._by_request.values() for s in sessions]
            for session in everyone:
                if session.expires_at <= now:
                    self._remove_locked(session)
                    listeners += _listeners_of(session)
                elif session.pins_expire_at > now:
                    continue
                self._charge_locked(session, 0)
                expired.append(_taken(session))
            self._expiry_due_at = self._next_expiry_locked(now)
        _tell(listeners, 0)
        return expired

    def closed_owners(self) -> frozenset[Owner]:
        """Return the connections that are closed and whose look-ups are not settled."""
        with self._lock:
            owners = {s.owner for sessions in self._by_request.values() for s in sessions}
        return frozenset(owner for owner in owners if not owner.is_open)

    def drop(self, owner: Owner) -> Sequence[Pins]:
        """Drop the sessions of somebody who is gone for good; return their pins."""
        with self._lock:
            everyone = [s for sessions in self._by_request.values() for s in sessions]
            dropped = [session for session in everyone if session.owner is owner]
            listeners = [listener for session in dropped for listener in _listeners_of(session)]
            for session in dropped:
                self._remove_locked(session)
        _tell(listeners, 0)
        return [_taken(session) for session in dropped]

    @property
    def expiry_due_at(self) -> float:
        """When to call `expire` again at the latest, if nothing shall outlive its time for long."""
        with self._lock:
            return self._expiry_due_at

    def _next_expiry_locked(self, now: float) -> float:
        """The earliest end of what is here, or of what may begin from now on."""
        assert self._lock.locked()
        ends = [now + min(self._pin_ttl_seconds, self._session_ttl_seconds)]
        for session in (s for sessions in self._by_request.values() for s in sessions):
            ends.append(session.expires_at)
            if session.pins_expire_at > now:
                ends.append(session.pins_expire_at)
        return max(min(ends), self._next_expiry_scan)

    def leases(self) -> Sequence[Lease]:
        """Return what each session holds now, oldest first."""
        now = self._now()
        with self._lock:
            leases = [
                Lease(
                    peer=session.peer,
                    request_id=session.request_id,
                    state=session.state,
                    pinned_objects=len(session.pins),
                    pins=sum(session.pins.values()),
                    age_seconds=now - session.began_at,
                    seconds_left=max(0.0, session.pins_expire_at - now),
                )
                for sessions in self._by_request.values()
                for session in sessions
            ]
        return sorted(leases, key=lambda lease: -lease.age_seconds)

    def __len__(self) -> int:
        """Count the sessions that have not been settled."""
        with self._lock:
            return self._sessions.in_all

    def _used_locked(self, session: Session) -> None:
        assert self._lock.locked()
        session.expires_at = self._now() + self._session_ttl_seconds

    def _find_locked(self, owner: Owner, peer: str, request_id: str) -> Session | None:
        """The owner's own session, or else one of its peer's that nobody has any more.

        What another engine behind the same address has open is none of its business.
        """
        assert self._lock.locked()
        living = [s for s in self._by_request.get(request_id, ()) if not s.ended]
        own = next((s for s in living if s.owner is owner), None)
        return own or next(
            (s for s in living if peer and s.peer == peer and not s.owner.is_open), None
        )

    def _remove_locked(self, session: Session) -> None:
        """Take a session out of the table; fine if it is out already."""
        assert self._lock.locked()
        sessions = self._by_request.get(session.request_id, [])
        if session not in sessions:
            return
        sessions.remove(session)
        self._sessions.add(session.peer, -1)
        self._charge_locked(session, 0)
        if not sessions:
            del self._by_request[session.request_id]

    def _charge_locked(self, session: Session, objects: int) -> None:
        """Note how many objects a session has pinned."""
        assert self._lock.locked()
        self._pinned.add(session.peer, objects - session.charged)
        session.charged = objects


def _taken(session: Session | None) -> Pins:
    """Empty a session's pins into the caller's hands. A removed session has no other user."""
    if session is None:
        return NO_PINS
    pins, session.pins = session.pins, {}
    return pins


def _listeners_of(session: Session | None) -> list[Listener]:
    """Take out who waits for a session's lookup."""
    if session is None:
        return []
    listeners, session.listeners = session.listeners, []
    return listeners


def _tell(listeners: Iterable[Listener], hit_chunks: int) -> None:
    for listener in listeners:
        listener(hit_chunks)


def _take(session: Session, key: Hashable, reader: Hashable) -> bool:
    """Take a reader's pin of an object, unless it has none or none is left."""
    takers = session.takers.get(key, ())
    if not session.pins.get(key) or reader in takers:
        return False
    _reduce(session.pins, key, 1)
    if key in session.pins:
        session.takers.setdefault(key, set()).add(reader)
    else:
        session.takers.pop(key, None)
    return True


def _reduce(pins: dict[Hashable, int], key: Hashable, count: int) -> None:
    pins[key] -= count
    if not pins[key]:
        del pins[key]
