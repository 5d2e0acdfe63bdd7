"""Copies of plain bytes. NumPy lets other threads run meanwhile, a `memoryview` does not."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copy all of `source` into `target`, which is as long."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def joined(parts: Sequence[bytes | memoryview]) -> memoryview:
    """Return the parts one behind the other, in memory of their own."""
    whole = np.empty(sum(map(len, parts)), np.uint8)
    offset = 0
    for part in parts:
        whole[offset : offset + len(part)] = np.frombuffer(part, np.uint8)
        offset += len(part)
    return whole.data
