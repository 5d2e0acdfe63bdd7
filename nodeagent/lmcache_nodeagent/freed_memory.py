"""Freed memory goes back to the system, so that a burst of messages leaves nothing.

glibc keeps freed blocks of up to 32 MiB in each thread's arena, which shrinks only from its end:
after 150 MB of refused registrations up to 60 MB stayed with the agent, by chance and for good.
Mapping large blocks one by one instead (`M_MMAP_THRESHOLD`) has the kernel clear every page of
every large message: messages of 4 MiB then travel at less than half the speed.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

WORTH_BYTES = 4 << 20
"""Growth from which on the arenas are walked, which takes milliseconds."""

_PAGE_BYTES = os.sysconf("SC_PAGESIZE")


class FreedMemory:
    """Gives back what is free whenever the process has grown. Thread: main."""

    def __init__(self, private_bytes: Callable[[], int], trim: Callable[[], None]) -> None:
        self._private_bytes = private_bytes
        self._trim = trim
        self._known_bytes = private_bytes()

    @classmethod
    @contextmanager
    def of_this_process(cls) -> Iterator[FreedMemory]:
        """Hold one descriptor open throughout: looking makes none that come and go."""
        with Path("/proc/self/statm").open("rb", buffering=0) as statm:
            yield cls(partial(_private_bytes, statm.fileno()), _trim)

    def give_back(self) -> None:
        """Look, and trim if it is worth it; to be called every now and then."""
        found = self._private_bytes()
        if found < self._known_bytes + WORTH_BYTES:
            self._known_bytes = min(found, self._known_bytes)
            return
        self._trim()
        self._known_bytes = self._private_bytes()


def _private_bytes(statm: int) -> int:
    """Resident memory that is no shared mapping; proc(5), statm."""
    _, resident, shared, *_ = os.pread(statm, 256, 0).split()
    return (int(resident) - int(shared)) * _PAGE_BYTES


def _trim() -> None:
    """malloc_trim(3) gives back free pages of all arenas; musl has none, and keeps little."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)
