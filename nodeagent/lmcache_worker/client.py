"""A blocking client of the multiprocess server, for tests, benchmarks and tools."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self, TypeVar

from lmcache_worker.dealer import Connection, DealerConnection
from lmcache_worker.wire import (
    BadReply,
    BlockAllocation,
    CacheKey,
    EngineGroup,
    NoReply,
    Reply,
    SharedTensor,
    decode_reply,
    decode_uid,
    encode_request,
)

DEFAULT_TIMEOUT_SECONDS = 10.0

HOST_EVENT = b"stub_ipc_handle"
"""What stock clients send in place of a device event when the memory is the host's."""

_POLL_SECONDS = 0.002

_T = TypeVar("_T")


class WorkerClient:
    """One connection to one server. Thread: whichever enters it, and no other.

    `call` and the named methods wait for their own reply; `send` and `receive` keep several
    requests in flight. Replies of requests that timed out, and messages that answer nothing,
    are ignored, as stock clients do.

    Raises (all calls): `RequestRefused`, `NoReply`, `BadReply`.
    """

    def __init__(
        self,
        url: str,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        connection: Connection | None = None,
    ) -> None:
        """Prepare a client; entering it connects.

        Args:
            url: `tcp://host:port`, `ipc:///path`, or `host:port` for TCP.
            timeout_seconds: How long a call waits for its reply.
            connection: Used in place of a new DEALER to `url`.
        """
        self._url = url
        self._timeout_seconds = timeout_seconds
        self._connection = connection
        self._next_uid = 0  # never reset: a server tells a returning client from a new one by it
        self._pending: dict[int, str] = {}  # uid -> operation
        self._arrived: dict[int, Reply] = {}

    def __enter__(self) -> Self:
        if self._connection is None:
            self._connection = DealerConnection.open(self._url)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Disconnect; requests in flight are forgotten. Idempotent."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self._pending.clear()
        self._arrived.clear()

    def send(self, operation: str, *payload: object) -> int:
        """Send a request without waiting; return the uid that its reply will carry."""
        uid, self._next_uid = self._next_uid, self._next_uid + 1
        self._connected().send(encode_request(uid, operation, payload))
        self._pending[uid] = operation
        return uid

    def receive(self, uid: int | None = None, timeout_seconds: float | None = None) -> Reply:
        """Return the reply to `uid`, or with None the next one to any request in flight.

        Raises:
            NoReply: Nothing came in time; a request named by `uid` is given up.
        """
        seconds = self._timeout_seconds if timeout_seconds is None else timeout_seconds
        deadline = time.monotonic() + seconds
        while True:
            wanted = next(iter(self._arrived), None) if uid is None else uid
            if wanted is not None and wanted in self._arrived:
                return self._arrived.pop(wanted)
            frames = self._connected().receive(max(0.0, deadline - time.monotonic()))
            if frames is None:
                given_up = "any request" if uid is None else self._pending.pop(uid, f"uid {uid}")
                raise NoReply(f"no reply to {given_up} within {seconds} s from {self._url}")
            self._take(frames)

    def call(self, operation: str, *payload: object) -> object:
        """Send a request and return the value of its reply (None for a reply without one)."""
        return self.receive(self.send(operation, *payload)).result()

    def get_chunk_size(self) -> int:
        """Tokens in a chunk."""
        return _typed(self.call("get_chunk_size"), int)

    def get_experimental(self) -> list[str]:
        """Capabilities that the server offers beyond the base protocol."""
        return [_typed(name, str) for name in _typed(self.call("get_experimental"), list)]

    def noop(self) -> str:
        """`OK`."""
        return _typed(self.call("noop"), str)

    def register_kv_cache(
        self,
        instance_id: int,
        tensors: Sequence[SharedTensor],
        model: str,
        world_size: int = 1,
        *,
        engine_type: str = "vllm",
        layout_hints: Mapping[str, object] | None = None,
        groups: Sequence[EngineGroup] = (),
    ) -> None:
        """Let the server map this worker's KV tensors, one for each layer.

        Args:
            instance_id: A number in 0..2**63-1 that no other worker uses.
            tensors: As they lie in memory.
            model: Cache namespace.
            world_size: Number of KV shards that make up a chunk.
            engine_type: The engine that the worker belongs to.
            layout_hints: What the shapes do not tell; NHD when None.
            groups: How the layers are grouped; one group of all when empty.
        """
        hints = {"kv_layout": "NHD"} if layout_hints is None else dict(layout_hints)
        self.call(
            "register_kv_cache",
            instance_id,
            tensors,
            model,
            world_size,
            engine_type,
            hints,
            groups,
        )

    def unregister(self, instance_id: int) -> None:
        """Let the server unmap this worker's tensors."""
        self.call("unregister_kv_cache", instance_id)

    def ping(self, instance_id: int | None) -> bool:
        """Give a sign of life; False asks to register again."""
        return _typed(self.call("ping", instance_id), bool)

    def lookup(self, key: CacheKey, tp_size: int = 1) -> None:
        """Start looking for the longest cached prefix; `query_prefetch_status` has the result."""
        self.call("lookup", key, tp_size)

    def query_prefetch_status(self, request_id: str) -> int | None:
        """Chunks that the lookup found, once; None while it runs."""
        found = self.call("query_prefetch_status", request_id)
        return None if found is None else _typed(found, int)

    def hit_chunks(self, key: CacheKey) -> int:
        """Look up and wait for the result: chunks found, which are now locked for reading."""
        self.lookup(key)
        deadline = time.monotonic() + self._timeout_seconds
        while time.monotonic() < deadline:
            if (found := self.query_prefetch_status(key.request_id)) is not None:
                return found
            time.sleep(_POLL_SECONDS)
        raise NoReply(f"lookup of {key.request_id} still runs after {self._timeout_seconds} s")

    def free_lookup_locks(self, key: CacheKey, tp_size: int = 1) -> None:
        """Give up the read locks of a lookup on the chunks in [start, end)."""
        self.call("free_lookup_locks", key, tp_size)

    def end_session(self, request_id: str) -> None:
        """Say that the request is finished."""
        self.call("end_session", request_id)

    def store(
        self,
        key: CacheKey,
        instance_id: int,
        block_ids: Sequence[Sequence[int]],
        event_handle: bytes = HOST_EVENT,
    ) -> tuple[bytes, bool]:
        """Copy the blocks of [start, end) into the cache; returns (completion event, success)."""
        return _transferred(self.call("store", key, instance_id, block_ids, event_handle))

    def retrieve(
        self,
        key: CacheKey,
        instance_id: int,
        block_ids: Sequence[Sequence[int]],
        event_handle: bytes = HOST_EVENT,
        skip_first_n_tokens: int = 0,
    ) -> tuple[bytes, bool]:
        """Copy [start, end) into the blocks; returns (completion event, success)."""
        reply = self.call(
            "retrieve", key, instance_id, block_ids, event_handle, skip_first_n_tokens
        )
        return _transferred(reply)

    def clear(self, *, force: bool = False) -> None:
        """Empty the cache; `force` includes objects that are locked."""
        self.call("clear", force)

    def report_block_allocation(
        self, scheduler_pid: int, model: str, records: Sequence[BlockAllocation]
    ) -> None:
        """Tell which blocks requests gained; feeds metrics only."""
        self.call("report_block_allocation", scheduler_pid, model, records)

    def _connected(self) -> Connection:
        if self._connection is None:
            raise RuntimeError("the client is not connected: use it as a context manager")
        return self._connection

    def _take(self, frames: Sequence[bytes]) -> None:
        uid = decode_uid(frames)
        operation = None if uid is None else self._pending.pop(uid, None)
        if uid is not None and operation is not None:
            self._arrived[uid] = decode_reply(uid, operation, frames)


def _typed(value: object, kind: type[_T]) -> _T:
    if type(value) is not kind:
        raise BadReply(f"expected {kind.__name__}, got {value!r}")
    return value


def _transferred(value: object) -> tuple[bytes, bool]:
    match value:
        case [bytes(event), bool(success)]:
            return event, success
        case _:
            raise BadReply(f"expected [bytes, bool], got {value!r}")
