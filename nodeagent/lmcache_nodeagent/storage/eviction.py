"""Which objects give way when L1 fills up. Pure bookkeeping: the store decides and frees.

LRU with a watermark follows LMCache 0.5.6 (`--eviction-trigger-watermark` 0.8, `--eviction-ratio`
0.2), except that it runs inside the reservation that finds the mark passed instead of once a
second: a burst of stores then never fails while there is something to evict.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from typing import Generic, Protocol, TypeVar

Key = TypeVar("Key", bound=Hashable)


class EvictionPolicy(Protocol[Key]):
    """Order of eviction. The owner serialises calls (`L1Store` under its lock)."""

    def touch(self, keys: Iterable[Key]) -> None:
        """Note a use of each key, in this order: the last one is then the youngest of all."""

    def forget(self, key: Key) -> None:
        """Drop a key that left L1, for whatever reason."""

    def is_due(self, used_bytes: int, capacity_bytes: int) -> bool:
        """Tell whether to evict although the next reservation may still fit."""

    def victims(self, may_evict: Callable[[Key], bool], evictable: int) -> list[Key]:
        """Choose the next batch among the `evictable` keys for which `may_evict` holds.

        Returns:
            Keys in order of eviction; empty only when nothing may go.
        """


class LruPolicy(Generic[Key]):
    """Evicts the least recently touched share of what may be evicted."""

    def __init__(self, trigger_ratio: float = 0.8, evict_ratio: float = 0.2) -> None:
        for name, ratio in (("trigger_ratio", trigger_ratio), ("evict_ratio", evict_ratio)):
            if not 0 < ratio <= 1:
                raise ValueError(f"{name} must lie in (0, 1], not {ratio}")
        self._trigger_ratio = trigger_ratio
        self._evict_ratio = evict_ratio
        self._order: OrderedDict[Key, None] = OrderedDict()  # oldest first

    def touch(self, keys: Iterable[Key]) -> None:
        """See `EvictionPolicy.touch`."""
        order = self._order
        for key in keys:
            order[key] = None
            order.move_to_end(key)

    def forget(self, key: Key) -> None:
        """See `EvictionPolicy.forget`."""
        del self._order[key]

    def is_due(self, used_bytes: int, capacity_bytes: int) -> bool:
        """Compare with the watermark; at the mark counts as passed."""
        return used_bytes >= self._trigger_ratio * capacity_bytes

    def victims(self, may_evict: Callable[[Key], bool], evictable: int) -> list[Key]:
        """Take `evict_ratio` of the evictable keys, at least one, oldest first."""
        wanted = math.ceil(self._evict_ratio * evictable)
        chosen: list[Key] = []
        for key in self._order:
            if len(chosen) == wanted:
                break
            if may_evict(key):
                chosen.append(key)
        return chosen


class NoEvictionPolicy(Generic[Key]):
    """Keeps everything: a store into a full L1 fails until somebody clears it."""

    def touch(self, keys: Iterable[Key]) -> None:
        """Order does not matter."""

    def forget(self, key: Key) -> None:
        """Nothing is remembered."""

    def is_due(self, used_bytes: int, capacity_bytes: int) -> bool:  # noqa: ARG002 - protocol
        """Never."""
        return False

    def victims(self, may_evict: Callable[[Key], bool], evictable: int) -> list[Key]:  # noqa: ARG002
        """Nobody."""
        return []
