"""What the kernel says, beside what the agent says: mappings, process states, shared memory."""

from __future__ import annotations

import os
import socket
from pathlib import Path

_SHARED_MEMORY = Path("/dev/shm")

_SO_PEERPIDFD = 77
"""include/uapi/asm-generic/socket.h, Linux 6.5."""


def mapped_bytes(agent_pid: int, worker_pid: int) -> int:
    """Bytes of a worker's shared memory in the agent's address space (proc_pid_maps(5))."""
    segment = f"/lmcache_kv_{worker_pid}_"
    total = 0
    for line in Path(f"/proc/{agent_pid}/maps").read_text().splitlines():
        if segment in line:
            start, _, end = line.split(maxsplit=1)[0].partition("-")
            total += int(end, 16) - int(start, 16)
    return total


def shared_bytes(worker_pid: int) -> int:
    """Bytes of the shared memory that a worker has made."""
    return sum(path.stat().st_size for path in _SHARED_MEMORY.glob(f"lmcache_kv_{worker_pid}_*"))


def process_state(pid: int) -> str:
    """State letter of a process (proc_pid_stat(5)): `T` is stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def exits_are_proven() -> bool:
    """Tell whether this kernel hands out a descriptor of the process at a Unix socket's end."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        try:
            descriptor = ours.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
        except OSError:
            return False
    os.close(descriptor)
    return True


def regions_of_port(port: int) -> list[str]:
    """Names in /dev/shm of an agent's L1 region."""
    return [path.name for path in _SHARED_MEMORY.glob(f"lmcache-kube.l1.port-{port}")]
