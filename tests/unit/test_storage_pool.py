"""The shared-memory pool within one process: ownership, refusals, closing."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from lmcache_nodeagent.errors import AgentError, CapacityError, ConfigError
from lmcache_nodeagent.memory_limits import MemoryLimit
from lmcache_nodeagent.storage import pool as pool_module
from lmcache_nodeagent.storage.pool import NAME_PREFIX, SHM_DIRECTORY, SharedPool

SIZE = 1 << 20


@pytest.fixture
def name() -> Iterator[str]:
    """Make a name that nobody else uses; nothing of it is left afterwards."""
    unique = f"test-{uuid4().hex}"
    yield unique
    assert not path_of(unique).exists()


def path_of(name: str) -> Path:
    """Return where a pool of this name lies."""
    return SHM_DIRECTORY / f"{NAME_PREFIX}{name}"


def make_left_over(name: str, content: bytes = b"old") -> Path:
    """Leave a file that nobody has locked, as a killed owner does."""
    path = path_of(name)
    path.write_bytes(content)
    return path


def test_the_segment_is_private_complete_and_shared(name: str) -> None:
    """Mode 0600, every page allocated, and the buffer is what a reader of the file sees."""
    pool = SharedPool.create(name, SIZE)
    status = path_of(name).stat()
    assert pool.name == f"lmcache-kube.l1.{name}"
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_size == pool.size_bytes == len(pool.buffer) == SIZE
    assert status.st_blocks * 512 >= SIZE
    pool.buffer[-3:] = b"end"
    assert path_of(name).read_bytes()[-3:] == b"end"
    pool.close()


def test_close_removes_the_segment_once(name: str) -> None:
    """Closing again, even after somebody made a new one, touches nothing."""
    pool = SharedPool.create(name, SIZE)
    pool.close()
    successor = SharedPool.create(name, SIZE)
    pool.close()
    assert path_of(name).exists()
    successor.close()


def test_close_leaves_a_file_that_is_not_ours(name: str) -> None:
    """If somebody replaced the segment, their file stays."""
    pool = SharedPool.create(name, SIZE)
    path_of(name).unlink()
    make_left_over(name)
    pool.close()
    assert path_of(name).read_bytes() == b"old"
    path_of(name).unlink()


def test_close_with_views_in_use_removes_the_name_all_the_same(name: str) -> None:
    """A transfer that is still reading keeps its bytes, not the name."""
    pool = SharedPool.create(name, SIZE)
    pool.buffer[:4] = b"data"
    view = pool.buffer[:4]
    pool.close()
    assert not path_of(name).exists()
    assert bytes(view) == b"data"


def test_a_left_over_is_replaced(name: str) -> None:
    """A file of our name that nobody has locked belongs to nobody."""
    make_left_over(name)
    pool = SharedPool.create(name, SIZE)
    assert bytes(pool.buffer[:3]) == b"\0\0\0"
    pool.close()


def test_left_overs_of_other_names_go_too(name: str) -> None:
    """What dead owners left under our prefix goes; living owners' and strange files stay."""
    neighbour = SharedPool.create(f"{name}-living", SIZE)
    left_over = make_left_over(f"{name}-dead")
    strange = path_of(f"{name}-strange")
    strange.mkdir()
    SharedPool.create(name, SIZE).close()
    assert not left_over.exists()
    assert path_of(f"{name}-living").exists()
    strange.rmdir()
    neighbour.close()


