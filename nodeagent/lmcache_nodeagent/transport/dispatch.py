"""From frames to a module and back: who asks, what for, may they, and where it runs."""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING, Protocol

from lmcache_nodeagent.errors import (
    MalformedRequest,
    NotTheSpeaker,
    Overloaded,
    RequestError,
    TransferOverdue,
    UnsupportedOperation,
)
from lmcache_nodeagent.events import MalformedMessage, StrangerRefused
from lmcache_nodeagent.ids import InstanceId
from lmcache_nodeagent.liveness.entry import Speaker
from lmcache_nodeagent.modules.calls import Call, Pending, Streaming
from lmcache_nodeagent.protocol.codec import (
    Frame,
    decode_operation,
    decode_payload,
    is_uid,
    mismatched_operation,
    peek_instance_id,
)
from lmcache_nodeagent.protocol.operations import Pool as PoolKind
from lmcache_nodeagent.transport.requests import Reply, Request

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from lmcache_nodeagent.events import Publish
    from lmcache_nodeagent.ids import RoutingId
    from lmcache_nodeagent.liveness.evidence import Connection
    from lmcache_nodeagent.liveness.slots import SlotRun
    from lmcache_nodeagent.liveness.targets import Touched
    from lmcache_nodeagent.protocol.operations import Operation
    from lmcache_nodeagent.transport.lost_commits import LostCommits
    from lmcache_nodeagent.transport.pools import Pool
    from lmcache_nodeagent.transport.waiting_bytes import Waiting

_IDS_KEPT_PER_CONNECTION = 64

_CONNECTIONS_REMEMBERED = 1024

_CONTROL_FRAMES = 3
"""Uid of a stream, an empty frame where requests name their operation, a word."""

_CONTROL_WORDS = (b"ack", b"cancel")
"""Anything else is a request without an operation, and refused: somebody may wait for an answer."""

_SET_MODE = "in the worker's kv_connector_extra_config, or start the agent with auto"

_FIXES = {
    "register_kv_cache_engine_driven_context": (
        "it serves lmcache_driven transfers only (--supported-transfer-mode): set"
        f" lmcache.mp.mp_transfer_mode to lmcache_driven {_SET_MODE}"
    ),
    "register_kv_cache": (
        "it serves engine_driven transfers only (--supported-transfer-mode): set"
        f" lmcache.mp.mp_transfer_mode to engine_driven {_SET_MODE}"
    ),
}
"""What a user changes, for refusals that a start-up fails with."""


class Hear(Protocol):
    """Takes a sign of life as it is read; see `ManagementModule.hear`."""

    def __call__(
        self, instance_id: InstanceId, connection: Connection, /, *, ping: bool
    ) -> Touched:
        """Refresh the instance, if the connection may speak for it."""
        ...


