"""One KV tensor as an engine registers it: which dimension means what.

The shapes are those that vLLM's attention backends allocate (LMCache 0.5.6 registers them as they
lie in memory, dimensions ordered by stride). NB blocks, BS token slots per block, NH heads, HS
elements per head:

    [2, NB, BS, NH, HS]  [2, NB, NH, BS, HS]   K and V as planes, planes outermost
    [NB, 2, BS, NH, HS]  [NB, 2, NH, BS, HS]   K and V as planes inside each block
    [NB, BS, NH, C]      [NB, NH, BS, C]       K and V fused in the last dimension
    [NB, BS, HS]                               latent (MLA) cache, or a sparse-attention index

Heads before slots is "HND", slots before heads "NHD"; only the `kv_layout` hint tells them apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from math import prod

from lmcache_nodeagent.errors import LayoutError
from lmcache_nodeagent.protocol.descriptors import DTYPE_BYTES
from lmcache_nodeagent.protocol.messages import LayoutHints, TensorDescriptor, TensorMetadata

HEADS_BEFORE_SLOTS = {"HND": True, "BLHNC": True, "NHD": False, "BLNHC": False}
"""The `kv_layout` hint. The BL* names put all layers into one block: other strides, same shapes."""

DEFAULT_KV_LAYOUT = "HND"
"""Assumed without a hint: what CPU attention allocated before hints existed."""

INDEX_ROW_BYTES = 132
"""Width of a sparse-attention index row: 128 float8 values and one float32 scale."""

MAX_BLOCK_BYTES = 2**31 - 1
"""Largest block per plane: it becomes one NumPy element, whose size is a C int."""

SUPPORTED_SHAPES = (
    "supported are [2, NB, BS, NH, HS], [NB, 2, BS, NH, HS], [NB, BS, NH, C] (each also with heads "
    "before slots) and [NB, BS, HS]"
)


class Format(Enum):
    """Shape families; layers of different families never share a kernel group."""

    PLANES_FIRST = "planes first"
    PLANES_SECOND = "planes second"
    FUSED = "fused K/V"
    LATENT = "latent"


@dataclass(frozen=True)
class PagedTensor:
    """One layer's tensor with its dimensions in the order the object has them.

    `shape` is (planes, blocks, slots, heads, head elements); `strides` are bytes, in that order.
    """

    index: int  # in the registered list
    format: Format
    dtype: str
    shape: tuple[int, int, int, int, int]
    strides: tuple[int, int, int, int, int]
    offset: int  # bytes from the start of the segment

    @property
    def item_bytes(self) -> int:
        """Size of one element."""
        return DTYPE_BYTES[self.dtype]


def heads_before_slots(hints: LayoutHints) -> bool:
    """Read the `kv_layout` hint.

    Raises:
        LayoutError: a hint that no supported engine sends.
    """
    if hints.kv_list_layout is not None:
        raise LayoutError(
            f"kv_list_layout {hints.kv_list_layout!r} is not supported: register one tensor per "
            "layer, without that hint"
        )
    return HEADS_BEFORE_SLOTS[hints.kv_layout or DEFAULT_KV_LAYOUT]


def recognise(index: int, descriptor: TensorDescriptor, *, heads_first: bool) -> PagedTensor:
    """Say what the dimensions of one registered tensor are.

    Raises:
        LayoutError: another shape, an empty tensor, an unknown dtype, elements that overlap or lie
            outside the tensor's bytes.
    """
    view = descriptor.metadata
    if view is None:
        raise LayoutError(f"tensor {index} ({descriptor.type}) has no shape")
    item = DTYPE_BYTES.get(view.dtype)
    if item is None:
        raise LayoutError(f"tensor {index}: dtype {view.dtype!r} is not supported")
    axes, kind = _axes(index, view, heads_first=heads_first)
    _check_span(index, view, item, descriptor.nbytes)
    return PagedTensor(
        index=index,
        format=kind,
        dtype=view.dtype,
        shape=_pick(view.shape, axes, absent=1),
        strides=_pick(_byte_strides(view, item), axes, absent=0),
        offset=view.storage_offset * item,
    )


def _axes(
    index: int, view: TensorMetadata, *, heads_first: bool
) -> tuple[tuple[int | None, ...], Format]:
    """Axis numbers of (planes, blocks, slots, heads, elements); None for one that is absent."""
    slots, heads = (1, 0) if heads_first else (0, 1)
    match view.shape:
        case [2, _, _, _, _]:
            return (0, 1, 2 + slots, 2 + heads, 4), Format.PLANES_FIRST
        case [_, 2, _, _, _]:
            return (1, 0, 2 + slots, 2 + heads, 4), Format.PLANES_SECOND
        case [_, _, _, width]:
            # An index cache allocated like a latent one carries a single head; it belongs with
            # the rank 3 form of the same cache.
            alone = view.shape[1 + heads] == 1
            indexer = alone and view.dtype == "uint8" and width == INDEX_ROW_BYTES
            return (None, 0, 1 + slots, 1 + heads, 3), Format.LATENT if indexer else Format.FUSED
        case [_, _, _]:
            return (None, 0, 1, None, 2), Format.LATENT
        case [_, _, _, _, _, _] as shape:
            raise LayoutError(
                f"tensor {index}: rank 6 {shape} (one tensor for all layers) is not "
                f"supported; {SUPPORTED_SHAPES}"
            )
        case shape:
            raise LayoutError(f"tensor {index}: shape {shape}; {SUPPORTED_SHAPES}")


def _pick(
    values: Sequence[int], axes: tuple[int | None, ...], absent: int
) -> tuple[int, int, int, int, int]:
    planes, blocks, slots, heads, elements = (
        absent if axis is None else values[axis] for axis in axes
    )
    return planes, blocks, slots, heads, elements


def _byte_strides(view: TensorMetadata, item: int) -> list[int]:
    """Strides in bytes; 0 where there is nothing to stride over, so that alike looks alike."""
    sizes = zip(view.shape, view.stride, strict=True)
    return [stride * item if size > 1 else 0 for size, stride in sizes]


def _check_span(index: int, view: TensorMetadata, item: int, nbytes: int) -> None:
    where = (
        f"tensor {index}: shape {view.shape}, stride {view.stride}, offset {view.storage_offset}"
    )
    if len(view.shape) != len(view.stride) or min(*view.stride, view.storage_offset) < 0:
        raise LayoutError(f"{where} do not fit together")
    if min(view.shape) < 1:
        raise LayoutError(f"{where}: empty, so it holds no blocks")
    if view.span_elements() * item > nbytes:
        raise LayoutError(f"{where} reach byte {view.span_elements() * item} of {nbytes}")
    if prod(view.shape) * item > nbytes:
        raise LayoutError(f"{where}: elements overlap")
