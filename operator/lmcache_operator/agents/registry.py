"""Which agents are connected, and what each of them has said.

Everything here belongs to the operator's one loop: no locks, and nothing waits but the parts of
`agents/server.py` that serve one stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Protocol, assert_never

import structlog

from lmcache_nodeagent.operator_link.messages import (
    MAX_INSTANCES,
    AgentState,
    FromAgent,
    FromOperator,
    Hello,
    InstanceReport,
    Instances,
    JournalEntry,
    LinkError,
)
from lmcache_operator.agents.sanity import check_entry, check_report, check_state

MAX_UNSENT = 4 * MAX_INSTANCES
"""Messages that wait for one agent: a mapping and some evidence for each of its instances."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ServerRef:
    """One `LMCacheServer`. A new object of an old name has another uid."""

    namespace: str
    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class AgentIdentity:
    """Who an agent is, as the API server says, not as it says itself.

    Attributes:
        expires_at: of its token, in seconds since 1970 by the API server's clock.
    """

    server: ServerRef
    node: str
    pod_name: str
    pod_uid: str
    expires_at: float


class StreamEnd(StrEnum):
    """Why a stream ended, as it is counted and logged."""

    AGENT_LEFT = "agent_left"
    AGENT_SILENT = "agent_silent"
    REPLACED = "replaced"
    TOKEN_EXPIRED = "token_expired"  # noqa: S105  # no token
    GARBAGE = "garbage"
    TOO_SLOW = "too_slow"
    FAILED = "failed"
    STOPPED = "stopped"


class AgentSession:
    """One stream of one agent, from its `hello` on. A reconnect is a new session."""

    def __init__(self, identity: AgentIdentity, hello: Hello) -> None:
        self._identity = identity
        self._hello = hello
        self._instances: dict[tuple[int, int], InstanceReport] = {}
        self._complete = False
        self._state: AgentState | None = None
        self._unsent: asyncio.Queue[FromOperator] = asyncio.Queue(MAX_UNSENT)
        self._ended = asyncio.Event()
        self._end: tuple[StreamEnd, str] | None = None

    @property
    def server(self) -> ServerRef:
        """Whose agent it is."""
        return self._identity.server

    @property
    def node(self) -> str:
        """The node that its pod is bound to."""
        return self._identity.node

    @property
    def pod_name(self) -> str:
        """The agent's pod, in the namespace of its server."""
        return self._identity.pod_name

    @property
    def pod_uid(self) -> str:
        """What tells two pods of one name apart."""
        return self._identity.pod_uid

    @property
    def boot_id(self) -> str:
        """New at each start of the agent's process."""
        return self._hello.boot_id

    @property
    def release(self) -> str:
        """The agent's release."""
        return self._hello.release

    @property
    def instances(self) -> Mapping[tuple[int, int], InstanceReport]:
        """What is registered, by (instance id, registration); a view that follows changes."""
        return MappingProxyType(self._instances)

    @property
    def complete(self) -> bool:
        """Whether the agent has said all it has; until then an absence means nothing."""
        return self._complete

    @property
    def state(self) -> AgentState | None:
        """The agent as a whole, once it has said so."""
        return self._state

    @property
    def end_cause(self) -> StreamEnd | None:
        """Why the stream ends, if it does."""
        return self._end[0] if self._end else None

    @property
    def end_detail(self) -> str:
        """The same in words, for the log and the agent; may be empty."""
        return self._end[1] if self._end else ""

    def send(self, message: FromOperator) -> None:
        """Queue a message; never waits. An agent that lets too many pile up loses its stream.

        It comes back and is told everything again, so nothing is lost by that.
        """
        if self._end is not None:
            return
        try:
            self._unsent.put_nowait(message)
        except asyncio.QueueFull:
            self.end(StreamEnd.TOO_SLOW, f"more than {MAX_UNSENT} messages wait to be read")

    async def next_unsent(self) -> FromOperator:
        """Take the oldest message that is not sent yet; waits until there is one."""
        return await self._unsent.get()

    def take_unsent(self) -> list[FromOperator]:
        """Take all messages that are not sent yet."""
        return [self._unsent.get_nowait() for _ in range(self._unsent.qsize())]

    def end(self, cause: StreamEnd, detail: str = "") -> None:
        """Have the stream closed; the first cause counts."""
        if self._end is None:
            self._end = (cause, detail)
            self._ended.set()

    async def wait_ended(self) -> None:
        """Wait until somebody wants the stream closed."""
        await self._ended.wait()

    def apply_instances(self, message: Instances) -> None:
        """Take in what the agent says is registered.

        Raises:
            LinkError: no agent says such a thing.
        """
        for report in message.changed:
            check_report(report)
            self._instances[report.instance_id, report.registration] = report
        for key in message.gone:
            self._instances.pop(key, None)
        if len(self._instances) > MAX_INSTANCES:
            raise LinkError(
                f"{len(self._instances)} instances at once, at most {MAX_INSTANCES} are taken"
            )
        self._complete = self._complete or message.complete

    def apply_state(self, message: AgentState) -> None:
        """Take in what the agent says of itself.

        Raises:
            LinkError: no agent says such a thing.
        """
        check_state(message)
        self._state = message