class Dispatcher:
    """Routes requests. `receive` runs on zmq-router, `run` on the threads of the pools."""

    def __init__(
        self,
        handlers: Mapping[str, Callable[..., object]],
        pools: Mapping[PoolKind, Pool],
        hear: Hear,
        send: Callable[[Reply], None],
        publish: Publish,
        control: Callable[[Connection, bytes, bytes], None],
        lost: LostCommits,
        run_is_over: Callable[[SlotRun], bool] = lambda _: False,
        waiting: Waiting | None = None,
    ) -> None:
        """Make a dispatcher.

        Args:
            handlers: By operation name.
            pools: Where requests run.
            hear: Takes signs of life.
            send: Sends replies.
            publish: Takes facts.
            control: Takes what a client says about a stream that it has.
            lost: Answers what was too large to be read.
            run_is_over: Whether the container at a slot has ended.
            waiting: Bounds the bytes of requests and of unread replies.
        """
        self._waiting = waiting
        self._control = control
        self._run_is_over = run_is_over
        self._handlers = handlers
        self._pools = pools
        self._hear = hear
        self._send = send
        self._publish = publish
        self._lost = lost
        self._closing = False
        self._in_order: dict[RoutingId, Request] = {}  # the last in SYNC; router thread only
        # Handed to a pool, in order of arrival. Each dict operation is atomic: no lock.
        self._unanswered: dict[Request, None] = {}

    def close(self) -> None:
        """Hand no request to a pool any more: refuse it. Threads: any."""
        self._closing = True

    def give_up(self) -> None:
        """Refuse what is still unanswered, so that nobody waits for an agent that leaves.

        Threads: any, after `close` and once nobody waits for the pools any more.
        """
        for request in tuple(self._unanswered):
            request.refuse(RequestError(f"{request.operation.name}: the agent is stopping"))

    def overdue(self, request: Request, seconds: float) -> None:
        """Answer a transfer at its deadline; a copy that goes on does so for nobody.

        Thread: transfer-watch.
        """
        request.cancellation.cancel()
        reason = f"{request.operation.name} did not finish within {seconds:.1f} s of its arrival"
        request.fail(TransferOverdue(reason), reason)
        self._unanswered.pop(request, None)
        if not request.begun:
            _give_back(request)  # nobody will run it

    def receive(self, connection: Connection, frames: Sequence[Frame]) -> None:
        """Take one message without its routing id. Thread: zmq-router."""
        if len(frames) < 2 or not is_uid(frames[0]):  # noqa: PLR2004  # uid and operation
            self._malformed(connection, "framing", f"{len(frames)} frames, no uid and operation")
            return
        uid = bytes(frames[0])
        is_control = not frames[1] and len(frames) == _CONTROL_FRAMES
        if is_control and frames[2] in _CONTROL_WORDS:
            self._control(connection, uid, bytes(frames[2]))
            return
        connection.last_uid = uid
        try:
            operation = decode_operation(frames[1])
        except RequestError as error:
            self._malformed(connection, error.code, str(error))
            self._send(Reply(connection, "unknown", uid, mismatched_operation(str(error)), None))
            return
        request = Request(
            connection,
            operation,
            uid,
            bytes(frames[1]),
            frames[2:],
            self._send,
            self._publish,
            unread=self._waiting.unread_replies if self._waiting else None,
        )
        try:
            self._admit(request)
        except RequestError as error:
            request.refuse(error)
        except Exception as error:  # noqa: BLE001  # worker dispatch: no request ends the router
            request.fail(error, traceback.format_exc())

    def _malformed(self, connection: Connection, reason: str, detail: str) -> None:
        self._publish(MalformedMessage(reason, connection.peer.text, detail))

    def _admit(self, request: Request) -> None:
        """Stamp the sign of life, see who speaks, and hand the request to its pool."""
        operation = request.operation
        self._refuse_the_ended(request)
        if len(request.payload) != len(operation.payload):
            decode_payload(operation, request.payload)  # raises, with the frames it wants
        instance_id = peek_instance_id(operation, request.payload)
        self._note_what_it_says(request.connection, operation, instance_id)
        if instance_id is not None and operation.life_sign:
            request.touched = self._touch(request, instance_id)
            self._lost.heard(instance_id, request)
        if operation.name not in self._handlers:
            fix = _FIXES.get(operation.name, "see its documentation for what it serves")
            raise UnsupportedOperation(f"{operation.name} is not served by this agent; {fix}")
        if operation.pool in {PoolKind.INLINE, PoolKind.STREAM}:
            self.run(request)
            return
        if self._waiting is not None:
            size = sum(map(len, request.payload))
            request.hold = self._waiting.requests.take(request.connection.routing_id, size)
        self._unanswered[request] = None
        if self._closing or not self._submit(request):
            self._unanswered.pop(request, None)
            _give_back(request)
            raise Overloaded(
                f"{operation.name}: the agent is stopping, its {operation.pool.value} queue"
                " is full, or an earlier transfer of this connection hangs; try again later"
            )

    def _refuse_the_ended(self, request: Request) -> None:
        """Refuse whatever comes over a slot from a container that has ended.

        Some process of it may still hold its connection; the slot is the next container's.
        """
        connection = request.connection
        if connection.slot and self._run_is_over(connection.slot):
            instance_id = peek_instance_id(request.operation, request.payload)
            said = instance_id or InstanceId(0), request.operation.name, connection.peer.text
            self._publish(StrangerRefused(*said, f"the container now at {connection.slot.words}"))
            raise NotTheSpeaker(
                f"{request.operation.name}: the container that connected has ended, and"
                f" {connection.slot.words} is the next one's"
            )

    def _submit(self, request: Request) -> bool:
        """Queue a request; a transfer goes behind its own connection's registrations.

        Clients need not wait for the reply to a registration, and a transfer that overtook it
        would copy to or from the memory that was registered before. Thread: zmq-router.
        """
        kind, who = request.operation.pool, request.connection.routing_id
        earlier = self._in_order.get(who)
        if kind is PoolKind.AFFINITY and earlier is not None and earlier.in_order:
            request.follows_registration = True
            kind = PoolKind.SYNC
        if kind is not PoolKind.SYNC:
            self._in_order.pop(who, None)
            return self._pools[kind].submit(request)
        request.in_order = True
        if not self._pools[kind].submit(request):
            return False
        self._in_order[who] = request
        if len(self._in_order) > _CONNECTIONS_REMEMBERED:
            self._in_order = {w: r for w, r in self._in_order.items() if r.in_order}
        return True

    def _touch(self, request: Request, instance_id: InstanceId) -> Touched:
        """Refresh the instance; refuse a stranger, but answer its ping."""
        operation = request.operation
        touched = self._hear(instance_id, request.connection, ping=operation.name == "ping")
        if touched.speaker is Speaker.STRANGER:
            peer = request.connection.peer.text
            self._publish(StrangerRefused(instance_id, operation.name, peer, touched.bound_peer))
            if operation.name != "ping":
                raise NotTheSpeaker(
                    f"{operation.name}: {peer} does not speak for this instance;"
                    f" {touched.bound_peer} does, and its connection is open"
                )
        return touched

    @staticmethod
    def _note_what_it_says(
        connection: Connection, operation: Operation, instance_id: InstanceId | None
    ) -> None:
        """Remember what tells this connection from a worker that came back."""
        if instance_id is not None:
            spoke_for = connection.spoke_for
            if instance_id not in spoke_for and len(spoke_for) < _IDS_KEPT_PER_CONNECTION:
                connection.spoke_for = spoke_for | {instance_id}
        elif operation.name in {"lookup", "ping"}:
            connection.asked_lookups = True

    def run(self, request: Request) -> None:
        """Decode, call the module, answer. Thread: the pool's."""
        if request.follows_registration:
            self._pass_on(request)
            return
        request.begun = True
        try:
            self._serve(request)
        finally:
            _give_back(request)
        request.in_order = False

    def _pass_on(self, request: Request) -> None:
        """The registrations before this transfer are done. Thread: sync."""
        request.follows_registration = False
        if not self._pools[PoolKind.AFFINITY].submit(request):
            self._unanswered.pop(request, None)
            _give_back(request)
            request.refuse(Overloaded(f"{request.operation.name}: the queue is full"))
        request.in_order = False  # after that: what comes now may not overtake this one

    def _serve(self, request: Request) -> None:
        if not request.connection.is_open and request.operation.pool is PoolKind.AFFINITY:
            request.refuse(MalformedRequest("the connection closed before the transfer began"))
            self._unanswered.pop(request, None)
            return
        try:
            payload = decode_payload(request.operation, request.payload)
            request.payload = ()
            stream = request if request.operation.pool is PoolKind.STREAM else None
            call = Call(request.connection, request.touched, request.cancellation, stream)
            value = self._handlers[request.operation.name](call, *payload)
        except RequestError as error:
            request.refuse(error)
        except Exception as error:  # noqa: BLE001  # worker dispatch: any fault of a module is one request's
            request.fail(error, traceback.format_exc())
        else:
            if isinstance(value, Pending):
                value.when_settled(lambda settled: self._answer(request, settled))
                return
            if not isinstance(value, Streaming):
                request.answer(value)
        self._unanswered.pop(request, None)

    def _answer(self, request: Request, value: object) -> None:
        """Give an answer that came later. Thread: whichever settles it."""
        request.answer(value)
        self._unanswered.pop(request, None)


def _give_back(request: Request) -> None:
    """Nothing of a request's payload is needed any more."""
    request.payload = ()
    if request.hold is not None:
        request.hold.give_back()
