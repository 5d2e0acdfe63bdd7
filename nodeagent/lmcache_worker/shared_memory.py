"""A worker's KV cache in host memory: POSIX shared memory that the server can map.

It goes through `os` and `mmap` and not through `multiprocessing.shared_memory`, whose resource
tracker removes segments behind their owner's back when any process that attached exits.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from lmcache_worker.wire import SharedTensor, TensorMetadata

SHM_DIRECTORY = Path("/dev/shm")
"""Where Linux keeps POSIX shared memory."""

_NUMPY_DTYPES: dict[str, np.dtype[np.generic]] = {
    "bfloat16": np.dtype(np.uint16),  # numpy has none: the bits
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
    "uint8": np.dtype(np.uint8),
    "int8": np.dtype(np.int8),
    "float8_e4m3fn": np.dtype(np.uint8),
    "float8_e5m2": np.dtype(np.uint8),
}

_numbers = itertools.count()


class SharedKvCache:
    """One layer's KV tensor in a segment of its own. Thread: any, one at a time.

    The segment is `/lmcache_kv_<pid>_<n>`, mode 0600, as stock workers name theirs. It belongs to
    this object: `close` removes it, and mappings that others have stay valid.
    """

    def __init__(
        self, path: Path, memory: mmap.mmap, array: npt.NDArray[np.generic], tensor: SharedTensor
    ) -> None:
        """Wrap a segment; `create` makes one."""
        self._path = path
        self._memory = memory
        self._array: npt.NDArray[np.generic] | None = array
        self._tensor = tensor

    @classmethod
    def create(
        cls,
        shape: Sequence[int],
        dtype: str = "bfloat16",
        directory: Path = SHM_DIRECTORY,
    ) -> Self:
        """Make a zeroed segment for one contiguous tensor.

        Args:
            shape: As the memory lies, e.g. [2, blocks, block tokens, heads, head size]; no zeros.
            dtype: PyTorch's name of the element type.
            directory: Where segments are files.

        Raises:
            OSError: The memory is not there (ENOSPC), now rather than as a bus error later.
        """
        kind = _NUMPY_DTYPES[dtype]
        nbytes = math.prod(shape) * kind.itemsize
        path, memory = _create_segment(directory, nbytes)
        array = np.frombuffer(memory, dtype=kind).reshape(shape)
        strides = [step // kind.itemsize for step in array.strides]
        metadata = TensorMetadata(dtype=dtype, shape=list(shape), stride=strides)
        return cls(path, memory, array, SharedTensor(f"/{path.name}", nbytes, metadata))

    @property
    def tensor(self) -> SharedTensor:
        """What to register."""
        return self._tensor

    @property
    def array(self) -> npt.NDArray[np.generic]:
        """The memory, in the shape given to `create`; bfloat16 and float8 as their bits."""
        if self._array is None:
            raise ValueError(f"{self._path.name} is closed")
        return self._array

    def close(self) -> None:
        """Remove the segment; idempotent. Views of `array` that are still held stay valid."""
        if self._array is None:
            return
        self._array = None
        self._path.unlink(missing_ok=True)
        # A view that is still held keeps the mapping; it goes with the view.
        with contextlib.suppress(BufferError):
            self._memory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _create_segment(directory: Path, nbytes: int) -> tuple[Path, mmap.mmap]:
    descriptor, path = _open_new(directory)
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
        return path, mmap.mmap(descriptor, nbytes)
    except OSError:
        path.unlink()
        raise
    finally:
        os.close(descriptor)


def _open_new(directory: Path) -> tuple[int, Path]:
    # Process ids repeat between containers and after restarts: a taken number is skipped.
    while True:
        path = directory / f"lmcache_kv_{os.getpid()}_{next(_numbers)}"
        with contextlib.suppress(FileExistsError):
            return os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600), path
