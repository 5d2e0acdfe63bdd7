"""What happened to instances in this agent's life, numbered, for people and for the operator."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Literal

from lmcache_nodeagent.clock import wall_time_text
from lmcache_nodeagent.ids import render_instance_id
from lmcache_nodeagent.liveness.slots import NO_SLOT, SlotRun

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lmcache_nodeagent.ids import InstanceId
    from lmcache_nodeagent.liveness.targets import ReapableEntry
    from lmcache_nodeagent.liveness.testimony import Registered

JOURNAL_LENGTH = 1024

Kind = Literal[
    "reaped",
    "would_reap",
    "cancelled",
    "false_reap",
    "stuck_release",
    "start_held",
    "shared_memory_exceeded",
]
"""`cancelled`: a hint or an end that a sign of life refuted. `false_reap`: a reaped instance that
was heard again. `stuck_release`: memory that is not back in time. `start_held`: a container whose
start waited for memory of what ran in its slot before. `shared_memory_exceeded`: the container of
a living one has more in its /dev/shm than it may."""


@dataclass(frozen=True, slots=True)
class Subject:
    """Whom an entry is about."""

    instance_id: InstanceId
    model: str
    registered: Registered
    slot: SlotRun = NO_SLOT

    @classmethod
    def of(cls, entry: ReapableEntry) -> Subject:
        """Take it from an instance's entry."""
        return cls(entry.instance_id, entry.model, entry.registered, entry.slot)


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalEntry:
    """One thing that happened.

    Attributes:
        happened_at: seconds since 1970; of a reap, when it was decided.
        release_seconds: `None` if the memory is not released.
        latency_seconds: from the worker's end, as far as it is known, to its memory's release.
        trigger: the operator's, if its word had a part in it; or `slot_released`.
        waiting_slot: of the container whose start was held.
    """

    kind: Kind
    subject: Subject
    reason: str
    evidence: tuple[str, ...]
    silent_seconds: float
    happened_at: float
    release_seconds: float | None = None
    released_bytes: int = 0
    latency_seconds: float | None = None
    trigger: str = ""
    waiting_slot: SlotRun = NO_SLOT


def stuck_release(entry: ReapableEntry, waited_seconds: float, happened_at: float) -> JournalEntry:
    """Write up a release that has passed its deadline, whatever it was for."""
    return JournalEntry(
        kind="stuck_release",
        subject=Subject.of(entry),
        reason="release_deadline",
        evidence=(
            f"memory not back after {waited_seconds:.0f} s",
            f"{entry.transfers_in_flight} transfer(s) in flight",
        ),
        silent_seconds=0.0,
        happened_at=happened_at,
    )


@dataclass(frozen=True, slots=True)
class Numbered:
    """An entry with its number, and how many just before it are no longer kept."""

    seq: int
    entry: JournalEntry
    missed: int = 0


class Journal:
    """The last entries, numbered from 1 without gaps. Threads: any.

    The operator acknowledges what it has dealt with; people may read all that is kept. A reader
    that sees `oldest` > `since` + 1 missed some.
    """

    def __init__(self, boot_id: str, length: int = JOURNAL_LENGTH) -> None:
        self._boot_id = boot_id
        self._lock = Lock()  # guards: _entries, _last, _acknowledged, _missed
        self._entries: deque[tuple[int, JournalEntry]] = deque(maxlen=length)
        self._last = 0
        self._acknowledged = 0
        self._missed = 0
        self._tell: Callable[[], None] = lambda: None

    def tell(self, listener: Callable[[], None]) -> None:
        """Have `listener` called after each new entry; it must return at once. Before any."""
        self._tell = listener

    def append(self, entry: JournalEntry) -> int:
        """Add an entry and return its number."""
        with self._lock:
            full = len(self._entries) == self._entries.maxlen
            self._missed += full and self._entries[0][0] > self._acknowledged
            self._last += 1
            number = self._last
            self._entries.append((number, entry))
        self._tell()
        return number

    def unacknowledged(self, after: int = 0) -> Sequence[Numbered]:
        """Return what is not acknowledged and has a number beyond `after`, oldest first."""
        with self._lock:
            entries, after = tuple(self._entries), max(after, self._acknowledged)
        fresh = [(seq, entry) for seq, entry in entries if seq > after]
        if not fresh:
            return ()
        first, entry = fresh[0]
        rest = (Numbered(seq, later) for seq, later in fresh[1:])
        return [Numbered(first, entry, first - 1 - after), *rest]

    def acknowledge(self, number: int) -> bool:
        """Note that all entries up to a number are dealt with; False if there is no such number."""
        with self._lock:
            if not 0 <= number <= self._last:
                return False
            self._acknowledged = max(self._acknowledged, number)
            return True

    @property
    def missed(self) -> int:
        """Entries that gave way to newer ones before anybody acknowledged them."""
        with self._lock:
            return self._missed

    @property
    def waiting(self) -> int:
        """Entries that nobody has acknowledged, those that are no longer kept included."""
        with self._lock:
            return self._last - self._acknowledged

    def since(self, number: int) -> Mapping[str, object]:
        """Return the reaps after `number` as `/v1/reaps` shows them.

        The numbers are those of all entries, so reaps may have gaps between them. `missed` counts
        entries after `number` that are no longer kept.
        """
        with self._lock:
            entries, last = tuple(self._entries), self._last
        oldest = entries[0][0] if entries else last + 1
        return {
            "boot_id": self._boot_id,
            "next": last,
            "oldest": oldest,
            "missed": max(0, oldest - 1 - number) if number <= last else 0,
            "reaps": [
                _rendered(seq, entry)
                for seq, entry in entries
                if seq > number and entry.kind == "reaped"
            ],
        }


def _rendered(seq: int, entry: JournalEntry) -> Mapping[str, object]:
    pod = entry.subject.registered.pod
    return {
        "seq": seq,
        "instance_id": render_instance_id(entry.subject.instance_id),
        "registration": entry.subject.registered.serial,
        "model": entry.subject.model,
        "mapping": None if pod is None else dataclasses.asdict(pod),
        "reason": entry.reason,
        "trigger": entry.trigger,
        "evidence": list(entry.evidence),
        "silent_seconds": round(entry.silent_seconds, 3),
        "detected_at": wall_time_text(entry.happened_at),
        "release_seconds": _rounded(entry.release_seconds),
        "latency_seconds": _rounded(entry.latency_seconds),
        "bytes": entry.released_bytes,
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
