"""Which registrations have a chunk layout, and how the rest is refused."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_nodeagent.contexts.formats import MAX_BLOCK_BYTES
from lmcache_nodeagent.contexts.layout import ChunkLayout, plan_layout
from lmcache_nodeagent.errors import LayoutError
from lmcache_nodeagent.protocol.messages import (
    EngineGroupInfo,
    LayoutHints,
    TensorDescriptor,
    TensorMetadata,
)
from tests.fakes.paged_memory import kv_tensor

NHD = LayoutHints(kv_layout="NHD")
KV = [2, 8, 16, 2, 8]


def info(layers: list[int], tokens_per_block: int = 0, window: int = -1) -> EngineGroupInfo:
    """A group info of engine group 0."""
    return EngineGroupInfo(
        engine_group_id=0,
        layer_indices=layers,
        tokens_per_block=tokens_per_block,
        sw_size_tokens=window,
    )


def plan(*shapes: list[int], groups: tuple[EngineGroupInfo, ...] = ()) -> ChunkLayout:
    """Lay out contiguous bfloat16 tensors, chunks of 64 tokens."""
    tensors = [kv_tensor(f"/{number}", shape) for number, shape in enumerate(shapes)]
    return plan_layout(tensors, NHD, groups, 64)


def test_without_group_infos_all_layers_form_one_group() -> None:
    """One list of block ids, and blocks that cover as many tokens as they have slots."""
    layout = plan(KV, KV)
    (group,) = layout.groups
    assert [layer.index for layer in group.layers] == [0, 1]
    assert (layout.block_lists, group.tokens_per_block, group.blocks_per_chunk) == (1, 16, 4)
    assert layout.object_nbytes == 2 * 2 * 64 * 16 * 2


def test_without_group_infos_layers_may_differ_but_not_in_block_size() -> None:
    """One list of ids serves every kernel group, which needs the same blocks per chunk."""
    layout = plan(KV, [2, 8, 16, 4, 8])
    assert [group.block_list for group in layout.groups] == [0, 0]
    assert [group.offset for group in layout.groups] == [0, layout.groups[0].nbytes]
    with pytest.raises(LayoutError, match="group infos"):
        plan(KV, [2, 8, 32, 2, 8])


def test_compressed_caches_hold_fewer_slots_than_tokens() -> None:
    """Blocks of 64 tokens in 16 slots: a chunk is 16 slots of the object."""
    layout = plan([8, 16, 24], groups=(info([0], 64),))
    assert layout.object_nbytes == 16 * 24 * 2


def test_layers_in_no_group_are_left_out_whatever_they_are() -> None:
    """Layers that share another layer's KV; theirs may even be an empty tensor."""
    layout = plan(KV, [0], KV, groups=(info([0, 2], 16),))
    assert [layer.index for group in layout.groups for layer in group.layers] == [0, 2]


def test_the_smallest_tensor_bounds_the_block_ids_of_a_group() -> None:
    """The number of blocks is no part of the physical identity."""
    (group,) = plan(KV, [2, 6, 16, 2, 8]).groups
    assert group.blocks == 6


