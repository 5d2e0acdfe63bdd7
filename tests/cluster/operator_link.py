"""The operator's end of the link alone, against a real API server, and a client of its own kind.

Server and clients share one loop, in this process.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from http import HTTPStatus
from pathlib import Path

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidStatus
from websockets.typing import Subprotocol

from lmcache_nodeagent.operator_link.messages import (
    SUBPROTOCOL,
    FromAgent,
    Hello,
    Instances,
    encode,
)
from lmcache_operator.agents.authenticator import Authenticator
from lmcache_operator.agents.registry import AgentRegistry, AgentSession
from lmcache_operator.agents.server import AgentServer, LinkSettings
from lmcache_operator.certs.material import Lifetimes
from lmcache_operator.certs.trust import LinkTrust
from lmcache_operator.clock import Now, wall
from lmcache_operator.cluster import Cluster
from tests.cluster.control_plane import ControlPlane
from tests.fakes.link_listener import WritesDown
from tests.polling import PATIENCE_SECONDS

_INTERVAL_SECONDS = 0.01


class Link:
    """A running server of agents' streams with everything that it needs."""

    def __init__(
        self,
        cluster: Cluster,
        namespace: str,
        settings: LinkSettings | None = None,
        lifetimes: Lifetimes | None = None,
        now: Now = wall,
    ) -> None:
        self.ready = True
        self._cluster = cluster
        self.registry = AgentRegistry()
        self.listener = WritesDown()
        self.registry.subscribe(self.listener)
        self.trust = LinkTrust(
            cluster, namespace=namespace, hosts=["localhost"], lifetimes=lifetimes, now=now
        )
        self.server = AgentServer(
            settings or LinkSettings("127.0.0.1", 0),
            self.registry,
            Authenticator(cluster),
            self.trust.context,
            is_ready=lambda: self.ready,
        )

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"wss://localhost:{self.server.port}"

    def client_tls(self, bundle: str | None = None) -> ssl.SSLContext:
        """Return what an agent trusts that has read a bundle, by default the newest."""
        return ssl.create_default_context(cadata=bundle or self.trust.ca_bundle())

    def dial(
        self, token: str | None, *, bundle: str | None = None, subprotocol: str | None = SUBPROTOCOL
    ) -> connect:
        """Prepare a connection: an asynchronous context manager."""
        return connect(
            self.url,
            ssl=self.client_tls(bundle),
            additional_headers={} if token is None else {"Authorization": f"Bearer {token}"},
            subprotocols=None if subprotocol is None else [Subprotocol(subprotocol)],
            compression=None,
            proxy=None,
            open_timeout=PATIENCE_SECONDS,
            close_timeout=2,
        )

    @asynccontextmanager
    async def without_an_api_server(self) -> AsyncGenerator[None]:
        """Have the operator's requests go where nobody answers."""
        settings = self._cluster.client.configuration
        url, settings.host = settings.host, "https://127.0.0.1:1"
        try:
            yield
        finally:
            settings.host = url

    def session_of(self, pod_uid: str) -> AgentSession | None:
        """Return the session of one agent, if there is one."""
        found = (each for each in self.registry.sessions() if each.pod_uid == pod_uid)
        return next(found, None)


@asynccontextmanager
async def running_link(
    kubeconfig: Path,
    namespace: str,
    settings: LinkSettings | None = None,
    *,
    lifetimes: Lifetimes | None = None,
    now: Now = wall,
) -> AsyncGenerator[Link]:
    """Run a server; at the end it stops as the operator stops. `now` is that of certificates."""
    async with await Cluster.connect(str(kubeconfig)) as cluster:
        link = Link(cluster, namespace, settings, lifetimes, now)
        await link.trust.refresh()
        running = asyncio.create_task(link.server.run())
        try:
            await link.server.listening.wait()
            yield link
        finally:
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running


async def say(connection: ClientConnection, *messages: FromAgent) -> None:
    """Send messages as an agent does."""
    for message in messages:
        await connection.send(encode(message))


async def greet(connection: ClientConnection, boot_id: str = "b1") -> None:
    """Say what an agent without workers says first."""
    await say(connection, Hello(boot_id=boot_id, release="test"), Instances(complete=True))


async def until(predicate: Callable[[], object], what: str) -> None:
    """Wait until something is so, while the loop runs; fail with what was waited for."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + PATIENCE_SECONDS
    while not predicate():
        assert loop.time() < deadline, f"not within {PATIENCE_SECONDS} s: {what}"
        await asyncio.sleep(_INTERVAL_SECONDS)


def run_linked(
    control_plane: ControlPlane,
    namespace: str,
    story: Callable[[Link], Coroutine[object, object, None]],
    settings: LinkSettings | None = None,
) -> None:
    """Run a story beside a server of streams."""

    async def linked() -> None:
        async with running_link(control_plane.kubeconfig, namespace, settings) as link:
            await story(link)

    asyncio.run(linked())


async def answer_to(link: Link, token: str | None, subprotocol: str | None = SUBPROTOCOL) -> int:
    """Dial and return the status; with 101 the stream was open for a moment."""
    try:
        async with link.dial(token, subprotocol=subprotocol):
            return HTTPStatus.SWITCHING_PROTOCOLS
    except InvalidStatus as error:
        return error.response.status_code


class SilentAgent:
    """An agent whose process stands still: it said hello, and now neither reads nor answers."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer

    @classmethod
    async def connect(cls, link: Link, token: str, *, hello: bool = True) -> SilentAgent:
        """Open a stream by hand; little of what is sent then fits into its buffers."""
        reader, writer = await asyncio.open_connection(
            "localhost", link.server.port, ssl=link.client_tls(), limit=1024
        )
        request = (
            "GET / HTTP/1.1",
            "Host: localhost",
            "Upgrade: websocket",
            "Connection: Upgrade",
            "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==",
            "Sec-WebSocket-Version: 13",
            f"Sec-WebSocket-Protocol: {SUBPROTOCOL}",
            f"Authorization: Bearer {token}",
        )
        writer.write("\r\n".join([*request, "", ""]).encode())
        assert b" 101 " in await reader.readuntil(b"\r\n\r\n")
        if hello:
            writer.write(_masked(encode(Hello(boot_id="silent", release="test")).encode()))
        await writer.drain()
        return cls(writer)

    def close(self) -> None:
        """Let go of the connection."""
        self._writer.transport.abort()


def _masked(text: bytes) -> bytes:
    """Return a text frame (RFC 6455, 5.2) of less than 126 bytes, masked with zeros."""
    return bytes([0x81, 0x80 | len(text), 0, 0, 0, 0]) + text
