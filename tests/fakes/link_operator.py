"""An operator's end of the link for agents under test: a real WebSocket server with real TLS.

It says and notes what a test wants. Its threads end with it.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Iterable, Iterator
from http import HTTPStatus
from pathlib import Path
from threading import Event, Lock, Thread
from types import TracebackType
from typing import Self, TypeVar

from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response
from websockets.sync.server import Server, ServerConnection, serve
from websockets.typing import Subprotocol

from lmcache_nodeagent.operator_link.messages import (
    SUBPROTOCOL,
    Ack,
    AgentState,
    Evidence,
    FromAgent,
    FromOperator,
    Hello,
    InstanceReport,
    Instances,
    JournalEntry,
    Mapping,
    PodRun,
    decode_from_agent,
    encode,
)
from tests.cluster.certificates import Authority
from tests.fakes.mounted_folder import MountedFolder
from tests.polling import PATIENCE_SECONDS, poll_until

TOKEN = "a-token-for-agents"  # noqa: S105  # no secret: the server that takes it ends with the test
POD = PodRun(namespace="default", name="engine-0", uid="uid-1", container="engine")

_T = TypeVar("_T")


class Stream:
    """One agent's stream, and everything that it has said. Threads: any."""

    def __init__(self, connection: ServerConnection) -> None:
        self.connection = connection
        self.closed = Event()
        self._lock = Lock()  # guards: _heard
        self._heard: list[tuple[float, FromAgent]] = []

    def note(self, message: FromAgent) -> None:
        """Write down what came."""
        with self._lock:
            self._heard.append((time.monotonic(), message))

    def heard(self, kind: type[_T]) -> list[_T]:
        """Return the messages of one kind, in their order."""
        with self._lock:
            return [message for _, message in self._heard if isinstance(message, kind)]

    def count(self) -> int:
        """Count everything that came."""
        with self._lock:
            return len(self._heard)

    @property
    def hello(self) -> Hello:
        """The agent's first message."""
        return poll_until(lambda: next(iter(self.heard(Hello)), None), "a hello")

    @property
    def state(self) -> AgentState:
        """The newest word about the agent as a whole."""
        return poll_until(lambda: next(reversed(self.heard(AgentState)), None))

    @property
    def complete(self) -> bool:
        """Whether all instances have been said."""
        return any(message.complete for message in self.heard(Instances))

    def instances(self) -> dict[tuple[int, int], InstanceReport]:
        """Put together what the agent has said of its instances, by id and registration."""
        found: dict[tuple[int, int], InstanceReport] = {}
        for message in self.heard(Instances):
            for gone in message.gone:
                found.pop(gone, None)
            found |= {(each.instance_id, each.registration): each for each in message.changed}
        return found

    def instance(self, instance_id: int) -> InstanceReport:
        """Wait for an instance's newest registration."""

        def newest() -> InstanceReport | None:
            found = (report for key, report in self.instances().items() if key[0] == instance_id)
            return max(found, key=lambda report: report.registration, default=None)

        return poll_until(newest, f"instance {instance_id} is reported")

    def journal(self) -> list[JournalEntry]:
        """Return the journal entries, in their order."""
        return self.heard(JournalEntry)

    def entry(self, kind: str, instance_id: int) -> JournalEntry:
        """Wait for a journal entry."""
        return poll_until(
            lambda: next(
                (e for e in self.journal() if (e.kind, e.instance_id) == (kind, instance_id)), None
            ),
            f"{kind} of {instance_id}",
        )

    def say(self, *messages: FromOperator) -> None:
        """Send messages."""
        for message in messages:
            self.connection.send(encode(message))

    def say_raw(self, frame: str | bytes) -> None:
        """Send anything."""
        self.connection.send(frame)

    def map(self, instance_id: int, pod: PodRun | None = POD) -> InstanceReport:
        """Say where an instance runs; wait until the agent repeats it."""
        registration = self.instance(instance_id).registration
        self.say(Mapping(instance_id=instance_id, registration=registration, pod=pod))
        return poll_until(
            lambda: (
                report
                if (report := self.instances()[instance_id, registration]).mapping == pod
                else None
            ),
            "the mapping is repeated",
        )

    def evidence(self, instance_id: int, trigger: str, **changes: object) -> Evidence:
        """Write evidence about an instance's newest registration; the terminated ones are proof."""
        proof = trigger in {"container_terminated", "pod_terminated"}
        values: dict[str, object] = {
            "id": f"{instance_id}/{trigger}/{time.monotonic_ns()}",
            "boot_id": self.hello.boot_id,
            "instance_id": instance_id,
            "registration": self.instance(instance_id).registration,
            "pod_uid": POD.uid,
            "container": POD.container,
            "trigger": trigger,
            "proof": proof,
            "observed_at": time.time(),
            "finished_at": float(int(time.time())) if proof else None,
        }
        return Evidence(**{**values, **changes})  # type: ignore[arg-type]  # as of the message

    def acknowledge(self, seq: int) -> None:
        """Say that the journal up to an entry is dealt with."""
        self.say(Ack(boot_id=self.hello.boot_id, seq=seq))

    def close(self) -> None:
        """End the stream from this side, in order."""
        self.connection.close()


