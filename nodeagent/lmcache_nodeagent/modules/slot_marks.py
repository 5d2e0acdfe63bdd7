"""Marks in the slots of the shared pool: a slot that still has one was never written.

A worker may hold the mapping of an earlier agent's pool, or confirm what it gave up writing: the
slot's bytes are then whatever was there before, and nobody would see that from the outside.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_MARK_BYTES = 16
"""KV bytes that equal it by chance are less likely than a memory error."""

_MARK = secrets.token_bytes(_MARK_BYTES)


def mark(slots: Iterable[memoryview]) -> None:
    """Put the mark at both ends of each slot that has room for it."""
    for slot in slots:
        if len(slot) >= 2 * _MARK_BYTES:
            slot[:_MARK_BYTES] = slot[-_MARK_BYTES:] = _MARK


def is_written(slot: memoryview) -> bool:
    """Tell whether neither end has the mark any more."""
    return slot[:_MARK_BYTES] != _MARK and slot[-_MARK_BYTES:] != _MARK
