"""One request on its way through the agent: it is answered exactly once, whatever happens."""

from __future__ import annotations

import time
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING

from lmcache_nodeagent.errors import AgentError, RequestError, TooMuchWaiting
from lmcache_nodeagent.events import ReplyDropped, RequestFailed, RequestRefused
from lmcache_nodeagent.liveness.targets import UNTOUCHED, Touched
from lmcache_nodeagent.modules.calls import Cancellation
from lmcache_nodeagent.protocol.codec import encode_reply, mismatched_operation

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lmcache_nodeagent.events import Publish
    from lmcache_nodeagent.liveness.evidence import Connection
    from lmcache_nodeagent.protocol.codec import Frame
    from lmcache_nodeagent.protocol.operations import Operation
    from lmcache_nodeagent.transport.waiting_bytes import Hold, WaitingBytes


@dataclass(frozen=True, slots=True)
class Reply:
    """Frames for one peer, ready to send: `operation_frame` echoes the request's or refuses it.

    Whoever sends or drops it gives its `hold` back once the document's memory is free.
    """

    connection: Connection
    operation_name: str
    uid: bytes
    operation_frame: bytes
    document: Frame | None
    hold: Hold | None = None


class Request:
    """A well-framed request of a known operation. Threads: any; the first answer counts."""

    __slots__ = (
        "_answered",
        "_lock",
        "_publish",
        "_send",
        "_unread",
        "begun",
        "cancellation",
        "connection",
        "follows_registration",
        "hold",
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
        payload: Sequence[Frame],
        send: Callable[[Reply], None],
        publish: Publish,
        touched: Touched = UNTOUCHED,
        unread: WaitingBytes | None = None,
    ) -> None:
        """`unread` bounds what waits for clients to read it."""
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
        self.begun = False  # a thread has it
        self.hold: Hold | None = None  # what it takes up until it has run
        self._send = send
        self._publish = publish
        self._unread = unread
        self._lock = Lock()  # guards: _answered
        self._answered = False

    def answer(self, value: object) -> None:
        """Send the operation's reply.

        A value that cannot be encoded becomes the negative one, as does one that is too large for a
        client which has not read what it was sent before.
        """
        try:
            document = encode_reply(self.operation, value)
            hold = self._take(document)
        except AgentError as error:
            self.fail(error, str(error))
            return
        except TooMuchWaiting as error:
            self.refuse(error)
            return
        self._reply(self.operation_frame, document, hold)

    def _take(self, document: Frame | None) -> Hold | None:
        """Take up a document's bytes.

        Raises:
            TooMuchWaiting: the client does not read.
        """
        if self._unread is None or document is None:
            return None
        return self._unread.take(self.connection.routing_id, len(document))

    def send(self, value: object) -> None:
        """Send one document of a stream; none after its end, nor to a client that does not read."""
        document = encode_reply(self.operation, value)
        with self._lock:
            if self._answered:
                return
        try:
            hold = self._take(document)
        except TooMuchWaiting:
            peer = self.connection.peer.text
            self._publish(ReplyDropped(self.operation.name, "peer_not_reading", peer))
            return
        self._hand_over(self.operation_frame, document, hold)

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

    def _reply(
        self, operation_frame: bytes, document: Frame | None, hold: Hold | None = None
    ) -> bool:
        with self._lock:
            late, self._answered = self._answered, True
        if not late:
            self._hand_over(operation_frame, document, hold)
        elif hold is not None:
            hold.give_back()
        return not late

    def _hand_over(self, operation_frame: bytes, document: Frame | None, hold: Hold | None) -> None:
        name = self.operation.name
        self._send(Reply(self.connection, name, self.uid, operation_frame, document, hold))