class LinkOperator:
    """The server, its certificates, and the folder that an agent finds it by.

    Attributes:
        folder: what `--operator-link` names; empty until `announce`.
        tokens: those that are accepted.
        streams: every stream so far.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self.folder = MountedFolder(directory / "link")
        self.token_file = directory / "token"
        self.token_file.write_text(TOKEN)
        self.tokens = {TOKEN}
        self.status_when_refused = HTTPStatus.UNAUTHORIZED
        self.subprotocol: str | None = SUBPROTOCOL
        self.authority = Authority(directory / "ca-1")
        self.streams: list[Stream] = []
        self.refused = 0
        self._server: Server | None = None
        self._thread: Thread | None = None
        self._port = 0

    @property
    def flags(self) -> tuple[str, str]:
        """What the agent is started with."""
        return (
            f"--operator-link={self.folder.path}",
            f"--operator-token-file={self.token_file}",
        )

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"wss://localhost:{self._port}"

    def start(self) -> Self:
        """Listen, on the port of the last time if there was one."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.num_tickets = 0  # as the real one, for the reason that stands there
        pair = self.authority.issue("operator", "operator", hosts=("localhost", "127.0.0.1"))
        context.load_cert_chain(pair.certificate, pair.key)
        offered = [] if self.subprotocol is None else [Subprotocol(self.subprotocol)]
        self._server = serve(
            self._serve_stream,
            "127.0.0.1",
            self._port,
            ssl=context,
            process_request=self._admit,
            subprotocols=offered,
            select_subprotocol=lambda _, wanted: next(
                (each for each in offered if each in wanted), None
            ),
            compression=None,
            ping_interval=None,
            close_timeout=1,
        )
        self._port = self._server.socket.getsockname()[1]
        self._thread = Thread(target=self._server.serve_forever, name="link-operator")
        self._thread.start()
        return self

    def announce(self, url: str | None = None, authorities: Iterable[Authority] = ()) -> None:
        """Write the folder: where to connect, and whose certificates to trust."""
        bundle = "".join(
            each.certificate.read_text() for each in (list(authorities) or [self.authority])
        )
        self.folder.put({"url": url or self.url, "ca.crt": bundle})

    def renew_authority(self) -> Authority:
        """Have another authority from the next start on."""
        number = len(list(self._directory.glob("ca-*"))) + 1
        self.authority = Authority(self._directory / f"ca-{number}")
        return self.authority

    def stop(self) -> None:
        """Stop listening and end every stream, as an operator that leaves does."""
        if self._server is None or self._thread is None:
            return
        self._server.shutdown()
        for stream in self.open_streams():
            stream.connection.close(1001)
            assert stream.closed.wait(PATIENCE_SECONDS)
        self._thread.join(PATIENCE_SECONDS)
        self._server = self._thread = None

    def open_streams(self) -> list[Stream]:
        """Return the streams that are open now."""
        return [stream for stream in self.streams if not stream.closed.is_set()]

    def stream(self, number: int = 1) -> Stream:
        """Wait for the n-th stream, and until it has said everything."""

        def said_all() -> Stream | None:
            found = self.streams[number - 1] if len(self.streams) >= number else None
            return found if found and found.complete and found.heard(AgentState) else None

        return poll_until(said_all, f"stream {number} has said all")

    def _admit(self, connection: ServerConnection, request: Request) -> Response | None:
        given = request.headers.get("Authorization", "")
        if given.removeprefix("Bearer ") in self.tokens:
            return None
        self.refused += 1
        return connection.respond(self.status_when_refused, "no such agent\n")

    def _serve_stream(self, connection: ServerConnection) -> None:
        stream = Stream(connection)
        self.streams.append(stream)
        try:
            for frame in self._frames(connection):
                stream.note(decode_from_agent(frame))
        finally:
            stream.closed.set()

    @staticmethod
    def _frames(connection: ServerConnection) -> Iterator[str | bytes]:
        while True:
            try:
                yield connection.recv()
            except ConnectionClosed:
                return

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()
