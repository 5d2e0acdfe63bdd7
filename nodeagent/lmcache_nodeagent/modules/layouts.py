"""Which models have a living worker, and how their chunks look.

Shared by all workers of one (model, world size), so it is counted: the last one to leave takes it
along, nobody before (field report: LMCache issue 3448).
"""

from __future__ import annotations

import zlib
from threading import Lock
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmcache_nodeagent.contexts.layout import ChunkLayout


def layout_id(layout: ChunkLayout) -> int:
    """Number that stands for what a chunk's bytes mean: it goes into the object keys.

    Two workers that use one model name with, say, other dtypes must not read each other's bytes.
    Only what all pipeline stages of a model share is counted in, not their layers: a lookup asks
    for all ranks with the id of one of them. The size of each object is checked besides.
    """
    first = layout.groups[0]
    meaning = (first.layers[0].dtype, first.planes, first.heads, first.head_bytes)
    return zlib.crc32(repr(meaning).encode())


class LayoutRegistry:
    """Layout ids by (model, world size), one for each registration. Threads: any."""

    def __init__(self) -> None:
        self._lock = Lock()  # guards: _ids
        self._ids: dict[tuple[str, int], list[int]] = {}

    def add(self, model: str, world_size: int, identity: int) -> None:
        """Count a registration in; lookups use the latest."""
        with self._lock:
            self._ids.setdefault((model, world_size), []).append(identity)

    def remove(self, model: str, world_size: int, identity: int) -> None:
        """Count a registration out, once for each `add`."""
        with self._lock:
            identities = self._ids[model, world_size]
            identities.remove(identity)
            if not identities:
                del self._ids[model, world_size]

    def find(self, model: str, world_size: int) -> int | None:
        """Return the layout id that lookups use, None while no worker of the model is here."""
        with self._lock:
            identities = self._ids.get((model, world_size))
            return identities[-1] if identities else None

    def __len__(self) -> int:
        """Count the (model, world size) pairs."""
        with self._lock:
            return len(self._ids)
