"""The agent's end of the stream to the operator. Nothing of the agent ever waits for it.

The operator may be slow, away, or send rubbish: then the stream ends and is tried again, and the
agent goes on by what it sees itself.
"""

from __future__ import annotations

import socket
import ssl
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING

from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException
from websockets.sync.client import connect
from websockets.typing import Subprotocol

from lmcache_nodeagent.events import (
    OperatorLinkConnected,
    OperatorLinkDown,
    OperatorLinkFailed,
    OperatorLinkLost,
)
from lmcache_nodeagent.operator_link.address import Target, look, read_token
from lmcache_nodeagent.operator_link.conversation import Conversation
from lmcache_nodeagent.operator_link.messages import MAX_FRAME_BYTES, SUBPROTOCOL, LinkError
from lmcache_nodeagent.operator_link.retry import Retry

if TYPE_CHECKING:
    from websockets.sync.client import ClientConnection

    from lmcache_nodeagent.clock import Now
    from lmcache_nodeagent.events import Publish
    from lmcache_nodeagent.operator_link.conversation import AgentSide

LOOK_SECONDS = 2.0
"""What no event announces (a worker that falls silent) is said within this time."""

_SHORTEST_LOOK_SECONDS = 0.1
"""A look goes through all instances: a burst of changes costs ten of them a second."""

FOLDER_LOOK_SECONDS = 2.0

_RECEIVE_SECONDS = 0.1
_CONNECT_SECONDS = 4.0
_CLOSE_SECONDS = 1.0
_PING_SECONDS = 10.0
_UNREAD_MILLISECONDS = 20_000
"""The kernel gives up a stream whose peer takes no more data; a blocked write ends then."""

_REFUSALS = {401, 403}
_SERVER_TROUBLE = 500
_POLICY_VIOLATION = 1008  # RFC 6455, section 7.4.1


@dataclass(frozen=True, slots=True)
class LinkStatus:
    """What people see of the link. `problem` is why there is no stream, empty if there is one."""

    url: str = ""
    connected: bool = False
    problem: str = "not looked for yet"


@dataclass(frozen=True, slots=True)
class _End:
    """How a stream ended, or an attempt at one (`lasted_seconds` is None then).

    `reason` has few values, for metrics; `refused`: trying again soon helps nobody.
    """

    reason: str
    detail: str
    refused: bool = False
    lasted_seconds: float | None = None


class _NotOpened(Exception):
    """There is no stream; `end` says why."""

    def __init__(self, reason: str, detail: object, *, refused: bool = False) -> None:
        text = str(detail) or type(detail).__name__
        super().__init__(text)
        self.end = _End(reason, text, refused)


