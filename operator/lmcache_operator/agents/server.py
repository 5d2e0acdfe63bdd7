"""The operator's end of the agents' streams: WebSockets over TLS, one for each agent pod.

Who connects is asked before the upgrade. From then on each stream has two tasks, one that reads and
one that writes; whatever goes wrong in one stream ends that stream alone, and the agent comes back
and says everything again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from asyncio import sslproto
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final, NoReturn

import structlog
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.frames import CloseCode
from websockets.http11 import Request, Response
from websockets.typing import Subprotocol

from lmcache_nodeagent.operator_link.messages import (
    MAX_FRAME_BYTES,
    SUBPROTOCOL,
    FromAgent,
    Hello,
    LinkError,
    decode_from_agent,
    encode,
)
from lmcache_operator.agents.authenticator import Authenticator, Overloaded, Refused
from lmcache_operator.agents.refusals import Refusals
from lmcache_operator.agents.registry import (
    AgentIdentity,
    AgentRegistry,
    AgentSession,
    StreamEnd,
)
from lmcache_operator.clock import Now, wall
from lmcache_operator.errors import ApiError, Unreachable

SUBPROTOCOLS: Final = (Subprotocol(SUBPROTOCOL),)
"""Spoken here, newest first: this version and the one before it, which there is none of yet."""

# asyncio gives each TLS connection a read buffer of 256 KiB: 200 MiB for a thousand idle agents.
_TLS_BUFFER_BYTES = 32 * 1024
_MOST_UNREAD_FRAMES = 4
_LONGEST_REASON_BYTES = 123  # RFC 6455, 5.5: a control frame has 125, two are the code

_CLOSE_CODES: Final = {
    StreamEnd.AGENT_LEFT: CloseCode.NORMAL_CLOSURE,
    StreamEnd.AGENT_SILENT: CloseCode.INTERNAL_ERROR,
    StreamEnd.REPLACED: CloseCode.POLICY_VIOLATION,
    StreamEnd.TOKEN_EXPIRED: CloseCode.SERVICE_RESTART,
    StreamEnd.GARBAGE: CloseCode.POLICY_VIOLATION,
    StreamEnd.TOO_SLOW: CloseCode.TRY_AGAIN_LATER,
    StreamEnd.FAILED: CloseCode.INTERNAL_ERROR,
    StreamEnd.STOPPED: CloseCode.GOING_AWAY,
}

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class LinkSettings:
    """Where to listen, and how long to wait for what, in seconds.

    Attributes:
        host: None for all addresses.
        port: 0 takes a free one.
        hello_seconds: from the upgrade to the first message.
        send_seconds: for the agent to take a message off the connection's full buffer.
        shortest_stay_seconds: a stream lasts as long as its token, and at least this: if this
            machine's clock is ahead, the API server still takes a token that seems to have expired.
    """

    host: str | None
    port: int
    ping_interval_seconds: float = 10.0
    ping_timeout_seconds: float = 10.0
    open_seconds: float = 10.0
    hello_seconds: float = 10.0
    send_seconds: float = 10.0
    close_seconds: float = 2.0
    shortest_stay_seconds: float = 5.0


class _Stream(ServerConnection):
    """A connection that knows who is at the other end, once that is proven."""

    identity: AgentIdentity | None = None


class AgentServer:
    """Serves the streams of all agents.

    Attributes:
        listening: set when agents can connect; then `port` is known.
        refusals: who was refused.
        ended: streams that ended, by cause.
    """

    def __init__(
        self,
        settings: LinkSettings,
        registry: AgentRegistry,
        authenticator: Authenticator,
        tls: ssl.SSLContext,
        *,
        is_ready: Callable[[], bool],
        wall_now: Now = wall,
    ) -> None:
        self.listening = asyncio.Event()
        self.port = settings.port
        self.refusals = Refusals()
        self.ended: Counter[StreamEnd] = Counter()
        self._settings = settings
        self._registry = registry
        self._authenticator = authenticator
        self._tls = tls
        self._is_ready = is_ready
        self._wall_now = wall_now

    async def run(self) -> NoReturn:
        """Serve until cancelled; then every stream is closed as "going away"."""
        sslproto.SSLProtocol.max_size = _TLS_BUFFER_BYTES
        async with self._serving() as server:
            self.port = server.sockets[0].getsockname()[1]
            self.listening.set()
            log.info("link_listening", port=self.port)
            try:
                await asyncio.Future()
            finally:
                for session in self._registry.sessions():
                    session.end(StreamEnd.STOPPED, "this operator stops")
        raise AssertionError("only cancelling ends it")

    def _serving(self) -> Server:
        settings = self._settings
        return serve(
            self._serve,
            settings.host,
            settings.port,
            ssl=self._tls,
            subprotocols=SUBPROTOCOLS,
            compression=None,
            process_request=self._admit,
            server_header=None,
            open_timeout=settings.open_seconds,
            ping_interval=settings.ping_interval_seconds,
            ping_timeout=settings.ping_timeout_seconds,
            close_timeout=settings.close_seconds,
            max_size=MAX_FRAME_BYTES,
            max_queue=_MOST_UNREAD_FRAMES,
            logger=_silent_logger(),
            create_connection=_Stream,
        )

    async def _admit(self, connection: ServerConnection, request: Request) -> Response | None:
        """Answer the request for an upgrade, or let it pass."""
        assert isinstance(connection, _Stream), "that is what it makes"
        try:
            refusal = await self._identify(connection, request)
        except Exception:
            log.exception("agent_not_judged", peer=_peer(connection))
            refusal = HTTPStatus.INTERNAL_SERVER_ERROR, "failed", "see the operator's log"
        if refusal is None:
            return None
        status, reason, detail = refusal
        self.refusals.note(_peer(connection), reason, detail)
        return connection.respond(status, f"{reason}\n")

    async def _identify(
        self, connection: _Stream, request: Request
    ) -> tuple[HTTPStatus, str, str] | None:
        """Find out who asks; otherwise return why not: status, reason, detail for our log."""
        if not self._is_ready():
            return HTTPStatus.SERVICE_UNAVAILABLE, "not_ready", "another operator acts, or none yet"
        offered = ",".join(request.headers.get_all("Sec-WebSocket-Protocol"))
        if not {name.strip() for name in offered.split(",")} & set(SUBPROTOCOLS):
            detail = f'it offers "{offered}", this operator speaks {", ".join(SUBPROTOCOLS)}'
            return HTTPStatus.BAD_REQUEST, "other_subprotocol", detail
        given = request.headers.get_all("Authorization")
        try:
            found = await self._authenticator.authenticate(given[0] if len(given) == 1 else "")
        except (Unreachable, ApiError) as error:
            return HTTPStatus.SERVICE_UNAVAILABLE, "no_word_of_the_api_server", str(error)
        except Overloaded as error:
            return HTTPStatus.SERVICE_UNAVAILABLE, "overloaded", str(error)
        if isinstance(found, Refused):
            return HTTPStatus.UNAUTHORIZED, found.reason, found.detail
        connection.identity = found
        return None

    async def _serve(self, connection: ServerConnection) -> None:
        """Serve one stream from its upgrade to its end."""
        assert isinstance(connection, _Stream), "that is what it makes"
        assert connection.identity is not None, "others are not let in"
        peer = _peer(connection)  # at its end the connection does not know any more
        try:
            cause, detail = await self._converse(connection, connection.identity)
        except Exception:
            log.exception("agent_stream_failed", peer=peer)
            cause, detail = StreamEnd.FAILED, "the operator failed"
        self.ended[cause] += 1
        log.info(
            "agent_disconnected",
            peer=peer,
            node=connection.identity.node,
            pod=connection.identity.pod_name,
            cause=cause,
            detail=detail,
        )
        await self._close(connection, cause, detail)

    async def _converse(
        self, connection: _Stream, identity: AgentIdentity
    ) -> tuple[StreamEnd, str]:
        try:
            async with asyncio.timeout(self._settings.hello_seconds):
                hello = _decoded(await connection.recv())
        except TimeoutError:
            return StreamEnd.AGENT_SILENT, f"no hello in {self._settings.hello_seconds:g} s"
        except ConnectionClosed as error:
            return _why_closed(error)
        except LinkError as error:
            return StreamEnd.GARBAGE, str(error)
        if not isinstance(hello, Hello):
            return StreamEnd.GARBAGE, "its first message is no hello"
        session = AgentSession(identity, hello)
        await self._hold(connection, session)
        assert session.end_cause is not None, "it is held until it ends"
        return session.end_cause, session.end_detail

    async def _hold(self, connection: _Stream, session: AgentSession) -> None:
        """Exchange messages until the session ends, or its token."""
        log.info(
            "agent_connected",
            peer=_peer(connection),
            server=f"{session.server.namespace}/{session.server.name}",
            node=session.node,
            pod=session.pod_name,
            boot_id=session.boot_id,
            release=session.release,
        )
        tasks: list[asyncio.Task[None]] = []
        try:
            self._registry.add(session)
            parts = (self._read(connection, session), self._write(connection, session))
            tasks = [asyncio.create_task(part) for part in (*parts, session.wait_ended())]
            done, _ = await asyncio.wait(
                tasks,
                timeout=self._stay_seconds(connection),
                return_when=asyncio.FIRST_COMPLETED,
            )
            if not done:
                session.end(StreamEnd.TOKEN_EXPIRED, "connect again with a newer token")
        finally:
            session.end(StreamEnd.FAILED, "the operator failed")  # if nothing else has ended it
            self._registry.remove(session)
            for task in tasks:
                task.cancel()
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome

    def _stay_seconds(self, connection: _Stream) -> float:
        assert connection.identity is not None, "others are not let in"
        left = connection.identity.expires_at - self._wall_now()
        return max(left, self._settings.shortest_stay_seconds)

    async def _read(self, connection: _Stream, session: AgentSession) -> None:
        try:
            while True:
                self._registry.receive(session, _decoded(await connection.recv()))
        except LinkError as error:
            session.end(StreamEnd.GARBAGE, str(error))
        except ConnectionClosed as error:
            session.end(*_why_closed(error))

    async def _write(self, connection: _Stream, session: AgentSession) -> None:
        try:
            while True:
                message = await session.next_unsent()
                async with asyncio.timeout(self._settings.send_seconds):
                    await connection.send(encode(message))
        except TimeoutError:
            seconds = self._settings.send_seconds
            session.end(StreamEnd.TOO_SLOW, f"it has not read for {seconds:g} s")
        except ConnectionClosed as error:
            session.end(*_why_closed(error))

    async def _close(self, connection: _Stream, cause: StreamEnd, detail: str) -> None:
        """Say why; who does not listen is cut off, for a full buffer would wait for ever."""
        words = detail.encode()[:_LONGEST_REASON_BYTES].decode(errors="ignore")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.close_seconds):
                await connection.close(_CLOSE_CODES[cause], words)
        connection.transport.abort()


def _decoded(frame: str | bytes) -> FromAgent:
    """Read a frame.

    Raises:
        LinkError: it is none of an agent's messages.
    """
    if isinstance(frame, bytes):
        raise LinkError("a binary frame: messages are text")
    return decode_from_agent(frame)


def _why_closed(error: ConnectionClosed) -> tuple[StreamEnd, str]:
    """Tell an agent that left from one that went silent, and from one that broke the rules."""
    ours, theirs = error.sent, error.rcvd
    if ours is None or (theirs is not None and error.rcvd_then_sent):
        return StreamEnd.AGENT_LEFT, "" if theirs is None else f"it said {theirs.code}"
    if ours.code in {CloseCode.INTERNAL_ERROR, CloseCode.GOING_AWAY}:
        silent = ours.code == CloseCode.INTERNAL_ERROR
        return (StreamEnd.AGENT_SILENT if silent else StreamEnd.STOPPED), ours.reason
    return StreamEnd.GARBAGE, ours.reason


def _peer(connection: ServerConnection) -> str:
    """Return the address of the other end, without its port."""
    address = connection.remote_address
    return str(address[0]) if address else "unknown"


def _silent_logger() -> logging.Logger:
    """Return a logger that writes nothing: anybody can make the library log at error level."""
    logger = logging.getLogger(f"{__name__}.websockets")
    logger.disabled = True
    return logger
