"""Who is dead: one pure function over what is known. Nothing else in the agent decides a reap.

Rules and reasons: docs/liveness.md. All moments are monotonic seconds; nothing here reads a clock,
takes a lock or has an effect.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from lmcache_nodeagent.liveness.evidence import CloseKind, all_closed

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from lmcache_nodeagent.liveness.entry import Hint, LivenessEntry
    from lmcache_nodeagent.liveness.evidence import Connection, Link, Surroundings
    from lmcache_nodeagent.liveness.stalls import Stalls

ENGINE_WITH_ALL_EVIDENCE = "vllm"
"""Connectors of other engines behave differently on closes: silence and proof alone judge them."""

NETWORK_EVENT_SECONDS = 2.0
"""Closes from two or more peers within this time are the network's doing, not the workers'."""

BRAKE_MIN_PEERS = 3
BRAKE_SHARE = 0.6


class Reason(Enum):
    """Why an instance was reaped; names as in logs, journal and metrics."""

    PROCESS_EXIT = "process_exit"
    CONNECTION_CLOSED = "connection_closed"
    POD_HINT = "pod_hint"
    HEARTBEAT_TIMEOUT = "heartbeat_timeout"
    REGISTRATION_GRACE = "registration_grace"


class Window(Enum):
    """Which window an instance is judged on."""

    HEARTBEAT_TIMEOUT = "heartbeat_timeout"
    REGISTRATION_GRACE = "registration_grace"
    HINT = "hint"
    CLOSE = "close"
    NONE = "none"


class State(Enum):
    """What people see of an instance."""

    ACTIVE = "active"
    IDLE = "idle"
    CLOSED = "closed"
    SUSPECT = "suspect"
    RELEASING = "releasing"


@dataclass(frozen=True, slots=True)
class LivenessSettings:
    """The windows, in seconds. `reap_timeout_seconds` 0 means that nothing is ever reaped."""

    reap_timeout_seconds: float = 120.0
    registration_grace_seconds: float = 3600.0
    heartbeat_interval_seconds: float = 10.0
    hint_confirm_seconds: float = 15.0
    close_confirm_seconds: float = 10.0
    enforce: bool = True
    reap_idle_connected: bool = False

    @property
    def reaps(self) -> bool:
        """False: verdicts are only reported (observe mode, or a reap timeout of 0)."""
        return self.enforce and self.reap_timeout_seconds > 0


@dataclass(frozen=True, slots=True)
class Verdict:
    """What follows for one instance now.

    `deadline` is when `window` ends, None if nothing runs out; `reason` is set once it has, or on
    proof. `held_by` names what keeps a dead-looking instance, for people.
    """

    state: State
    window: Window
    deadline: float | None
    reason: Reason | None
    held_by: str | None
    evidence: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Limit:
    """One running window: the earliest limit is the verdict."""

    window: Window
    reason: Reason
    deadline: float


def judge(
    entry: LivenessEntry,
    now: float,
    settings: LivenessSettings,
    surroundings: Surroundings,
    stalls: Stalls,
    *,
    describe: bool = True,
) -> Verdict:
    """Judge one instance. The caller holds the lock that guards `entry`.

    `describe` asks for the evidence in words, which costs more than the judgement.
    """
    closed = all_closed(entry.connections)
    held_by, candidates = None, 0
    if closed:
        candidates = sum(1 for _ in open_candidates(entry, surroundings))
        held_by = f"{candidates} candidate connection(s)" if candidates else None
    elif not entry.has_liveness_signal and not settings.reap_idle_connected:
        held_by = "open connection"
    evidence = _describe(entry, now, candidates) if describe else ()
    if closed and entry.last_connection.process_gone:
        return Verdict(State.CLOSED, Window.NONE, None, Reason.PROCESS_EXIT, None, evidence)
    limits = list(_limits(entry, now, settings, surroundings, stalls, held=held_by is not None))
    earliest = min(limits, key=lambda limit: limit.deadline, default=None)
    state = _state(entry, now, closed=closed, settings=settings)
    if earliest is None:
        return Verdict(state, Window.NONE, None, None, held_by, evidence)
    reason = earliest.reason if now >= earliest.deadline else None
    return Verdict(state, earliest.window, earliest.deadline, reason, held_by, evidence)


def _limits(
    entry: LivenessEntry,
    now: float,
    settings: LivenessSettings,
    surroundings: Surroundings,
    stalls: Stalls,
    *,
    held: bool,
) -> Iterable[_Limit]:
    """Yield every window that runs for this entry."""

    def limit(window: Window, reason: Reason, start: float, seconds: float) -> _Limit:
        return _Limit(window, reason, start + seconds + stalls.delay_since(start))

    if not held and entry.engine_type == ENGINE_WITH_ALL_EVIDENCE:
        for hint in standing_hints(entry, now):
            seconds = hint_window_seconds(entry, settings)
            yield limit(Window.HINT, Reason.POD_HINT, hint.observed_at, seconds)
        if closed_by_peer(entry):
            start, seconds = close_window(entry, settings, surroundings)
            yield limit(Window.CLOSE, Reason.CONNECTION_CLOSED, start, seconds)
    if settings.reap_timeout_seconds <= 0:
        return
    if entry.has_liveness_signal:
        seconds = silence_window_seconds(entry, settings)
        yield limit(Window.HEARTBEAT_TIMEOUT, Reason.HEARTBEAT_TIMEOUT, entry.last_seen, seconds)
    elif settings.reap_idle_connected or not held:
        window, reason = Window.REGISTRATION_GRACE, Reason.REGISTRATION_GRACE
        grace = limit(window, reason, entry.last_seen, settings.registration_grace_seconds)
        if all_closed(entry.connections) and not settings.reap_idle_connected:
            # The grace may have ended while the open connection held it: leave time to reconnect.
            reconnected = limit(window, reason, *close_window(entry, settings, surroundings))
            grace = max(grace, reconnected, key=lambda one: one.deadline)
        yield grace


def silence_window_seconds(entry: LivenessEntry, settings: LivenessSettings) -> float:
    """T, or three observed ping intervals if that is longer, at most the grace."""
    widened = min(3 * entry.observed_interval_seconds, settings.registration_grace_seconds)
    return max(settings.reap_timeout_seconds, widened)


def hint_window_seconds(entry: LivenessEntry, settings: LivenessSettings) -> float:
    """The confirm time, or one and a half observed ping intervals, at most the grace."""
    widened = min(1.5 * entry.observed_interval_seconds, settings.registration_grace_seconds)
    return max(settings.hint_confirm_seconds, widened)


def heartbeat_is_mismatched(entry: LivenessEntry, settings: LivenessSettings) -> bool:
    """Tell whether the worker pings too slowly for T; 10 % of jitter is not a mismatch."""
    timeout = settings.reap_timeout_seconds
    return timeout > 0 and 3 * entry.observed_interval_seconds > 1.1 * timeout


def closed_by_peer(entry: LivenessEntry) -> bool:
    """Tell whether the instance's connections are all closed, the last one by the worker's end."""
    return all_closed(entry.connections) and entry.last_connection.close_kind is CloseKind.PEER


def standing_hints(entry: LivenessEntry, now: float) -> Sequence[Hint]:
    """Return the hints that have not expired."""
    return [hint for hint in entry.hints if now < hint.expires_at]


def open_candidates(entry: LivenessEntry, surroundings: Surroundings) -> Iterable[str]:
    """Yield a line for each open connection that might be the same worker come back."""
    for link in surroundings.links:
        if _may_be_the_worker(link, entry):
            who = link.connection.peer.text if link.connection else "somebody silent so far"
            yield f"link {link.serial} from {who}"


def _may_be_the_worker(link: Link, entry: LivenessEntry) -> bool:
    """Tell whether a link was accepted after the instance's last one and not shown to be another's.

    That one is excluded for good: a link that is not the worker's says nothing by its end either.
    """
    if link.serial <= entry.last_connection.accept_serial:
        return False
    return link.connection is None or not _excluded(link.connection, entry)


def _excluded(candidate: Connection, entry: LivenessEntry) -> bool:
    """Tell whether a connection has shown that it is somebody else.

    Stock clients count their uids on over a reconnect, so uid 0 is a new process's first request.
    """
    if candidate.first_uid == 0 or candidate.spoke_for - {entry.instance_id}:
        return True
    return candidate.asked_lookups and not any(c.asked_lookups for c in entry.connections)


def close_window(
    entry: LivenessEntry, settings: LivenessSettings, surroundings: Surroundings
) -> tuple[float, float]:
    """Return start and length of the time in which a living worker has come back.

    It starts at the latest of: the close, a candidate's close, a router stall's end.
    """
    closes = _closes(entry, surroundings)
    start, stall_ended_at = max(closes), surroundings.router_stall_ended_at
    if stall_ended_at is not None:
        start = max(start, stall_ended_at)
    if _is_network_event(entry, surroundings, closes):
        return start, hint_window_seconds(entry, settings)
    return start, settings.close_confirm_seconds


def _closes(entry: LivenessEntry, surroundings: Surroundings) -> list[float]:
    """When the instance's connections closed, and links that may have been the worker come back."""
    closes = [c.closed_at for c in entry.connections if c.closed_at is not None]
    closes += [
        link.closed_at
        for link in surroundings.gone
        if link.closed_at is not None and _may_be_the_worker(link, entry)
    ]
    return closes


