"""The client of all measurements, the same for both servers: a bare DEALER and ready-made frames.

Frames are encoded before the clock runs, so that what is timed is the server and the socket.
"""

from __future__ import annotations

import itertools
import time
from types import TracebackType
from typing import Self

import zmq

from lmcache_worker.wire import decode_reply, encode_request

TIMEOUT_SECONDS = 30.0

_DOCUMENT = 2
"""The frame after uid and operation."""

Frames = list[bytes]


class Dealer:
    """One connection. Not thread-safe."""

    def __init__(self, url: str) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RECONNECT_IVL, 5)  # a server that starts is seen within 5 ms
        self.socket.connect(url)
        self._uids = itertools.count()

    def request(self, operation: str, *payload: object) -> Frames:
        """Encode a request."""
        return encode_request(next(self._uids), operation, payload)

    def send(self, frames: Frames) -> None:
        """Send an encoded request."""
        self.socket.send_multipart(frames)

    def receive(self, timeout_seconds: float = TIMEOUT_SECONDS) -> Frames | None:
        """Return the next reply, or None after the time-out."""
        if not self.socket.poll(int(timeout_seconds * 1000)):
            return None
        return self.socket.recv_multipart()

    def exchange(self, frames: Frames, timeout_seconds: float = TIMEOUT_SECONDS) -> Frames:
        """Send a request and return its reply; no other may be in flight.

        Raises:
            TimeoutError: No reply.
        """
        self.send(frames)
        while (reply := self.receive(timeout_seconds)) is not None:
            if reply[0] == frames[0]:  # the agent's probes carry a uid that no client reaches
                return reply
        raise TimeoutError(f"no reply within {timeout_seconds} s")

    def timed(self, frames: Frames) -> tuple[float, memoryview]:
        """Send a request; return the seconds until its reply is here, and the reply's document.

        Neither is copied on the way between the caller and libzmq: for what is large.

        Raises:
            TimeoutError: No reply, or one that refuses.
        """
        begin = time.perf_counter()
        self.socket.send_multipart(frames, copy=False)
        while self.socket.poll(int(TIMEOUT_SECONDS * 1000)):
            reply = self.socket.recv_multipart(copy=False)
            if reply[0].bytes == frames[0] and len(reply) == _DOCUMENT + 1:
                return time.perf_counter() - begin, reply[_DOCUMENT].buffer
        raise TimeoutError(f"no reply within {TIMEOUT_SECONDS} s")

    def call(self, operation: str, *payload: object) -> object:
        """Encode, exchange, decode: for what is not timed."""
        reply = self.exchange(self.request(operation, *payload))
        return decode_reply(0, operation, reply).result()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._context.destroy(linger=0)
