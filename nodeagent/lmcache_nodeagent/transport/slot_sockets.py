"""One Unix socket for each slot of the device plugin, and who speaks over it.

libzmq tells nothing about the local end of a connection but its descriptor, which may be another's
by the time that a message is read. So each slot's socket has a ZAP domain (RFC 27): at the
handshake of a connection libzmq asks which user that is, we answer with the slot and the run that
has it, and libzmq puts the answer into the metadata of every message of that connection.
"""

from __future__ import annotations

import contextlib
import secrets
from typing import TYPE_CHECKING

import zmq

from lmcache_nodeagent.liveness.slots import NO_SLOT, SlotRun

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

_ADDRESS = "inproc://zeromq.zap.01"
_SCHEME = "ipc://"


class SlotSockets:
    """Answers who speaks at which slot. Thread: zmq-router, once made."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], folder: Path, names: Sequence[str]
    ) -> None:
        self._folder = folder
        self._names = frozenset(names)
        self._secret = secrets.token_hex(16)  # a peer may send any metadata, but not this
        self.socket = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(_ADDRESS)

    def path(self, name: str) -> Path:
        """Where a slot's socket is bound; its folder has another name for it."""
        return self._folder / name

    def slot_of_address(self, address: str) -> str:
        """Return the slot whose socket is bound to an address, empty if none is."""
        folder, _, name = address.removeprefix(_SCHEME).rpartition("/")
        return name if folder == str(self._folder) and name in self._names else ""

    def answer(self, current: Callable[[str], SlotRun]) -> None:
        """Say whose the new connections are: of the run that has the slot now."""
        while True:
            try:  # RFC 27: an empty frame, version, request id, domain, address, ...
                asker, _, version, request_id, domain, *_ = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            run = current(domain.decode())
            user = f"{self._secret}/{run.slot}/{run.run}".encode()
            reply = (asker, b"", version, request_id, b"200", b"OK", user, b"")
            self.socket.send_multipart(reply, zmq.NOBLOCK)

    def slot_run(self, user: object) -> SlotRun:
        """Read our own answer back from a message's metadata; anything else is no slot."""
        secret, _, rest = str(user).partition("/")
        slot, _, run = rest.rpartition("/")
        return SlotRun(slot, int(run)) if secret == self._secret else NO_SLOT

    def unlink(self) -> None:
        """Remove the sockets' files."""
        for name in self._names:
            with contextlib.suppress(OSError):
                self.path(name).unlink()
