"""KV event streams: engines follow what L1 holds, batch by batch, as fast as they ask for it."""

from __future__ import annotations

import time
from array import array
from collections import OrderedDict
from dataclasses import dataclass
from threading import Event, Lock
from typing import TYPE_CHECKING

from lmcache_nodeagent.errors import Overloaded
from lmcache_nodeagent.events import KvEventStreamEnded
from lmcache_nodeagent.modules.calls import STREAMING, Streaming
from lmcache_nodeagent.protocol.optional_messages import KvEvent, KvEventBatch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from lmcache_nodeagent.events import Publish
    from lmcache_nodeagent.ids import InstanceId
    from lmcache_nodeagent.liveness.evidence import Connection
    from lmcache_nodeagent.modules.calls import Call, Stream
    from lmcache_nodeagent.protocol.messages import CacheKey
    from lmcache_nodeagent.storage.changes import Change
    from lmcache_nodeagent.storage.objects import L1Store

CAPABILITY = "kv_event_stream"
"""What `get_experimental` lists: stock clients then read the stream instead of guessing."""

MAX_STREAMS = 1024

_MEDIUM = "CPU"
_LOOK_SECONDS = 0.05
_RECORDS_PER_LOOK = 4096


@dataclass(frozen=True, slots=True)
class _Binding:
    parent: bytes | None
    tokens: array[int]


class TokenBindings:
    """Which tokens a chunk hash stands for, and the hash before it. Threads: any.

    Bounded as the log is: four bytes a token.
    """

    def __init__(self, size: int, chunk_tokens: int) -> None:
        self._size = size
        self._chunk_tokens = chunk_tokens
        self._lock = Lock()  # guards: _bindings
        self._bindings: OrderedDict[bytes, _Binding] = OrderedDict()

    def bind(self, key: CacheKey, hashes: Sequence[bytes], indices: Sequence[int]) -> None:
        """Remember chunks of [key.start, key.end), before they become visible.

        Args:
            key: Of the store; its `start` is a chunk boundary.
            hashes: Of all chunks of its prompt up to `end`.
            indices: Which of the range's chunks, counted from `start`.
        """
        if not self._size or key.worker_id or not indices:
            return  # the log notes the objects of rank 0 only
        size = self._chunk_tokens
        first = key.start // size
        made = {}
        for index in indices:
            at = first + index
            parent = hashes[at - 1] if at else None
            made[hashes[at]] = _Binding(
                parent, array("I", key.token_ids[at * size : (at + 1) * size])
            )
        with self._lock:
            self._bindings.update(made)
            while len(self._bindings) > self._size:
                self._bindings.popitem(last=False)

    def find(self, chunk_hash: bytes) -> _Binding | None:
        """Return what was bound, if it is still remembered."""
        with self._lock:
            return self._bindings.get(chunk_hash)


@dataclass(slots=True, eq=False)
class _Subscription:
    """One stream. `credit`: it may get a batch. Guarded by the module's lock."""

    stream: Stream
    model: str
    cursor: int
    max_events: int
    credit: bool = True


