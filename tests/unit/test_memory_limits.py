"""Memory limits as read from the kernel's files, laid out in a temporary tree."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lmcache_nodeagent.memory_limits import free_memory_bytes, memory_limits

MIB = 2**20


def lay_out(root: Path, files: dict[str, str]) -> None:
    """Write files below `root`, with their directories."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def limits_without_file_system(root: Path, files: dict[str, str]) -> dict[str, int]:
    """Return the limits found in the tree, by source with the tree's own path cut off."""
    machine = {"proc/meminfo": "MemTotal: 2048 kB\nMemAvailable:    1024 kB\n"}
    lay_out(root, machine | files)
    found = memory_limits(root, root)[1:]
    return {limit.source.replace(str(root), ""): limit.available_bytes for limit in found}


def test_the_file_system_and_the_machine_limit(tmp_path: Path) -> None:
    """Free space comes from the directory itself, available memory from meminfo in kB."""
    lay_out(tmp_path, {"proc/meminfo": "MemAvailable: 3 kB\n", "proc/self/cgroup": ""})
    file_system, machine = memory_limits(tmp_path, tmp_path)
    assert free_memory_bytes(tmp_path) == 3 * 1024, "whatever any file system has"
    assert file_system.source == f"free space of {tmp_path}"
    assert file_system.available_bytes > 0
    assert (machine.source, machine.available_bytes) == ("MemAvailable of the machine", 3 * 1024)


def test_a_tmpfs_without_a_limit_does_not_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Zero blocks mean no limit, not no room (tmpfs mounted with size=0)."""
    unlimited = os.statvfs_result((4096, 4096, 0, 0, 0, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _path: unlimited)
    lay_out(tmp_path, {"proc/meminfo": "MemAvailable: 3 kB\n", "proc/self/cgroup": ""})
    assert [limit.available_bytes for limit in memory_limits(tmp_path, tmp_path)] == [3072]


def test_each_cgroup_around_us_limits(tmp_path: Path) -> None:
    """Version 2: our group and its parents count, without page cache that can give way."""
    group = "sys/fs/cgroup/pods/pod1/agent"
    found = limits_without_file_system(
        tmp_path,
        {
            "proc/self/cgroup": "0::/pods/pod1/agent\n",
            f"{group}/memory.max": "max\n",
            f"{group}/memory.current": "1\n",
            f"{group}/memory.stat": "",
            "sys/fs/cgroup/pods/pod1/memory.max": f"{100 * MIB}\n",
            "sys/fs/cgroup/pods/pod1/memory.current": f"{60 * MIB}\n",
            "sys/fs/cgroup/pods/pod1/memory.stat": (
                f"anon 5\ninactive_file {20 * MIB}\nactive_file {10 * MIB}\n"
            ),
            "sys/fs/cgroup/pods/memory.max": "4096\n",
            "sys/fs/cgroup/pods/memory.current": "8192\n",
            "sys/fs/cgroup/pods/memory.stat": "anon 8192\n",
        },
    )
    assert found == {
        "MemAvailable of the machine": MIB,
        "memory limit of cgroup /sys/fs/cgroup/pods/pod1": 70 * MIB,
        "memory limit of cgroup /sys/fs/cgroup/pods": 0,
    }


def test_a_container_sees_its_own_group_as_the_root(tmp_path: Path) -> None:
    """In a cgroup namespace the path is / and the limit lies at the mount itself."""
    found = limits_without_file_system(
        tmp_path,
        {
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/memory.max": "1000\n",
            "sys/fs/cgroup/memory.current": "400\n",
            "sys/fs/cgroup/memory.stat": "",
        },
    )
    assert found["memory limit of cgroup /sys/fs/cgroup"] == 600


def test_version_1_limits_too(tmp_path: Path) -> None:
    """Only the memory controller's line counts, with version 1's file names."""
    found = limits_without_file_system(
        tmp_path,
        {
            "proc/self/cgroup": "5:cpu,cpuacct:/a\n4:memory:/a\n0::/\n",
            "sys/fs/cgroup/memory/a/memory.limit_in_bytes": "1000\n",
            "sys/fs/cgroup/memory/a/memory.usage_in_bytes": "900\n",
            "sys/fs/cgroup/memory/a/memory.stat": "total_inactive_file 300\n",
        },
    )
    assert found == {
        "MemAvailable of the machine": MIB,
        "memory limit of cgroup /sys/fs/cgroup/memory/a": 400,
    }
