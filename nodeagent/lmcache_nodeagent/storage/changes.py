"""What came to L1 and what went, in order: the log that KV event streams read from.

It is kept under the store's own lock, so its order is the order in which lookups saw the changes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmcache_nodeagent.storage.objects import ObjectKey

MAX_KEYS_PER_CHANGE = 1024
"""A clear of a large L1 becomes several records, so that batches stay small."""


@dataclass(frozen=True, slots=True)
class Change:
    """One record. `stored`: one key that became visible; else keys that went, all of one model."""

    seq: int
    stored: bool
    keys: tuple[ObjectKey, ...]


@dataclass(frozen=True, slots=True)
class Changes:
    """Records after a cursor. `lost`: there were others, which the log has no more."""

    records: Sequence[Change]
    next_cursor: int
    lost: bool


class ChangeLog:
    """The last `size` records, numbered from 1. The owner serialises calls (`L1Store`).

    Every rank of a prompt has objects of its own and they come and go together, near enough: only
    those of rank 0 are noted, as LMCache 0.5.6 does.
    """

    def __init__(self, size: int) -> None:
        self._records: deque[Change] = deque(maxlen=size)
        self.last = 0

    def stored(self, key: ObjectKey) -> None:
        """Note an object that became visible."""
        if _is_first_rank(key):
            self._append(key, stored=True)

    def removed(self, keys: Sequence[ObjectKey]) -> None:
        """Note objects that became invisible."""
        by_model: dict[str, list[ObjectKey]] = {}
        for key in keys:
            if _is_first_rank(key):
                by_model.setdefault(key.model_name, []).append(key)
        for gone in by_model.values():
            for start in range(0, len(gone), MAX_KEYS_PER_CHANGE):
                self._append(*gone[start : start + MAX_KEYS_PER_CHANGE], stored=False)

    def since(self, cursor: int, limit: int) -> Changes:
        """Return up to `limit` records after number `cursor`.

        A cursor behind the log or ahead of it has lost something; then all that is left follows.
        """
        oldest = self.last - len(self._records) + 1
        lost = not oldest - 1 <= cursor <= self.last
        first = 0 if lost else cursor + 1 - oldest
        records = [self._records[i] for i in range(first, min(first + limit, len(self._records)))]
        return Changes(records, oldest - 1 + first + len(records), lost)

    def _append(self, *keys: ObjectKey, stored: bool) -> None:
        self.last += 1
        self._records.append(Change(self.last, stored, keys))


def _is_first_rank(key: ObjectKey) -> bool:
    return key.kv_rank >> 16 & 0xFF == 0
