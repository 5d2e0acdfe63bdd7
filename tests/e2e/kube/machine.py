"""What the machine must have for a real node: root, and programs of Debian packages.

As a script it prints the packages that are missing, before anything of the project is installed.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

CNI_PLUGINS = Path("/usr/lib/cni")
BUSYBOX = Path("/bin/busybox")
"""The pause container's only file, so it has to be the static one."""

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


class MachineLacks(Exception):
    """The machine cannot be a node; the message says what would make it one."""


def missing_packages() -> list[str]:
    """Return the Debian packages to install, in order."""
    absent = {package for program, package in _PROGRAMS.items() if not shutil.which(program)}
    absent |= {package for file, package in _FILES.items() if not file.exists()}
    if BUSYBOX.exists() and b"ld-linux" in BUSYBOX.read_bytes()[:4096]:  # names its loader
        absent.add(_FILES[BUSYBOX])
    return sorted(absent)


def check_machine() -> None:
    """Check everything at once.

    Raises:
        MachineLacks: something is missing.
    """
    problems = []
    if os.geteuid():
        problems.append(f"it needs root, and this is user {os.geteuid()}")
    if lacking := missing_packages():
        names = " ".join(lacking)
        problems.append(
            f"Debian packages are missing: apt-get install --no-install-recommends {names}"
        )
    if problems:
        raise MachineLacks(f"this machine cannot be a Kubernetes node: {'; '.join(problems)}")


if __name__ == "__main__":
    print(" ".join(missing_packages()))
