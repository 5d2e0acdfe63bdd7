"""Holds a container's start until what ran in its slot before has given its memory back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmcache_nodeagent.clock import wall
from lmcache_nodeagent.events import ContainerStarted
from lmcache_nodeagent.ids import render_instance_id
from lmcache_nodeagent.liveness.journal import JournalEntry, Subject

if TYPE_CHECKING:
    from collections.abc import Callable
    from threading import Event

    from lmcache_nodeagent.clock import Now
    from lmcache_nodeagent.events import Publish
    from lmcache_nodeagent.liveness.journal import Journal
    from lmcache_nodeagent.liveness.slots import SlotRun
    from lmcache_nodeagent.liveness.targets import InstanceLivenessTarget, ReapableEntry
    from lmcache_nodeagent.liveness.windows import LivenessSettings

_LOOK_SECONDS = 0.01
NOTICEABLE_SECONDS = 1.0
"""A start that waited longer is journalled, and so becomes an Event."""


@dataclass(frozen=True, slots=True)
class _Held:
    """An instance that the start waits for, kept because the entry goes on changing."""

    subject: Subject
    nbytes: int


class StartGate:
    """Fails open: after its time a container starts whatever is still mapped. Threads: any."""

    def __init__(
        self,
        targets: Sequence[InstanceLivenessTarget],
        settings: Callable[[], LivenessSettings],
        journal: Journal,
        publish: Publish,
        now: Now,
        wait_seconds: float,
    ) -> None:
        self._targets = targets
        self._settings = settings
        self._journal = journal
        self._publish = publish
        self._now = now
        self._wait_seconds = wait_seconds

    def wait(self, runs: Sequence[SlotRun], stopping: Event) -> str:
        """Wait for the memory of earlier runs; return `at_once`, `released` or `gave_up`."""
        began_at = self._now()
        first = held = self._held(runs)
        while held and self._now() - began_at < self._wait_seconds:
            if stopping.wait(_LOOK_SECONDS):
                break
            held = self._held(runs)
        seconds = self._now() - began_at
        outcome = "gave_up" if held else "released" if first else "at_once"
        slots = tuple(run.slot for run in runs)
        names = tuple(render_instance_id(one.subject.instance_id) for one in held or first)
        self._publish(ContainerStarted(slots, outcome, seconds, names))
        if held or seconds > NOTICEABLE_SECONDS:
            self._journal.append(_entry(outcome, seconds, held or first, runs))
        return outcome

    def _held(self, runs: Sequence[SlotRun]) -> Sequence[_Held]:
        """Find what earlier runs still have mapped.

        What nobody will reap is not waited for: in observe mode a start would always wait in vain.
        """
        latest = {run.slot: run.run for run in runs}
        found: list[_Held] = []

        def visit(entry: ReapableEntry) -> None:
            if entry.slot and entry.slot.run < latest.get(entry.slot.slot, 0):
                found.append(_Held(Subject.of(entry), entry.nbytes))

        for target in self._targets:
            if self._settings().reaps:
                target.visit_entries(visit)  # before those that leave: it may be on its way there
            for entry in target.leaving_entries():
                visit(entry)
        return found


def _entry(
    outcome: str, seconds: float, held: Sequence[_Held], runs: Sequence[SlotRun]
) -> JournalEntry:
    slots = ", ".join(run.words for run in runs)
    nbytes = sum(one.nbytes for one in held)
    waited = f"the start of a container waited {seconds:.1f} s for {len(held)} instance(s) of"
    still = "still mapped" if outcome == "gave_up" else "released"
    return JournalEntry(
        kind="start_held",
        subject=held[0].subject,
        reason=outcome,
        evidence=(f"{waited} earlier runs in {slots}", f"{nbytes} bytes {still}"),
        silent_seconds=0.0,
        happened_at=wall(),
        waiting_slot=runs[0],
    )
