"""What the machine must have for a real node: root, programs of Debian packages, and powers.

As a script it needs no more than Python, before anything of the project is installed:

- `machine.py` prints the packages that are missing;
- `machine.py --can-host` prints why this machine cannot host a node and ends with 3, or with 0.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

CNI_PLUGINS = Path("/usr/lib/cni")
BUSYBOX = Path("/bin/busybox")
"""The pause container's only file, so it has to be the static one."""

CANNOT_HOST = 3
"""Exit status of `--can-host`: it is the machine, and no defect of the project."""

_PROGRAMS: Mapping[str, str] = {
    "buildah": "buildah",
    "containerd": "containerd",
    "debootstrap": "debootstrap",
    "ip": "iproute2",
    "iptables": "iptables",
    "mount": "mount",
    "runc": "runc",
    "setpriv": "util-linux",
    "unshare": "util-linux",
}
_FILES: Mapping[Path, str] = {
    BUSYBOX: "busybox-static",
    CNI_PLUGINS / "ptp": "containernetworking-plugins",
    Path("/etc/ssl/certs/ca-certificates.crt"): "ca-certificates",
}
_ROOT = Path(__file__).parents[3]
_CGROUPS = Path("/sys/fs/cgroup")
_CONTROLLERS = ("cpu", "cpuset", "memory", "pids")
_TUNED = ("kernel/panic", "kernel/panic_on_oops", "net/ipv4/ip_forward", "vm/overcommit_memory")
"""Under /proc/sys; a kubelet does not start where it cannot set its own of these."""

_SO_PEERPIDFD = 77  # include/uapi/asm-generic/socket.h
_NULL_DEVICE = os.makedev(1, 3)
_GIB = 1 << 30
_MEMORY_BYTES = 3 * _GIB  # containers, and four caches of 256 MiB in half of the memory
_DISK_BYTES = 4 * _GIB  # images as archives, in buildah's store and unpacked
_STEP_SECONDS = 240.0  # of a second, on a busy machine too, unless something hangs

# What kube-proxy and the plugin of the pods' network write: the matches and targets of their rules.
_RULES = (
    "nat -N PROBE",
    "nat -A PROBE -m comment --comment x -m addrtype --dst-type LOCAL -j RETURN",
    "nat -A PROBE -m mark ! --mark 0x1/0x1 -j RETURN",
    "nat -A PROBE -m statistic --mode random --probability 0.5 -j RETURN",
    "nat -A PROBE -j MARK --or-mark 0x1",
    "nat -A PROBE -j MASQUERADE --random-fully",
    "nat -A PROBE -p tcp -m tcp --dport 1 -j DNAT --to-destination 192.0.2.2:1",
    "filter -N PROBE",
    "filter -A PROBE -m conntrack --ctstate INVALID -j DROP",
    "filter -A PROBE -j REJECT",
)


class MachineLacks(Exception):
    """The machine cannot be a node; the message says what would make it one."""


def missing_packages() -> list[str]:
    """Return the Debian packages to install, in order."""
    absent = {package for program, package in _PROGRAMS.items() if not shutil.which(program)}
    absent |= {package for file, package in _FILES.items() if not file.exists()}
    if BUSYBOX.exists() and b"ld-linux" in BUSYBOX.read_bytes()[:4096]:  # names its loader
        absent.add(_FILES[BUSYBOX])
    return sorted(absent)


def problems() -> list[str]:
    """Return what keeps this machine from hosting a node: all of it, in sentences' parts."""
    found = []
    if os.geteuid():
        found.append(f"it needs root, and this is user {os.geteuid()}")
    if lacking := missing_packages():
        names = " ".join(lacking)
        found.append(
            f"Debian packages are missing: apt-get install --no-install-recommends {names}"
        )
    return found or _missing_powers()


def check_machine() -> None:
    """Check everything at once.

    Raises:
        MachineLacks: something is missing.
    """
    if found := problems():
        raise MachineLacks(f"this machine cannot be a Kubernetes node: {'; '.join(found)}")


def _missing_powers() -> list[str]:
    build = _ROOT / "build"
    build.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="node-probe-", dir=build) as made:
        looks = (_kernel, _room, _devices, _cgroups, _namespaces)
        return [problem for look in looks for problem in look(Path(made))]


# Each of these returns what is wrong, and leaves nothing but files in the folder.


def _kernel(folder: Path) -> list[str]:
    del folder
    found: list[str] = []
    left, right = socket.socketpair()
    with left, right, _noted(found, "who is at a Unix socket is not told (Linux 6.5 does)"):
        os.close(left.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD))
    return found


