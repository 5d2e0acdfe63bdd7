"""Block ids of a request, checked and cut to the blocks that are copied."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lmcache_nodeagent.contexts.layout import ChunkLayout, GroupLayout
from lmcache_nodeagent.errors import LayoutError

BlockTable = NDArray[np.int64]
"""Shape [chunks, window blocks]: the blocks of one kernel group that are copied, by chunk."""


def read_block_ids(
    layout: ChunkLayout, block_ids: Sequence[Sequence[int]], chunks: int
) -> tuple[BlockTable, ...]:
    """Return one table per kernel group for the first `chunks` chunks of the range.

    Ids past those chunks are allowed in whole chunks and not looked at, as LMCache 0.5.6 does;
    neither are ids in front of a sliding window, because their blocks may be gone.

    Raises:
        LayoutError: as `WorkerContext.check_block_ids`.
    """
    if len(block_ids) != layout.block_lists:
        raise LayoutError(
            f"{len(block_ids)} lists of block ids, registered were {layout.block_lists} groups"
        )
    return tuple(_read_group(group, block_ids[group.block_list], chunks) for group in layout.groups)


def _read_group(group: GroupLayout, ids: Sequence[int], chunks: int) -> BlockTable:
    needed = chunks * group.blocks_per_chunk
    if len(ids) < needed or len(ids) % group.blocks_per_chunk:
        raise LayoutError(
            f"group {group.block_list}: {len(ids)} block ids; {chunks} chunks need {needed}, and "
            f"any more in multiples of {group.blocks_per_chunk}"
        )
    wanted = ids[:needed]
    if not set(map(type, wanted)) <= {int}:  # a bool would pass for a block
        raise LayoutError(f"group {group.block_list}: block ids must be integers")
    try:
        table = np.fromiter(wanted, dtype=np.int64, count=needed)
    except OverflowError:
        raise LayoutError(f"group {group.block_list}: block id beyond 64 bits") from None
    table = table.reshape(chunks, group.blocks_per_chunk)[:, -group.window_blocks :]
    if table.size and not (table.min() >= 0 and table.max() < group.blocks):
        raise LayoutError(
            f"group {group.block_list}: block ids {table.min()}..{table.max()} outside the "
            f"tensors' 0..{group.blocks - 1}"
        )
    return table
