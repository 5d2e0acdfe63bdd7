"""What every worker context must do.

Expected bytes come from `expected_object`, which is written against the wire shapes with plain
loops and shares no code with the contexts.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Protocol

import numpy as np
import pytest
from numpy.typing import NDArray

from lmcache_nodeagent.contexts.base import WorkerContext
from lmcache_nodeagent.errors import LayoutError, TransferError
from lmcache_nodeagent.protocol.messages import EngineGroupInfo, LayoutHints, TensorDescriptor
from tests.fakes.paged_memory import fill, kv_tensor

CHUNK_TOKENS = 16
BLOCKS = 12

AXES = {
    # Layout hint and the meaning of each wire dimension: Planes, Blocks, Slots, Heads, Elements.
    "planes first, NHD": ("NHD", "PBSHE"),
    "planes first, HND": ("HND", "PBHSE"),
    "planes first, no hint": (None, "PBHSE"),
    "planes second, NHD": ("NHD", "BPSHE"),
    "planes second, HND": ("HND", "BPHSE"),
    "fused, NHD": ("NHD", "BSHE"),
    "fused, HND": ("HND", "BHSE"),
    "blocks outermost, NHD": ("BLNHC", "BSHE"),
    "blocks outermost, HND": ("BLHNC", "BHSE"),
    "latent": ("NHD", "BSE"),
}
SIZES = {"P": 2, "B": BLOCKS, "S": 4, "H": 3, "E": 5}


def expected_object(
    layers: Sequence[NDArray[np.uint16]], axes: str, block_ids: Sequence[int]
) -> bytes:
    """Object bytes of one kernel group for the given blocks: planes, layers, slots, heads."""
    sizes = dict(zip(axes, layers[0].shape, strict=True))
    ranges = [range(sizes.get(axis, 1)) for axis in "SHE"]
    elements = []
    for plane, layer, block in product(range(sizes.get("P", 1)), layers, block_ids):
        for slot, head, element in product(*ranges):
            place = {"P": plane, "B": block, "S": slot, "H": head, "E": element}
            elements.append(layer[tuple(place[axis] for axis in axes)])
    return np.array(elements, dtype=np.uint16).tobytes()


def new_objects(context: WorkerContext, count: int) -> list[memoryview]:
    """Objects full of stale bytes."""
    size = context.layout.object_nbytes
    return [memoryview(bytearray(b"\xee" * size)) for _ in range(count)]


class Harness(Protocol):
    """One kind of context, and the memory behind it."""

    def open(
        self,
        tensors: Sequence[TensorDescriptor],
        hints: LayoutHints,
        groups: Sequence[EngineGroupInfo],
        chunk_tokens: int,
    ) -> WorkerContext:
        """Make the segments that the descriptors name, then open a context on them."""
        ...

    def memory(self, name: str) -> NDArray[np.uint8]:
        """Bytes of a segment, shared with the context that has it open."""
        ...


def open_layers(
    harness: Harness, axes: str, kv_layout: str | None, groups: Sequence[EngineGroupInfo] = ()
) -> tuple[WorkerContext, list[NDArray[np.uint16]]]:
    """Open two layers; also return their tensors in wire shape, filled."""
    shape = [SIZES[axis] for axis in axes]
    names = ["/layer-0", "/layer-1"]
    tensors = [kv_tensor(name, shape) for name in names]
    context = harness.open(tensors, _hints(kv_layout), groups, CHUNK_TOKENS)
    layers = []
    for number, name in enumerate(names):
        fill(harness.memory(name), number)
        layers.append(harness.memory(name).view(np.uint16).reshape(shape))
    return context, layers


class ContextContract:
    """Inherit in a `Test...` class that has a fixture `harness`."""

    @pytest.mark.parametrize("name", AXES)
    def test_objects_are_token_major_for_every_paged_shape(
        self, harness: Harness, name: str
    ) -> None:
        """Planes, layers, slots, heads: whatever order the paged memory has."""
        kv_layout, axes = AXES[name]
        context, layers = open_layers(harness, axes, kv_layout)
        objects = new_objects(context, 3)
        ids = [5, 2, 2, 11, 3, 4, 5, 6, 0, 1, 8, 9]

        context.gather([ids], [0, 1, 2], objects)

        for chunk, data in enumerate(objects):
            expected = expected_object(layers, axes, ids[chunk * 4 : chunk * 4 + 4])
            assert bytes(data) == expected
        context.close()

    @pytest.mark.parametrize("name", AXES)
    def test_what_was_gathered_can_be_scattered_elsewhere(
        self, harness: Harness, name: str
    ) -> None:
        """Blocks named by a scatter equal the blocks gathered; all others keep their bytes."""
        kv_layout, axes = AXES[name]
        context, layers = open_layers(harness, axes, kv_layout)
        before = [layer.copy() for layer in layers]
        objects = new_objects(context, 2)
        context.gather([[0, 1, 2, 3, 9, 8, 4, 6]], [0, 1], objects)

        context.scatter([[8, 9, 10, 11, 7, 1, 5, 0]], list(enumerate(objects)), 0)

        source = [6, 8, 2, 3, 4, 4, 6, 9, 0, 1, 2, 3]  # by block: what it must hold now
        axis = axes.index("B")
        for old, new in zip(before, layers, strict=True):
            assert np.array_equal(new, old.take(source, axis=axis))
        context.close()

    @pytest.mark.parametrize(("skip_tokens", "kept"), [(0, 0), (3, 0), (4, 1), (21, 5), (40, 8)])
    def test_skipped_tokens_are_rounded_down_to_whole_blocks(
        self, harness: Harness, skip_tokens: int, kept: int
    ) -> None:
        """The blocks in front are shared with other requests and must not be written."""
        context, layers = open_layers(harness, "PBSHE", "NHD")
        objects = new_objects(context, 2)
        ids = list(range(4, 12))

        context.scatter([ids], list(enumerate(objects)), skip_tokens)

        written = [bool((layers[0][:, block] == 0xEEEE).all()) for block in ids]
        assert written == [False] * kept + [True] * (8 - kept)
        context.close()

    def test_only_named_chunks_are_copied(self, harness: Harness) -> None:
        """A chunk that is stored already is left out of the call; indices count in the range."""
        context, layers = open_layers(harness, "PBSHE", "NHD")
        objects = new_objects(context, 2)
        ids = list(range(12))

        context.gather([ids], [2, 0], objects)

        assert bytes(objects[0]) == expected_object(layers, "PBSHE", ids[8:12])
        assert bytes(objects[1]) == expected_object(layers, "PBSHE", ids[0:4])
        context.close()

    def test_a_short_window_keeps_only_the_last_blocks_of_each_chunk(
        self, harness: Harness
    ) -> None:
        """They lie at the start of the region, zeros follow, and only they are written back."""
        window = _info([0, 1], sw_size_tokens=8)
        context, layers = open_layers(harness, "PBSHE", "NHD", [window])
        before = layers[0].copy()
        (data,) = new_objects(context, 1)
        expected = expected_object(layers, "PBSHE", [2, 3])
        assert len(data) == 2 * len(expected)

        context.gather([[-1, 99, 2, 3]], [0], [data])  # blocks that left the window are not read
        context.scatter([[4, 5, 6, 7]], [(0, data)], 12)

        assert bytes(data) == expected.ljust(len(data), b"\0")
        assert np.array_equal(layers[0][:, 7], before[:, 3])
        assert np.array_equal(layers[0][:, 4:7], before[:, 4:7])
        context.close()

    def test_groups_follow_each_other_in_the_order_of_their_first_layers(
        self, harness: Harness
    ) -> None:
        """Each region is read with the block ids of its own group info."""
        context, layers = open_layers(harness, "PBSHE", "NHD", [_info([1], group=1), _info([0])])
        (data,) = new_objects(context, 1)

        context.gather([[4, 5, 6, 7], [0, 1, 2, 3]], [0], [data])

        first = expected_object(layers[:1], "PBSHE", [0, 1, 2, 3])
        assert bytes(data) == first + expected_object(layers[1:], "PBSHE", [4, 5, 6, 7])
        context.close()

    @pytest.mark.parametrize(
        "ids",
        [
            [],
            [[0, 1, 2, 3], [0, 1, 2, 3]],
            [[0, 1, 2]],
            [[0, 1, 2, 3, 4]],
            [[0, 1, 2, BLOCKS]],
            [[0, 1, 2, -1]],
            [[0, 1, 2, 2**63]],
            [[0, 1, 2, -(2**80)]],
            [[0, 1, 2, True]],
            [[0, 1, 2, 1.0]],
        ],
    )
    def test_bad_block_ids_are_refused_and_nothing_is_copied(
        self, harness: Harness, ids: list[list[int]]
    ) -> None:
        """Checked before the first byte moves, by the check and by the copies."""
        context, layers = open_layers(harness, "PBSHE", "NHD")
        (data,) = new_objects(context, 1)
        before = layers[0].copy()
        with pytest.raises(LayoutError):
            context.check_block_ids(ids, 1)
        with pytest.raises(LayoutError):
            context.gather(ids, [0], [data])
        with pytest.raises(LayoutError):
            context.scatter(ids, [(0, data)], 0)
        assert set(bytes(data)) == {0xEE}
        assert np.array_equal(layers[0], before)
        context.close()

    def test_more_ids_than_needed_are_fine_in_whole_chunks(self, harness: Harness) -> None:
        """As LMCache 0.5.6; the ids of later chunks are not looked at."""
        context, _ = open_layers(harness, "PBSHE", "NHD")
        context.check_block_ids([[0, 1, 2, 3, 99, 99, 99, 99]], 1)
        context.close()

    def test_objects_of_the_wrong_size_are_refused(self, harness: Harness) -> None:
        """An object of another layout must never reach worker memory."""
        context, _ = open_layers(harness, "PBSHE", "NHD")
        short = memoryview(bytearray(context.layout.object_nbytes - 2))
        read_only = memoryview(bytes(context.layout.object_nbytes))
        for destination in (short, read_only):
            with pytest.raises(TransferError):
                context.gather([[0, 1, 2, 3]], [0], [destination])
        with pytest.raises(TransferError):
            context.scatter([[0, 1, 2, 3]], [(0, short)], 0)
        with pytest.raises(TransferError):
            context.scatter([[0, 1, 2, 3]], [(-1, read_only)], 0)
        context.close()

    def test_read_only_sources_are_fine(self, harness: Harness) -> None:
        """L1 hands out read-only views of stored objects."""
        context, layers = open_layers(harness, "PBSHE", "NHD")
        source = memoryview(bytes(context.layout.object_nbytes))
        context.scatter([[0, 1, 2, 3]], [(0, source)], 0)
        assert not layers[0][:, :4].any()
        context.close()

    def test_no_chunks_is_no_copy(self, harness: Harness) -> None:
        """A store whose chunks are all present already."""
        context, _ = open_layers(harness, "PBSHE", "NHD")
        context.gather([[0, 1, 2, 3]], [], [])
        context.scatter([[0, 1, 2, 3]], [], 0)
        context.close()

    def test_a_closed_context_refuses_copies(self, harness: Harness) -> None:
        """Closing twice is harmless."""
        context, _ = open_layers(harness, "PBSHE", "NHD")
        objects = new_objects(context, 1)
        context.close()
        context.close()
        with pytest.raises(TransferError):
            context.gather([[0, 1, 2, 3]], [0], objects)
        with pytest.raises(TransferError):
            context.scatter([[0, 1, 2, 3]], list(enumerate(objects)), 0)

    def test_size_and_handles_outlive_the_mapping(self, harness: Harness) -> None:
        """The registry names what it has released."""
        context, layers = open_layers(harness, "PBSHE", "NHD")
        nbytes, handles = context.nbytes, context.handles
        assert nbytes == sum(layer.nbytes for layer in layers)
        assert len(handles) == 2
        context.close()
        assert (context.nbytes, context.handles) == (nbytes, handles)


def _hints(kv_layout: str | None) -> LayoutHints:
    match kv_layout:
        case "NHD" | "HND" | "BLHNC" | "BLNHC":
            return LayoutHints(kv_layout=kv_layout)
        case _:
            return LayoutHints()


def _info(layers: list[int], group: int = 0, sw_size_tokens: int = -1) -> EngineGroupInfo:
    return EngineGroupInfo(
        engine_group_id=group,
        layer_indices=layers,
        tokens_per_block=4,
        sw_size_tokens=sw_size_tokens,
    )
