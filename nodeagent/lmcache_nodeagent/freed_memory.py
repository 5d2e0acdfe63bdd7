"""Large blocks that were freed go back to the system, so that a burst of messages leaves nothing.

glibc raises its threshold for mapping a block of its own to the largest block that was ever freed,
up to 32 MiB. Blocks below it come from each thread's arena, which shrinks only from its end: after
150 MB of refused registrations up to 60 MB stayed with the agent, by chance and for good.
"""

from __future__ import annotations

import ctypes

_M_MMAP_THRESHOLD = -3
"""malloc.h; setting it by hand ends its growth (mallopt(3))."""

OWN_MAPPING_BYTES = 256 << 10
"""Blocks from here on are mapped and unmapped each by itself."""


def return_large_blocks() -> bool:
    """Fix glibc's threshold; call before there are threads.

    Returns:
        False where the C library has no `mallopt` (musl) or refuses: memory then stays with the
        process as that library likes.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and mallopt(_M_MMAP_THRESHOLD, OWN_MAPPING_BYTES) == 1
