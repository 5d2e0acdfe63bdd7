"""Which models have a living worker, and how their chunks look.

Shared by all workers of one (model, world size), so it is counted: the last one to leave takes it
along, nobody before (field report: LMCache issue 3448).
"""

from __future__ import annotations

import zlib
from threading import Lock
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lmcache_nodeagent.contexts.layout import ChunkLayout


def layout_id(layout: ChunkLayout) -> int:
    """Number that stands for what a chunk's bytes mean: it goes into the object keys.

    Two workers that use one model name with, say, other dtypes, attention windows or groups of
    layers must not read each other's bytes, which may well be as many. Block sizes do not matter:
    objects are token-major.
    """
    meaning = [
        (
            group.layers[0].dtype,
            group.planes,
            len(group.layers),
            group.heads,
            group.head_bytes,
            group.blocks_per_chunk * group.slots_per_block,
            group.window_blocks * group.slots_per_block,
        )
        for group in layout.groups
    ]
    return zlib.crc32(repr(meaning).encode())


class LayoutRegistry:
    """Layout ids by (model, world size), one for each registration. Threads: any.

    The workers of one engine need not have the same: pipeline stages hold other layers. `pod` is
    `Connection.pod_identity`, which engine's worker that is, as far as it can be told.
    """

    def __init__(self) -> None:
        self._lock = Lock()  # guards: _ids
        self._ids: dict[tuple[str, int], list[tuple[int, str]]] = {}

    def add(self, model: str, world_size: int, identity: int, pod: str = "") -> None:
        """Count a registration in."""
        with self._lock:
            self._ids.setdefault((model, world_size), []).append((identity, pod))

    def remove(self, model: str, world_size: int, identity: int, pod: str = "") -> None:
        """Count a registration out, once for each `add`."""
        with self._lock:
            registered = self._ids[model, world_size]
            registered.remove((identity, pod))
            if not registered:
                del self._ids[model, world_size]

    def find(self, model: str, world_size: int, pod: str = "") -> Sequence[int]:
        """Return the layout ids of a model, latest first; none while no worker of it is here.

        Of the workers of `pod` alone, if all ranks of an engine are there.
        """
        with self._lock:
            registered = tuple(reversed(self._ids.get((model, world_size), ())))
        own = [identity for identity, theirs in registered if pod and theirs == pod]
        everybody = [identity for identity, _ in registered]
        return tuple(dict.fromkeys(own if len(own) >= world_size else everybody))

    def __len__(self) -> int:
        """Count the (model, world size) pairs."""
        with self._lock:
            return len(self._ids)
