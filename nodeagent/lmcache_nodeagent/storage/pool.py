"""The region of L1: one shared-memory file that the agent owns and other processes map.

Ownership is a held `flock`, not a process id: it ends with its owner however that dies, and it
can be seen across PID namespaces. The file is made without a name, locked, allocated in full, and
only then linked into place, so nobody ever sees it unlocked or with pages missing. (Missing pages
would be charged to the container that touches them first, or raise SIGBUS on a full file system.)

Readers attach with `os.open` and `mmap`, or with LMCache's own client, which does the same in
effect. A plain `multiprocessing.shared_memory.SharedMemory(name)` must not be used: its resource
tracker removes the file under its owner when the reader exits, unless `track=False` (Python 3.13)
says otherwise (cpython issue 82300). Processes forked off the owner inherit the lock and would
keep it: spawn them.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from lmcache_nodeagent.errors import AgentError, CapacityError, ConfigError
from lmcache_nodeagent.memory_limits import memory_limits

SHM_DIRECTORY = Path("/dev/shm")
NAME_PREFIX = "lmcache-kube.l1."
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_START_ATTEMPTS = 3
_LOCK_PAUSES_SECONDS = (0.01, 0.04)


class SharedPool:
    """A mapped and locked segment. Threads: any may use `buffer`; one closes."""

    def __init__(self, path: Path, descriptor: int, size_bytes: int) -> None:
        self.name = path.name
        """What readers open: a file of this name in /dev/shm (no leading slash)."""
        self.size_bytes = size_bytes
        self._path = path
        self._descriptor = descriptor  # holds the lock
        self._map = mmap.mmap(descriptor, size_bytes)
        self.buffer = memoryview(self._map)
        """The whole region, writable, one byte per item."""
        self._closed = False

    @classmethod
    def create(cls, name: str, size_bytes: int, *, directory: Path = SHM_DIRECTORY) -> SharedPool:
        """Make the segment `lmcache-kube.l1.<name>`, after removing what dead owners left.

        1 GiB takes about 0.3 s, most of it in the kernel's page allocation.

        Raises:
            ConfigError: the name cannot be used, or a living agent holds it.
            CapacityError: the file system, the machine or a cgroup has no room for `size_bytes`.
            AgentError: somebody else's file stands in the way.
        """
        if not _NAME.fullmatch(name):
            raise ConfigError([f"L1 name {name!r} does not match {_NAME.pattern}"])
        path = directory / f"{NAME_PREFIX}{name}"
        _remove_other_left_overs(directory, path)
        for _ in range(_START_ATTEMPTS):
            _remove_left_over(path, _LOCK_PAUSES_SECONDS)
            descriptor = _allocate(directory, size_bytes)
            try:
                _link(descriptor, path)
                return cls(path, descriptor, size_bytes)
            except FileExistsError:  # another agent of this name was faster; the loop says who
                os.close(descriptor)
            except BaseException:
                _unlink_if_ours(path, descriptor)
                os.close(descriptor)
                raise
        raise AgentError(f"{path} comes and goes; is another program using this name?")

    def close(self) -> None:
        """Remove the segment's name, then unmap it as far as possible. Idempotent.

        Where views of `buffer` are still in use the mapping and the lock last until the process
        ends; its name is free all the same.
        """
        if self._closed:
            return
        self._closed = True
        _unlink_if_ours(self._path, self._descriptor)
        with suppress(BufferError):
            self.buffer.release()
            self._map.close()
        os.close(self._descriptor)


def _remove_other_left_overs(directory: Path, own: Path) -> None:
    """Remove what dead agents of other names left: a free port gives another name each time.

    Nobody else would ever free that memory. Only a lock that can be had proves an owner's death.
    """
    for path in directory.glob(f"{NAME_PREFIX}*"):
        if path != own:
            with suppress(AgentError):  # a living agent's, or another user's: not ours to touch
                _remove_left_over(path, pauses_seconds=())


def _remove_left_over(path: Path, pauses_seconds: Sequence[float]) -> None:
    """Unlink the file of an owner that is gone; its lock being free is the proof."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    except OSError as error:
        raise AgentError(f"cannot take over {path}: {error.strerror}; remove it") from error
    try:
        _lock(descriptor, pauses_seconds)
        _unlink_if_ours(path, descriptor)
    except BlockingIOError:
        problem = (
            f"L1 name {path.name.removeprefix(NAME_PREFIX)!r} is in use: a living agent holds "
            f"{path}; stop that agent or choose another name"
        )
        raise ConfigError([problem]) from None
    finally:
        os.close(descriptor)


def _lock(descriptor: int, pauses_seconds: Sequence[float]) -> None:
    """Take the lock, or raise BlockingIOError when it is still held after some pauses.

    Another agent's start holds the lock of a left-over for the moment in which it removes it.
    """
    for pause in pauses_seconds:
        with suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(pause)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _unlink_if_ours(path: Path, descriptor: int) -> None:
    """Unlink `path` if it is the locked file; whoever holds a file's lock may remove its name."""
    with suppress(FileNotFoundError):
        if os.path.samestat(path.lstat(), os.fstat(descriptor)):
            path.unlink()


def _allocate(directory: Path, size_bytes: int) -> int:
    """Return the descriptor of a locked, nameless file with all its pages."""
    for limit in memory_limits(directory):
        if size_bytes > limit.available_bytes:
            raise CapacityError(
                f"an L1 of {size_bytes} bytes does not fit: {limit.source} leaves "
                f"{limit.available_bytes} bytes; make L1 smaller or raise that limit"
            )
    try:
        descriptor = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise AgentError(
            f"no file for L1 can be made in {directory}: {error.strerror}; mount a writable tmpfs"
            " there"
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.posix_fallocate(descriptor, 0, size_bytes)
    except OSError as error:
        os.close(descriptor)
        if error.errno not in {errno.ENOSPC, errno.ENOMEM}:
            raise AgentError(
                f"an L1 of {size_bytes} bytes cannot be taken in {directory}: {error.strerror};"
                " make L1 smaller or lift the limit"
            ) from error
        left = min(limit.available_bytes for limit in memory_limits(directory))
        raise CapacityError(
            f"an L1 of {size_bytes} bytes does not fit: {error.strerror} in {directory}, with "
            f"{left} bytes left at most; make L1 smaller"
        ) from error
    return descriptor


def _link(descriptor: int, path: Path) -> None:
    """Give the nameless file its name, atomically; FileExistsError if the name is taken.

    See open(2), O_TMPFILE. `dst_dir_fd` is what makes CPython use linkat(2), and so follow the
    link in /proc instead of linking to it.
    """
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        source = f"/proc/self/fd/{descriptor}"
        os.link(source, path.name, dst_dir_fd=directory, follow_symlinks=True)
    finally:
        os.close(directory)
