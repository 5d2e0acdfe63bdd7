"""HTTP: health and metrics for everybody, status for those on this machine. It changes nothing.

waitress reads requests and writes replies on the thread that calls `HttpServer.run`, named `http`;
requests that have arrived in full are answered on two threads of its own, `waitress-0` and
`waitress-1`, which end before `run` returns. A client that is slow to send or to read holds a
connection, never a thread, and is cut off; whoever has the most connections loses some of them when
there are many, so that a probe is always let in.
"""

from __future__ import annotations

import ipaddress
import json
import socket
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from threading import Event
from typing import Protocol, cast
from urllib.parse import parse_qs
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from waitress.channel import HTTPChannel
from waitress.server import MultiSocketServer, create_server

from lmcache_nodeagent.config_rules import bare_host
from lmcache_nodeagent.errors import ConfigError
from lmcache_nodeagent.observability.metrics import CONTENT_TYPE as METRICS_TYPE

_MAX_SINCE = (1 << 63) - 1
_MAX_QUERY_FIELDS = 16
_SHOWN_CHARACTERS = 40
_MAX_BUFFERED_BYTES = 64 << 20  # an answer beyond it would go through a temporary file
_MOST_CONNECTIONS = 48
"""Probes, Prometheus and people need few; descriptors are for workers."""

_SILENT_SECONDS = 5
_STOP_CHECK_SECONDS = 0.5
_SHUTDOWN_SECONDS = 2


class AgentView(Protocol):
    """What HTTP shows of the agent. Threads: any; every method returns at once."""

    def healthy(self) -> tuple[bool, str]:
        """Whether the process does its work; if not, it is restarted. With a reason in words."""

    def ready(self) -> tuple[bool, str]:
        """Whether workers can be served now, with a reason in words."""

    def status(self) -> Mapping[str, object]:
        """The body of `/status`."""

    def instances(self) -> Sequence[Mapping[str, object]]:
        """The entries of `/v1/instances`; instance ids are decimal strings."""

    def leases(self) -> Sequence[Mapping[str, object]]:
        """The entries of `/v1/leases`."""

    def reaps(self, since: int) -> Mapping[str, object]:
        """The body of `/v1/reaps`: entries of the journal after the sequence number `since`."""

    def metrics_text(self) -> bytes:
        """The body of `/metrics`."""


@dataclass(frozen=True, slots=True)
class _Reply:
    status: HTTPStatus
    body: bytes
    content_type: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Route:
    """`answer` takes the view and the query string."""

    answer: Callable[[AgentView, str], _Reply]
    loopback_only: bool


def listen(host: str, port: int) -> socket.socket:
    """Take the port; connections wait until an `HttpServer` runs on it.

    Raises:
        ConfigError: the address cannot be had.
    """
    try:
        return _listen(bare_host(host), port)
    except OSError as error:
        problem = (
            f"http-host {host} with http-port {port} cannot be listened on "
            f"({error.strerror or error}): give an address of this machine and a free port"
        )
        raise ConfigError([problem]) from error


class HttpServer:
    """The loop over a listening socket. Threads: `run` on `http`, the others any."""

    def __init__(self, listener: socket.socket, view: AgentView) -> None:
        self._listener = listener
        self._view = view
        self._stopping = Event()

    @property
    def port(self) -> int:
        """The bound TCP port."""
        return int(self._listener.getsockname()[1])

    def run(self) -> None:
        """Serve until stopped, then close everything."""
        connections: dict[int, socket.socket] = {}
        server = create_server(
            application(self._view),
            map=connections,
            sockets=[self._listener],
            threads=2,
            connection_limit=2048,
            channel_timeout=_SILENT_SECONDS,
            cleanup_interval=2,
            max_request_header_size=16 << 10,
            max_request_body_size=1 << 10,
            outbuf_overflow=_MAX_BUFFERED_BYTES,
            asyncore_use_poll=True,
            clear_untrusted_proxy_headers=True,
            ident=None,
        )
        assert not isinstance(server, MultiSocketServer), "one socket was given"
        try:
            while not self._stopping.is_set():
                server.asyncore.loop(
                    timeout=_STOP_CHECK_SECONDS, use_poll=True, map=connections, count=1
                )
                # The stubs take the table for one of its entries.
                channels = cast("Mapping[int, HTTPChannel]", server.active_channels)
                _make_room(channels.values())
        finally:
            server.task_dispatcher.shutdown(timeout=_SHUTDOWN_SECONDS)
            server.asyncore.close_all(connections, ignore_all=True)

    def stop(self) -> None:
        """Let `run` return within a second or so."""
        self._stopping.set()

    def close(self) -> None:
        """Give the port back; for a server that never ran."""
        self._listener.close()


def _make_room(channels: Collection[HTTPChannel]) -> None:
    """While there are too many, end those of whoever has the most, the longest silent first."""
    open_ones = [channel for channel in channels if not channel.will_close]
    too_many = len(open_ones) - _MOST_CONNECTIONS
    if too_many <= 0:
        return
    by_address = Counter(channel.addr[0] for channel in open_ones)
    idle = [channel for channel in open_ones if not channel.requests]
    idle.sort(key=lambda channel: (-by_address[channel.addr[0]], channel.last_activity))
    for channel in idle[:too_many]:
        channel.will_close = True


