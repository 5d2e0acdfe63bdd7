"""One peer that connects without end keeps nobody else away."""

from __future__ import annotations

import selectors
import socket
import struct
import sys
import threading
from types import TracebackType
from typing import Self

from tests.fakes.agent_process import FAST_WINDOWS, AgentProcess
from tests.fakes.raw_client import Footprint
from tests.fakes.worker_process import Worker
from tests.polling import poll_until

DESCRIPTORS = 1024
SOCKETS = 600
"""More than all connections that so few descriptors allow, fewer than the descriptors."""

LIMITED = f"""
import os, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, ({DESCRIPTORS}, {DESCRIPTORS}))
os.execv(sys.argv[1], sys.argv[1:])
"""
FEW_DESCRIPTORS = (sys.executable, "-c", LIMITED)
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # leaves no port behind in TIME_WAIT


class _Storm:
    """Sockets of one address, each of which connects anew as soon as it is closed."""

    def __init__(self, port: int, count: int) -> None:
        self._address = ("127.0.0.1", port)
        self._count = count
        self._open = selectors.DefaultSelector()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="storm")

    def _connect(self) -> None:
        one = socket.socket()
        one.setblocking(False)  # noqa: FBT003  # its only argument
        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        one.connect_ex(self._address)
        self._open.register(one, selectors.EVENT_READ)

    def _run(self) -> None:
        for _ in range(self._count):
            self._connect()
        while not self._stop.is_set():
            for key, _ in self._open.select(0.1):
                one = key.fileobj
                assert isinstance(one, socket.socket)
                try:
                    goes_on = one.recv(4096)
                except OSError:
                    goes_on = b""
                if not goes_on:
                    self._open.unregister(one)
                    one.close()
                    self._connect()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()
        for key in tuple(self._open.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
        self._open.close()


def test_a_peer_that_connects_without_end_keeps_nobody_away() -> None:
    """With more sockets than there may be connections: workers come back, probes are answered."""
    with AgentProcess(*FAST_WINDOWS, wrapper=FEW_DESCRIPTORS) as agent:
        agent.status()
        footprint = Footprint(agent.pid)
        with _Storm(agent.port, SOCKETS):
            poll_until(lambda: _turned_away(agent) > 1000, "the storm rages")
            for number in range(1, 11):
                with Worker(f"tcp://127.0.0.2:0;127.0.0.1:{agent.port}", number) as worker:
                    worker.register()
                    assert worker.ping()
                    assert worker.store(number)
                    worker.unregister()
            before = _turned_away(agent)
            poll_until(lambda: _turned_away(agent) > before, "it still does")
            assert agent.get("/healthz")["healthy"]
        footprint.descriptors_return()
        assert agent.metric("connections_turned_away_total", reason="all") == 0
        records = agent.log_records("connection_turned_away")
        assert {record["peer"].partition(":")[0] for record in records} == {"127.0.0.1"}


def _turned_away(agent: AgentProcess) -> float:
    return agent.metric("connections_turned_away_total", reason="peer")
