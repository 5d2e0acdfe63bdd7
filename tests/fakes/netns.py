"""A network namespace with one link to the host, in which a test can lose packets.

Needs root, `ip` and `tc` (Debian package iproute2); no packet filter, which not every kernel has.
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

_TOOLS = ("ip", "tc")
_LOSE = ("qdisc", "replace")
_EVERYTHING = ("root", "blackhole")  # the sender sees success, as on a real network
_NOTHING = ("root", "pfifo")
_numbers = count()

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root makes network namespaces")


class NetNamespace:
    """Entered: the namespace exists, its link is up. `host` is our address as seen from inside.

    Raises:
        AssertionError: a tool is missing, with the package that has it.
    """

    def __init__(self) -> None:
        for tool in _TOOLS:
            assert shutil.which(tool), f"`{tool}` not found: apt-get install iproute2"
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

    def lose_outgoing(self) -> None:
        """Lose every packet that leaves the namespace, SYNs among them; what enters arrives."""
        self._inside("tc", *_LOSE, "dev", "eth0", *_EVERYTHING)

    def lose_incoming(self) -> None:
        """Lose every packet that enters the namespace, acknowledgements among them."""
        _run("tc", *_LOSE, "dev", self._outside, *_EVERYTHING)

    def lose_everything(self) -> None:
        """Lose every packet, both ways, without a word to either side."""
        self.lose_outgoing()
        self.lose_incoming()

    def lose_nothing(self) -> None:
        """Let all packets through again."""
        self._inside("tc", *_LOSE, "dev", "eth0", *_NOTHING)
        _run("tc", *_LOSE, "dev", self._outside, *_NOTHING)

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
