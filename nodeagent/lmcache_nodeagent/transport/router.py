"""The thread that owns the ROUTER socket: it reads, stamps, routes and replies, and never waits.

Nothing a peer sends ends this thread, and no peer that does not read stops it: replies are sent
without blocking, and one that does not fit into the peer's queue is dropped and counted.
"""

from __future__ import annotations

import math
import os
import select
from collections import Counter, deque
from threading import Event, Lock
from typing import TYPE_CHECKING

import zmq

from lmcache_nodeagent.events import ReplyDropped
from lmcache_nodeagent.liveness.stalls import STALL_SECONDS
from lmcache_nodeagent.transport.connections import SUSPECT_CHECK_SECONDS, ConnectionTable
from lmcache_nodeagent.transport.sockets import RECEIVE_QUEUE_MESSAGES
from lmcache_nodeagent.transport.unread import UnreadReplies

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from lmcache_nodeagent.clock import Now
    from lmcache_nodeagent.events import Publish
    from lmcache_nodeagent.ids import RoutingId
    from lmcache_nodeagent.liveness.evidence import Connection, ConnectionLedger
    from lmcache_nodeagent.liveness.slots import SlotBook
    from lmcache_nodeagent.liveness.stalls import Stalls
    from lmcache_nodeagent.protocol.codec import Frame
    from lmcache_nodeagent.transport.requests import Reply
    from lmcache_nodeagent.transport.sockets import BoundSockets

_NOBLOCK = int(zmq.NOBLOCK)  # plain numbers: pyzmq's enums cost a microsecond for each frame
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)

_MESSAGES_PER_TURN = 256
_FRAMES_KEPT = 16
"""No operation has more; the frames after these are read and dropped."""

_LEFT_IN_PLACE_BYTES = 64 << 10
"""Frames from here on stay in libzmq's memory: copying them would hold up everybody's pings."""

_LONGEST_WAIT_MS = 500
_SUSPECT_WAIT_MS = math.ceil(SUSPECT_CHECK_SECONDS * 1000)

_PROBE = (b"\xcf" + b"\xff" * 8, b"\xa0")
"""A reply with a uid that no client has reached: clients drop it. Sent only to connections that the
monitor says may be gone, to learn whether they are."""


