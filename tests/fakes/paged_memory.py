"""KV memory of an imagined worker: descriptors, and files that stand for its shared memory."""

from __future__ import annotations

import mmap
import os
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lmcache_nodeagent.protocol.descriptors import DTYPE_BYTES
from lmcache_nodeagent.protocol.messages import TensorDescriptor, TensorMetadata


def contiguous_stride(shape: list[int]) -> list[int]:
    """Strides, in elements, of a tensor without gaps."""
    return [prod(shape[axis + 1 :]) for axis in range(len(shape))]


def kv_tensor(
    name: str,
    shape: list[int],
    *,
    dtype: str = "bfloat16",
    stride: list[int] | None = None,
    storage_offset: int = 0,
    nbytes: int | None = None,
) -> TensorDescriptor:
    """Describe a `cpu_shm` tensor; contiguous and alone in its segment unless said otherwise."""
    if nbytes is None:
        nbytes = (storage_offset + prod(shape)) * DTYPE_BYTES[dtype]
    return TensorDescriptor(
        type="cpu_shm",
        metadata=TensorMetadata(
            dtype=dtype,
            shape=shape,
            stride=contiguous_stride(shape) if stride is None else stride,
            storage_offset=storage_offset,
            device_uuid="cpu",
        ),
        shm_name=name,
        nbytes=nbytes,
    )


def create_segment(directory: Path, name: str, nbytes: int) -> NDArray[np.uint8]:
    """Create a fully allocated file and return its bytes, shared with whoever maps it."""
    fd = os.open(directory / name.removeprefix("/"), os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        os.posix_fallocate(fd, 0, nbytes)
        return np.frombuffer(mmap.mmap(fd, nbytes), dtype=np.uint8)
    finally:
        os.close(fd)


def fill(memory: NDArray[np.uint8], number: int = 0) -> None:
    """Write bytes that differ between neighbours, rows and segments (by `number`).

    The formula is that of `tests/conformance/record_chunk_layouts.py`.
    """
    position = np.arange(memory.size, dtype=np.int64)
    memory[:] = (position * 31 + (position >> 8) * 7 + number * 101) % 251
