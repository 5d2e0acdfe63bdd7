"""Who is dead: one pure function over what is known. Nothing else in the agent decides a reap.

Rules and reasons: docs/liveness.md. All moments are monotonic seconds; nothing here reads a clock,
takes a lock or has an effect.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from lmcache_nodeagent.liveness.closes import (
    close_window,
    closed_by_peer,
    has_come_back,
    last_close,
    open_candidates,
)
from lmcache_nodeagent.liveness.evidence import all_closed
from lmcache_nodeagent.liveness.testimony import Hint
from lmcache_nodeagent.liveness.windows import (
    HINT_LASTS_SECONDS,
    fell_silent,
    hint_window_seconds,
    silence_window_seconds,
)
from lmcache_nodeagent.liveness.words import describe as in_words

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from lmcache_nodeagent.liveness.entry import LivenessEntry
    from lmcache_nodeagent.liveness.evidence import Surroundings
    from lmcache_nodeagent.liveness.slots import SlotWord
    from lmcache_nodeagent.liveness.stalls import Stalls
    from lmcache_nodeagent.liveness.windows import LivenessSettings

ENGINE_WITH_ALL_EVIDENCE = "vllm"
"""Connectors of other engines behave differently on closes: silence and proof alone judge them."""

LATE_SIGN_SECONDS = 2.0
"""What an ended run sent or closed is read by then: the kubelet's time of its end is rounded down
to a second, and reading takes a moment."""

NEXT_RUN_SECONDS = 1.0
"""A connection made this much after a run's end, as the kubelet rounds it down, is not that run's.
Less than a second after an end no worker of the next run is there: the kubelet has to notice, the
runtime to start a container, an interpreter to start in it."""

BRAKE_MIN_PEERS = 3
BRAKE_SHARE = 0.6


class Reason(Enum):
    """Why an instance was reaped; names as in logs, journal and metrics."""

    PROCESS_EXIT = "process_exit"
    CONTAINER_TERMINATED = "container_terminated"
    POD_TERMINATED = "pod_terminated"
    SLOT_RESTARTED = "slot_restarted"
    SLOT_RELEASED = "slot_released"
    CONNECTION_CLOSED = "connection_closed"
    POD_HINT = "pod_hint"
    HEARTBEAT_TIMEOUT = "heartbeat_timeout"
    REGISTRATION_GRACE = "registration_grace"


PROOFS = {one.value: one for one in (Reason.CONTAINER_TERMINATED, Reason.POD_TERMINATED)}
"""The operator's triggers that may be proof; the reap's reason is the trigger."""


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
class Verdict:
    """What follows for one instance now.

    `deadline` is when `window` ends, None if nothing runs out; `reason` is set once it has, or on
    proof. `held_by` names what keeps a dead-looking instance, for people. `since` is when the
    worker's end shows, as far as it is known; `trigger` is the operator's, if its word decides.
    """

    state: State
    window: Window
    deadline: float | None
    reason: Reason | None
    held_by: str | None
    evidence: tuple[str, ...]
    since: float | None = None
    trigger: str = ""


@dataclass(frozen=True, slots=True)
class _Limit:
    """One running window: the earliest limit is the verdict."""

    window: Window
    reason: Reason
    deadline: float
    since: float
    trigger: str = ""


@dataclass(frozen=True, slots=True)
class _Case:
    """One instance, what is around it, and the moment."""

    entry: LivenessEntry
    now: float
    settings: LivenessSettings
    surroundings: Surroundings
    stalls: Stalls

    @property
    def hints(self) -> Sequence[Hint]:
        """What counts now of what the operator said, and of what the kubelet said itself."""
        told = self.entry.hints if self.settings.operator_word else []
        counted = [hint for hint in told if hint.ended_at is not None or self.lasts(hint)]
        given_up_at = self.slot_given_up_at
        if given_up_at is not None and self.entry.last_seen <= given_up_at:
            counted += filter(self.lasts, [Hint(Reason.SLOT_RELEASED.value, given_up_at)])
        return counted

    @property
    def slot_word(self) -> SlotWord | None:
        """What the kubelet said about the entry's slot."""
        return self.surroundings.slots.get(self.entry.slot.slot)

    @property
    def slot_given_up_at(self) -> float | None:
        """When the entry's pod no longer had its slot; None while it has, for all we know."""
        word, run = self.slot_word, self.entry.slot.run
        return word.given_up_at if word is not None and word.run == run else None

    def lasts(self, hint: Hint) -> bool:
        """Tell whether a hint has not expired."""
        window = hint_window_seconds(self.entry, self.settings)
        return self.now < self.ends(hint.received_at, window + HINT_LASTS_SECONDS)

    def ends(self, start: float, seconds: float) -> float:
        """Return when a window ends: the agent's own lateness is added to it."""
        return start + seconds + self.stalls.delay_since(start)

    def close_ends(self) -> float:
        """Return when the close window ends."""
        return self.ends(*close_window(self.entry, self.settings, self.surroundings))

    def outlived(self, ended_at: float, moment: float) -> bool:
        """Tell whether something happened too late to have come from a run that ended."""
        lateness = LATE_SIGN_SECONDS + self.stalls.delay_between(ended_at, moment)
        return moment > ended_at + lateness


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
    case = _Case(entry, now, settings, surroundings, stalls)
    closed = all_closed(entry.connections)
    held_by, candidates = None, 0
    if closed:
        candidates = sum(1 for _ in open_candidates(entry, surroundings))
        held_by = f"{candidates} candidate connection(s)" if candidates else None
    elif not entry.has_liveness_signal and not settings.reap_idle_connected:
        held_by = "open connection"
    hints = case.hints
    evidence = in_words(entry, now, hints, candidates, case.slot_word) if describe else ()
    state = _state(case, hints, closed=closed)
    proof = _proven(case, hints) if closed else None
    proof = proof or _slot_proof(case, candidates, closed=closed)
    if proof is not None:
        return Verdict(state, Window.NONE, None, proof[0], None, evidence, *proof[1:])
    limits = list(_limits(case, hints, held=held_by is not None))
    earliest = min(limits, key=lambda limit: limit.deadline, default=None)
    if earliest is None:
        return Verdict(state, Window.NONE, None, None, held_by, evidence)
    reason = earliest.reason if now >= earliest.deadline else None
    return Verdict(
        state,
        earliest.window,
        earliest.deadline,
        reason,
        held_by,
        evidence,
        earliest.since,
        earliest.trigger,
    )


