"""Mapping a worker's shared memory, and refusing what would hurt the agent."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path

import pytest

from lmcache_nodeagent.contexts import segments
from lmcache_nodeagent.contexts.segments import open_segment
from lmcache_nodeagent.errors import LayoutError
from lmcache_nodeagent.memory_limits import MemoryLimit
from tests.fakes.paged_memory import create_segment


def open_files() -> int:
    """File descriptors of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("name", ["/kv", "kv"])
def test_a_mapping_shares_the_workers_bytes(name: str, tmp_path: Path) -> None:
    """The leading slash of POSIX names is optional; the file stays when the mapping goes."""
    memory = create_segment(tmp_path, name, 4096)
    segment = open_segment(name, 4096, tmp_path)
    memory[7] = 42
    assert segment.buffer[7] == 42
    segment.buffer[8] = 43
    segment.close()
    assert memory[8] == 43
    assert (tmp_path / "kv").exists()


def test_a_mapping_survives_the_workers_unlink(tmp_path: Path) -> None:
    """Workers unlink when their last tensor goes, which may be before they unregister."""
    create_segment(tmp_path, "/kv", 4096)[0] = 9
    segment = open_segment("/kv", 4096, tmp_path)
    (tmp_path / "kv").unlink()
    assert segment.buffer[0] == 9
    segment.close()


def test_the_handle_names_the_file_not_the_path(tmp_path: Path) -> None:
    """Two names of one file are one handle; a new file under an old name is another."""
    create_segment(tmp_path, "/kv", 4096)
    (tmp_path / "link").hardlink_to(tmp_path / "kv")
    first, second = (open_segment(name, 4096, tmp_path) for name in ("/kv", "/link"))
    (tmp_path / "kv").unlink()
    create_segment(tmp_path, "/kv", 4096)
    third = open_segment("/kv", 4096, tmp_path)
    assert first.handle == second.handle != third.handle
    for segment in (first, second, third):
        segment.close()


@pytest.mark.parametrize(
    "name", ["", "/", ".", "/..", "//kv", "/a/b", "../kv", "/../kv", "a\0b", "/lmcache-kube.l1.x"]
)
def test_names_that_are_not_one_workers_segment_are_refused(name: str, tmp_path: Path) -> None:
    """No way out of the folder, and none into an agent's own pool."""
    create_segment(tmp_path, "kv", 4096)
    with pytest.raises(LayoutError, match=r"name|belongs"):
        open_segment(name, 4096, tmp_path)


def test_only_whole_regular_files_are_mapped(tmp_path: Path) -> None:
    """Touching memory that no file backs would end the agent (SIGBUS)."""
    create_segment(tmp_path, "/small", 4096)
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to(tmp_path / "small")
    refused = {
        "/small": "4096 bytes, not 8192",
        "/missing": "cannot be opened: No such file",
        "/folder": "cannot be opened: Is a directory",
        "/fifo": "not a regular file",
        "/link": "cannot be opened",
        "/" + "x" * 300: "cannot be opened: File name too long",
    }
    for name, message in refused.items():
        with pytest.raises(LayoutError, match=message):
            open_segment(name, 8192, tmp_path)


def test_holes_are_filled_before_they_are_mapped(tmp_path: Path) -> None:
    """A worker that only set the size of its segment is served; touching a hole can be fatal."""
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 20)
    open_segment("/sparse", 1 << 20, tmp_path).close()
    assert (tmp_path / "sparse").stat().st_blocks * 512 >= 1 << 20


def test_holes_in_front_of_more_memory_are_filled(tmp_path: Path) -> None:
    """What a file has behind the part that is mapped does not make up for them."""
    with (tmp_path / "kv").open("wb") as file:
        os.posix_fallocate(file.fileno(), 1 << 20, 1 << 20)
    open_segment("/kv", 1 << 20, tmp_path).close()
    assert (tmp_path / "kv").stat().st_blocks * 512 >= 2 << 20


def test_holes_beyond_a_memory_limit_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Filled, they count as the agent's: the kernel would kill it for a worker's memory."""
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 20)
    create_segment(tmp_path, "/whole", 1 << 20)
    limits = [MemoryLimit("memory limit of cgroup /agent", (1 << 20) - 1)]
    monkeypatch.setattr(segments, "memory_limits", lambda _: limits)
    with pytest.raises(LayoutError, match="cgroup /agent leaves the agent 1048575"):
        open_segment("/sparse", 1 << 20, tmp_path)
    assert (tmp_path / "sparse").stat().st_blocks == 0
    open_segment("/whole", 1 << 20, tmp_path).close()


def test_holes_without_room_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full file system is a clear no at registration, not the agent's death at the copy."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 20)
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(LayoutError, match="no room to fill"):
        open_segment("/sparse", 1 << 20, tmp_path)


def test_memory_that_cannot_be_mapped_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Out of address space or descriptors; nothing stays open."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    create_segment(tmp_path, "/kv", 4096)
    monkeypatch.setattr(mmap, "mmap", refuse)
    before = open_files()
    with pytest.raises(LayoutError, match="cannot be mapped"):
        open_segment("/kv", 4096, tmp_path)
    assert open_files() == before


def test_a_segment_cut_short_is_noticed(tmp_path: Path) -> None:
    """`is_whole` is asked before each copy."""
    create_segment(tmp_path, "/kv", 8192)
    segment = open_segment("/kv", 8192, tmp_path)
    assert segment.is_whole()
    os.truncate(tmp_path / "kv", 4096)
    assert not segment.is_whole()
    segment.close()


def test_closing_under_a_view_leaves_the_mapping_to_the_view(tmp_path: Path) -> None:
    """A traceback that is being logged may hold one: no error, and no use after unmap."""
    create_segment(tmp_path, "/kv", 4096)[0] = 5
    segment = open_segment("/kv", 4096, tmp_path)
    view = memoryview(segment.buffer)
    segment.close()
    assert view[0] == 5
    assert str(tmp_path) in Path("/proc/self/maps").read_text()
    view.release()
    del view
    assert f"{tmp_path}/kv" not in Path("/proc/self/maps").read_text()