class Router:
    """Thread: zmq-router, but for `send`, `caught_up`, `stop` and the figures (any)."""

    def __init__(
        self,
        sockets: BoundSockets,
        ledger: ConnectionLedger,
        stalls: Stalls,
        wake_reaper: Callable[[], None],
        publish: Publish,
        now: Now,
        slot_book: SlotBook | None = None,
    ) -> None:
        self._sockets = sockets
        self._slot_book = slot_book
        self._socket = sockets.router
        self._stalls = stalls
        self._ledger = ledger
        self._publish = publish
        self._now = now
        self._receive: Callable[[Connection, Sequence[Frame]], None] = lambda _c, _f: None
        self._monitor = sockets.monitor
        self._connections = ConnectionTable(
            monitor=self._monitor,
            ledger=ledger,
            is_routable=self._is_routable,
            handshake_seconds=sockets.handshake_seconds,
            keepalive_silence_seconds=sockets.keepalive_silence_seconds,
            half_open_seconds=sockets.half_open_seconds,
            max_links=sockets.max_links,
            on_change=wake_reaper,
            publish=publish,
            now=now,
            slots=sockets.slots,
            slot_book=slot_book,
        )
        self._outbox: deque[Reply] = deque()
        self._unread = UnreadReplies()
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._wake_on_send = True
        self._lock = Lock()  # guards: _marks
        self._wakeup_lock = Lock()  # guards: _closed, and _wakeup against being closed
        self._closed = False
        self._a_run_ended = False
        self._marks: list[Event] = []
        self._read_since_mark: Counter[bytes] = Counter()  # router thread only
        self._stopping = Event()
        self._last_read_at = now()
        self._last_turn_at = now()

    def serve(self, receive: Callable[[Connection, Sequence[Frame]], None]) -> None:
        """Connect the dispatcher; before `run`."""
        self._receive = receive

    def run(self) -> None:
        """Serve until stopped, then send what is left and close."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._monitor.socket, zmq.POLLIN)
        poller.register(self._wakeup, zmq.POLLIN)
        poller.register(self._connections.exits.fileno(), select.POLLIN)
        if self._sockets.slots is not None:
            poller.register(self._sockets.slots.socket, zmq.POLLIN)
        try:
            while not self._stopping.is_set():
                asked_at = self._now()
                hurry = self._connections.has_suspects
                ready = dict(poller.poll(_SUSPECT_WAIT_MS if hurry else _LONGEST_WAIT_MS))
                woke_at = self._now()
                self._note_stall(asked_at + _LONGEST_WAIT_MS / 1000, woke_at)
                self._turn(ready)
                self._note_stall(woke_at, self._now())
            self._send_replies()
        finally:
            self._close()

    def _turn(self, ready: Mapping[object, int]) -> None:
        """Do everything that is due, in an order that keeps the books right."""
        self._wake_on_send = False  # replies are looked for at the end of the turn anyway
        if self._wakeup in ready:
            os.eventfd_read(self._wakeup)
        asked = len(self._marks)  # what is queued for the later ones may be missed in this turn
        if self._monitor.socket in ready:
            self._connections.read_monitor()
        if self._connections.exits.fileno() in ready:
            self._connections.read_exits()
        self._serve_slots()
        empty = self._read_messages()
        self._wake_on_send = True  # before the outbox is emptied, so that nothing is missed
        self._send_replies()
        self._unread.tidy()
        self._connections.tidy(all_read=empty)
        if asked and (empty or self._has_read_past_every_queue()):
            self._set_marks(asked)
        self._last_turn_at = self._now()

    def _serve_slots(self) -> None:
        """Say whose new connections are, and end those of containers that have ended."""
        slots, book = self._sockets.slots, self._slot_book
        if slots is None or book is None:
            return
        slots.answer(book.current)
        if self._a_run_ended:
            self._a_run_ended = False
            self._connections.end_those_of_earlier_runs()

    def run_ended(self) -> None:
        """End the connections of the containers that have ended. Threads: any."""
        self._a_run_ended = True
        self._wake()

    def _note_stall(self, expected: float, now: float) -> None:
        if now - expected > STALL_SECONDS:
            self._stalls.record(expected, now)
            self._ledger.router_stalled(now)

    def _read_messages(self) -> bool:
        """Read a bounded number of messages; True if there were no more."""
        for _ in range(_MESSAGES_PER_TURN):
            try:
                first = self._socket.recv(_NOBLOCK, copy=False)
            except zmq.Again:
                return True
            frames = self._rest_of_message(first)
            self._last_read_at = self._now()
            if self._marks:
                self._read_since_mark[first.bytes] += 1
            connection = self._connections.of_message(first)
            if connection.first_uid is None and frames:
                connection.first_uid = _small_uid(frames[0])
            self._receive(connection, frames)
        return False

    def _rest_of_message(self, frame: zmq.Frame) -> list[Frame]:
        frames: list[Frame] = []
        while frame.more:
            frame = self._socket.recv(_NOBLOCK, copy=False)
            if len(frames) < _FRAMES_KEPT:
                large = len(frame) >= _LEFT_IN_PLACE_BYTES
                frames.append(frame.buffer if large else frame.bytes)
        return frames

    def send(self, reply: Reply) -> None:
        """Queue a reply and wake the router. Threads: any."""
        self._outbox.append(reply)
        if self._wake_on_send:
            self._wake()

    def _wake(self) -> None:
        self._wake_on_send = False  # one is enough until the next turn has been through the outbox
        with self._wakeup_lock:
            if not self._closed:
                os.eventfd_write(self._wakeup, 1)

    def _send_replies(self) -> None:
        while self._outbox:
            self._send_now(self._outbox.popleft())

    def _send_now(self, reply: Reply) -> None:
        connection = reply.connection
        if not connection.is_open:
            self._dropped(reply, "peer_gone")
            return
        try:
            self._hand_over(reply)
        except zmq.Again:
            connection.replies_dropped += 1
            self._dropped(reply, "peer_not_reading")
        except zmq.ZMQError:
            self._dropped(reply, "peer_gone")
            self._connections.unroutable(connection)
            return
        self._connections.replied(connection)

    def _hand_over(self, reply: Reply) -> None:
        """Give a reply's frames to libzmq: if it takes the first one, it takes them all."""
        send = self._socket.send
        send(reply.connection.routing_id, _MORE)
        send(reply.uid, _MORE)
        if reply.document is None:
            send(reply.operation_frame, _NOBLOCK)
            return
        send(reply.operation_frame, _MORE)
        if reply.hold is None:
            send(reply.document, _NOBLOCK)
        else:
            tracker = send(reply.document, _NOBLOCK, copy=False, track=True)
            self._unread.sent(tracker, reply.hold)

    def _dropped(self, reply: Reply, reason: str) -> None:
        if reply.hold is not None:
            reply.hold.give_back()
        self._publish(ReplyDropped(reply.operation_name, reason, reply.connection.peer.text))

    def _is_routable(self, routing_id: RoutingId) -> bool:
        """Ask libzmq whether a connection still exists; a full queue means that it does."""
        try:
            self._socket.send_multipart((routing_id, *_PROBE), zmq.NOBLOCK)
        except zmq.Again:
            return True
        except zmq.ZMQError:
            return False
        return True

    def caught_up(self, timeout_seconds: float) -> bool:
        """Wait until everything queued before this call was read, closes included. Threads: any."""
        mark = Event()
        with self._lock:
            self._marks.append(mark)
        self._wake()
        if mark.wait(timeout_seconds):
            return True
        with self._lock:
            self._marks = [other for other in self._marks if other is not mark]
        return mark.is_set()

    def _has_read_past_every_queue(self) -> bool:
        """Tell whether what was queued at the mark is read, though more keeps coming.

        libzmq serves connections in turn: once one of them has given a full queue of messages,
        each other has given at least what it had queued, or run empty.
        """
        return max(self._read_since_mark.values(), default=0) > RECEIVE_QUEUE_MESSAGES

    def _set_marks(self, asked: int) -> None:
        with self._lock:
            marks, self._marks = self._marks[:asked], self._marks[asked:]
        self._read_since_mark.clear()
        self._connections.read_monitor()
        for mark in marks:
            mark.set()

    def last_read_at(self) -> float:
        """Moment (monotonic) of the last message from anybody. Threads: any."""
        return self._last_read_at

    def last_turn_at(self) -> float:
        """Moment (monotonic) at which the loop last came round. Threads: any."""
        return self._last_turn_at

    def connections_open(self) -> int:
        """Count the connections that have spoken and are open. Threads: any."""
        return sum(connection.is_open for connection in self._connections)

    def stop(self) -> None:
        """Make `run` return once the queued replies are handed to libzmq. Threads: any."""
        self._stopping.set()
        self._wake()

    def _close(self) -> None:
        self._connections.close()
        self._monitor.close()
        self._sockets.close()
        with self._wakeup_lock:
            self._closed = True
            os.close(self._wakeup)


def _small_uid(frame: Frame) -> int:
    """Tell a first uid of 0 from any other; -1 for what is no small integer."""
    return frame[0] if len(frame) == 1 and frame[0] <= 0x7F else -1  # noqa: PLR2004  # fixint