def _is_network_event(
    entry: LivenessEntry, surroundings: Surroundings, closes: Sequence[float]
) -> bool:
    """Tell whether another peer's connection closed within two seconds of one of this one's."""
    own, ordered = entry.last_connection.peer.identity, sorted(closes)
    for identity, moment in surroundings.peer_closes:
        if identity != own:
            after = bisect_left(ordered, moment - NETWORK_EVENT_SECONDS)
            if after < len(ordered) and ordered[after] <= moment + NETWORK_EVENT_SECONDS:
                return True
    return False


def fell_silent(entry: LivenessEntry, now: float, settings: LivenessSettings) -> bool:
    """Tell whether half of the silence window has passed without a word: a ping is overdue."""
    window = silence_window_seconds(entry, settings)
    return entry.has_liveness_signal and 0 < window / 2 < now - entry.last_seen


def is_mass_silence(silent_peers: int, pinging_peers: int) -> bool:
    """Tell whether at least three peers, and over 60 % of those that ping, are silent together."""
    return silent_peers >= BRAKE_MIN_PEERS and silent_peers > BRAKE_SHARE * pinging_peers


def _state(entry: LivenessEntry, now: float, *, closed: bool, settings: LivenessSettings) -> State:
    if closed:
        return State.CLOSED
    if standing_hints(entry, now) or fell_silent(entry, now, settings):
        return State.SUSPECT
    return State.ACTIVE if entry.has_liveness_signal else State.IDLE


def _describe(entry: LivenessEntry, now: float, candidates: int) -> tuple[str, ...]:
    """Say in words what is known, for the journal and for people."""
    lines = [f"silent for {now - entry.last_seen:.1f} s"]
    lines.append("has pinged" if entry.has_liveness_signal else "never pinged")
    if entry.observed_interval_seconds:
        lines.append(f"pings every {entry.observed_interval_seconds:.1f} s")
    last = entry.last_connection
    if last.closed_at is None or last.close_kind is None:
        lines.append(f"connection from {last.peer.text} open")
    else:
        ago = now - last.closed_at
        lines.append(
            f"connection from {last.peer.text} closed {ago:.1f} s ago ({last.close_kind.value})"
        )
    if last.process_gone:
        lines.append("process exited (pidfd)")
    if candidates:
        lines.append(f"{candidates} connection(s) might be the worker come back")
    lines.extend(f"hint: {hint.trigger}" for hint in standing_hints(entry, now))
    return tuple(lines)