def application(view: AgentView) -> WSGIApplication:
    """Return the WSGI application that answers from `view`."""

    def respond(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        reply = _answer(view, environ)
        headers = {
            "Content-Type": reply.content_type,
            "Content-Length": str(len(reply.body)),
            "Cache-Control": "no-store",
            **reply.headers,
        }
        start_response(f"{reply.status.value} {reply.status.phrase}", list(headers.items()))
        return [] if environ["REQUEST_METHOD"] == "HEAD" else [reply.body]

    return respond


def is_loopback(address: str) -> bool:
    """Tell whether a peer's address is this machine's loopback, IPv4 written as IPv6 included."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return (mapped or parsed).is_loopback


def _answer(view: AgentView, environ: WSGIEnvironment) -> _Reply:
    path = environ["PATH_INFO"]
    route = _ROUTES.get(path)
    if route is None:
        return _refusal(HTTPStatus.NOT_FOUND, f"no {path} here: try one of {', '.join(_ROUTES)}")
    if environ["REQUEST_METHOD"] not in {"GET", "HEAD"}:
        reason = f"{environ['REQUEST_METHOD']} is not offered: nothing can be changed over HTTP"
        return _refusal(HTTPStatus.METHOD_NOT_ALLOWED, reason, {"Allow": "GET, HEAD"})
    if route.loopback_only and not is_loopback(environ.get("REMOTE_ADDR", "")):
        reason = f"{path} is answered to loopback only: use a port-forward to this agent"
        return _refusal(HTTPStatus.FORBIDDEN, reason)
    return route.answer(view, environ.get("QUERY_STRING", ""))


def _healthz(view: AgentView, _: str) -> _Reply:
    healthy, reason = view.healthy()
    return _json(_probe_status(good=healthy), {"healthy": healthy, "reason": reason})


def _readyz(view: AgentView, _: str) -> _Reply:
    ready, reason = view.ready()
    return _json(_probe_status(good=ready), {"ready": ready, "reason": reason})


def _metrics(view: AgentView, _: str) -> _Reply:
    return _Reply(HTTPStatus.OK, view.metrics_text(), METRICS_TYPE)


def _status(view: AgentView, _: str) -> _Reply:
    return _json(HTTPStatus.OK, view.status())


def _instances(view: AgentView, _: str) -> _Reply:
    return _json(HTTPStatus.OK, {"instances": view.instances()})


def _leases(view: AgentView, _: str) -> _Reply:
    return _json(HTTPStatus.OK, {"leases": view.leases()})


def _reaps(view: AgentView, query: str) -> _Reply:
    try:
        since = _since(query)
    except ValueError as error:
        return _refusal(HTTPStatus.BAD_REQUEST, str(error))
    return _json(HTTPStatus.OK, view.reaps(since))


_ROUTES: Mapping[str, _Route] = {
    "/healthz": _Route(_healthz, loopback_only=False),
    "/readyz": _Route(_readyz, loopback_only=False),
    "/metrics": _Route(_metrics, loopback_only=False),
    "/status": _Route(_status, loopback_only=True),
    "/v1/instances": _Route(_instances, loopback_only=True),
    "/v1/leases": _Route(_leases, loopback_only=True),
    "/v1/reaps": _Route(_reaps, loopback_only=True),
}


def _since(query: str) -> int:
    """Read `since`, by default 0.

    Raises:
        ValueError: it is no sequence number; the message has value, limit and fix.
    """
    fields = parse_qs(query, keep_blank_values=True, max_num_fields=_MAX_QUERY_FIELDS)
    text = fields.get("since", ["0"])[-1]
    digits_only = text.isascii() and text.isdigit() and len(text) <= len(str(_MAX_SINCE))
    if digits_only and int(text) <= _MAX_SINCE:
        return int(text)
    shown = text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"
    raise ValueError(
        f"since is {shown!r}, but must be a whole number from 0 to {_MAX_SINCE}: "
        "pass the `next` of the reply before"
    )


def _probe_status(*, good: bool) -> HTTPStatus:
    return HTTPStatus.OK if good else HTTPStatus.SERVICE_UNAVAILABLE


def _refusal(status: HTTPStatus, reason: str, headers: Mapping[str, str] | None = None) -> _Reply:
    reply = _json(status, {"error": reason})
    return _Reply(reply.status, reply.body, reply.content_type, headers or {})


def _json(status: HTTPStatus, body: Mapping[str, object]) -> _Reply:
    return _Reply(status, json.dumps(body, allow_nan=False).encode() + b"\n")


def _listen(host: str, port: int) -> socket.socket:
    if host == "*":
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        return socket.create_server(("", port), family=family, dualstack_ipv6=both)
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    return socket.create_server(address[:2], family=family, dualstack_ipv6=address[0] == "::")