def test_signatures_tell_objects_of_equal_size_apart() -> None:
    """float16 bytes must never be served to a bfloat16 worker."""
    half = [kv_tensor("/0", KV, dtype="float16")]
    assert plan(KV).signature == plan([2, 99, 16, 2, 8]).signature
    assert plan_layout(half, NHD, (), 64).signature != plan(KV).signature
    assert plan(KV).object_nbytes == plan_layout(half, NHD, (), 64).object_nbytes


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ([2, 3, 2, 8, 16, 8], "rank 6"),
        ([3, 8, 16, 2, 8], "supported are"),
        ([8, 16], "supported are"),
        ([], "supported are"),
        ([2, 0, 16, 2, 8], "empty"),
        ([8, 16, 0], "empty"),
    ],
)
def test_other_shapes_are_refused_with_what_is_supported(shape: list[int], message: str) -> None:
    """The worker's log must say what to change."""
    with pytest.raises(LayoutError, match=message):
        plan(shape)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ((info([0], 16),) * 2, "already placed"),
        ((info([0, 1, 2], 16),), "names layer 2 of 2"),
        ((info([]), info([0, 1])), "names no layers"),
        ((info([0]), info([1])), "one info per engine group"),
        ((info([0, 1], 24),), "no multiple of the 16 slots"),
        ((info([0, 1], 48),), "chunk size 64"),
        ((info([0, 1], 128),), "chunk size 64"),
        ((info([0, 1], -16),), "tokens_per_block -16"),
        ((info([0, 1], 16, window=24),), "sliding window of 24"),
        ((info([0, 1], 16, window=0),), "sliding window of 0"),
        ((msgspec.structs.replace(info([0, 1]), recurrent_state=True),), "recurrent state"),
    ],
)
def test_groups_that_do_not_fit_the_tensors_are_refused(
    groups: tuple[EngineGroupInfo, ...], message: str
) -> None:
    """Block ids would be applied to the wrong memory otherwise."""
    with pytest.raises(LayoutError, match=message):
        plan(KV, KV, groups=groups)


def test_no_tensors_are_refused() -> None:
    """There is nothing to cache."""
    with pytest.raises(LayoutError, match="no KV tensors"):
        plan()


def test_split_key_and_value_lists_are_refused() -> None:
    """A hint of an engine whose tensors mean something else."""
    with pytest.raises(LayoutError, match="kv_list_layout 'k_v'"):
        plan_layout([kv_tensor("/0", KV)], LayoutHints(kv_list_layout="k_v"), (), 64)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (kv_tensor("/0", KV, nbytes=100), "of 100"),
        (kv_tensor("/0", KV, storage_offset=1, nbytes=2 * 8 * 16 * 16 * 2), "reach byte"),
        (kv_tensor("/0", KV, stride=[0] * 5, nbytes=100), "overlap"),
        (kv_tensor("/0", [2, 8, 16, 2, 2**70], stride=[0] * 5, nbytes=4096), "overlap"),
        (kv_tensor("/0", KV, stride=[2**80] * 5), "reach byte"),
        (kv_tensor("/0", KV, stride=[1, 1, 1]), "do not fit"),
        (kv_tensor("/0", KV, stride=[2048, -256, 16, 8, 1]), "do not fit"),
        (kv_tensor("/0", [-2, 3, 4], stride=[12, 4, 1], nbytes=4096), "empty"),
        (TensorDescriptor(type="npu", metadata=None), "npu"),
        (
            TensorDescriptor(
                type="cpu_shm",
                metadata=TensorMetadata(
                    dtype="complex64", shape=KV, stride=KV, storage_offset=0, device_uuid="cpu"
                ),
            ),
            "complex64",
        ),
    ],
)
def test_views_that_leave_their_memory_are_refused(tensor: TensorDescriptor, message: str) -> None:
    """Checked again here, as arithmetic without overflow."""
    with pytest.raises(LayoutError, match=message):
        plan_layout([tensor], NHD, (), 64)


def test_blocks_beyond_the_element_limit_are_refused() -> None:
    """NumPy would refuse them later, with less to say."""
    with pytest.raises(LayoutError, match=f"at most {MAX_BLOCK_BYTES}"):
        plan([1, 16, 2**27])


SIZES = st.integers(0, 2**65)


@given(
    shape=st.lists(SIZES, max_size=7),
    stride=st.lists(SIZES, max_size=7),
    storage=st.tuples(SIZES, SIZES),
    group=st.builds(info, st.just([0]), SIZES, st.integers(-1, 2**65)),
)
def test_no_numbers_make_the_planner_fail_otherwise(
    shape: list[int], stride: list[int], storage: tuple[int, int], group: EngineGroupInfo
) -> None:
    """A layout or a LayoutError, whatever a client sends."""
    offset, nbytes = storage
    tensor = kv_tensor("/0", shape, stride=stride, storage_offset=offset, nbytes=nbytes)
    try:
        layout = plan_layout([tensor], NHD, [group], 64)
    except LayoutError:
        return
    assert layout.object_nbytes > 0
