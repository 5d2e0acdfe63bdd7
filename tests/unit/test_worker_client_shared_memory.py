"""A worker's KV memory: a segment of its own that it alone removes."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import numpy as np
import pytest

from lmcache_worker.shared_memory import SharedKvCache

SHAPE = [2, 4, 16, 2, 8]


def test_segment_is_described_as_it_lies(tmp_path: Path) -> None:
    """Name, size and contiguous strides are what a server needs to map it."""
    with SharedKvCache.create(SHAPE, directory=tmp_path) as cache:
        tensor = cache.tensor
        assert tensor.shm_name.startswith(f"/lmcache_kv_{os.getpid()}_")
        assert tensor.nbytes == 2 * 4 * 16 * 2 * 8 * 2
        assert tensor.metadata.dtype == "bfloat16"
        assert list(tensor.metadata.stride) == [1024, 256, 16, 8, 1]
        assert tensor.metadata.storage_offset == 0


@pytest.mark.parametrize(("dtype", "itemsize"), [("bfloat16", 2), ("float32", 4), ("uint8", 1)])
def test_array_is_the_segment(tmp_path: Path, dtype: str, itemsize: int) -> None:
    """Writes reach the file, which starts zeroed and is the owner's alone."""
    with SharedKvCache.create([4, 8], dtype, tmp_path) as cache:
        path = tmp_path / cache.tensor.shm_name[1:]
        assert path.read_bytes() == bytes(4 * 8 * itemsize)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        cache.array[...] = np.arange(32).reshape(4, 8)
        assert path.read_bytes() == cache.array.tobytes()


def test_close_removes_the_segment(tmp_path: Path) -> None:
    """It is gone at the end, and closing twice is fine."""
    cache = SharedKvCache.create(SHAPE, directory=tmp_path)
    cache.close()
    cache.close()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="is closed"):
        _ = cache.array


def test_views_outlive_the_segment(tmp_path: Path) -> None:
    """A view that is still held keeps its memory, as any mapping does."""
    cache = SharedKvCache.create([4], "uint8", tmp_path)
    view = cache.array
    view[...] = 7
    cache.close()
    assert view.tolist() == [7, 7, 7, 7]
    assert list(tmp_path.iterdir()) == []


def test_left_over_names_are_skipped(tmp_path: Path) -> None:
    """A file of an earlier process with the same id is neither taken nor removed."""
    with SharedKvCache.create([4], "uint8", tmp_path) as cache:
        taken = int(cache.tensor.shm_name.rsplit("_", 1)[1]) + 1
    left_over = tmp_path / f"lmcache_kv_{os.getpid()}_{taken}"
    left_over.write_bytes(b"not ours")
    with SharedKvCache.create([4], "uint8", tmp_path) as cache:
        assert cache.tensor.shm_name == f"/lmcache_kv_{os.getpid()}_{taken + 1}"
    assert left_over.read_bytes() == b"not ours"


def test_segment_that_does_not_fit_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too little memory is an error now, not a bus error later, and leaves nothing behind."""

    def no_space(descriptor: int, offset: int, size: int) -> None:
        del descriptor, offset, size
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", no_space)
    with pytest.raises(OSError, match="No space left"):
        SharedKvCache.create(SHAPE, directory=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_unknown_dtype_is_refused(tmp_path: Path) -> None:
    """Nothing is made for an element type without a size."""
    with pytest.raises(KeyError, match="float7"):
        SharedKvCache.create(SHAPE, "float7", tmp_path)
    assert list(tmp_path.iterdir()) == []
