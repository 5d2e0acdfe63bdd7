"""Which bytes make up one chunk: the layout that LMCache 0.5.6 gives to stored objects.

An object is the concatenation, over the kernel groups ordered by their first layer, of

    [plane (1 or 2)] [layer of the group] [token slot of the chunk] [head, element]

in the tensors' dtype; slots come before heads whatever the paged memory does. Of a sliding window
shorter than a chunk only the slots of the last window are there, and zeros follow up to the size
of a whole chunk.

A *kernel group* is the set of layers of one engine group with the same physical shape, so that one
description copies them all. Everything here is arithmetic on descriptors: nothing is mapped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lmcache_nodeagent.contexts.formats import (
    MAX_BLOCK_BYTES,
    Format,
    PagedTensor,
    heads_before_slots,
    recognise,
)
from lmcache_nodeagent.errors import LayoutError
from lmcache_nodeagent.protocol.messages import EngineGroupInfo, LayoutHints, TensorDescriptor

FULL_ATTENTION = -1
"""`sw_size_tokens` of a group without a sliding window."""


@dataclass(frozen=True)
class GroupLayout:
    """One kernel group: its layers, and its region of the object."""

    layers: tuple[PagedTensor, ...]
    block_list: int  # which list of a request's block ids applies
    tokens_per_block: int  # logical; more than `slots_per_block` where the cache is compressed
    blocks_per_chunk: int
    window_blocks: int  # trailing blocks of each chunk that are kept; all without a short window
    offset: int  # of the region in the object, bytes

    @property
    def blocks(self) -> int:
        """Block ids of this group lie in 0..blocks-1."""
        return min(layer.shape[1] for layer in self.layers)

    @property
    def planes(self) -> int:
        """2 where K and V are apart, else 1."""
        return self.layers[0].shape[0]

    @property
    def slots_per_block(self) -> int:
        """Physical token slots of one block."""
        return self.layers[0].shape[2]

    @property
    def heads(self) -> int:
        """KV heads; 1 for latent caches."""
        return self.layers[0].shape[3]

    @property
    def head_bytes(self) -> int:
        """Bytes of one head of one slot."""
        return self.layers[0].shape[4] * self.layers[0].item_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in one plane of one layer."""
        return self.slots_per_block * self.heads * self.head_bytes

    @property
    def nbytes(self) -> int:
        """Size of the region. A short window does not shrink it."""
        return self.planes * len(self.layers) * self.blocks_per_chunk * self.block_bytes

    @property
    def kept_nbytes(self) -> int:
        """Size of what is copied. It lies without gaps at the start of the region; zeros follow."""
        return self.planes * len(self.layers) * self.window_blocks * self.block_bytes

    @property
    def signature(self) -> tuple[object, ...]:
        """What the bytes of the region mean; equal signatures are interchangeable."""
        _, _, slots, heads, elements = self.layers[0].shape
        return (
            self.layers[0].dtype,
            self.planes,
            len(self.layers),
            slots,
            heads * elements,
            self.blocks_per_chunk,
            self.window_blocks,
        )


@dataclass(frozen=True)
class ChunkLayout:
    """The object of one chunk."""

    chunk_tokens: int
    block_lists: int  # lists of block ids that a request carries
    groups: tuple[GroupLayout, ...]

    @property
    def object_nbytes(self) -> int:
        """Size of one object."""
        return sum(group.nbytes for group in self.groups)

    @property
    def signature(self) -> tuple[object, ...]:
        """What an object's bytes mean: contexts that share it may read each other's objects."""
        return (self.chunk_tokens, *(group.signature for group in self.groups))


