"""Notices a container that takes more shared memory than it may, after its registration too.

The kernel holds a container to the memory limit of its own pod, and all of a node together to its
/dev/shm; between them nothing but what is said here holds it to its share (docs/connect.md).
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from lmcache_nodeagent.clock import wall
from lmcache_nodeagent.events import SharedMemoryExceeded
from lmcache_nodeagent.liveness.journal import JournalEntry, Subject

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lmcache_nodeagent.device_plugin.folders import SlotFolders
    from lmcache_nodeagent.events import Publish
    from lmcache_nodeagent.liveness.journal import Journal
    from lmcache_nodeagent.liveness.slots import SlotBook, SlotRun
    from lmcache_nodeagent.liveness.targets import InstanceLivenessTarget, ReapableEntry


class SharedMemoryWatch:
    """Says it once for each run of a container; nobody is reaped for it. Thread: device-plugin."""

    def __init__(
        self,
        book: SlotBook,
        folders: SlotFolders,
        targets: Sequence[InstanceLivenessTarget],
        journal: Journal,
        publish: Publish,
    ) -> None:
        self._book = book
        self._folders = folders
        self._targets = targets
        self._journal = journal
        self._publish = publish
        self._said: dict[str, SlotRun] = {}

    def look(self) -> None:
        """Measure every slot."""
        for name in self._book.names:
            run = self._book.current(name)
            excess = ""
            with contextlib.suppress(OSError):  # a new folder is put in its place just now
                excess = self._folders.use_of(name).excess
            if excess and self._said.get(name) != run:
                self._said[name] = run
                self._say(run, excess)

    def _say(self, run: SlotRun, excess: str) -> None:
        owner = self._book.owner(run)
        pod = f"{owner.namespace}/{owner.pod}" if owner else ""
        self._publish(SharedMemoryExceeded(run.slot, pod, excess))
        if (subject := self._subject(run)) is not None:
            self._journal.append(
                JournalEntry(
                    kind="shared_memory_exceeded",
                    subject=subject,
                    reason="over_limit",
                    evidence=(f"{run.words} has {excess}",),
                    silent_seconds=0.0,
                    happened_at=wall(),
                )
            )

    def _subject(self, run: SlotRun) -> Subject | None:
        """Return one of the instances of a run; the Event goes to their pod, which is the same."""
        found: list[Subject] = []

        def visit(entry: ReapableEntry) -> None:
            if entry.slot == run:
                found.append(Subject.of(entry))

        for target in self._targets:
            target.visit_entries(visit)
        return found[0] if found else None
