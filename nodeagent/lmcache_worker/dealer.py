"""The client's socket: one DEALER connection with bounded waits."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol, Self

import zmq

_CONNECT_TIMEOUT_MS = 5000
_RECONNECT_MAX_MS = 1000


class Connection(Protocol):
    """What the client needs of a connection."""

    def send(self, frames: Sequence[bytes]) -> None:
        """Queue one message."""

    def receive(self, timeout_seconds: float) -> list[bytes] | None:
        """Return the next message, None after the time-out."""

    def close(self) -> None:
        """Drop everything; idempotent."""


class DealerConnection:
    """A DEALER to one server. Thread: the one that made it (asserted).

    While the server is away messages queue and go out in order to whichever server appears at
    the address, as with stock clients.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        """Make the socket; `open` connects it.

        Args:
            context: Its own, ended by `close`.
        """
        self._thread = threading.get_ident()
        self._context = context
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IPV6, 1)
        self._socket.setsockopt(zmq.CONNECT_TIMEOUT, _CONNECT_TIMEOUT_MS)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)

    @classmethod
    def open(cls, url: str) -> Self:
        """Connect, which does not wait for the server.

        Args:
            url: `tcp://host:port`, `ipc:///path`, or `host:port` for TCP.
        """
        connection = cls(zmq.Context())
        try:
            connection._socket.connect(url if "://" in url else f"tcp://{url}")
        except zmq.ZMQError:
            connection.close()
            raise
        return connection

    def send(self, frames: Sequence[bytes]) -> None:
        """Queue one message.

        Raises:
            zmq.Again: The send queue is full: the server has not read for a long time.
        """
        self._assert_own_thread()
        self._socket.send_multipart(frames, zmq.DONTWAIT)

    def receive(self, timeout_seconds: float) -> list[bytes] | None:
        """Return the next message, None after the time-out."""
        self._assert_own_thread()
        if not self._socket.poll(round(timeout_seconds * 1000)):
            return None
        return self._socket.recv_multipart()

    def close(self) -> None:
        """Close the connection and drop what is still queued; idempotent."""
        self._assert_own_thread()
        self._socket.close()
        self._context.term()

    def _assert_own_thread(self) -> None:
        assert threading.get_ident() == self._thread, "a ZMQ socket never leaves its thread"
