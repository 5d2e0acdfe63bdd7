"""A TCP proxy in front of an agent, so that a test can cut connections that both sides keep."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from types import TracebackType
from typing import Self

from tests.polling import PATIENCE_SECONDS

_CHUNK = 65536


class TcpProxy:
    """Forwards to `127.0.0.1:port`. One thread copies; the test cuts."""

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self._target = ("127.0.0.1", port)
        self._listener = socket.create_server((host, 0))
        self._host = host
        self._lock = threading.Lock()  # guards: _pairs
        self._pairs: dict[socket.socket, socket.socket] = {}
        self._wakeup, self._waker = socket.socketpair()
        self._thread = threading.Thread(target=self._copy, name="tcp-proxy")
        self._stopping = False

    @property
    def url(self) -> str:
        """Where workers connect."""
        return f"tcp://{self._host}:{self._listener.getsockname()[1]}"

    def connections(self) -> int:
        """Count the connections that are open through this proxy."""
        with self._lock:
            return len(self._pairs) // 2

    def cut(self) -> None:
        """End every connection towards both sides; new ones are accepted at once."""
        with self._lock:
            ends, self._pairs = list(self._pairs), {}
        for end in ends:
            with contextlib.suppress(OSError):  # the other side may have gone first
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        self._wake()

    def _wake(self) -> None:
        self._waker.send(b"\0")

    def _copy(self) -> None:
        """Thread: tcp-proxy."""
        while not self._stopping:
            with self._lock:
                ends = list(self._pairs)
            watched = [self._listener, self._wakeup, *(end for end in ends if end.fileno() >= 0)]
            try:
                readable, _, _ = select.select(watched, [], [])
            except (OSError, ValueError):
                continue  # one was cut meanwhile
            for end in readable:
                self._serve(end)

    def _serve(self, end: socket.socket) -> None:
        if end is self._wakeup:
            self._wakeup.recv(_CHUNK)
        elif end is self._listener:
            self._connect()
        else:
            self._forward(end)

    def _connect(self) -> None:
        worker, _ = self._listener.accept()
        agent = socket.create_connection(self._target)
        with self._lock:
            self._pairs |= {worker: agent, agent: worker}

    def _forward(self, end: socket.socket) -> None:
        with self._lock:
            other = self._pairs.get(end)
        if other is None:
            return
        try:
            data = end.recv(_CHUNK)
            if data:
                other.sendall(data)
                return
        except OSError:
            pass
        with self._lock:
            self._pairs.pop(end, None)
            self._pairs.pop(other, None)
        end.close()
        other.close()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stopping = True
        self.cut()
        self._thread.join(PATIENCE_SECONDS)
        self._listener.close()
        self._wakeup.close()
        self._waker.close()
