"""What a test may not leave behind: threads, child processes, descriptors, shared memory."""

from __future__ import annotations

import fcntl
import gc
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

_SHARED_MEMORY = Path("/dev/shm")
_OWN_PREFIXES = ("lmcache-kube.", "lmcache_kv_")
_LAST_STANDARD_STREAM = 2
_PATIENCE_SECONDS = 60.0  # threads and processes that were told to end may take a moment
_INTERVAL_SECONDS = 0.01

_made_for_us: set[str] = set()  # names in /dev/shm, without a worker's trailing number


def made_for_us(*names: str) -> None:
    """Say that child processes of this test run make these, so that they count if left behind.

    Whatever else runs on the machine has its own, be it another test of this run; without this
    tests would be blamed for what a process that was killed on purpose has left for a moment.
    """
    _made_for_us.update(names)


@dataclass(frozen=True)
class Holdings:
    """What this process holds at one moment, each written for people."""

    threads: frozenset[str]
    processes: frozenset[str]
    descriptors: frozenset[str]
    shared_memory: frozenset[str]

    @classmethod
    def now(cls) -> Holdings:
        """Look at this process."""
        return cls(
            threads=frozenset(f"{t.name} ({t.ident})" for t in threading.enumerate()),
            processes=frozenset(
                f"{p.pid} (started {p.create_time()})" for p in psutil.Process().children()
            ),
            descriptors=frozenset(_descriptors()),
            shared_memory=frozenset(_shared_memory()),
        )

    def beyond(self, earlier: Holdings) -> list[str]:
        """Name everything that `earlier` did not have."""
        return [
            *(f"thread {thread}" for thread in sorted(self.threads - earlier.threads)),
            *(f"process {process}" for process in sorted(self.processes - earlier.processes)),
            *(f"descriptor {fd}" for fd in sorted(self.descriptors - earlier.descriptors)),
            *(f"/dev/shm/{name}" for name in sorted(self.shared_memory - earlier.shared_memory)),
        ]


def leaks_since(earlier: Holdings) -> list[str]:
    """Return what is still held beyond `earlier` after a moment's patience."""
    found = Holdings.now().beyond(earlier)
    if found:
        gc.collect()  # what only a cycle still holds is not a leak
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while found and time.monotonic() < deadline:
        time.sleep(_INTERVAL_SECONDS)
        found = Holdings.now().beyond(earlier)
    return found


def _descriptors() -> list[str]:
    """All but the standard streams, which pytest turns this way and that."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        if int(entry.name) <= _LAST_STANDARD_STREAM:
            continue
        try:
            found.append(f"{entry.name} -> {entry.readlink()}")
        except FileNotFoundError:
            continue  # the listing's own descriptor
    return found


def _shared_memory() -> list[str]:
    """Entries that are ours by name and that no living process outside this test owns."""
    return [
        path.name
        for path in _SHARED_MEMORY.iterdir()
        if path.name.startswith(_OWN_PREFIXES) and not _owned_elsewhere(path)
    ]


def _owned_elsewhere(path: Path) -> bool:
    """Tell an entry of another test run on this machine."""
    pid = path.name.removeprefix("lmcache_kv_").partition("_")[0]
    if pid.isdigit():
        if int(pid) == os.getpid():
            return False
        return psutil.pid_exists(int(pid)) or _made_by_others(f"lmcache_kv_{pid}")
    return _is_locked(path) or _made_by_others(path.name)


def _made_by_others(name: str) -> bool:
    """Nobody lives who could tell: only what our own children are known to make is ours."""
    return name not in _made_for_us


def _is_locked(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return True  # gone by now, or another user's
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        return False
    finally:
        os.close(descriptor)
