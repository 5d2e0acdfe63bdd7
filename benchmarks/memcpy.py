"""The yardstick: a plain copy between two segments of shared memory, by one thread."""

from __future__ import annotations

import statistics
import time

import numpy as np

from lmcache_worker.shared_memory import SharedKvCache


class Memcpy:
    """Copies `nbytes` from one segment into another, both resident."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._segments = [SharedKvCache.create([nbytes], "uint8") for _ in range(2)]
        for number, segment in enumerate(self._segments):
            segment.array[...] = number + 1  # pages are there and mapped
        self._seconds()

    def rate(self, repeats: int) -> float:
        """Return the median of some copies, in GB/s (10^9)."""
        return self._nbytes / statistics.median(self._seconds() for _ in range(repeats)) / 1e9

    def _seconds(self) -> float:
        source, target = (segment.array for segment in self._segments)
        begin = time.perf_counter()
        np.copyto(target, source)
        return time.perf_counter() - begin

    def close(self) -> None:
        """Remove the segments."""
        for segment in self._segments:
            segment.close()
