"""A machine within the machine: namespaces in which a node may do as it likes.

A kubelet and its runtime leave mounts, links, iptables chains and processes all over. Here they
do so in network, mount and process namespaces of their own, which end with their first process,
also if that is killed. Only control groups outlast them, and those have a parent of our own.

As a module this is that first process: it makes the network and the mounts, runs a command, and
takes over orphans until the command ends.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

NODE_ADDRESS = "192.0.2.1"
"""The node's, and the API server's; of a range that is for documentation, so in nobody's way."""


_CGROUPS = Path("/sys/fs/cgroup")
_UNIFIED = _CGROUPS / "unified"  # of no use beside version 1, but runc makes groups there too
_UNIFIED_CONTROLLERS = {"cpu", "cpuset", "hugetlb", "memory", "pids"}
"""A kubelet wants those of them in its groups that the machine has at all."""

_CGROUP_SECONDS = 10.0

# What kubelet and containerd write, wherever that is configured: bound over, so that the machine's
# own is neither seen nor touched.
_BOUND = (
    "/var/lib/cni",
    "/var/lib/containerd",
    "/var/lib/kubelet",
    "/var/log/containers",
    "/var/log/pods",
)
_TMPFS = ("/run", "/dev/shm")


def cgroup(folder: Path) -> str:
    """Name the control group, in each hierarchy, of all pods of the node that writes there."""
    digest = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()
    return f"lmcache-kube-e2e-{digest[:8]}"


def run_inside(folder: Path, command: Sequence[str]) -> int:
    """Run a command in new namespaces, with `folder` for what a node writes; return its status."""
    _make_cgroups(cgroup(folder))
    # If this process is killed, so is the first one in there, and with it all the others.
    outside = ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "--mount", "--pid", "--fork"]
    outside += ["--kill-child", "--mount-proc"]
    inside = [sys.executable, "-m", "tests.e2e.kube.namespaces", str(folder), *command]
    try:
        return subprocess.run([*outside, *inside], check=False).returncode
    finally:
        _remove_cgroups(cgroup(folder))


def _remove_cgroups(name: str) -> None:
    """Remove what a run left, unless something still runs in there."""
    for root in (parent / name for parent in (*_hierarchies(), _UNIFIED)):
        for entry in sorted(root.glob("**/"), key=lambda path: -len(path.parts)):
            deadline = time.monotonic() + _CGROUP_SECONDS
            while _busy(entry) and time.monotonic() < deadline:
                time.sleep(0.01)  # the kernel still takes the last process apart


def _busy(cgroup: Path) -> bool:
    try:
        cgroup.rmdir()
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def _make_cgroups(name: str) -> None:
    """Make the parent of all pods' control groups; kubelet wants it to be there."""
    _remove_cgroups(name)  # of a run that was killed
    for root in (parent / name for parent in _hierarchies()):
        if (root.parent / "cgroup.subtree_control").exists():
            present = set((root.parent / "cgroup.controllers").read_text().split())
            enabled = " ".join(f"+{name}" for name in sorted(_UNIFIED_CONTROLLERS & present))
            (root.parent / "cgroup.subtree_control").write_text(enabled)
        root.mkdir(exist_ok=True)
        for file in ("cpuset.cpus", "cpuset.mems"):  # empty in a new group of version 1
            if (root / file).exists() and not (root / file).read_text().strip():
                (root / file).write_text((root.parent / file).read_text())


def _hierarchies() -> list[Path]:
    """Return where control groups are: one place of version 2, or one for each controller."""
    if (_CGROUPS / "cgroup.controllers").exists():
        return [_CGROUPS]
    found = {path.resolve() for path in _CGROUPS.iterdir() if path.is_dir()}
    return sorted(found - {_UNIFIED})


def _make_network() -> None:
    """Give the node an address that pods can reach, and no way out: packets have nowhere to go."""
    _ip("link", "set", "lo", "up")
    _ip("link", "add", "node0", "type", "veth", "peer", "name", "wire0")
    _ip("address", "add", f"{NODE_ADDRESS}/24", "dev", "node0")
    _ip("link", "set", "node0", "up")
    _ip("link", "set", "wire0", "up")
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")


def _make_mounts(folder: Path) -> None:
    for place in _TMPFS:
        _run("mount", "-t", "tmpfs", "-o", "mode=1777", "tmpfs", place)
    for place in _BOUND:
        source = folder / place.removeprefix("/").replace("/", "-")
        source.mkdir(parents=True)
        Path(place).mkdir(parents=True, exist_ok=True)
        _run("mount", "--bind", str(source), place)


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


def _watch(command: Sequence[str]) -> int:
    """Run the command as the first process of a system does: every orphan becomes its child."""
    # A Ctrl-C in the terminal reaches the command by itself. Ignored, it would be so there too.
    signal.signal(signal.SIGINT, lambda number, frame: None)  # noqa: ARG005  # they are given
    bound = ["setpriv", "--pdeathsig", "KILL", *command]
    process = subprocess.Popen(bound)

    def forward(number: int, frame: FrameType | None) -> None:
        del frame
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)

    signal.signal(signal.SIGTERM, forward)
    while True:
        ended, status = os.wait()
        if ended == process.pid:
            return os.waitstatus_to_exitcode(status)


def _main(arguments: Sequence[str]) -> int:
    folder, *command = arguments
    assert os.getpid() == 1, "run_inside starts this"
    _make_mounts(Path(folder))
    _make_network()
    status = _watch(command)
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