def plan_layout(
    tensors: Sequence[TensorDescriptor],
    hints: LayoutHints,
    groups: Sequence[EngineGroupInfo],
    chunk_tokens: int,
) -> ChunkLayout:
    """Work out the chunk layout of a registration.

    Without `groups` all layers form one engine group whose blocks cover as many tokens as they have
    slots. Layers that no group names (they share another layer's KV) are left out.

    Raises:
        LayoutError: tensors or groups that no object can hold, or that contradict each other.
    """
    if not tensors:
        raise LayoutError("no KV tensors: register at least one")
    infos = tuple(groups) or (
        EngineGroupInfo(engine_group_id=0, layer_indices=list(range(len(tensors)))),
    )
    heads_first = heads_before_slots(hints)
    members: dict[tuple[object, ...], list[PagedTensor]] = {}
    for index, engine_group in sorted(_engine_group_of(infos, len(tensors)).items()):
        tensor = recognise(index, tensors[index], heads_first=heads_first)
        members.setdefault((engine_group, *_identity(tensor)), []).append(tensor)
    planned: list[GroupLayout] = []
    offset = 0
    for layers in members.values():  # in the order of first layers
        block_list = _block_list(layers, infos) if groups else 0
        group = _plan_group(tuple(layers), block_list, infos[block_list], chunk_tokens, offset)
        planned.append(group)
        offset += group.nbytes
    if len({group.blocks_per_chunk for group in planned}) > 1 and not groups:
        raise LayoutError("layers with different block sizes need group infos")
    return ChunkLayout(chunk_tokens=chunk_tokens, block_lists=len(infos), groups=tuple(planned))


def _engine_group_of(infos: Sequence[EngineGroupInfo], tensors: int) -> dict[int, int]:
    """Engine group id by tensor index."""
    engine_groups: dict[int, int] = {}
    for position, info in enumerate(infos):
        if info.recurrent_state:
            raise LayoutError(
                f"group {position} holds recurrent state (Mamba), which is not supported: only "
                "attention KV is cached; disable prefix caching of state or leave the group out"
            )
        if not info.layer_indices:
            raise LayoutError(f"group {position} names no layers")
        for index in info.layer_indices:
            if not 0 <= index < tensors:
                raise LayoutError(f"group {position} names layer {index} of {tensors} tensors")
            if index in engine_groups:
                raise LayoutError(f"group {position} names layer {index}, which is already placed")
            engine_groups[index] = info.engine_group_id
    return engine_groups


def _identity(tensor: PagedTensor) -> tuple[Format, str, tuple[int, ...]]:
    planes, _, slots, heads, elements = tensor.shape
    return tensor.format, tensor.dtype, (planes, slots, heads, elements)


def _block_list(layers: Sequence[PagedTensor], infos: Sequence[EngineGroupInfo]) -> int:
    """Position of the info that describes exactly these layers."""
    wanted = [layer.index for layer in layers]
    for position, info in enumerate(infos):
        if sorted(info.layer_indices) == wanted:
            return position
    raise LayoutError(
        f"layers {wanted} are alike and share an engine group, but no group info names exactly "
        "them: send one info per engine group and physical shape"
    )


def _plan_group(
    layers: tuple[PagedTensor, ...],
    block_list: int,
    info: EngineGroupInfo,
    chunk_tokens: int,
    offset: int,
) -> GroupLayout:
    slots = layers[0].shape[2]
    tokens = info.tokens_per_block or slots
    where = f"group {block_list}: "
    if tokens < 0 or tokens % slots:
        raise LayoutError(
            f"{where}tokens_per_block {tokens} is no multiple of the {slots} slots per block"
        )
    if chunk_tokens % tokens:
        raise LayoutError(
            f"{where}chunk size {chunk_tokens} is no multiple of tokens_per_block {tokens}"
        )
    blocks_per_chunk = chunk_tokens // tokens
    group = GroupLayout(
        layers=layers,
        block_list=block_list,
        tokens_per_block=tokens,
        blocks_per_chunk=blocks_per_chunk,
        window_blocks=min(blocks_per_chunk, _window_blocks(where, info, tokens, chunk_tokens)),
        offset=offset,
    )
    if group.block_bytes > MAX_BLOCK_BYTES:
        raise LayoutError(f"{where}{group.block_bytes} bytes per block, at most {MAX_BLOCK_BYTES}")
    return group


def _window_blocks(where: str, info: EngineGroupInfo, tokens: int, chunk_tokens: int) -> int:
    window = info.sw_size_tokens
    if window == FULL_ATTENTION or window >= chunk_tokens:
        return chunk_tokens // tokens
    if window <= 0:
        raise LayoutError(
            f"{where}sliding window of {window} tokens; use {FULL_ATTENTION} for full attention"
        )
    if window % tokens:
        raise LayoutError(
            f"{where}sliding window of {window} tokens is shorter than a chunk and no multiple of "
            f"tokens_per_block {tokens}"
        )
    return window // tokens
