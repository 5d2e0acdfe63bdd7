"""The device plugin's slots: which run of which container has each, as the kubelet says.

A slot is a socket of its own that the kubelet brings into one container. What comes over it is of
that container and of nobody else; before the kubelet starts a container at a slot, whatever ran
there before has ended. Rules and reasons: docs/liveness.md, "Slots".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmcache_nodeagent.clock import Now

_OWNERS_KEPT = 8
"""Earlier runs of a slot whose pod is remembered: their instances may still be releasing."""


@dataclass(frozen=True, slots=True)
class SlotRun:
    """One run of a container at a slot; runs count up over the life of the agent.

    Falsy for what came over no slot.
    """

    slot: str = ""
    run: int = 0

    def __bool__(self) -> bool:
        """Tell whether there is a slot."""
        return self.slot != ""

    @property
    def words(self) -> str:
        """Name it for people."""
        return f"slot {self.slot}"

    def may_be_continued_by(self, other: SlotRun) -> bool:
        """Tell whether `other` may speak for what is of this run: the same slot, no earlier run."""
        return self.slot == other.slot and self.run <= other.run


NO_SLOT = SlotRun()


@dataclass(frozen=True, slots=True)
class SlotOwner:
    """Who has a slot. The kubelet does not tell the pod's uid."""

    namespace: str
    pod: str
    container: str


@dataclass(frozen=True, slots=True)
class SlotWord:
    """What the kubelet said about one slot. Moments are monotonic.

    Attributes:
        run: the run it began to start last; all before it have ended. 0: none since we watch.
        began_at: when it said so.
        given_up_at: since when the pod of that run no longer has the slot; None while it has.
    """

    run: int = 0
    began_at: float = 0.0
    given_up_at: float | None = None


@dataclass(slots=True)
class _Slot:
    word: SlotWord = field(default_factory=SlotWord)
    owner: SlotOwner | None = None  # of the current run, once listed by the kubelet that runs now
    owners: dict[int, SlotOwner] = field(default_factory=dict)  # by run
    changed_at: float = 0.0
    is_taken: bool = False  # by the next container, which has not been started yet
    unlisted_since: float | None = None


class SlotBook:
    """What is known of every slot. Written by the plugin's threads, read by any."""

    def __init__(self, slots: Sequence[str], now: Now) -> None:
        self._now = now
        self._lock = Lock()  # guards: _slots, _kubelet
        self._slots = {name: _Slot() for name in slots}
        self._kubelet = ""

    @property
    def names(self) -> Sequence[str]:
        """All slots."""
        return tuple(self._slots)

    def current(self, name: str) -> SlotRun:
        """Return the run that has a slot now."""
        with self._lock:
            return SlotRun(name, self._slots[name].word.run)

    def is_over(self, run: SlotRun) -> bool:
        """Tell whether a run has ended, as the kubelet says."""
        with self._lock:
            slot = self._slots.get(run.slot)
            return slot is not None and run.run < slot.word.run

    def begin_run(self, name: str) -> SlotRun:
        """Note that the kubelet is about to start a container at a slot."""
        with self._lock:
            slot, now = self._slots[name], self._now()
            slot.word = SlotWord(slot.word.run + 1, now)
            slot.owner, slot.is_taken = None, False
            slot.changed_at, slot.unlisted_since = now, None
            return SlotRun(name, slot.word.run)

    def allocated(self, name: str) -> None:
        """Note that the kubelet gives a slot to a container: who had it has it no more."""
        with self._lock:
            slot, now = self._slots[name], self._now()
            slot.is_taken = True
            slot.changed_at, slot.unlisted_since = now, None
            if slot.word.given_up_at is None:
                slot.word = replace(slot.word, given_up_at=now)

    def listed(self, owners: Mapping[str, SlotOwner], asked_at: float, kubelet: str) -> bool:
        """Take the kubelet's whole list; True if that changed anything.

        A slot counts as given up only if this very kubelet had listed it for its pod: one that has
        just started does not know its pods yet. A list that was asked for before a slot changed
        hands says nothing about it.

        Args:
            owners: who has a slot; the others nobody has.
            asked_at: when the list was asked for.
            kubelet: changes when the kubelet starts anew.
        """
        changed = False
        with self._lock:
            if kubelet != self._kubelet:
                self._kubelet = kubelet
                for slot in self._slots.values():
                    slot.owner = slot.unlisted_since = None
            for name, slot in self._slots.items():
                if asked_at >= slot.changed_at:
                    changed |= self._take_locked(slot, owners.get(name))
        return changed

    def _take_locked(self, slot: _Slot, owner: SlotOwner | None) -> bool:
        assert self._lock.locked()
        now, word = self._now(), slot.word
        if owner is None:
            slot.unlisted_since = now if slot.unlisted_since is None else slot.unlisted_since
        else:
            slot.unlisted_since = None
        if slot.is_taken:
            slot.unlisted_since = None
            return False
        known = slot.owners.get(word.run)
        if known is not None and owner == known:
            slot.owner = owner
            slot.word = replace(word, given_up_at=None)
            return word.given_up_at is not None
        if word.given_up_at is not None:
            return False
        if slot.owner is not None or (owner is not None and known is not None):
            slot.owner = None
            slot.word = replace(word, given_up_at=now)
            return True
        if owner is None:
            return False
        slot.owner = slot.owners[word.run] = owner
        for run in sorted(slot.owners)[:-_OWNERS_KEPT]:
            del slot.owners[run]
        return True

    def words(self) -> Mapping[str, SlotWord]:
        """Return what the kubelet said about each slot. Threads: any."""
        with self._lock:
            return {name: slot.word for name, slot in self._slots.items()}

    def owner(self, run: SlotRun) -> SlotOwner | None:
        """Return whose a run is, or was; None if that is not known. Threads: any."""
        with self._lock:
            slot = self._slots.get(run.slot)
            return None if slot is None else slot.owners.get(run.run)

    def listed_count(self) -> int:
        """Count the slots that pods have. Threads: any."""
        with self._lock:
            return sum(slot.owner is not None for slot in self._slots.values())

    def left(self, after_seconds: float) -> Sequence[str]:
        """Return the slots that no pod has: given up, or on no list for so long. Threads: any."""
        with self._lock:
            latest = self._now() - after_seconds
            return [
                name
                for name, slot in self._slots.items()
                if slot.unlisted_since is not None
                and (slot.word.given_up_at is not None or slot.unlisted_since <= latest)
            ]

    def by_least_use(self, names: Sequence[str]) -> Sequence[str]:
        """Order slots so that the one that changed hands longest ago comes first."""
        with self._lock:
            return sorted(names, key=lambda name: self._slots[name].changed_at)