class KvEventModule:
    """Serves subscribe_kv_events: subscribing on the router, batches from thread kv-events.

    A batch goes out only for credit: one at the start, one for each acknowledgement. So a client
    that does not read costs one batch, and learns by `lost` what the log has dropped meanwhile.
    """

    def __init__(self, store: L1Store, bindings: TokenBindings, publish: Publish) -> None:
        self._store = store
        self._bindings = bindings
        self._publish = publish
        self.incarnation = time.time_ns()
        self._lock = Lock()  # guards: _streams
        self._streams: dict[InstanceId, _Subscription] = {}
        self._work = Event()
        self._stop = Event()

    def handlers(self) -> Mapping[str, Callable[..., object]]:
        """Return the handlers by operation name."""
        return {"subscribe_kv_events": self.subscribe}

    def subscribe(
        self, call: Call, instance_id: InstanceId, model: str, cursor: int, max_events: int
    ) -> Streaming:
        """Begin a stream; an earlier one of this instance ends. Thread: zmq-router.

        Raises:
            Overloaded: there are too many streams.
        """
        assert call.stream is not None, "the dispatcher gives one to streaming operations"
        subscription = _Subscription(call.stream, model, cursor, max_events)
        with self._lock:
            if len(self._streams) >= MAX_STREAMS and instance_id not in self._streams:
                raise Overloaded(f"{MAX_STREAMS} KV event streams are open already")
            replaced = self._streams.pop(instance_id, None)
            self._streams[instance_id] = subscription
        if replaced is not None:
            self._end(replaced, "replaced")
        self._work.set()
        return STREAMING

    def control(self, connection: Connection, uid: bytes, word: bytes) -> None:
        """Take `ack` (one more batch may go) or `cancel`. Unknown streams are fine.

        Thread: zmq-router.
        """
        cancelled = None
        with self._lock:
            for instance_id, subscription in self._streams.items():
                stream = subscription.stream
                if stream.connection is connection and stream.uid == uid:
                    if word == b"ack":
                        subscription.credit = True
                    elif word == b"cancel":
                        cancelled = self._streams.pop(instance_id)
                    break
        if cancelled is not None:
            self._end(cancelled, "cancelled")
        self._work.set()

    def streams(self) -> int:
        """Count the streams that are open."""
        with self._lock:
            return len(self._streams)

    def run(self) -> None:
        """Send batches until stopped. Thread: kv-events."""
        while not self._stop.is_set():
            self._work.wait()
            self._work.clear()
            while not self._stop.is_set() and self.send_what_is_due():
                self._work.wait(_LOOK_SECONDS)

    def stop(self) -> None:
        """Let `run` return. The streams end with their connections."""
        self._stop.set()
        self._work.set()

    def send_what_is_due(self) -> bool:
        """Send each stream with credit what is new; return whether any of them waits for news."""
        with self._lock:
            gone = [i for i, s in self._streams.items() if not s.stream.connection.is_open]
            for instance_id in gone:
                del self._streams[instance_id]
            waiting = [s for s in self._streams.values() if s.credit]
        for _ in gone:
            self._publish(KvEventStreamEnded("connection_closed"))
        for subscription in waiting:
            self._serve(subscription)
        return bool(waiting)

    def _serve(self, subscription: _Subscription) -> None:
        """Send one batch if there is something of its model, or a loss, to report."""
        changes = self._store.changes_since(
            subscription.cursor, min(_RECORDS_PER_LOOK, subscription.max_events)
        )
        events = [
            event for record in changes.records for event in self._event(subscription, record)
        ]
        with self._lock:
            subscription.cursor = changes.next_cursor
            if not events and not changes.lost:
                return
            subscription.credit = False
        subscription.stream.send(
            KvEventBatch(
                enabled=True,
                incarnation=self.incarnation,
                next_cursor=changes.next_cursor,
                lost=changes.lost,
                events=events,
            )
        )

    def _event(self, subscription: _Subscription, record: Change) -> list[KvEvent]:
        """Write a record for the wire; nothing if it is of another model, or its tokens unknown."""
        if record.keys[0].model_name != subscription.model:
            return []
        hashes = [key.chunk_hash for key in record.keys]
        binding = self._bindings.find(hashes[0]) if record.stored else None
        if record.stored and binding is None:
            return []
        return [
            KvEvent(
                seq=record.seq,
                kind="stored" if record.stored else "removed",
                medium=_MEDIUM,
                model_name=subscription.model,
                block_hashes=hashes,
                parent_block_hash=binding.parent if binding else None,
                token_ids=binding.tokens.tolist() if binding else [],
            )
        ]

    def _end(self, subscription: _Subscription, reason: str) -> None:
        subscription.stream.end()
        self._publish(KvEventStreamEnded(reason))


def no_stream(connection: Connection, uid: bytes, word: bytes) -> None:
    """Take a word about a stream where there are none."""
    del connection, uid, word
