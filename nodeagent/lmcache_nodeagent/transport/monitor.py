"""The ROUTER's socket monitor: which connections were accepted, and which ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import zmq
from zmq.utils.monitor import parse_monitor_message

if TYPE_CHECKING:
    from collections.abc import Iterator

_FAILED_HANDSHAKES = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | _FAILED_HANDSHAKES

_ADDRESS = "inproc://lmcache-kube-router-monitor"


@dataclass(frozen=True, slots=True)
class Accepted:
    """A connection was accepted on `descriptor`, by the socket bound to `address`."""

    descriptor: int
    address: str = ""


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The connection on `descriptor` ended; `handshake_failed` if before it spoke ZMTP."""

    descriptor: int
    handshake_failed: bool


class SocketMonitor:
    """Reads the monitor events of one socket in order. Thread: zmq-router, once made.

    The queue is unbounded: libzmq blocks its I/O thread on a full one.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], router: zmq.Socket[bytes]) -> None:
        router.monitor(_ADDRESS, _EVENTS)
        self._router = router
        self.socket = context.socket(zmq.PAIR)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(_ADDRESS)
        self._handshake_failed = False

    def events(self) -> Iterator[Accepted | Disconnected]:
        """Yield everything that is queued.

        A failed handshake carries no descriptor, but comes right before the DISCONNECTED that
        does: both are written by the same I/O thread.
        """
        while True:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            message = parse_monitor_message(frames)
            event, value = message["event"], int(message["value"])
            if event & _FAILED_HANDSHAKES:
                self._handshake_failed = True
            elif event == zmq.EVENT_ACCEPTED:
                yield Accepted(value, message["endpoint"].decode(errors="replace"))
            elif event == zmq.EVENT_DISCONNECTED:
                failed, self._handshake_failed = self._handshake_failed, False
                yield Disconnected(value, failed)

    def close(self) -> None:
        """Stop monitoring."""
        self._router.disable_monitor()
        self.socket.close()