def test_a_lock_held_for_a_moment_is_waited_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another start that is just removing our left-over does not pass for a living owner."""
    make_left_over(name)
    flock = fcntl.flock

    def busy_once(_descriptor: int, _operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        raise BlockingIOError

    monkeypatch.setattr(fcntl, "flock", busy_once)
    SharedPool.create(name, SIZE).close()


def test_a_living_owner_keeps_its_segment(name: str) -> None:
    """The second start fails, naming the name, and takes nothing away."""
    pool = SharedPool.create(name, SIZE)
    with pytest.raises(ConfigError, match=f"'{name}' is in use: a living agent holds"):
        SharedPool.create(name, SIZE)
    assert path_of(name).stat().st_size == SIZE
    pool.close()


@pytest.mark.parametrize("kind", ["directory", "link"])
def test_a_strange_file_in_the_way_is_named(name: str, kind: str) -> None:
    """What is no segment is neither followed nor removed."""
    path = path_of(name)
    if kind == "directory":
        path.mkdir()
    else:
        path.symlink_to("/etc/hostname")
    with pytest.raises(AgentError, match=f"cannot take over {path}"):
        SharedPool.create(name, SIZE)
    path.rmdir() if kind == "directory" else path.unlink()


@pytest.mark.parametrize("bad", ["", "../x", "a/b", ".hidden", "a" * 201, "a\n"])
def test_a_name_is_one_plain_file_name(bad: str) -> None:
    """Anything else is refused before a file is touched."""
    with pytest.raises(ConfigError, match="does not match"):
        SharedPool.create(bad, SIZE)


def test_more_than_a_limit_leaves_is_refused_with_both_figures(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names what was wanted, what there is, and which limit it is."""
    limits = [MemoryLimit("roomy", SIZE), MemoryLimit("tight", SIZE - 1)]
    monkeypatch.setattr(pool_module, "memory_limits", lambda _directory: limits)
    with pytest.raises(CapacityError, match=f"L1 of {SIZE} bytes .* tight leaves {SIZE - 1} bytes"):
        SharedPool.create(name, SIZE)


def fail_with(code: int) -> object:
    """Make a stand-in for posix_fallocate that fails."""

    def posix_fallocate(_descriptor: int, _offset: int, _length: int) -> None:
        raise OSError(code, os.strerror(code))

    return posix_fallocate


def test_room_lost_while_allocating_is_a_capacity_error(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another program may take the space between the look and the allocation."""
    monkeypatch.setattr(os, "posix_fallocate", fail_with(errno.ENOSPC))
    with pytest.raises(CapacityError, match=rf"L1 of {SIZE} bytes .* with \d+ bytes left at most"):
        SharedPool.create(name, SIZE)


def test_other_faults_of_the_allocation_are_not_disguised(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault that more memory would not cure is told as what it is."""
    monkeypatch.setattr(os, "posix_fallocate", fail_with(errno.EIO))
    with pytest.raises(AgentError, match=os.strerror(errno.EIO)) as caught:
        SharedPool.create(name, SIZE)
    assert not isinstance(caught.value, CapacityError)


def test_a_folder_that_cannot_be_written_is_told_in_one_sentence(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read-only /dev/shm, for one: no traceback at the start."""
    really_open = os.open

    def refuse(path: str | Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return really_open(path, flags, mode)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(AgentError, match=r"Read-only file system; mount a writable tmpfs"):
        SharedPool.create(name, SIZE)


def test_losing_the_race_for_the_name_tells_who_won(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If another agent links its segment first, ours gives up and names the living owner."""
    winners = []
    link = pool_module._link

    def lose(descriptor: int, path: Path) -> None:
        monkeypatch.setattr(pool_module, "_link", link)
        winners.append(SharedPool.create(name, SIZE))
        link(descriptor, path)

    monkeypatch.setattr(pool_module, "_link", lose)
    with pytest.raises(ConfigError, match="is in use"):
        SharedPool.create(name, SIZE)
    (winner,) = winners
    assert path_of(name).exists()
    winner.close()


def test_a_name_that_comes_and_goes_is_given_up(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The attempts are bounded."""

    def taken(_descriptor: int, path: Path) -> None:
        raise FileExistsError(path)

    monkeypatch.setattr(pool_module, "_link", taken)
    with pytest.raises(AgentError, match="comes and goes"):
        SharedPool.create(name, SIZE)


def test_a_failed_start_leaves_no_segment(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interruption after the segment got its name takes the name away again."""
    link = pool_module._link

    def interrupted(descriptor: int, path: Path) -> None:
        link(descriptor, path)
        raise KeyboardInterrupt

    monkeypatch.setattr(pool_module, "_link", interrupted)
    with pytest.raises(KeyboardInterrupt):
        SharedPool.create(name, SIZE)


def test_a_left_over_replaced_meanwhile_is_not_removed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the name passed to a new owner before we had the lock, that owner's file stays."""
    left_over = make_left_over(name)
    flock = fcntl.flock
    owners = []

    def overtaken(descriptor: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        left_over.unlink()
        owners.append(SharedPool.create(name, SIZE))
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", overtaken)
    with pytest.raises(ConfigError, match="is in use"):
        SharedPool.create(name, SIZE)
    (owner,) = owners
    owner.close()
