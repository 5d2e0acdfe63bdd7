"""How much memory this process may still take, from each of the limits that could stop it.

A limit that is found out too late does not fail a call: the kernel kills a process with SIGBUS
(full tmpfs) or SIGKILL (cgroup). Hence whoever is about to take much asks before.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """What one limit leaves; `source` names it for people."""

    source: str
    available_bytes: int


@dataclass(frozen=True, slots=True)
class _CgroupFiles:
    """Where one version of the cgroup file system keeps its figures (kernel admin guide)."""

    mount: str
    limit: str
    usage: str
    reclaimable: tuple[str, ...]  # keys of memory.stat: page cache that gives way under pressure


_V2 = _CgroupFiles("", "memory.max", "memory.current", ("inactive_file", "active_file"))
_V1 = _CgroupFiles(
    "memory",
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
)


def memory_limits(directory: Path, root: Path = Path("/")) -> list[MemoryLimit]:
    """List every limit on memory that files in `directory` (a tmpfs) would count against.

    Args:
        directory: Where the files shall lie.
        root: Where `proc` and `sys` are found; another one in tests.
    """
    return [*_file_system_limit(directory), *_process_limits(root)]


def free_memory_bytes(root: Path = Path("/")) -> int:
    """Tell how much memory this process may still take."""
    return min(limit.available_bytes for limit in _process_limits(root))


def _process_limits(root: Path) -> list[MemoryLimit]:
    return [*_machine_limit(root / "proc/meminfo"), *_cgroup_limits(root)]


def _file_system_limit(directory: Path) -> Iterator[MemoryLimit]:
    figures = os.statvfs(directory)
    if figures.f_blocks:  # 0: a tmpfs mounted without a limit
        yield MemoryLimit(f"free space of {directory}", figures.f_bavail * figures.f_frsize)


def _machine_limit(meminfo: Path) -> Iterator[MemoryLimit]:
    for line in meminfo.read_text().splitlines():
        name, _, figure = line.partition(":")
        if name == "MemAvailable":
            yield MemoryLimit("MemAvailable of the machine", int(figure.split()[0]) * 1024)


def _cgroup_limits(root: Path) -> Iterator[MemoryLimit]:
    """Yield what is left in this process's cgroup and in each cgroup around it."""
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            files = _V2
        elif "memory" in controllers.split(","):
            files = _V1
        else:
            continue
        top = root / "sys/fs/cgroup" / files.mount
        for group in (PurePosixPath(path), *PurePosixPath(path).parents):
            yield from _cgroup_limit(top / group.relative_to("/"), files)


def _cgroup_limit(group: Path, files: _CgroupFiles) -> Iterator[MemoryLimit]:
    try:
        limit = (group / files.limit).read_text().strip()
        usage = int((group / files.usage).read_text())
        statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except FileNotFoundError:
        return  # the root cgroup, another version's mount, or a path outside our cgroup namespace
    if limit == "max":
        return
    reclaimable = sum(int(statistics.get(key, 0)) for key in files.reclaimable)
    left = int(limit) - usage + reclaimable
    yield MemoryLimit(f"memory limit of cgroup {group}", max(left, 0))
