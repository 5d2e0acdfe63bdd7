"""The client's half of LMCache's multiprocess wire: frames out, frames in. Pure.

A request is `[uid, operation, payload...]`, a reply `[uid, operation]` with at most one payload;
every frame is a msgpack document of its own. A reply whose operation is not the one asked for is
a refusal, and its operation frame is the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import cast

import msgpack  # type: ignore[import-untyped]

OPERATION_IDS = {
    "register_kv_cache": 1,
    "unregister_kv_cache": 2,
    "store": 6,
    "retrieve": 7,
    "lookup": 8,
    "query_prefetch_status": 9,
    "free_lookup_locks": 12,
    "end_session": 13,
    "register_kv_cache_engine_driven_context": 14,
    "unregister_kv_cache_engine_driven_context": 15,
    "prepare_store": 16,
    "commit_store": 17,
    "prepare_retrieve": 18,
    "commit_retrieve": 19,
    "clear": 20,
    "get_chunk_size": 21,
    "ping": 22,
    "report_block_allocation": 23,
    "noop": 24,
    "get_experimental": 32,
}
"""Numbers of the operations that stock clients send by number; others travel by name."""

EXT_TENSOR = 1
"""The msgpack ext code of a KV tensor's description."""


class WorkerError(Exception):
    """Root of what the client raises about a request."""


class RequestRefused(WorkerError):
    """The server said no, with a reason."""

    def __init__(self, operation: str, reason: str) -> None:
        self.operation = operation
        self.reason = reason
        super().__init__(f"{operation}: {reason}")


class NoReply(WorkerError):
    """No reply within the time-out; a later one is ignored."""


class BadReply(WorkerError):
    """A reply that is not what the operation answers."""


@dataclass(frozen=True, slots=True)
class CacheKey:
    """Tokens [start, end) of a prompt, for one KV shard (`worker_id`) or all of them (None)."""

    model_name: str
    world_size: int
    worker_id: int | None
    token_ids: Sequence[int]
    start: int
    end: int
    request_id: str
    cache_salt: str = ""
    request_configs: dict[str, object] | None = None
    num_kv_readers: int = 1


@dataclass(frozen=True, slots=True)
class EngineGroup:
    """Layers that share block ids; `layer_indices` index the registered tensors."""

    engine_group_id: int
    layer_indices: Sequence[int]
    tokens_per_block: int = 0
    sw_size_tokens: int = -1
    extra_object_group_tag: int = 0
    recurrent_state: bool = False


@dataclass(frozen=True, slots=True)
class ChunkDescription:
    """What an engine-driven worker registers: how the tensor of one of its chunks looks.

    `use_mla` means a single plane; `num_physical_slots` is the token slots of a chunk.
    """

    instance_id: int
    model_name: str
    world_size: int
    block_size: int
    num_layers: int
    hidden_dim_size: int
    dtype_str: str
    use_mla: bool
    num_physical_slots: int


@dataclass(frozen=True, slots=True)
class PoolSlot:
    """One chunk's place in the shared pool, in bytes."""

    offset: int
    length: int
    shape: Sequence[int]
    dtype: str


@dataclass(frozen=True, slots=True)
class StorePlan:
    """Which chunks of a range to write, and where: `chunk_indices` has one for each slot.

    Without a plan the worker sends the bytes, or commits in vain where it maps the pool.
    """

    slots: Sequence[PoolSlot]
    chunk_indices: Sequence[int]


@dataclass(frozen=True, slots=True)
class BlockAllocation:
    """Blocks and tokens that a request gained in one scheduler step."""

    req_id: str
    new_block_ids: Sequence[int]
    new_token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class TensorMetadata:
    """A strided view: strides and offset in elements, dtype as PyTorch names it."""

    dtype: str
    shape: Sequence[int]
    stride: Sequence[int]
    storage_offset: int = 0
    device_uuid: str = "cpu"


@dataclass(frozen=True, slots=True)
class SharedTensor:
    """A KV tensor in POSIX shared memory; `nbytes` is the size of the whole segment."""

    shm_name: str
    nbytes: int
    metadata: TensorMetadata


@dataclass(frozen=True, slots=True)
class Reply:
    """One reply; `refusal` has the reason if the server refused, and `value` is None then."""

    uid: int
    operation: str
    value: object
    refusal: str | None = None

    def result(self) -> object:
        """Return the value.

        Raises:
            RequestRefused: The server refused.
        """
        if self.refusal is not None:
            raise RequestRefused(self.operation, self.refusal)
        return self.value


def encode_request(uid: int, operation: str, payload: Sequence[object]) -> list[bytes]:
    """Encode a request; dataclasses become maps, a `SharedTensor` becomes an ext document."""
    return [_pack(uid), encode_operation(operation), *(_pack(part) for part in payload)]


def encode_operation(operation: str) -> bytes:
    """Encode an operation the way stock clients do: by number where it has one."""
    return _pack(OPERATION_IDS.get(operation, operation))


def decode_uid(frames: Sequence[bytes]) -> int | None:
    """Read a reply's uid; None if the frames are no reply at all."""
    if len(frames) not in (2, 3):
        return None
    try:
        uid = _unpack(frames[0])
    except BadReply:
        return None
    return uid if type(uid) is int else None


def decode_reply(uid: int, operation: str, frames: Sequence[bytes]) -> Reply:
    """Decode the reply to a request for `operation`.

    Raises:
        BadReply: A frame is no msgpack document.
    """
    answered = _unpack(frames[1])
    if answered not in (operation, OPERATION_IDS.get(operation, operation)):
        return Reply(uid, operation, None, refusal=str(answered))
    return Reply(uid, operation, _unpack(frames[2]) if len(frames) > 2 else None)  # noqa: PLR2004


def _pack(value: object) -> bytes:
    return cast("bytes", msgpack.packb(value, default=_to_wire))


def _to_wire(value: object) -> object:
    if isinstance(value, SharedTensor):
        body = {
            "type": "cpu_shm",
            "shm_name": value.shm_name,
            "nbytes": value.nbytes,
            "version": 1,
            "metadata": _as_map(value.metadata),
        }
        return msgpack.ExtType(EXT_TENSOR, _pack(body))
    if is_dataclass(value) and not isinstance(value, type):
        return _as_map(value)
    if isinstance(value, Sequence):
        return list(value)
    raise TypeError(f"{type(value).__name__} does not travel")


def _as_map(value: object) -> dict[str, object]:
    # Shallow, unlike dataclasses.asdict: a key's tokens are not copied.
    return {field.name: getattr(value, field.name) for field in fields(value)}  # type: ignore[arg-type]


def _unpack(frame: bytes) -> object:
    try:
        return msgpack.unpackb(frame, strict_map_key=False)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise BadReply(f"frame of {len(frame)} bytes is not msgpack: {error!r}") from error
