"""Freed memory is given back once there may be much of it, and not looked for all the time."""

from __future__ import annotations

from lmcache_nodeagent.freed_memory import WORTH_BYTES, FreedMemory


class Process:
    """A process of some size, of which a trim frees what nobody uses."""

    def __init__(self) -> None:
        self.used = self.resident = 50 * WORTH_BYTES
        self.trims = 0

    def size(self) -> int:
        """Resident bytes."""
        return self.resident

    def trim(self) -> None:
        """Give back."""
        self.trims += 1
        self.resident = self.used


def test_what_a_burst_left_is_given_back_once() -> None:
    """Growth that stays in use is not looked through again."""
    process = Process()
    freed = FreedMemory(process.size, process.trim)
    for _ in range(3):
        freed.give_back()
    assert process.trims == 0
    process.resident += 10 * WORTH_BYTES
    process.used += 2 * WORTH_BYTES
    for _ in range(3):
        freed.give_back()
    assert process.trims == 1
    assert process.resident == process.used


def test_growth_counts_from_the_least() -> None:
    """A process that shrank by itself and grows again is trimmed."""
    process = Process()
    freed = FreedMemory(process.size, process.trim)
    process.used = process.resident = 40 * WORTH_BYTES
    freed.give_back()
    process.resident += WORTH_BYTES - 1
    freed.give_back()
    assert process.trims == 0
    process.resident += 1
    freed.give_back()
    assert process.trims == 1


def test_this_process_can_be_measured_and_trimmed() -> None:
    """Whatever its C library offers."""
    with FreedMemory.of_this_process() as freed:
        kept = bytearray(2 * WORTH_BYTES)
        kept[::4096] = b"x" * len(kept[::4096])  # resident
        freed.give_back()
    assert len(kept) == 2 * WORTH_BYTES