def _proven(case: _Case, hints: Sequence[Hint]) -> tuple[Reason, float, str] | None:
    """Find proof that acts at once, now that every connection is closed: reason, since, trigger.

    A connection that closed long after the end that is reported contradicts it: see `_limits`. So
    does one that was made between the close and the end and is open still, unless it is somebody
    else's: what ended has no connections, so this would be another process of that address.
    """
    closed_at = last_close(case.entry)
    if case.entry.last_connection.process_gone:
        return Reason.PROCESS_EXIT, closed_at, ""
    for hint in hints:
        if hint.ended_at is None or case.outlived(hint.ended_at, closed_at):
            continue
        if not has_come_back(case.entry, case.surroundings, hint.ended_at + NEXT_RUN_SECONDS):
            return PROOFS[hint.trigger], max(hint.ended_at, closed_at), hint.trigger
    return None


def _slot_proof(case: _Case, candidates: int, *, closed: bool) -> tuple[Reason, float, str] | None:
    """Find the kubelet's proof by way of the device plugin: reason, since, trigger.

    Before a container is started at a slot, the one before it there has ended: that is so whoever
    still holds its connection, and though its process may hang on its exit. A slot that is taken
    back says less: a pod deleted by force is forgotten while it still runs, so the process or its
    connection has to agree.
    """
    entry, word = case.entry, case.slot_word
    closed_at = last_close(entry) if closed else case.now
    if word is not None and entry.slot.run < word.run:
        return Reason.SLOT_RESTARTED, min(closed_at, word.began_at), ""
    given_up_at = case.slot_given_up_at
    if given_up_at is None or candidates:
        return None
    if all(connection.ended_by_its_peer for connection in entry.connections):
        since = max(closed_at, given_up_at) if closed else given_up_at
        return Reason.SLOT_RELEASED, since, ""
    return None


def _limits(case: _Case, hints: Sequence[Hint], *, held: bool) -> Iterable[_Limit]:
    """Yield every window that runs for this entry."""
    entry, settings = case.entry, case.settings
    closed = all_closed(entry.connections)
    if closed and not held:
        for hint in hints:
            if hint.ended_at is not None:
                reason, since = PROOFS[hint.trigger], last_close(entry)
                yield _Limit(Window.CLOSE, reason, case.close_ends(), since, hint.trigger)
    if not held and entry.engine_type == ENGINE_WITH_ALL_EVIDENCE:
        yield from _hint_limits(case, hints, closed=closed)
        if closed_by_peer(entry):
            closes = case.close_ends()
            yield _Limit(Window.CLOSE, Reason.CONNECTION_CLOSED, closes, last_close(entry))
    if settings.reap_timeout_seconds <= 0:
        return
    if entry.has_liveness_signal:
        reason, seconds = Reason.HEARTBEAT_TIMEOUT, silence_window_seconds(entry, settings)
        deadline = case.ends(entry.last_seen, seconds)
        yield _Limit(Window.HEARTBEAT_TIMEOUT, reason, deadline, entry.last_seen)
    elif settings.reap_idle_connected or not held:
        deadline = case.ends(entry.last_seen, settings.registration_grace_seconds)
        if closed and not settings.reap_idle_connected:
            # The grace may have ended while the open connection held it: leave time to reconnect.
            deadline = max(deadline, case.close_ends())
        reason = Reason.REGISTRATION_GRACE
        yield _Limit(Window.REGISTRATION_GRACE, reason, deadline, entry.last_seen)


def _hint_limits(case: _Case, hints: Sequence[Hint], *, closed: bool) -> Iterable[_Limit]:
    """Yield the windows of hints; a contradicted proof counts as one while it is fresh."""
    seconds = hint_window_seconds(case.entry, case.settings)
    for hint in filter(case.lasts, hints):
        deadline = case.ends(hint.received_at, seconds)
        if closed:  # maybe a moment ago: leave time to reconnect
            deadline = max(deadline, case.close_ends())
        yield _Limit(Window.HINT, Reason.POD_HINT, deadline, hint.received_at, hint.trigger)


def is_mass_silence(silent_peers: int, pinging_peers: int) -> bool:
    """Tell whether at least three peers, and over 60 % of those that ping, are silent together."""
    return silent_peers >= BRAKE_MIN_PEERS and silent_peers > BRAKE_SHARE * pinging_peers


def _state(case: _Case, hints: Sequence[Hint], *, closed: bool) -> State:
    if closed:
        return State.CLOSED
    if hints or fell_silent(case.entry, case.now, case.settings):
        return State.SUSPECT
    return State.ACTIVE if case.entry.has_liveness_signal else State.IDLE
