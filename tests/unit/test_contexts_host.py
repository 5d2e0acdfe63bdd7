"""Opening and closing contexts on host memory: everything or nothing, and nothing left behind."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from lmcache_nodeagent.contexts.bus_errors import survive_bus_errors
from lmcache_nodeagent.contexts.host import open_host_context
from lmcache_nodeagent.errors import LayoutError, TransferError
from lmcache_nodeagent.protocol.messages import LayoutHints, TensorDescriptor
from tests.fakes.paged_memory import create_segment, fill, kv_tensor

NHD = LayoutHints(kv_layout="NHD")
KV = [2, 8, 4, 2, 8]
KV_BYTES = 2 * 8 * 4 * 2 * 8 * 2


def mappings(directory: Path) -> int:
    """How often files of a folder are mapped by this process."""
    return Path("/proc/self/maps").read_text().count(f"{directory}/")


def open_files() -> int:
    """File descriptors of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture
def layers(tmp_path: Path) -> Iterator[list[TensorDescriptor]]:
    """28 layers, each with a segment that is created but not mapped here."""
    tensors = [kv_tensor(f"/layer-{number}", KV) for number in range(28)]
    for tensor in tensors:
        with (tmp_path / tensor.shm_name.removeprefix("/")).open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, tensor.nbytes)
    yield tensors
    assert mappings(tmp_path) == 0


def test_closing_unmaps_everything(layers: list[TensorDescriptor], tmp_path: Path) -> None:
    """Opens equal closes, round after round, also after copies."""
    files = open_files()
    for _ in range(3):
        context = open_host_context(layers, NHD, (), 8, directory=tmp_path)
        assert mappings(tmp_path) == len(context.handles) == 28
        assert context.nbytes == 28 * KV_BYTES
        data = memoryview(bytearray(context.layout.object_nbytes))
        context.gather([[1, 5]], [0], [data])
        context.scatter([[1, 2]], [(0, data)], 0)
        context.close()
        assert mappings(tmp_path) == 0
    assert open_files() == files


@pytest.mark.parametrize("number", [0, 5, 27])
def test_a_failure_half_way_closes_what_was_opened(
    number: int, layers: list[TensorDescriptor], tmp_path: Path
) -> None:
    """The message names the segment."""
    (tmp_path / f"layer-{number}").unlink()
    files = open_files()
    with pytest.raises(LayoutError, match=f"/layer-{number}'"):
        open_host_context(layers, NHD, (), 8, directory=tmp_path)
    assert (mappings(tmp_path), open_files()) == (0, files)


@pytest.mark.parametrize("tag", ["cuda", "cuda_raw", "cuda_vmm", "musa", "npu"])
def test_device_memory_is_refused_by_name(
    tag: Literal["cuda", "cuda_raw", "cuda_vmm", "musa", "npu"],
) -> None:
    """With what the operator of the worker can do about it."""
    tensor = TensorDescriptor(type=tag, metadata=kv_tensor("", KV).metadata)
    with pytest.raises(LayoutError, match=rf"'{tag}' memory.*engine-driven"):
        open_host_context([tensor], NHD, (), 8)


def test_layers_that_are_views_of_one_storage_are_mapped_once(tmp_path: Path) -> None:
    """Blocks outermost, all layers inside a block: other offsets, larger block stride."""
    shape, stride = [8, 4, 2, 8], [2 * 64, 16, 8, 1]
    tensors = [
        kv_tensor("/kv", shape, stride=stride, storage_offset=64 * layer, nbytes=8 * 128 * 2)
        for layer in range(2)
    ]
    memory = create_segment(tmp_path, "/kv", 8 * 128 * 2)
    fill(memory)
    blocks = memory.reshape(8, 2, 128).copy()  # block, layer, bytes
    context = open_host_context(tensors, NHD, (), 8, directory=tmp_path)
    assert context.nbytes == memory.nbytes
    assert mappings(tmp_path) == 2  # ours, and that of this test

    data = memoryview(bytearray(context.layout.object_nbytes))
    context.gather([[6, 1]], [0], [data])
    assert bytes(data) == blocks[[6, 1]].transpose(1, 0, 2).tobytes()
    context.scatter([[0, 7]], [(0, data)], 0)
    context.close()
    assert np.array_equal(memory.reshape(8, 2, 128), blocks[[6, 1, 2, 3, 4, 5, 6, 1]])


