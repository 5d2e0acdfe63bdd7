"""The KV memory of models, in every layout that vLLM's attention backends allocate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lmcache_worker.wire import EngineGroup

CHUNK_TOKENS = 256
BLOCK_TOKENS = 16
BLOCKS_PER_CHUNK = CHUNK_TOKENS // BLOCK_TOKENS

FULL_ATTENTION = -1

_ITEM_BYTES = {"bfloat16": 2, "uint8": 1}


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's tensor as it lies in memory; `block_axis` is the dimension that counts blocks."""

    shape: tuple[int, ...]
    block_axis: int = 0
    dtype: str = "bfloat16"

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all planes."""
        return math.prod(self.shape) // self.shape[self.block_axis] * _ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Model:
    """What a worker registers. `hint` is the `kv_layout`; no groups mean one of all layers."""

    name: str
    layers: tuple[Layer, ...]
    blocks: int  # of 16 tokens
    hint: str = "NHD"
    groups: tuple[EngineGroup, ...] = ()

    @property
    def chunk_bytes(self) -> int:
        """Bytes that one chunk's store or retrieve moves."""
        return sum(
            self.layers[index].block_bytes * len(kept_ids(group, range(BLOCKS_PER_CHUNK)))
            for group in self.block_lists
            for index in group.layer_indices
        )

    @property
    def block_lists(self) -> tuple[EngineGroup, ...]:
        """One for each list of block ids that a request carries."""
        everything = EngineGroup(0, range(len(self.layers)), BLOCK_TOKENS)
        return self.groups or (everything,)


def block_ids(group: EngineGroup, blocks: Sequence[int]) -> list[int]:
    """Return the ids of a group's blocks that hold the tokens of `blocks`, of 16 tokens each.

    Where a group's blocks are longer, `blocks` must be runs that begin at one of theirs.
    """
    step = max(1, group.tokens_per_block // BLOCK_TOKENS)
    return [block // step for block in blocks[::step]]


def kept_ids(group: EngineGroup, blocks: Sequence[int]) -> list[int]:
    """Return those of them that are copied: of a short window only the end of each chunk."""
    ids = block_ids(group, blocks)
    if group.sw_size_tokens == FULL_ATTENTION:
        return ids
    per_chunk = CHUNK_TOKENS // group.tokens_per_block
    kept = group.sw_size_tokens // group.tokens_per_block
    return [block for at, block in enumerate(ids) if at % per_chunk >= per_chunk - kept]


def planes_first(name: str, layers: int, heads: int, head_size: int, blocks: int) -> Model:
    """[2, blocks, 16, heads, head size] for each layer: FlashAttention's layout."""
    shape = (2, blocks, BLOCK_TOKENS, heads, head_size)
    return Model(name, (Layer(shape, block_axis=1),) * layers, blocks)


SMALL = planes_first("small", layers=4, heads=1, head_size=64, blocks=1024)
"""1 KiB per token, 256 KiB per chunk: a small model's, where the cost per request counts."""

MEDIUM = planes_first("medium", layers=24, heads=2, head_size=64, blocks=1056)
"""12 KiB per token, 3 MiB per chunk: Qwen2.5-0.5B's, in pieces of 4 KiB where blocks scatter."""

LARGE = planes_first("large", layers=32, heads=8, head_size=128, blocks=272)
"""128 KiB per token, 32 MiB per chunk: Llama-3-8B's, where memory bandwidth counts."""
