"""Giving a dead or departed worker's memory back, without anybody waiting for it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING

from lmcache_nodeagent.events import InstanceReleased, ReleaseFailed, ReleaseStuck
from lmcache_nodeagent.ids import render_instance_id

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lmcache_nodeagent.clock import Now
    from lmcache_nodeagent.events import Publish
    from lmcache_nodeagent.ids import InstanceId
    from lmcache_nodeagent.liveness.targets import ReapableEntry

_log = logging.getLogger(__name__)

Spawn = Callable[[str, Callable[[], None]], None]
"""Starts a named daemon thread; only `app.py` provides it."""

OnReleased = Callable[[float | None], None]
"""Called with the seconds a release took, or None if its deadline passed or it failed."""


@dataclass(slots=True, eq=False)
class Release:
    """One release in progress. `started_at` is the moment of the fence."""

    entry: ReapableEntry
    started_at: float
    listeners: list[OnReleased] = field(default_factory=list)
    stuck_reported: bool = False


class Releaser:
    """Runs each release on a thread of its own and knows which are in progress.

    A release drains the transfers in flight, then closes the context. One that passes its deadline
    is reported as stuck and left alone: its thread goes on waiting, everybody else goes on working.
    """

    def __init__(
        self,
        spawn: Spawn,
        publish: Publish,
        now: Now,
        drop_instance_state: Callable[[InstanceId], None],
        deadline_seconds: float,
    ) -> None:
        self._spawn = spawn
        self._publish = publish
        self._now = now
        self._drop_instance_state = drop_instance_state
        self._deadline_seconds = deadline_seconds
        self._lock = Lock()  # guards: _releases and the fields of each
        self._releases: list[Release] = []

    def start(self, entry: ReapableEntry, on_released: OnReleased | None = None) -> None:
        """Begin to release an entry that its module has already taken out. Threads: any."""
        release = Release(entry, self._now())
        if on_released is not None:
            release.listeners.append(on_released)
        with self._lock:
            self._releases.append(release)
        name = f"release-{render_instance_id(entry.instance_id)}"
        self._spawn(name, lambda: self._run(release))

    def _run(self, release: Release) -> None:
        """Thread: release-<instance>."""
        entry = release.entry
        error: Exception | None = None
        mapped = entry.nbytes
        entry.wait_drained()
        try:
            entry.close()
        except Exception as failure:  # noqa: BLE001  # a close that raises must not lose the bookkeeping below
            _log.exception("release_failed")
            error = failure
        seconds = self._now() - release.started_at
        self._drop_instance_state(entry.instance_id)
        with self._lock:
            self._releases.remove(release)
            listeners, release.listeners = release.listeners, []
        if error is None:
            self._publish(InstanceReleased(entry.instance_id, mapped, seconds))
        else:
            self._publish(ReleaseFailed(entry.instance_id, repr(error)))
        for listener in listeners:
            listener(seconds if error is None else None)

    def report_stuck(self) -> float | None:
        """Report each release past its deadline once; return the next deadline, if any."""
        now = self._now()
        overdue: list[tuple[Release, list[OnReleased]]] = []
        upcoming: list[float] = []
        with self._lock:
            for release in self._releases:
                deadline = release.started_at + self._deadline_seconds
                if release.stuck_reported:
                    continue
                if now < deadline:
                    upcoming.append(deadline)
                    continue
                release.stuck_reported = True
                overdue.append((release, release.listeners))
                release.listeners = []
        for release, listeners in overdue:
            waited, entry = now - release.started_at, release.entry
            self._publish(ReleaseStuck(entry.instance_id, waited, entry.transfers_in_flight))
            for listener in listeners:
                listener(None)
        return min(upcoming, default=None)

    def is_releasing(self, instance_id: InstanceId) -> bool:
        """Tell whether a context of this id is still being released."""
        with self._lock:
            return any(r.entry.instance_id == instance_id for r in self._releases)

    def holds_any(self, handles: frozenset[str]) -> bool:
        """Tell whether one of these segments belongs to a context that is still being released."""
        with self._lock:
            return any(not handles.isdisjoint(r.entry.handles) for r in self._releases)

    def in_progress(self) -> Sequence[Release]:
        """Return the releases in progress, oldest first."""
        with self._lock:
            return tuple(self._releases)

    def is_stuck(self, release: Release) -> bool:
        """Tell whether a release has passed its deadline."""
        return self._now() - release.started_at > self._deadline_seconds
