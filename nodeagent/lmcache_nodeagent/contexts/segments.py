"""Shared memory segments that workers created, mapped into the agent."""

from __future__ import annotations

import mmap
import os
import stat
from pathlib import Path

from lmcache_nodeagent.contexts.bus_errors import forget, watch
from lmcache_nodeagent.errors import LayoutError
from lmcache_nodeagent.memory_limits import memory_limits

SHM_DIRECTORY = Path("/dev/shm")

OWN_PREFIX = "lmcache-kube."
"""Segments of this agent and its neighbours. A worker that registered one as its KV memory could
read and overwrite what others have stored."""


class Segment:
    """One mapped segment. Threads: any; `close` only when nobody uses `buffer`.

    The segment is the worker's: it is never unlinked, and the mapping outlives the worker's unlink.
    """

    def __init__(self, name: str, handle: str, buffer: mmap.mmap) -> None:
        self.name = name
        self.handle = handle
        self.buffer = buffer
        self._memory = watch(buffer)

    @property
    def nbytes(self) -> int:
        """Bytes that are mapped."""
        return len(self.buffer)

    @property
    def is_lost(self) -> bool:
        """It was found not whole: for good, the worker registers its memory anew."""
        return self._memory.is_lost

    def is_whole(self) -> bool:
        """Tell whether the file backs the mapping, and has done so all the time."""
        if self.buffer.size() < self.nbytes:
            self._memory.is_lost = True
        return not self._memory.is_lost

    def close(self) -> None:
        """Unmap, unless a view still lives; then the mapping goes with its last view."""
        forget(self._memory)
        try:
            self.buffer.close()
        except BufferError:  # e.g. the traceback of a failed copy is being logged
            del self.buffer


def open_segment(name: str, nbytes: int, directory: Path = SHM_DIRECTORY) -> Segment:
    """Map the first `nbytes` (at least 1) bytes of a segment for reading and writing.

    Holes are filled first: storage for a hole is found when it is touched, and if there is none
    the toucher dies (SIGBUS).

    Raises:
        LayoutError: no such segment, not ours to open, too small, or without room for its holes.
    """
    path = directory / _file_name(name)
    try:
        # NONBLOCK: opening a FIFO must not wait for its other end.
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise LayoutError(
            f"shared memory {name!r} cannot be opened: {error.strerror}; agent and worker need the "
            f"same {directory} and user"
        ) from error
    try:
        _check_file(name, os.fstat(fd), nbytes)
        _fill_holes(name, fd, nbytes, directory)
        status = os.fstat(fd)
        buffer = mmap.mmap(fd, nbytes)
    except (OSError, ValueError) as error:  # ValueError: it shrank meanwhile
        raise LayoutError(f"shared memory {name!r} cannot be mapped: {error}") from error
    finally:
        os.close(fd)
    return Segment(name, f"{status.st_dev}:{status.st_ino}", buffer)


def _file_name(name: str) -> str:
    file_name = name.removeprefix("/")
    if file_name in {"", ".", ".."} or "/" in file_name or "\0" in file_name:
        raise LayoutError(f"shared memory name {name!r} is not one name with an optional slash")
    if file_name.startswith(OWN_PREFIX):
        raise LayoutError(f"shared memory {name!r} belongs to an agent, not to a worker")
    return file_name


def _check_file(name: str, status: os.stat_result, nbytes: int) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise LayoutError(f"shared memory {name!r} is not a regular file")
    if status.st_size < nbytes:
        raise LayoutError(f"shared memory {name!r} has {status.st_size} bytes, not {nbytes}")


def _fill_holes(name: str, fd: int, nbytes: int, directory: Path) -> None:
    """Take the memory that the worker has not touched yet: it counts as this process's.

    In a container with too low a limit that would be the end of it, without an error.
    """
    status = os.fstat(fd)
    missing = min(nbytes, status.st_size - status.st_blocks * 512)  # stat(2) counts in 512 bytes
    if missing <= 0:
        return
    for limit in memory_limits(directory):
        if missing > limit.available_bytes:
            raise LayoutError(
                f"shared memory {name!r} has holes of {missing} bytes, and {limit.source} leaves"
                f" the agent {limit.available_bytes} to fill them; let the worker write to all of"
                " its KV memory before it registers, or raise that limit"
            )
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        raise LayoutError(
            f"shared memory {name!r} of {nbytes} bytes has holes, and there is no room to fill"
            f" them ({error.strerror}); make the worker's KV memory smaller or /dev/shm larger"
        ) from error
