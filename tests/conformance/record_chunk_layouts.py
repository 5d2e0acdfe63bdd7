r"""Record what LMCache 0.5.6 stores and retrieves for the KV layouts that vLLM registers on CPU.

Runs in the stock environment, which `make conformance` makes:

    .venvs/stock/bin/python tests/conformance/record_chunk_layouts.py \
        > tests/unit/recorded/chunk_layouts.json

Stock code wraps the tensors, plans the layout and copies; this script fills the memory, asks for
one store and one retrieve per case, and writes the registration with digests of the objects and of
the memory afterwards. `tests/unit/test_contexts_recorded.py` repeats the copies with our context.
"""

# mypy: disable-error-code="import-not-found"
# The stock packages are not installed where types are checked.

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from typing import Any

import torch
from lmcache import lmcache_native
from lmcache.v1.memory_management import MemoryObjMetadata, TensorMemoryObj
from lmcache.v1.multiprocess.group_view import EngineGroupInfo
from lmcache.v1.multiprocess.object_group_transfer import (
    downsample_and_stage_block_ids,
    transfer_kv_per_object_group,
)
from lmcache.v1.platform.devices.cpu.cache_context import CPUCacheContext
from lmcache.v1.platform.devices.cpu.shm import CpuShmTensorWrapper

CHUNK_TOKENS = 64
CHUNKS = 3
BF16, U8, F32 = torch.bfloat16, torch.uint8, torch.float32


def info(
    layers: list[int], tokens_per_block: int = 0, window: int = -1, group: int = 0
) -> dict[str, Any]:
    """One EngineGroupInfo as a map."""
    return {
        "engine_group_id": group,
        "layer_indices": layers,
        "tokens_per_block": tokens_per_block,
        "sw_size_tokens": window,
    }


# name: (kv_layout hint or None, [(shape, dtype) per layer], group infos, retrieve's skip in tokens)
CASES: dict[str, tuple[Any, ...]] = {
    "planes_first_nhd": ("NHD", [([2, 40, 16, 2, 8], BF16)] * 2, [info([0, 1], 16)], 0),
    "planes_first_hnd": ("HND", [([2, 40, 2, 16, 8], BF16)] * 2, [info([0, 1], 16)], 70),
    "no_hint_no_groups": (None, [([2, 40, 2, 16, 8], BF16)] * 2, [], 64),
    "planes_second_nhd": ("NHD", [([40, 2, 16, 2, 8], BF16)] * 3, [info([0, 1, 2], 16)], 33),
    "planes_second_hnd": ("HND", [([40, 2, 2, 16, 8], BF16)] * 2, [info([0, 1], 16)], 0),
    "two_blocks_planes_first_wins": ("NHD", [([2, 2, 64, 2, 8], BF16)], [info([0], 64)], 0),
    "fused_nhd": ("NHD", [([40, 16, 2, 16], BF16)] * 2, [info([0, 1], 16)], 16),
    "fused_hnd": ("HND", [([40, 2, 16, 16], BF16)] * 2, [info([0, 1], 16)], 0),
    "blocks_outermost_hnd": ("BLHNC", [([40, 2, 16, 16], BF16)] * 2, [info([0, 1], 16)], 0),
    "blocks_outermost_nhd": ("BLNHC", [([40, 16, 2, 16], F32)] * 2, [info([0, 1], 16)], 0),
    "latent": ("NHD", [([40, 16, 24], BF16)] * 2, [info([0, 1], 16)], 48),
    "latent_with_index": (
        "NHD",
        [([40, 16, 24], BF16), ([40, 16, 132], U8), ([40, 16, 24], BF16), ([40, 16, 1, 132], U8)],
        [info([0, 2], 16), info([1, 3], 16)],
        16,
    ),
    "kernel_groups_in_one_engine_group": (
        "NHD",
        [([2, 40, 16, 2, 8], BF16), ([2, 40, 16, 4, 8], BF16)] * 2,
        [info([0, 2], 16), info([1, 3], 16)],
        0,
    ),
    "engine_groups_with_other_block_sizes": (
        "NHD",
        [([2, 40, 16, 2, 8], BF16), ([2, 40, 32, 2, 8], BF16)],
        [info([0], 16, group=0), info([1], 32, group=1)],
        40,
    ),
    "compressed": ("NHD", [([40, 4, 24], BF16)] * 2, [info([0, 1], 16)], 16),
    "short_window": (
        "NHD",
        [([2, 40, 16, 2, 8], BF16), ([2, 40, 16, 2, 8], BF16)],
        [info([0], 16, group=0), info([1], 16, window=32, group=1)],
        100,
    ),
    "long_window": ("NHD", [([2, 40, 16, 2, 8], BF16)], [info([0], 16, window=96)], 0),
    "layer_left_out": ("NHD", [([2, 40, 16, 2, 8], BF16)] * 3, [info([0, 2], 16)], 0),
    "odd_sizes": ("HND", [([2, 40, 3, 16, 5], U8)], [info([0], 16)], 0),
}


