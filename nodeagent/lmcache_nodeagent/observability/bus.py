"""The event bus: any thread publishes, one thread tells the subscribers."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Event as Flag
from threading import Lock

import structlog

from lmcache_nodeagent.events import Event

Subscriber = Callable[[Event], None]
"""Threads: the one that runs the bus."""

CAPACITY = 10_000
"""Events that may wait: at 100 bytes or so each they cost little, and cover a stall of seconds."""

_CHECK_SECONDS = 0.5  # notices `stop` even if its wake-up did not fit into a full queue

_log = structlog.get_logger(__name__)


class EventBus:
    """A bounded queue between those who publish and the subscribers.

    Threads: `publish`, `stop` and the counts from any; `run` on the thread `events`.
    """

    def __init__(
        self,
        subscribers: Sequence[Subscriber],
        capacity: int = CAPACITY,
        when_full: Subscriber | None = None,
    ) -> None:
        """Make a bus.

        Args:
            subscribers: Told about every event that fits.
            capacity: Events that may wait.
            when_full: The one subscriber that is told about the others as well, by whoever
                publishes them: it must be thread-safe and quick.
        """
        self._subscribers = tuple(subscribers)
        self._when_full = when_full
        self._queue: queue.Queue[Event | None] = queue.Queue(capacity)  # None wakes `run` to stop
        self._stopping = Flag()
        self._lock = Lock()  # guards: _dropped, _failures
        self._dropped = 0
        self._failures = 0

    @property
    def dropped(self) -> int:
        """Events that did not fit since the start."""
        with self._lock:
            return self._dropped

    @property
    def failures(self) -> int:
        """Times a subscriber raised since the start."""
        with self._lock:
            return self._failures

    def publish(self, event: Event) -> None:
        """Hand over an event without waiting; a full bus drops it for all but `when_full`."""
        try:
            self._queue.put_nowait(event)
        except queue.Full:
            with self._lock:
                self._dropped += 1
            if self._when_full is not None:
                self._tell_one(self._when_full, event)

    def run(self) -> None:
        """Tell the subscribers about every event, in order, until stopped and drained."""
        while True:
            event = self._next()
            if event is not None:
                self._tell(event)
            elif self._stopping.is_set():
                return

    def stop(self) -> None:
        """Let `run` return once it has told what was published before."""
        self._stopping.set()
        with suppress(queue.Full):
            self._queue.put_nowait(None)

    def _next(self) -> Event | None:
        try:
            return self._queue.get(timeout=_CHECK_SECONDS)
        except queue.Empty:
            return None

    def _tell(self, event: Event) -> None:
        for subscriber in self._subscribers:
            self._tell_one(subscriber, event)

    def _tell_one(self, subscriber: Subscriber, event: Event) -> None:
        try:
            subscriber(event)
        except Exception:  # noqa: BLE001 - one of the three boundaries
            with self._lock:
                self._failures += 1
            _log.exception("event_subscriber_failed", published=type(event).__name__)
