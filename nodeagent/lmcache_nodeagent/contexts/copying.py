"""Block copies between paged tensors and objects, at memory speed and without the GIL.

Whatever is contiguous on both sides becomes one NumPy element (a void type of that size): a whole
block when slots come before heads, one head of one slot otherwise. So dtypes without a NumPy
counterpart (bfloat16, float8) need no care, and each NumPy call moves many bytes while other
threads run. Blocks with consecutive ids are copied as one slice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from lmcache_nodeagent.contexts.base import BeforeChunk, go_on
from lmcache_nodeagent.contexts.block_ids import BlockTable
from lmcache_nodeagent.contexts.formats import PagedTensor
from lmcache_nodeagent.contexts.layout import GroupLayout

Elements = NDArray[np.void]


class GroupCopier:
    """Copies the blocks of one kernel group. Threads: any.

    `_paged` holds per layer [planes, blocks, ...], `_rows` the same memory as one dense row of
    blocks, which is what `take` needs to copy without a temporary; empty if it is not dense.
    """

    def __init__(self, group: GroupLayout, buffers: Sequence[memoryview]) -> None:
        """`buffers[i]` is the memory that the offset of layer `i` counts from."""
        self._group = group
        self._element, self._inner = _element(group)
        self._planes = range(group.planes)
        pairs = list(zip(group.layers, buffers, strict=True))
        self._paged = [self._paged_view(layer, buffer) for layer, buffer in pairs]
        self._plane_step, self._block_step = _row_steps(group) if not self._inner else (0, 0)
        dense = self._block_step > 0
        self._rows = [self._row_view(layer, buffer) for layer, buffer in pairs] if dense else []

    def gather(
        self,
        table: BlockTable,
        chunks: Sequence[int],
        objects: Sequence[memoryview],
        before_chunk: BeforeChunk = go_on,
    ) -> None:
        """Fill this group's region of each object with its chunk."""
        group = self._group
        for data in objects if group.nbytes > group.kept_nbytes else ():
            padding = slice(group.offset + group.kept_nbytes, group.offset + group.nbytes)
            np.frombuffer(data, np.uint8)[padding] = 0  # in place of stale bytes
        firsts = _first_blocks(table)
        rows = [table * self._block_step + plane * self._plane_step for plane in self._planes]
        for chunk, region in zip(chunks, self._regions(objects), strict=True):
            before_chunk()
            first = firsts[chunk]
            if first is None and self._rows:
                self._take_rows([index[chunk] for index in rows], region)
                continue
            blocks = table[chunk] if first is None else slice(first, first + group.window_blocks)
            for layer, paged in enumerate(self._paged):
                region[:, layer] = paged[:, blocks]

    def scatter(
        self,
        table: BlockTable,
        chunks: Sequence[int],
        objects: Sequence[memoryview],
        skip_tokens: int,
        before_chunk: BeforeChunk = go_on,
    ) -> None:
        """Copy this group's region of each object into the blocks of its chunk."""
        group = self._group
        skip_blocks = skip_tokens // group.tokens_per_block
        before_window = group.blocks_per_chunk - group.window_blocks
        firsts = _first_blocks(table)
        for chunk, region in zip(chunks, self._regions(objects), strict=True):
            before_chunk()
            skip = max(0, skip_blocks - chunk * group.blocks_per_chunk - before_window)
            if skip >= group.window_blocks:
                continue
            first = firsts[chunk]
            blocks = (
                table[chunk, skip:]
                if first is None
                else slice(first + skip, first + group.window_blocks)
            )
            for layer, paged in enumerate(self._paged):
                paged[:, blocks] = region[:, layer, skip:]

    def _take_rows(self, indices: Sequence[NDArray[np.int64]], region: Elements) -> None:
        for layer, rows in enumerate(self._rows):
            for plane, index in enumerate(indices):
                # Any mode but the default writes straight into `out`; the ids were checked.
                rows.take(index, axis=0, out=region[plane, layer], mode="clip")

    def _regions(self, objects: Sequence[memoryview]) -> Iterator[Elements]:
        """What is kept of this group in each object, as [planes, layers, blocks, ...]."""
        group = self._group
        shape = (group.planes, len(group.layers), group.window_blocks, *self._inner)
        for data in objects:
            yield np.ndarray(shape, dtype=self._element, buffer=data, offset=group.offset)

    def _paged_view(self, layer: PagedTensor, buffer: memoryview) -> Elements:
        inner = len(self._inner)  # the outer ones of slots, heads, elements
        return np.ndarray(
            layer.shape[:2] + self._inner,
            dtype=self._element,
            buffer=buffer,
            offset=layer.offset,
            strides=layer.strides[: 2 + inner],
        )

    def _row_view(self, layer: PagedTensor, buffer: memoryview) -> Elements:
        planes, blocks = layer.shape[:2]
        rows = (planes - 1) * self._plane_step + (blocks - 1) * self._block_step + 1
        return np.ndarray((rows,), dtype=self._element, buffer=buffer, offset=layer.offset)


def _element(group: GroupLayout) -> tuple[np.dtype[np.void], tuple[int, ...]]:
    """Return the NumPy element, and the dimensions inside a block that it does not span."""
    nbytes = group.layers[0].item_bytes
    inner = list(group.layers[0].shape[2:])
    while inner:
        axis = 1 + len(inner)
        if inner[-1] > 1 and any(layer.strides[axis] != nbytes for layer in group.layers):
            break
        nbytes *= inner.pop()
    return np.dtype((np.void, nbytes)), tuple(inner)


def _row_steps(group: GroupLayout) -> tuple[int, int]:
    """Distance of planes and of blocks, counted in blocks; zeros where it is not whole or alike."""
    planes, blocks = group.layers[0].strides[:2]
    alike = all(layer.strides[:2] == (planes, blocks) for layer in group.layers)
    if not alike or planes % group.block_bytes or blocks % group.block_bytes:
        return 0, 0
    return planes // group.block_bytes, blocks // group.block_bytes


def _first_blocks(table: BlockTable) -> list[int | None]:
    """Return the first block id of each chunk, or None where the ids are not consecutive."""
    consecutive = (np.diff(table, axis=1) == 1).all(axis=1).tolist()
    firsts = table[:, 0].tolist()
    return [first if alike else None for first, alike in zip(firsts, consecutive, strict=True)]
