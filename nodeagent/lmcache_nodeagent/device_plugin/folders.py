"""What a slot's container gets to see: folders with the socket, and its shared memory.

    <slots folder>/sockets/<slot>            the bound socket (transport/slot_sockets.py)
    <slots folder>/slots/<slot>/agent.sock   another name of it; the folder is the container's
    <shared memory folder>/<slot>/           the container's /dev/shm, with a name of L1 in it

A container keeps the folder that it was started with, so a folder is never used twice: each start
gets a fresh one, and the earlier one is emptied, whoever may still see it. An agent that starts
anew puts its socket into the folders that are there.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from lmcache_nodeagent.config import SOCKETS_FOLDER
from lmcache_nodeagent.contexts.segments import OWN_PREFIX, SHM_DIRECTORY
from lmcache_nodeagent.errors import LayoutError

if TYPE_CHECKING:
    from lmcache_nodeagent.config import AgentConfig
    from lmcache_nodeagent.liveness.slots import SlotRun

SOCKET_NAME = "agent.sock"
IN_CONTAINER = "/run/lmcache-kube"
URL = f"ipc://{IN_CONTAINER}/{SOCKET_NAME}"
_SLOTS = "slots"

_SOCKET_FOLDER_MODE = 0o755
_SHARED_MODE = 0o1777
_GROUP_MODE = 0o3770
_POOL_MODE = 0o666
_POOL_GROUP_MODE = 0o660
_BLOCK_BYTES = 512  # st_blocks of stat(2)

_MOST_FILES = 4096
_DEEPEST = 8
"""A worker has a file or some for each layer. To look at many more would take too long."""


@dataclass(frozen=True, slots=True)
class MountPoint:
    """A folder of the host in a container."""

    container_path: str
    host_path: str
    read_only: bool


@dataclass(frozen=True, slots=True)
class SharedMemoryUse:
    """What a slot's container has in its shared memory, L1 not counted.

    A file with holes counts whole: the agent fills those of what it maps.
    """

    nbytes: int
    files: int
    limit_bytes: int

    @property
    def excess(self) -> str:
        """What is more than the container may have, in words; empty if nothing is."""
        if self.files > _MOST_FILES:
            return f"more than {_MOST_FILES} files, or folders {_DEEPEST} deep, which nobody counts"
        if self.nbytes > self.limit_bytes:
            return f"{self.nbytes} bytes in its shared memory, but may have {self.limit_bytes}"
        return ""


class SlotFolders:
    """Makes, renews and empties them. Threads: any, but one at a time for each slot."""

    def __init__(self, config: AgentConfig) -> None:
        own, shared = config.slots_folder, config.slot_shared_memory_folder
        self._names = config.slot_names
        self._sockets = Path(own) / SOCKETS_FOLDER
        self._slots = Path(own) / _SLOTS
        self._host_slots = f"{config.slots_host_folder or own}/{_SLOTS}"
        self._limit_bytes = config.slot_shared_memory_bytes
        self._shared = Path(shared) if self._limit_bytes and self._names else None
        self._host_shared = config.slot_shared_memory_host_folder or shared
        self._group = config.slot_shared_memory_group
        self._pool: Path | None = None

    def prepare(self) -> None:
        """Put the sockets into the folders that running containers see. Before L1 is taken.

        The names that a dead agent's L1 has in the slots would keep its memory.

        Raises:
            OSError: the folders cannot be made or written.
        """
        for name in self._names:
            self._make(self._slots / name, _SOCKET_FOLDER_MODE)
            self._link(self._sockets / name, self._slots / name / SOCKET_NAME)
            if self._shared is not None:
                self._make_shared(self._shared / name)
                self._withdraw(self._shared / name)

    def offer_pool(self, pool: Path) -> None:
        """Give L1 a name in the shared memory of every slot, for workers of any user."""
        if self._shared is None:
            return
        if self._group:
            os.chown(pool, -1, self._group)
        pool.chmod(_POOL_GROUP_MODE if self._group else _POOL_MODE)
        self._pool = pool
        for name in self._names:
            self._link(pool, self._shared / name / pool.name)

    def withdraw_pool(self) -> None:
        """Take L1's names away, so that its memory is free once it is unmapped."""
        self._pool = None
        if self._shared is not None:
            for name in self._names:
                with contextlib.suppress(OSError):
                    self._withdraw(self._shared / name)

    def renew(self, name: str) -> None:
        """Give the next container of a slot folders that nobody has seen.

        Raises:
            OSError: they cannot be made; the container must not start with the earlier ones.
        """
        self._replace(self._slots / name, _SOCKET_FOLDER_MODE)
        self._link(self._sockets / name, self._slots / name / SOCKET_NAME)
        if self._shared is not None:
            folder = self._shared / name
            self._replace(folder, _SHARED_MODE)
            self._make_shared(folder)
            if self._pool is not None:
                self._link(self._pool, folder / self._pool.name)

    def remove_left_overs(self, name: str) -> int:
        """Empty the shared memory of a slot that no pod has; return how many files there were."""
        if self._shared is None:
            return 0
        files = self._segments(self._shared / name)
        for path in files:
            _remove(path)
        return len(files)

    def mounts(self, name: str) -> Sequence[MountPoint]:
        """What the kubelet mounts into a slot's container."""
        mounts = [MountPoint(IN_CONTAINER, f"{self._host_slots}/{name}", read_only=True)]
        if self._shared is not None:
            shared = f"{self._host_shared}/{name}"
            mounts.append(MountPoint(str(SHM_DIRECTORY), shared, read_only=False))
        return mounts

    @staticmethod
    def environment(name: str) -> Mapping[str, str]:
        """What the kubelet puts into the environment of a slot's container."""
        return {"LMCACHE_KUBE_URL": URL, "LMCACHE_KUBE_SLOT": name}

    def segments_of(self, run: SlotRun) -> Path:
        """Where the shared memory of a worker is, as far as the agent can see it.

        Raises:
            LayoutError: the container has more than it may.
        """
        if not run or self._shared is None:
            return SHM_DIRECTORY
        if excess := self.use_of(run.slot).excess:
            raise LayoutError(
                f"{run.words} has {excess}: make the worker's KV memory smaller, or raise"
                " --slot-shared-memory-bytes"
            )
        return self._shared / run.slot

    def use_of(self, name: str) -> SharedMemoryUse:
        """Measure the shared memory of a slot. Takes no longer, whatever a container does there."""
        if self._shared is None:
            return SharedMemoryUse(0, 0, 0)
        nbytes = files = 0
        pending = [(path, 1) for path in self._segments(self._shared / name)]
        while pending and files + len(pending) <= _MOST_FILES:
            path, depth = pending.pop()
            files += 1 if depth < _DEEPEST else _MOST_FILES
            with contextlib.suppress(OSError):  # gone meanwhile
                status = path.lstat()
                nbytes += max(status.st_size, status.st_blocks * _BLOCK_BYTES)
                if stat.S_ISDIR(status.st_mode):
                    pending += [(inner, depth + 1) for inner in _some(path)]
        return SharedMemoryUse(nbytes, files + len(pending), self._limit_bytes)

    def _segments(self, folder: Path) -> Sequence[Path]:
        return [
            path for path in _some(folder) if self._pool is None or path.name != self._pool.name
        ]

    def _replace(self, folder: Path, mode: int) -> None:
        """Put a new folder in the place of one; the earlier one is emptied."""
        fresh, old = (
            folder.with_name(f".new-{folder.name}"),
            folder.with_name(f".old-{folder.name}"),
        )
        for left_over in (fresh, old):
            _remove(left_over)
        self._make(fresh, mode)
        with contextlib.suppress(FileNotFoundError):
            folder.rename(old)
        fresh.rename(folder)
        _remove(old)

    @staticmethod
    def _make(folder: Path, mode: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(mode)  # whatever the umask is

    def _make_shared(self, folder: Path) -> None:
        self._make(folder, _GROUP_MODE if self._group else _SHARED_MODE)
        if self._group:
            os.chown(folder, -1, self._group)
            folder.chmod(_GROUP_MODE)  # a change of the group may drop bits

    @staticmethod
    def _link(source: Path, name: Path) -> None:
        """Give a file another name, in the place of whatever has that name."""
        fresh = name.with_name(f".{name.name}")
        fresh.unlink(missing_ok=True)
        os.link(source, fresh)
        fresh.rename(name)

    @staticmethod
    def _withdraw(folder: Path) -> None:
        for path in folder.glob(f"{OWN_PREFIX}*"):
            path.unlink()


def _some(folder: Path) -> Sequence[Path]:
    """List a folder, up to one file more than is looked at."""
    with os.scandir(folder) as entries:
        return [Path(entry.path) for entry in islice(entries, _MOST_FILES + 2)]  # one is L1


def _remove(path: Path) -> None:
    """Remove whatever a container left there; links are not followed."""
    with contextlib.suppress(FileNotFoundError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
