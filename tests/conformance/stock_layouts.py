"""KV caches as vLLM's backends allocate them: what the stock client can register on CPU.

Plain data for the stock process; the layouts are those of `record_chunk_layouts.py`, with blocks
for a few prompts. Chunks have 64 tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field

BLOCKS = 64


@dataclass(frozen=True)
class EngineGroup:
    """One KV cache group of the engine: its layers, and the tokens that one block id covers."""

    layers: list[int]
    tokens_per_block: int = 16
    window: int = -1
    group: int = 0


@dataclass(frozen=True)
class Layout:
    """One registration: `kv_layout` hint, (shape, dtype) of each layer, groups."""

    hint: str
    layers: list[tuple[list[int], str]]
    groups: list[EngineGroup] = field(default_factory=list)

    @property
    def block_lists(self) -> list[int]:
        """Tokens per block of each engine group: a request carries one list of ids for each."""
        sizes = {group.group: group.tokens_per_block for group in self.groups}
        return [sizes[number] for number in sorted(sizes)]


def _alike(hint: str, shape: list[int], layers: int = 2) -> Layout:
    everything = [EngineGroup(list(range(layers)))]
    return Layout(hint, [(shape, "bfloat16")] * layers, everything)


LAYOUTS: dict[str, Layout] = {
    "planes_first_nhd": _alike("NHD", [2, BLOCKS, 16, 2, 8]),
    "planes_first_hnd": _alike("HND", [2, BLOCKS, 2, 16, 8]),
    "planes_second_nhd": _alike("NHD", [BLOCKS, 2, 16, 2, 8], layers=3),
    "planes_second_hnd": _alike("HND", [BLOCKS, 2, 2, 16, 8]),
    "fused_nhd": _alike("NHD", [BLOCKS, 16, 2, 16]),
    "fused_hnd": _alike("HND", [BLOCKS, 2, 16, 16]),
    "latent": _alike("NHD", [BLOCKS, 16, 24]),
    "latent_with_index": Layout(
        "NHD",
        [([BLOCKS, 16, 24], "bfloat16"), ([BLOCKS, 16, 132], "uint8")] * 2,
        [EngineGroup([0, 2]), EngineGroup([1, 3])],
    ),
    "kernel_groups_in_one_engine_group": Layout(
        "NHD",
        [([2, BLOCKS, 16, 2, 8], "bfloat16"), ([2, BLOCKS, 16, 4, 8], "bfloat16")],
        [EngineGroup([0]), EngineGroup([1])],
    ),
    "engine_groups_with_other_block_sizes": Layout(
        "NHD",
        [([2, BLOCKS, 16, 2, 8], "bfloat16"), ([2, BLOCKS, 32, 2, 8], "bfloat16")],
        [EngineGroup([0]), EngineGroup([1], tokens_per_block=32, group=1)],
    ),
    "compressed": Layout("NHD", [([BLOCKS, 4, 24], "bfloat16")] * 2, [EngineGroup([0, 1])]),
    "short_window": Layout(
        "NHD",
        [([2, BLOCKS, 16, 2, 8], "bfloat16")] * 2,
        [EngineGroup([0]), EngineGroup([1], window=32, group=1)],
    ),
}
"""By name; every one is stored and loaded through the agent by the stock adapters."""


def block_axis(shape: list[int]) -> int:
    """Which dimension counts blocks."""
    return 1 if len(shape) == 5 and shape[0] == 2 else 0  # planes outermost
