"""When the agent itself was late: nobody else may pay for that."""

from __future__ import annotations

from collections import deque
from threading import Lock

STALL_SECONDS = 1.0
"""Lateness that counts. Shorter delays are scheduling noise beside windows of 3 s and more."""

_KEPT = 256


class Stalls:
    """Intervals in which scans or the router did not run. Written by reaper and router, any reads.

    A stopped process stalls both at once; overlapping intervals count once.
    """

    def __init__(self) -> None:
        self._lock = Lock()  # guards: _intervals
        self._intervals: deque[tuple[float, float]] = deque(maxlen=_KEPT)

    def record(self, start: float, end: float) -> None:
        """Note that nothing ran between the two moments (monotonic seconds)."""
        if end <= start:
            return
        with self._lock:
            while self._intervals and self._intervals[-1][1] >= start:
                earlier_start, earlier_end = self._intervals.pop()
                start, end = min(start, earlier_start), max(end, earlier_end)
            self._intervals.append((start, end))

    def delay_since(self, start: float) -> float:
        """Seconds by which a deadline that began at `start` is put off."""
        with self._lock:
            intervals = tuple(self._intervals)
        return sum(end - max(begin, start) for begin, end in intervals if end > start)

    def delay_between(self, start: float, end: float) -> float:
        """Seconds of the time between two moments in which nothing ran."""
        with self._lock:
            intervals = tuple(self._intervals)
        overlaps = (min(until, end) - max(begin, start) for begin, until in intervals)
        return sum(overlap for overlap in overlaps if overlap > 0)

    def any_since(self, start: float) -> bool:
        """Tell whether a stall ended after `start`."""
        with self._lock:
            return any(end > start for _, end in self._intervals)
