"""A network namespace with one link to the host, in which a test can lose packets.

Needs root, `ip` (Debian package iproute2) and `nft` (Debian package nftables).
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from itertools import count
from types import TracebackType
from typing import Self

import pytest

_TOOLS = {"ip": "iproute2", "nft": "nftables"}
_numbers = count()

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root makes network namespaces")


class NetNamespace:
    """Entered: the namespace exists, its link is up. `host` is our address as seen from inside.

    Raises:
        AssertionError: a tool is missing, with the package that has it.
    """

    def __init__(self) -> None:
        for tool, package in _TOOLS.items():
            assert shutil.which(tool), f"`{tool}` not found: apt-get install {package}"
        number = (os.getpid() * 8 + next(_numbers)) % 4096
        self.name = f"lmk{os.getpid()}x{number}"
        self._outside = f"lmk{number}o"
        network = f"198.18.{number // 64}"  # a /30 of the range for benchmarks, RFC 2544
        self.host = f"{network}.{number % 64 * 4 + 1}"
        self.address = f"{network}.{number % 64 * 4 + 2}"

    @property
    def wrapper(self) -> Sequence[str]:
        """What goes before a command that shall run inside."""
        return ("ip", "netns", "exec", self.name)

    def drop_new_connections(self) -> None:
        """Lose every SYN that leaves the namespace."""
        self._filter("tcp flags & (syn | ack) == syn drop")

    def drop_everything(self) -> None:
        """Lose every packet, both ways, without a word to either side."""
        self._filter("drop")

    def drop_nothing(self) -> None:
        """Let all packets through again."""
        self._inside("nft", "delete", "table", "ip", "loss")

    def _filter(self, rule: str) -> None:
        chains = "".join(
            f"chain {hook} {{ type filter hook {hook} priority 0; {rule}; }}\n"
            for hook in ("input", "output")
        )
        _run("ip", "netns", "exec", self.name, "nft", f"table ip loss {{\n{chains}}}")

    def _inside(self, *command: str) -> None:
        _run(*self.wrapper, *command)

    def __enter__(self) -> Self:
        _run("ip", "netns", "add", self.name)
        try:
            self._connect()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _connect(self) -> None:
        peer = ("peer", "name", "eth0", "netns", self.name)
        _run("ip", "link", "add", self._outside, "type", "veth", *peer)
        _run("ip", "address", "add", f"{self.host}/30", "dev", self._outside)
        _run("ip", "link", "set", self._outside, "up")
        self._inside("ip", "address", "add", f"{self.address}/30", "dev", "eth0")
        self._inside("ip", "link", "set", "eth0", "up")
        self._inside("ip", "link", "set", "lo", "up")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # The namespace lives on while sockets in it do; its link goes now.
        subprocess.run(["ip", "link", "delete", self._outside], check=False, capture_output=True)  # noqa: S607
        _run("ip", "netns", "delete", self.name)


def _run(*command: str) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