class AgentListener(Protocol):
    """Is told what agents say, on the loop. Must return at once; if it raises, that stream ends."""

    def connected(self, session: AgentSession) -> None:
        """Tell of a new stream; nothing is known of its instances yet."""

    def instances_changed(
        self,
        session: AgentSession,
        changed: Sequence[InstanceReport],
        gone: Sequence[tuple[int, int]],
    ) -> None:
        """Tell of changes, which `session.instances` has already; both may be empty.

        The call after which `session.complete` is set ends the full list after a connect.
        """

    def state_changed(self, session: AgentSession) -> None:
        """Tell of a new `session.state`."""

    def journal(self, session: AgentSession, entry: JournalEntry) -> None:
        """Tell of something that happened; it is repeated until an `Ack` is sent."""

    def disconnected(self, session: AgentSession) -> None:
        """Tell that a stream ended; also before `connected` of the one that replaces it."""


class AgentRegistry:
    """The sessions, at most one for each agent pod."""

    def __init__(self) -> None:
        self._sessions: dict[str, AgentSession] = {}
        self._listeners: list[AgentListener] = []

    def subscribe(self, listener: AgentListener) -> None:
        """Have a listener told of everything from now on."""
        self._listeners.append(listener)

    def sessions(self, server: ServerRef | None = None) -> Sequence[AgentSession]:
        """Return the sessions of one server, or all, as they are now."""
        return tuple(
            session
            for session in self._sessions.values()
            if server is None or session.server == server
        )

    def add(self, session: AgentSession) -> None:
        """Take in a new session; an older one of the same pod ends."""
        older = self._sessions.get(session.pod_uid)
        if older is not None:
            older.end(StreamEnd.REPLACED, "the same pod has opened a newer stream")
            self.remove(older)
        self._sessions[session.pod_uid] = session
        self._tell(session, lambda listener: listener.connected(session))

    def remove(self, session: AgentSession) -> None:
        """Forget a session, if it is still there."""
        if self._sessions.get(session.pod_uid) is not session:
            return
        del self._sessions[session.pod_uid]
        self._tell(session, lambda listener: listener.disconnected(session))

    def receive(self, session: AgentSession, message: FromAgent) -> None:
        """Take in one message; what a session says that has been replaced counts no more.

        Raises:
            LinkError: an agent does not say this, or not now.
        """
        if self._sessions.get(session.pod_uid) is not session:
            return
        match message:
            case Instances():
                session.apply_instances(message)
                changed, gone = message.changed, message.gone
                self._tell(session, lambda each: each.instances_changed(session, changed, gone))
            case AgentState():
                session.apply_state(message)
                self._tell(session, lambda each: each.state_changed(session))
            case JournalEntry():
                check_entry(message)
                self._tell(session, lambda each: each.journal(session, message))
            case Hello():
                raise LinkError("a second hello: an agent says it once, first of all")
            case _:
                assert_never(message)

    def _tell(self, session: AgentSession, call: Callable[[AgentListener], None]) -> None:
        """Tell every listener; one that fails ends the stream, so that all is said again."""
        for listener in self._listeners:
            try:
                call(listener)
            except Exception:
                log.exception("agent_listener_failed", node=session.node, pod=session.pod_name)
                session.end(StreamEnd.FAILED, "the operator failed on what was said")
