"""What a lookup promised, and to whom: until a retrieve, a free, the session's end or its time-out.

A session belongs to the connection that looked up, so that two engines that use one request id
never meet. A reused id starts anew: chunk hashes are computed from the tokens of each request and
are never remembered by id. Pins are opaque keys here; whoever calls does the unpinning.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock

Pins = Mapping[Hashable, int]
"""How many pins each object has; what a method returns is the caller's to unpin."""

NO_PINS: Pins = {}

_EXPIRY_SCAN_SECONDS = 1.0


@dataclass(slots=True, eq=False)
class Session:
    """One request of one engine. Guarded by the table's lock.

    `owner` is the connection that looked up and `peer` what connections of one engine share.
    `hit_chunks` is the result of the lookup until it is asked for. Moments are monotonic seconds.
    """

    owner: Hashable
    peer: str
    request_id: str
    hit_chunks: int | None
    pins: dict[Hashable, int]
    expires_at: float
    pins_expire_at: float
    ended: bool = field(default=False)


class SessionTable:
    """All sessions. Threads: any."""

    def __init__(self, session_ttl_seconds: float, pin_ttl_seconds: float) -> None:
        self._session_ttl_seconds = session_ttl_seconds
        self._pin_ttl_seconds = pin_ttl_seconds
        self._lock = Lock()  # guards: everything below
        self._by_request: dict[str, list[Session]] = {}
        self._count = 0
        self._next_expiry_scan = 0.0

    def start(
        self, owner: Hashable, peer: str, request_id: str, hit_chunks: int, pins: Pins, now: float
    ) -> Pins:
        """Begin a session with a lookup's result; return the pins of one that it replaces."""
        session = Session(
            owner=owner,
            peer=peer,
            request_id=request_id,
            hit_chunks=hit_chunks,
            pins=dict(pins),
            expires_at=now + self._session_ttl_seconds,
            pins_expire_at=now + self._pin_ttl_seconds,
        )
        with self._lock:
            sessions = self._by_request.setdefault(request_id, [])
            replaced = next((s for s in sessions if s.owner is owner and not s.ended), None)
            if replaced is not None:
                self._remove_locked(replaced)
                sessions = self._by_request.setdefault(request_id, [])
            sessions.append(session)
            self._count += 1
        return _taken(replaced)

    def take_status(self, owner: Hashable, peer: str, request_id: str) -> int:
        """Return the hit in chunks, once; 0 for an unknown request and after that."""
        with self._lock:
            session = self._find_locked(owner, peer, request_id)
            if session is None or session.hit_chunks is None:
                return 0
            hit_chunks, session.hit_chunks = session.hit_chunks, None
            return hit_chunks

    def release(
        self, owner: Hashable, peer: str, request_id: str, keys: Iterable[Hashable], count: int
    ) -> Pins:
        """Give back up to `count` pins of each key, as far as this session has them."""
        released: dict[Hashable, int] = {}
        with self._lock:
            session = self._find_locked(owner, peer, request_id)
            if session is None:
                return NO_PINS
            session.hit_chunks = None
            for key in keys:
                held = session.pins.get(key, 0)
                if held:
                    released[key] = min(held, count)
                    _reduce(session.pins, key, released[key])
        return released

    def consume(self, peer: str, request_id: str, keys: Sequence[Hashable]) -> Pins:
        """Take one pin of each key out of the sessions of this request id, as a retrieve does.

        Sessions of the same peer come first. A key without a pin is left out: nobody else's pin is
        ever taken.
        """
        consumed: dict[Hashable, int] = {}
        with self._lock:
            sessions = self._by_request.get(request_id, ())
            for session in sorted(sessions, key=lambda s: s.peer != peer):
                for key in keys:
                    if key not in consumed and session.pins.get(key):
                        _reduce(session.pins, key, 1)
                        consumed[key] = 1
        return consumed

    def end(self, owner: Hashable, peer: str, request_id: str) -> Callable[[], Pins] | None:
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
        return lambda: self._settle(session)

    def _settle(self, session: Session) -> Pins:
        with self._lock:
            self._remove_locked(session)
        return _taken(session)

    def expire(self, now: float) -> Sequence[Pins]:
        """Drop what is too old and return its pins; cheap to call often."""
        expired: list[Pins] = []
        with self._lock:
            if now < self._next_expiry_scan:
                return expired
            self._next_expiry_scan = now + _EXPIRY_SCAN_SECONDS
            everyone = [s for sessions in self._by_request.values() for s in sessions]
            for session in everyone:
                if session.expires_at <= now:
                    self._remove_locked(session)
                elif session.pins_expire_at > now:
                    continue
                expired.append(_taken(session))
        return expired

    def __len__(self) -> int:
        """Count the sessions that have not been settled."""
        with self._lock:
            return self._count

    def _find_locked(self, owner: Hashable, peer: str, request_id: str) -> Session | None:
        """The owner's own session, or else one of its peer: a client that reconnected."""
        assert self._lock.locked()
        living = [s for s in self._by_request.get(request_id, ()) if not s.ended]
        own = next((s for s in living if s.owner is owner), None)
        return own or next((s for s in living if peer and s.peer == peer), None)

    def _remove_locked(self, session: Session) -> None:
        """Take a session out of the table; fine if it is out already."""
        assert self._lock.locked()
        sessions = self._by_request.get(session.request_id, [])
        if session not in sessions:
            return
        sessions.remove(session)
        self._count -= 1
        if not sessions:
            del self._by_request[session.request_id]


def _taken(session: Session | None) -> Pins:
    """Empty a session's pins into the caller's hands. A removed session has no other user."""
    if session is None:
        return NO_PINS
    pins, session.pins = session.pins, {}
    return pins


def _reduce(pins: dict[Hashable, int], key: Hashable, count: int) -> None:
    pins[key] -= count
    if not pins[key]:
        del pins[key]