def fill(segment: torch.Tensor, number: int) -> None:
    """Write bytes that differ between neighbours, rows and segments; `tests/fakes` has a copy."""
    position = torch.arange(segment.numel(), dtype=torch.int64)
    segment.copy_(((position * 31 + (position >> 8) * 7 + number * 101) % 251).to(torch.uint8))


def block_ids(groups: Sequence[dict[str, Any]], blocks: int) -> tuple[list[list[int]], ...]:
    """Return store ids (scattered, with runs) and retrieve ids (other blocks), by group."""
    per_chunk = [CHUNK_TOKENS // (g["tokens_per_block"] or 16) for g in groups]
    store = [[(7 * (i // 2) + i % 2) % blocks for i in range(n * CHUNKS)] for n in per_chunk]
    load = [[(blocks - 1 - 3 * i) % blocks for i in range(n * CHUNKS)] for n in per_chunk]
    return store, load


def digest(tensor: torch.Tensor) -> str:
    """SHA-256 of the bytes."""
    return hashlib.sha256(bytes(tensor.contiguous().view(-1).view(U8).numpy())).hexdigest()


def new_object(nbytes: int) -> TensorMemoryObj:
    """A zeroed object as the stock L1 would allocate it."""
    raw = torch.zeros(nbytes, dtype=U8)
    shape = torch.Size([nbytes])
    return TensorMemoryObj(
        raw, MemoryObjMetadata(shape, U8, 0, nbytes, 1, shapes=[shape], dtypes=[U8]), None
    )


def transfer(
    context: CPUCacheContext,
    ids: list[list[int]],
    objects: list[TensorMemoryObj],
    skip: int,
    direction: lmcache_native.TransferDirection,
) -> None:
    """Run one store or retrieve as the stock transfer module does."""
    host_ids = [list(group) for group in ids]
    staged = downsample_and_stage_block_ids(context, host_ids)
    store = direction == lmcache_native.TransferDirection.D2H
    transfer_kv_per_object_group(
        context,
        staged,
        objects,
        object_group_id=0,
        batch_size=1 if store else context.max_batch_size,
        skip_first_n_tokens=skip,
        direction=direction,
        transfer_key="recording",
        block_ids_host=host_ids,
    )


def record(
    kv_layout: str | None,
    layers: list[tuple[list[int], torch.dtype]],
    groups: list[dict[str, Any]],
    skip: int,
) -> dict[str, Any]:
    """Store and retrieve once; return the registration and what came out."""
    tensors = [torch.zeros(shape, dtype=dtype) for shape, dtype in layers]
    wrapped = [CpuShmTensorWrapper.wrap(tensor) for tensor in tensors]
    for number, tensor in enumerate(tensors):
        fill(tensor.view(-1).view(U8), number)
    context = CPUCacheContext(
        wrapped,
        CHUNK_TOKENS,
        layout_hints={} if kv_layout is None else {"kv_layout": kv_layout},
        engine_group_infos=[
            EngineGroupInfo(**{**g, "layer_indices": tuple(g["layer_indices"])}) for g in groups
        ],
    )
    context.tmp_cpu_buffer_.zero_()  # slots in front of a short window are not written
    blocks = min(t.shape[1] if t.dim() == 5 and t.shape[0] == 2 else t.shape[0] for t in tensors)
    store_ids, load_ids = block_ids(groups or [info([])], blocks)
    objects = [new_object(context.tmp_chunk_bytes_) for _ in range(CHUNKS)]
    transfer(context, store_ids, objects, 0, lmcache_native.TransferDirection.D2H)
    stored = [digest(o.raw_data) for o in objects]
    transfer(context, load_ids, objects, skip, lmcache_native.TransferDirection.H2D)
    return {
        "kv_layout": kv_layout,
        "tensors": [describe(wrapper) for wrapper in wrapped],
        "groups": groups,
        "chunk_tokens": CHUNK_TOKENS,
        "store_block_ids": store_ids,
        "object_nbytes": context.tmp_chunk_bytes_,
        "object_sha256": stored,
        "retrieve_block_ids": load_ids,
        "retrieve_skip_tokens": skip,
        "memory_sha256": [digest(tensor) for tensor in tensors],
    }


def describe(wrapper: CpuShmTensorWrapper) -> dict[str, Any]:
    """The wire descriptor, without the segment name."""
    wire = wrapper.to_wire()
    meta = wire.metadata
    return {
        "dtype": str(meta.dtype).removeprefix("torch."),
        "shape": list(meta.shape),
        "stride": list(meta.stride),
        "storage_offset": meta.storage_offset,
        "nbytes": wire.nbytes,
    }


if __name__ == "__main__":
    cases = {name: record(*case) for name, case in CASES.items()}
    lines = [f" {json.dumps(name)}: {json.dumps(case)}" for name, case in cases.items()]
    sys.stdout.write("{\n" + ",\n".join(lines) + "\n}\n")