class OperatorLink:
    """Keeps one stream open. Thread: operator-link, but for `wake`, `stop` and `status` (any).

    The two threads of websockets' own, reading and pings, live only while a stream is open.
    """

    def __init__(
        self,
        folder: Path,
        token: Path | None,
        agent: AgentSide,
        publish: Publish,
        now: Now = time.monotonic,
        retry: Retry | None = None,
    ) -> None:
        self._folder = folder
        self._token = token
        self._agent = agent
        self._publish = publish
        self._now = now
        self._retry = retry or Retry()
        self._stopping = Event()
        self._changed = Event()
        self._status = LinkStatus()  # replaced as a whole
        self._reported = ""  # why the link is down, as it was last reported; operator-link only

    @property
    def status(self) -> LinkStatus:
        """What is so now."""
        return self._status

    def wake(self) -> None:
        """Something is to be said."""
        self._changed.set()

    def stop(self) -> None:
        """Make `run` return soon; an attempt to connect may take some seconds to end."""
        self._stopping.set()

    def run(self) -> None:
        """Connect, talk, and try again until stopped."""
        while not self._stopping.is_set():
            found = look(self._folder)
            if found.target is not None:
                self._stopping.wait(self._attempt(found.target))
                continue
            self._status = LinkStatus(problem=found.problem or "no operator is named")
            if found.problem:
                self._report_down("address", found.problem)
            self._stopping.wait(FOLDER_LOOK_SECONDS)

    def _attempt(self, target: Target) -> float:
        """Have one stream; return how long to wait before the next."""
        end = self._have_stream(target)
        self._status = LinkStatus(target.url, problem=f"{end.reason}: {end.detail}")
        if end.lasted_seconds is None:
            self._publish(OperatorLinkFailed(end.reason, end.detail))
            self._report_down(end.reason, end.detail)
        else:
            self._publish(OperatorLinkLost(end.reason, end.detail))
        return self._retry.delay(refused=end.refused, lasted_seconds=end.lasted_seconds or 0.0)

    def _report_down(self, reason: str, detail: str) -> None:
        """Say why there is no link, once per reason until there is one."""
        if reason != self._reported:
            self._reported = reason
            self._publish(OperatorLinkDown(reason, detail))

    def _have_stream(self, target: Target) -> _End:
        with ExitStack() as stack:
            try:
                stream = self._open(target, stack)
            except _NotOpened as failure:
                return failure.end
            opened_at = self._now()
            self._status, self._reported = LinkStatus(target.url, connected=True, problem=""), ""
            self._publish(OperatorLinkConnected(target.url))
            reason, detail, refused = self._talk(stream, target)
            return _End(reason, detail, refused, self._now() - opened_at)

    def _talk(self, stream: ClientConnection, target: Target) -> tuple[str, str, bool]:
        """Talk until it ends; return the reason, a detail, and whether we were refused."""
        try:
            return self._exchange(stream, target), "", False
        except LinkError as error:
            return "bad_message", str(error), True
        except ConnectionClosed as error:
            code = None if error.rcvd is None else error.rcvd.code
            return "closed", str(error), code == _POLICY_VIOLATION

    def _exchange(self, stream: ClientConnection, target: Target) -> str:
        """Say what changes and hear what comes; return why there is nothing more to say.

        Raises:
            LinkError: the operator sent what makes no sense.
            ConnectionClosed: the stream is gone.
        """
        conversation = Conversation(self._agent)
        for frame in conversation.greeting():
            stream.send(frame)
        looked_at = self._now()
        next_folder_look = looked_at + FOLDER_LOOK_SECONDS
        while not self._stopping.is_set():
            if _hears_one(stream, conversation):
                self._changed.set()  # a mapping is repeated to the operator
            now = self._now()
            wait = _SHORTEST_LOOK_SECONDS if self._changed.is_set() else LOOK_SECONDS
            if now >= looked_at + wait:
                self._changed.clear()
                looked_at = now
                for frame in conversation.news():
                    stream.send(frame)
            if now >= next_folder_look:
                next_folder_look = now + FOLDER_LOOK_SECONDS
                if look(self._folder).target != target:
                    return "moved"
        return "stopped"

    def _open(self, target: Target, stack: ExitStack) -> ClientConnection:
        """Open a stream that ends with `stack`.

        Raises:
            _NotOpened: there is none.
        """
        token = read_token(self._token)
        if not token:
            raise _NotOpened("token", "there is no token to show (yet)")
        try:
            stream = stack.enter_context(_connect(target, token))
        except InvalidStatus as error:
            status = error.response.status_code
            words = bytes(error.response.body or b"").decode(errors="replace").strip()[:200]
            detail = f"HTTP {status} {words}"
            if status in _REFUSALS:
                raise _NotOpened("unauthorized", detail, refused=True) from None
            raise _NotOpened("unavailable", detail, refused=status < _SERVER_TROUBLE) from None
        except ssl.SSLError as error:
            raise _NotOpened("certificate", error, refused=True) from None
        except (OSError, UnicodeError) as error:
            raise _NotOpened("unreachable", error) from None
        except (WebSocketException, ValueError) as error:
            raise _NotOpened("protocol", error) from None
        if stream.subprotocol != SUBPROTOCOL:
            raise _NotOpened("protocol", f"it does not speak {SUBPROTOCOL}", refused=True)
        return stream


def _hears_one(stream: ClientConnection, conversation: Conversation) -> bool:
    """Take a frame, if one comes in a moment.

    Raises:
        LinkError: it makes no sense.
        ConnectionClosed: the stream is gone.
    """
    try:
        frame = stream.recv(timeout=_RECEIVE_SECONDS)
    except TimeoutError:
        return False
    conversation.hear(frame)
    return True


def _connect(target: Target, token: str) -> ClientConnection:
    """Connect over a socket of our own: it is bounded, and redirects are refused."""
    context = _trust(target.ca) if target.secure else None
    plain = socket.create_connection((target.host, target.port), timeout=_CONNECT_SECONDS)
    try:
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNREAD_MILLISECONDS)
        plain.settimeout(None)
        return connect(
            target.url,
            sock=plain,
            ssl=context,
            subprotocols=[Subprotocol(SUBPROTOCOL)],
            compression=None,
            additional_headers={"Authorization": f"Bearer {token}"},
            proxy=None,
            open_timeout=_CONNECT_SECONDS,
            ping_interval=_PING_SECONDS,
            ping_timeout=_PING_SECONDS,
            close_timeout=_CLOSE_SECONDS,
            max_size=MAX_FRAME_BYTES,
        )
    except BaseException:
        plain.close()
        raise


def _trust(ca: str) -> ssl.SSLContext:
    """Trust these certificates and no others."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_verify_locations(cadata=ca)
    return context