def _room(folder: Path) -> list[str]:
    found = []
    lines = Path("/proc/meminfo").read_text().splitlines()
    (available,) = [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvail")]
    if available < _MEMORY_BYTES:
        least = _MEMORY_BYTES / _GIB
        found.append(f"{available / _GIB:.1f} GiB of memory are available, of {least:.0f} it needs")
    if (free := shutil.disk_usage(folder).free) < _DISK_BYTES:
        least = _DISK_BYTES / _GIB
        found.append(f"{free / _GIB:.1f} GiB are free at {folder.parent}, of {least:.0f} it needs")
    return found


def _devices(folder: Path) -> list[str]:
    found: list[str] = []
    with _noted(found, "/dev/kmsg, where a kubelet learns of OOM kills, cannot be read"):
        os.close(os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK))
    with _noted(found, f"no device can be made and used in {folder.parent}"):
        os.mknod(folder / "null", 0o020666, _NULL_DEVICE)
        (folder / "null").write_text("x")
    return found


def _cgroups(folder: Path) -> list[str]:
    """Look where `namespaces.py` will make control groups, in either version's hierarchies."""
    found: list[str] = []
    unified = (_CGROUPS / "cgroup.controllers").exists()
    roots = [_CGROUPS] if unified else [_CGROUPS / name for name in _CONTROLLERS]
    with _noted(found, f"no control groups with {', '.join(_CONTROLLERS)} can be made"):
        if unified:
            enabled = " ".join(f"+{name}" for name in _CONTROLLERS)
            (_CGROUPS / "cgroup.subtree_control").write_text(enabled)
        for probe in (root / folder.name for root in roots):
            probe.mkdir()
            probe.rmdir()
    return found


def _namespaces(folder: Path) -> list[str]:
    """Try in namespaces what the node does in its own; nothing of it outlasts them."""
    entering = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    status, said = _run([*entering, sys.executable, __file__, "--inside", str(folder)])
    if status in {0, CANNOT_HOST}:
        return said.splitlines()
    return [f"no namespaces of network, mounts and processes can be made: {said}"]


def _tunables(folder: Path) -> list[str]:
    del folder
    found: list[str] = []
    for name in _TUNED:
        with _noted(found, "a setting of the kernel cannot be changed"):
            os.close(os.open(f"/proc/sys/{name}", os.O_WRONLY))
    return found


def _mounts(folder: Path) -> list[str]:
    places = {name: folder / name for name in ("tmpfs", "bound", "lower", "upper", "work", "all")}
    for place in places.values():
        place.mkdir()
    layers = ",".join(f"{name}dir={places[name]}" for name in ("lower", "upper", "work"))
    return _failures(
        ["mount", "-t", "tmpfs", "tmpfs", str(places["tmpfs"])],
        ["mount", "--bind", str(places["lower"]), str(places["bound"])],
        ["mount", "-t", "overlay", "overlay", "-o", layers, str(places["all"])],
    )


def _links(folder: Path) -> list[str]:
    del folder
    return _failures(
        *(
            ["ip", *words.split()]
            for words in (
                "link set lo up",
                "link add probe0 type veth peer name probe1",
                "address add 192.0.2.1/24 dev probe0",
                "link set probe0 up",
                "link set probe1 up",
                "route add 198.51.100.0/24 via 192.0.2.9",
            )
        )
    )


def _rules(folder: Path) -> list[str]:
    del folder
    return _failures(*(["iptables", "-w", "-t", *rule.split()] for rule in _RULES))


def _failures(*commands: Sequence[str]) -> list[str]:
    """Run commands until one fails, which is said."""
    for command in commands:
        status, said = _run(command)
        if status:
            return [f"`{' '.join(command)}` fails: {said}"]
    return []


@contextmanager
def _noted(found: list[str], meaning: str) -> Iterator[None]:
    """Note what an error of the system in the block means."""
    try:
        yield
    except OSError as error:
        found.append(f"{meaning}: {error}")


def _run(command: Sequence[str]) -> tuple[int, str]:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_STEP_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return 1, str(error)
    return done.returncode, f"{done.stdout}{done.stderr}".strip()


def _main(arguments: Sequence[str]) -> int:
    if not arguments:
        print(" ".join(missing_packages()))
        return 0
    if arguments[0] == "--inside":
        looks = (_tunables, _mounts, _links, _rules)
        found = [problem for look in looks for problem in look(Path(arguments[1]))]
    else:
        assert list(arguments) == ["--can-host"], arguments
        found = problems()
    for problem in found:
        print(problem)
    return CANNOT_HOST if found else 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
