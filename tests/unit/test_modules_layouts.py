"""Engines that use one model name with other layouts never read each other's bytes."""

from __future__ import annotations

import pytest

from lmcache_nodeagent.modules.layouts import LayoutRegistry, layout_id
from lmcache_nodeagent.protocol.messages import EngineGroupInfo, TensorDescriptor
from tests.fakes.module_bench import BLOCK, CHUNKS, MODEL, PER_CHUNK, SHAPE, Engine, ModuleBench
from tests.fakes.paged_memory import kv_tensor

LATENT = [CHUNKS * PER_CHUNK + 1, BLOCK, 8]


def tensors(segment: str, *shapes: list[int], dtype: str = "float16") -> list[TensorDescriptor]:
    """Tensors of one segment, one after the other."""
    offset, made = 0, []
    total = sum(kv_tensor("/x", shape, dtype=dtype).nbytes for shape in shapes)
    for shape in shapes:
        made.append(
            kv_tensor(segment, shape, dtype=dtype, storage_offset=offset // 2, nbytes=total)
        )
        offset += kv_tensor("/x", shape, dtype=dtype).nbytes
    return made


def group(*layers: int, number: int = 0, window: int = -1) -> EngineGroupInfo:
    """An engine group of these layers."""
    return EngineGroupInfo(
        engine_group_id=number, layer_indices=list(layers), sw_size_tokens=window
    )


Layout = tuple[list[list[int]], str, list[EngineGroupInfo]]

PLAIN: Layout = ([SHAPE] * 4, "float16", [])
PAIRS: dict[str, tuple[Layout, Layout]] = {
    "dtype": (PLAIN, ([SHAPE] * 4, "bfloat16", [])),
    "planes": (([SHAPE], "float16", []), ([LATENT], "float16", [])),
    "heads": (
        ([[2, 33, BLOCK, 2, 4]], "float16", []),
        ([[2, 33, BLOCK, 1, 8]], "float16", []),
    ),
    "split into groups": (PLAIN, ([SHAPE] * 4, "float16", [group(0, 2), group(1, 3, number=1)])),
    "other split": (
        ([SHAPE] * 4, "float16", [group(0, 1, 2), group(3, number=1)]),
        ([SHAPE] * 4, "float16", [group(0, 1), group(2, 3, number=1)]),
    ),
    "window": (
        ([SHAPE] * 4, "float16", [group(0, 1), group(2, 3, number=1)]),
        ([SHAPE] * 4, "float16", [group(0, 1), group(2, 3, number=1, window=BLOCK)]),
    ),
    "dtype of a later group": (
        ([SHAPE] * 2, "float16", [group(0), group(1, number=1)]),
        ([SHAPE, LATENT], "float16", [group(0), group(1, number=1)]),
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_layouts_that_mean_other_bytes_are_not_exchanged(name: str) -> None:
    """Both store the same prompt; each gets its own bytes back, or a clean no."""
    bench = ModuleBench()
    engines = [Engine(bench, number, register=False) for number in (1, 2)]
    lists = []
    for engine, (shapes, dtype, groups) in zip(engines, PAIRS[name], strict=True):
        engine.register(tensors(engine.segment, *shapes, dtype=dtype), groups)
        engine.fill()
        lists.append([list(range(1, 1 + 2 * PER_CHUNK))] * max(1, len(groups)))
    first, second = engines
    assert first.store(lists[0], end=2)
    assert not second.retrieve(lists[1], end=2)
    assert second.store(lists[1], end=2)
    for engine, ids in zip(engines, lists, strict=True):
        before = bytes(engine.memory)
        assert engine.retrieve(ids, end=2)
        assert engine.memory == before


def test_engines_with_other_block_sizes_share_their_objects() -> None:
    """Objects are token-major: how tokens are grouped into blocks does not matter."""
    bench = ModuleBench()
    small, large = Engine(bench, 1), Engine(bench, 2, register=False)
    large.register([kv_tensor(large.segment, [2, 9, 2 * BLOCK, 1, 4], dtype="float16")])
    assert small.store(end=2)
    assert large.retrieve([[1, 2, 3, 4]], end=2)


def test_pipeline_stages_with_other_layers_are_looked_up_together() -> None:
    """A look-up asks for all ranks; each stage has objects of its own layout."""
    bench = ModuleBench()
    stages = [Engine(bench, rank + 1, rank=rank, world=2, register=False) for rank in (0, 1)]
    for stage, layers in zip(stages, (3, 2), strict=True):
        stage.register(tensors(stage.segment, *[SHAPE] * layers))
        stage.fill()
        assert stage.store(end=4)
    for stage in stages:
        assert stage.lookup(end=CHUNKS, request=f"r{stage.rank}") == 4
        assert stage.retrieve(end=4, request=f"r{stage.rank}")
    stages[0].free(request="r1")
    stages[1].free(request="r0")
    for stage in stages:
        stage.end(f"r{stage.rank}")
    bench.transfers_end()
    assert bench.pins() == 0


def test_a_look_up_promises_what_the_engine_itself_can_load() -> None:
    """Not what another pod has stored of the model in another layout, with every prompt anew."""
    bench = ModuleBench()
    old = Engine(bench, 1, address="10.0.0.1")
    new = Engine(bench, 2, address="10.0.0.2", register=False)
    new.register([kv_tensor(new.segment, SHAPE, dtype="bfloat16")])
    new.fill()
    assert old.store(end=4)
    assert new.lookup(end=4) == 0
    assert old.lookup(end=4) == 4
    assert new.store(end=2)
    assert new.lookup(end=4, request="r2") == 2
    assert new.retrieve(end=2, request="r2")
    elsewhere = Engine(bench, 3, address="10.0.0.3", register=False)
    assert elsewhere.lookup(end=4, request="r3") == 4


def test_stages_in_pods_of_their_own_are_looked_up_together() -> None:
    """The pod that looks up has one of the ranks; the others' layouts are theirs."""
    bench = ModuleBench()
    stages = [
        Engine(bench, rank + 1, rank=rank, world=2, address=f"10.0.0.{rank}", register=False)
        for rank in (0, 1)
    ]
    for stage, layers in zip(stages, (3, 2), strict=True):
        stage.register(tensors(stage.segment, *[SHAPE] * layers))
        stage.fill()
        assert stage.store(end=4)
    assert stages[0].lookup(end=CHUNKS) == 4


def test_registrations_are_counted() -> None:
    """Shared by the workers of a model; the last one takes it along."""
    layouts = LayoutRegistry()
    for identity in (5, 5, 7):
        layouts.add(MODEL, 2, identity)
    assert layouts.find(MODEL, 2) == (7, 5)
    assert layouts.find(MODEL, 1) == ()
    layouts.remove(MODEL, 2, 5)
    assert layouts.find(MODEL, 2) == (7, 5)
    layouts.remove(MODEL, 2, 7)
    layouts.remove(MODEL, 2, 5)
    assert layouts.find(MODEL, 2) == ()
    assert len(layouts) == 0


def test_the_id_of_a_layout_is_stable() -> None:
    """It goes into keys, which may outlive a process one day."""
    bench = ModuleBench()
    Engine(bench)
    assert layout_id(bench.opener.contexts[0].layout) == layout_id(bench.opener.contexts[0].layout)
    assert 0 <= layout_id(bench.opener.contexts[0].layout) < 2**32
