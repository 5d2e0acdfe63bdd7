"""The HTTP server on a real socket: it answers, withstands slow clients and stops."""

from __future__ import annotations

import contextlib
import http.client
import logging
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence

import pytest

from lmcache_nodeagent.errors import ConfigError
from lmcache_nodeagent.observability import http as http_module
from lmcache_nodeagent.observability.http import HttpServer, listen
from tests.polling import PATIENCE_SECONDS, poll_until

HOST = "127.0.0.1"


class SmallView:
    """An agent that is well; one answer is large."""

    def healthy(self) -> tuple[bool, str]:
        """Be well."""
        return True, "fine"

    def ready(self) -> tuple[bool, str]:
        """Be ready."""
        return True, "fine"

    def status(self) -> Mapping[str, object]:
        """Fail, as no view should."""
        raise RuntimeError("a fault of the view")

    def instances(self) -> Sequence[Mapping[str, object]]:
        """Return about 1 MB, more than a socket buffers."""
        return [{"instance_id": str(number), "padding": "x" * 100} for number in range(8000)]

    def leases(self) -> Sequence[Mapping[str, object]]:
        """One."""
        return [{"request_id": "r1"}]

    def reaps(self, since: int) -> Mapping[str, object]:
        """Return nothing."""
        return {"next": since}

    def metrics_text(self) -> bytes:
        """Return nothing."""
        return b""


@pytest.fixture
def server() -> Iterator[HttpServer]:
    """Run a server on a free port and see that it ends within a second or so."""
    server = HttpServer(listen(HOST, 0), SmallView())
    thread = threading.Thread(target=server.run, name="http")
    thread.start()
    yield server
    server.stop()
    thread.join(timeout=PATIENCE_SECONDS)
    assert not thread.is_alive()


def get(port: int, path: str, host: str = HOST) -> tuple[int, bytes]:
    """Send one request and read the answer."""
    connection = http.client.HTTPConnection(host, port, timeout=PATIENCE_SECONDS)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def test_the_port_is_known_before_serving_and_early_clients_are_answered() -> None:
    """With port 0 the agent prints the port it got."""
    server = HttpServer(listen(HOST, 0), SmallView())
    assert server.port > 0
    early = socket.create_connection((HOST, server.port), timeout=PATIENCE_SECONDS)
    early.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
    thread = threading.Thread(target=server.run, name="http")
    thread.start()
    assert early.recv(100).startswith(b"HTTP/1.0 200 OK")
    early.close()
    server.stop()
    thread.join(timeout=PATIENCE_SECONDS)


def test_a_server_that_never_ran_gives_its_port_back() -> None:
    """Start-up can fail after the port was taken."""
    server = HttpServer(listen(HOST, 0), SmallView())
    port = server.port
    server.close()
    again = HttpServer(listen(HOST, port), SmallView())
    again.close()


def test_a_taken_port_is_a_configuration_problem() -> None:
    """The message names flags, values and what to do."""
    server = HttpServer(listen(HOST, 0), SmallView())
    with pytest.raises(ConfigError, match=f"http-port {server.port} cannot be listened on"):
        HttpServer(listen(HOST, server.port), SmallView())
    server.close()


@pytest.mark.parametrize(
    ("host", "reached_at"),
    [("localhost", HOST), ("*", HOST), ("[::1]", "::1"), ("::", HOST)],
)
def test_hosts_of_both_families_can_be_given(host: str, reached_at: str) -> None:
    """IPv6 with and without brackets; all addresses means both families."""
    server = HttpServer(listen(host, 0), SmallView())
    thread = threading.Thread(target=server.run, name="http")
    thread.start()
    try:
        assert get(server.port, "/v1/reaps?since=3", host=reached_at) == (200, b'{"next": 3}\n')
    finally:
        server.stop()
        thread.join(timeout=PATIENCE_SECONDS)


def test_clients_that_send_half_a_request_hold_up_nobody(server: HttpServer) -> None:
    """They hold a connection each, no thread."""
    slow = [socket.create_connection((HOST, server.port)) for _ in range(50)]
    for client in slow:
        client.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n")
    assert get(server.port, "/healthz")[0] == 200
    for client in slow:
        client.close()


def test_clients_that_do_not_read_hold_up_nobody(server: HttpServer) -> None:
    """Answers wait in buffers, not on threads."""
    deaf = [socket.create_connection((HOST, server.port)) for _ in range(8)]
    for client in deaf:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.sendall(b"GET /v1/instances HTTP/1.1\r\nHost: x\r\n\r\n")
    assert get(server.port, "/healthz")[0] == 200
    for client in deaf:
        client.close()


@pytest.mark.slow
def test_idle_connections_are_cut_off(server: HttpServer) -> None:
    """So that they cannot pile up."""
    with socket.create_connection((HOST, server.port), timeout=PATIENCE_SECONDS) as idle:
        assert idle.recv(1) == b""


def test_a_fault_of_the_view_is_a_500_and_the_server_goes_on(
    server: HttpServer, caplog: pytest.LogCaptureFixture
) -> None:
    """The traceback is in the log, not in the answer."""
    status, body = get(server.port, "/status")
    assert status == 500
    assert b"a fault of the view" not in body
    poll_until(lambda: "a fault of the view" in caplog.text, "the traceback is logged")
    assert any(record.levelno == logging.ERROR for record in caplog.records)
    assert get(server.port, "/healthz")[0] == 200


def test_garbage_is_refused_and_the_server_goes_on(server: HttpServer) -> None:
    """Whatever speaks on the port."""
    with socket.create_connection((HOST, server.port), timeout=PATIENCE_SECONDS) as client:
        client.sendall(b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\r\n\r\n")
        assert b"400 Bad Request" in client.recv(100)
    assert get(server.port, "/healthz")[0] == 200


def test_a_client_with_many_connections_loses_them_and_others_keep_theirs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Silent ones would hold their descriptors until they time out, which is put off here."""
    monkeypatch.setattr(http_module, "_SILENT_SECONDS", 3600)
    server = HttpServer(listen(HOST, 0), SmallView())
    thread = threading.Thread(target=server.run, name="http")
    thread.start()
    with contextlib.ExitStack() as stack:
        stack.callback(thread.join, 5)
        stack.callback(server.stop)
        probe = http.client.HTTPConnection(HOST, server.port, timeout=PATIENCE_SECONDS)
        stack.callback(probe.close)
        probe.connect()
        many = [
            stack.enter_context(
                socket.create_connection((HOST, server.port), source_address=("127.0.0.9", 0))
            )
            for _ in range(300)
        ]
        poll_until(lambda: sum(map(_was_closed, many)) >= 300 - 48, "room is made")
        probe.request("GET", "/healthz")
        assert probe.getresponse().status == 200
    assert not thread.is_alive()


def _was_closed(end: socket.socket) -> bool:
    end.settimeout(0)
    try:
        return end.recv(1) == b""
    except BlockingIOError:
        return False
