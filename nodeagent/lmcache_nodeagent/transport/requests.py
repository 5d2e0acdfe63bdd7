"""One request on its way through the agent: it is answered exactly once, whatever happens."""

from __future__ import annotations

import time
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING

from lmcache_nodeagent.errors import AgentError, RequestError
from lmcache_nodeagent.events import RequestFailed, RequestRefused
from lmcache_nodeagent.liveness.targets import UNTOUCHED, Touched
from lmcache_nodeagent.modules.calls import Cancellation
from lmcache_nodeagent.protocol.codec import encode_reply, mismatched_operation

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lmcache_nodeagent.events import Publish
    from lmcache_nodeagent.liveness.evidence import Connection
    from lmcache_nodeagent.protocol.operations import Operation


@dataclass(frozen=True, slots=True)
class Reply:
    """Frames for one peer, ready to send: `operation_frame` echoes the request's or refuses it."""

    connection: Connection
    operation_name: str
    uid: bytes
    operation_frame: bytes
    document: bytes | None


class Request:
    """A well-framed request of a known operation. Threads: any; the first answer counts."""

    __slots__ = (
        "_answered",
        "_lock",
        "_publish",
        "_send",
        "cancellation",
        "connection",
        "follows_registration",
        "in_order",
        "operation",
        "operation_frame",
        "payload",
        "received_at",
        "touched",
        "uid",
    )

    def __init__(
        self,
        connection: Connection,
        operation: Operation,
        uid: bytes,
        operation_frame: bytes,
        payload: Sequence[bytes],
        send: Callable[[Reply], None],
        publish: Publish,
        touched: Touched = UNTOUCHED,
    ) -> None:
        self.connection = connection
        self.operation = operation
        self.uid = uid
        self.operation_frame = operation_frame
        self.payload = payload
        self.touched = touched
        self.received_at = time.monotonic()
        self.cancellation = Cancellation()
        self.in_order = False  # is in the SYNC queue, or runs there
        self.follows_registration = False  # a transfer that goes through that queue first
        self._send = send
        self._publish = publish
        self._lock = Lock()  # guards: _answered
        self._answered = False

    def answer(self, value: object) -> None:
        """Send the operation's reply; a value that cannot be encoded becomes the negative one."""
        try:
            document = encode_reply(self.operation, value)
        except AgentError as error:
            self.fail(error, str(error))
            return
        self._reply(self.operation_frame, document)

    def send(self, value: object) -> None:
        """Send one document of a stream; none after its end."""
        document = encode_reply(self.operation, value)
        with self._lock:
            if self._answered:
                return
        self._send(
            Reply(self.connection, self.operation.name, self.uid, self.operation_frame, document)
        )

    def end(self) -> None:
        """End a stream."""
        self._reply(self.operation_frame, None)

    def refuse(self, error: RequestError) -> None:
        """Tell the caller no: in-band where stock clients want that, else with the reason."""
        fact = RequestRefused(
            self.operation.name, error.code, self.connection.peer.text, str(error)
        )
        if self._negative(str(error)):
            self._publish(fact)

    def fail(self, error: BaseException, detail: str) -> None:
        """Tell the caller no because of a failure of ours; `detail` goes to the log."""
        fact = RequestFailed(
            self.operation.name, type(error).__name__, self.connection.peer.text, detail
        )
        if self._negative(f"the agent failed: {type(error).__name__}"):
            self._publish(fact)

    def _negative(self, reason: str) -> bool:
        if self.operation.negative is not None:
            return self._reply(self.operation_frame, self.operation.negative)
        return self._reply(mismatched_operation(reason), None)

    def _reply(self, operation_frame: bytes, document: bytes | None) -> bool:
        with self._lock:
            if self._answered:
                return False
            self._answered = True
        self._send(Reply(self.connection, self.operation.name, self.uid, operation_frame, document))
        return True
