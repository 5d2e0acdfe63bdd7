"""Which bytes of a region are taken. Offsets only: nothing here touches memory."""

from __future__ import annotations

from bisect import bisect_left

ALIGNMENT_BYTES = 4096
"""Slots start and end on page boundaries, as in LMCache's own pool (clients map whole pages)."""


def aligned_bytes(size_bytes: int) -> int:
    """Round up to what a slot of `size_bytes` really takes."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class ByteAllocator:
    """First fit over a sorted list of free extents; neighbours coalesce when freed.

    The owner serialises calls (`L1Store` under its lock).
    """

    def __init__(self, size_bytes: int) -> None:
        self.capacity_bytes = size_bytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        if self.capacity_bytes < 1:
            raise ValueError(f"{size_bytes} bytes hold no slot of {ALIGNMENT_BYTES} bytes")
        self.used_bytes = 0
        self._starts = [0]  # offsets of the free extents, ascending
        self._free = {0: self.capacity_bytes}  # offset -> bytes of a free extent
        self._taken: dict[int, int] = {}  # offset -> bytes of a slot

    @property
    def free_bytes(self) -> int:
        """Bytes in free extents, which need not be one piece."""
        return self.capacity_bytes - self.used_bytes

    def allocate(self, size_bytes: int, count: int = 1) -> list[int] | None:
        """Take `count` slots of `size_bytes` each, rounded up to pages: all of them or none.

        Returns:
            Ascending offsets, or None when the free extents do not hold that many slots.

        Raises:
            ValueError: a size or count below 1.
        """
        if size_bytes < 1 or count < 1:
            raise ValueError(f"cannot allocate {count} slots of {size_bytes} bytes")
        slot = aligned_bytes(size_bytes)
        plan = self._first_fit(slot, count)
        if plan is None:
            return None
        offsets = [
            start + slot * n
            for index, slots in plan
            for start in (self._starts[index],)
            for n in range(slots)
        ]
        for index, slots in reversed(plan):  # backwards: removals shift what comes after
            self._shrink(index, slot * slots)
        self._taken.update(dict.fromkeys(offsets, slot))
        self.used_bytes += slot * count
        return offsets

    def free(self, offset: int) -> None:
        """Give a slot back.

        Raises:
            ValueError: no slot starts at `offset` (freed twice, or never taken).
        """
        size = self._taken.pop(offset, None)
        if size is None:
            raise ValueError(f"no slot starts at offset {offset}")
        self.used_bytes -= size
        index = bisect_left(self._starts, offset)
        if index < len(self._starts) and self._starts[index] == offset + size:
            size += self._free.pop(self._starts.pop(index))
        if index and self._end_of(index - 1) == offset:
            self._free[self._starts[index - 1]] += size
        else:
            self._starts.insert(index, offset)
            self._free[offset] = size

    def _first_fit(self, slot: int, count: int) -> list[tuple[int, int]] | None:
        """Return (index of a free extent, slots to cut from its front), or None."""
        if slot * count > self.free_bytes:
            return None
        plan = []
        for index, start in enumerate(self._starts):
            if slots := min(self._free[start] // slot, count):
                plan.append((index, slots))
                count -= slots
                if not count:
                    return plan
        return None

    def _shrink(self, index: int, taken_bytes: int) -> None:
        start = self._starts[index]
        left = self._free.pop(start) - taken_bytes
        if left:
            self._starts[index] = start + taken_bytes
            self._free[start + taken_bytes] = left
        else:
            del self._starts[index]

    def _end_of(self, index: int) -> int:
        start = self._starts[index]
        return start + self._free[start]