@pytest.mark.parametrize(
    ("shape", "stride"),
    [
        ([2, 8, 4, 2, 8], [1280, 160, 20, 10, 1]),  # a gap behind each head
        ([2, 8, 4, 2, 8], [1280, 160, 40, 8, 1]),  # a gap behind each slot
        ([2, 8, 4, 2, 8], [1280, 150, 16, 8, 1]),  # a gap behind each block, not whole
        ([2, 8, 4, 2, 4], [1280, 160, 20, 10, 2]),  # a gap behind each element
        ([1, 4, 8], [2**60, 8, 1]),  # a stride that is never used
    ],
)
def test_gaps_are_neither_read_nor_written(
    shape: list[int], stride: list[int], tmp_path: Path
) -> None:
    """Padded memory copies like dense memory."""
    memory = create_segment(tmp_path, "/kv", 8192)
    fill(memory)
    tensor = kv_tensor("/kv", shape, stride=stride, nbytes=8192)
    context = open_host_context([tensor], NHD, (), 8, directory=tmp_path)
    strides = [step * 2 if step < 4096 else 0 for step in stride]
    view: np.ndarray[tuple[int, ...], np.dtype[np.uint16]] = np.ndarray(
        shape, dtype=np.uint16, buffer=memory, strides=strides
    )
    ids = [0, 0] if shape[0] == 1 else [5, 2]
    blocks = view[ids] if shape[0] == 1 else view[:, ids]
    data = memoryview(bytearray(context.layout.object_nbytes))

    context.gather([ids], [0], [data])
    assert bytes(data) == np.ascontiguousarray(blocks).tobytes()

    before = memory.copy()
    context.scatter([ids], [(0, data)], 0)
    assert np.array_equal(memory, before)
    context.scatter([ids], [(0, memoryview(b"\xff" * len(data)))], 0)
    changed = np.count_nonzero(memory != before)
    assert changed == len(set(ids)) * len(data) // len(ids)
    context.close()


def test_one_name_with_two_sizes_is_mapped_in_the_larger(tmp_path: Path) -> None:
    """Each descriptor is still held to its own size."""
    memory = create_segment(tmp_path, "/kv", 2 * KV_BYTES)
    tensors = [
        kv_tensor("/kv", KV),
        kv_tensor("/kv", KV, storage_offset=KV_BYTES // 2, nbytes=2 * KV_BYTES),
    ]
    context = open_host_context(tensors, NHD, (), 8, directory=tmp_path)
    assert context.nbytes == memory.nbytes
    context.close()


def test_as_many_destinations_as_chunks(tmp_path: Path) -> None:
    """A mismatch is ours, and copies nothing."""
    create_segment(tmp_path, "/kv", KV_BYTES)
    context = open_host_context([kv_tensor("/kv", KV)], NHD, (), 8, directory=tmp_path)
    with pytest.raises(TransferError, match="0 destinations for 1 chunks"):
        context.gather([[0, 1]], [0], [])
    context.close()


def test_memory_that_the_worker_cut_short_is_not_touched(tmp_path: Path) -> None:
    """The copy fails; the agent lives."""
    create_segment(tmp_path, "/kv", KV_BYTES)
    context = open_host_context([kv_tensor("/kv", KV)], NHD, (), 8, directory=tmp_path)
    os.truncate(tmp_path / "kv", 10)
    data = memoryview(bytearray(context.layout.object_nbytes))
    with pytest.raises(TransferError, match="cut short"):
        context.gather([[0, 1]], [0], [data])
    with pytest.raises(TransferError, match="cut short"):
        context.scatter([[0, 1]], [(0, data)], 0)
    context.close()


@pytest.mark.parametrize("copy", ["gather", "scatter"])
def test_memory_that_the_worker_cuts_short_in_the_middle_of_a_copy(
    tmp_path: Path, copy: str
) -> None:
    """Its pages are gone under the copy, which fails; the agent lives, the context is of no use."""
    survive_bus_errors()
    create_segment(tmp_path, "/kv", KV_BYTES)
    context = open_host_context([kv_tensor("/kv", KV)], NHD, (), 8, directory=tmp_path)
    data = memoryview(bytearray(context.layout.object_nbytes))

    def cut() -> None:
        os.truncate(tmp_path / "kv", 0)

    copies = {
        "gather": lambda: context.gather([[0, 1]], [0], [data], cut),
        "scatter": lambda: context.scatter([[0, 1]], [(0, data)], 0, cut),
    }
    with pytest.raises(TransferError, match="cut short"):
        copies[copy]()
    assert not context.is_usable
    os.truncate(tmp_path / "kv", KV_BYTES)
    with pytest.raises(TransferError, match="register"):
        context.gather([[0, 1]], [0], [data])
    context.close()
