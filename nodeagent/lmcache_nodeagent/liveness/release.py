"""Giving a dead or departed worker's memory back, without anybody waiting for it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
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


_RETRY_SECONDS = 1.0

_ANSWER_SECONDS = 1.5
"""A caller that waits for a release is answered after this, released or not."""


@dataclass(slots=True, eq=False)
class Release:
    """One release in progress. `started_at` is the moment of the fence.

    `on_end` is told once it has ended or is stuck; `on_answer` once it has ended or has taken
    longer than a caller should wait.
    """

    entry: ReapableEntry
    started_at: float
    on_end: OnReleased | None = None
    on_answer: Callable[[], None] | None = None
    stuck_reported: bool = False
    retry_at: float | None = None


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
        wake: Callable[[], None],
        on_stuck: Callable[[ReapableEntry, float], object] = lambda _entry, _seconds: None,
    ) -> None:
        self._spawn = spawn
        self._publish = publish
        self._now = now
        self._drop_instance_state = drop_instance_state
        self._deadline_seconds = deadline_seconds
        self._wake = wake  # lets the thread that calls `report_overdue` look at the new deadlines
        self._on_stuck = on_stuck
        self._lock = Lock()  # guards: _releases and the fields of each
        self._releases: list[Release] = []

    def start(
        self,
        entry: ReapableEntry,
        on_end: OnReleased | None = None,
        on_answer: Callable[[], None] | None = None,
    ) -> None:
        """Begin to release an entry that its module has already taken out. Threads: any."""
        release = Release(entry, self._now(), on_end, on_answer)
        with self._lock:
            self._releases.append(release)
        self._start_thread(release)
        self._wake()

    def _start_thread(self, release: Release) -> None:
        """Start a release's thread; where the machine has none left, `report_overdue` retries."""
        name = f"release-{render_instance_id(release.entry.instance_id)}"
        try:
            self._spawn(name, lambda: self._run(release))
        except RuntimeError:
            _log.exception("release_thread_not_started")
            release.retry_at = self._now() + _RETRY_SECONDS
        else:
            release.retry_at = None

    def _run(self, release: Release) -> None:
        """Thread: release-<instance>."""
        entry = release.entry
        error: Exception | None = None
        mapped = entry.nbytes
        entry.wait_drained()
        try:
            entry.close()
        except Exception as failure:  # noqa: BLE001  # the bookkeeping below must not be lost
            _log.exception("release_failed")
            error = failure
        seconds = self._now() - release.started_at
        self._drop_instance_state(entry.instance_id)
        with self._lock:
            self._releases.remove(release)
            on_end, on_answer = _take_end(release), _take_answer(release)
        if error is None:
            self._publish(InstanceReleased(entry.instance_id, mapped, seconds))
        else:
            self._publish(ReleaseFailed(entry.instance_id, repr(error)))
        on_end(seconds if error is None else None)
        on_answer()

    def report_overdue(self) -> float | None:
        """Answer who has waited long enough, report each stuck release once.

        Returns:
            The next moment (monotonic) at which this has something to do, None without one.
        """
        now = self._now()
        for release in self.in_progress():
            if release.retry_at is not None and now >= release.retry_at:
                self._start_thread(release)
        answers: list[Callable[[], None]] = []
        stuck: list[tuple[Release, OnReleased]] = []
        upcoming: list[float] = []
        with self._lock:
            for release in self._releases:
                answer_at = release.started_at + _ANSWER_SECONDS
                stuck_at = release.started_at + self._deadline_seconds
                if release.on_answer is not None and now >= answer_at:
                    answers.append(_take_answer(release))
                if not release.stuck_reported and now >= stuck_at:
                    release.stuck_reported = True
                    stuck.append((release, _take_end(release)))
                moments = (answer_at, stuck_at, release.retry_at or now)
                upcoming += [moment for moment in moments if moment > now]
        for answer in answers:
            answer()
        for release, on_end in stuck:
            waited, entry = now - release.started_at, release.entry
            self._publish(ReleaseStuck(entry.instance_id, waited, entry.transfers_in_flight))
            on_end(None)
            self._on_stuck(entry, waited)
        return min(upcoming, default=None)

    def in_progress(self) -> Sequence[Release]:
        """Return the releases in progress, oldest first."""
        with self._lock:
            return tuple(self._releases)

    def stuck(self) -> Sequence[Release]:
        """Return the releases that have passed their deadline, oldest first."""
        return [release for release in self.in_progress() if self.is_stuck(release)]

    def is_stuck(self, release: Release) -> bool:
        """Tell whether a release has passed its deadline."""
        return self._now() - release.started_at > self._deadline_seconds


def _take_end(release: Release) -> OnReleased:
    """Take the listener, so that it is told once."""
    on_end, release.on_end = release.on_end, None
    return on_end or (lambda _seconds: None)


def _take_answer(release: Release) -> Callable[[], None]:
    on_answer, release.on_answer = release.on_answer, None
    return on_answer or (lambda: None)
