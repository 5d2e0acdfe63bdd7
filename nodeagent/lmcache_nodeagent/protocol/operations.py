"""Every operation of the wire, in one table.

Numbers are frozen upstream; operations without one travel as their name, and all are accepted
by name. A release of LMCache that moves a number or a payload is met here, in the recorded
frames under `tests/fixtures/wire`, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType, NoneType
from typing import Annotated

import msgspec
from msgspec import Meta

from lmcache_nodeagent.protocol.fields import (
    BLOCKS,
    EVENT,
    INSTANCE,
    KEY,
    MODEL,
    REQUEST,
    SHARDS,
    TENSORS,
    PayloadField,
    document,
    listed,
    numbers,
    registration,
    scalar,
    text,
)
from lmcache_nodeagent.protocol.limits import LIMITS
from lmcache_nodeagent.protocol.messages import (
    BlockAllocationRecord,
    EngineDrivenRegistration,
    InstanceNumber,
    NonNegative,
    PrepareRetrieveReply,
    PrepareStoreReply,
    SharedPoolInfo,
)
from lmcache_nodeagent.protocol.optional_messages import (
    BlendLookupReply,
    BlendMatch,
    KvEventBatch,
    MemoryLayout,
    ModuleCall,
    ModuleReply,
    PeerObjectKey,
    TransferAddress,
)

LMCACHE_RELEASE = "0.5.6"
"""The release of LMCache whose wire this package speaks."""


class Pool(Enum):
    """Where an operation runs."""

    INLINE = "inline"
    """On the router thread: constant time, no lock that anything slow holds."""
    SYNC = "sync"
    """Registrations: one at a time, in order of arrival."""
    NORMAL = "normal"
    """Lookups and other work without worker memory."""
    AFFINITY = "affinity"
    """Transfers: first in, first out for each connection."""
    STREAM = "stream"
    """Answered more than once, for as long as the client grants credit."""


@dataclass(frozen=True, slots=True)
class Operation:
    """How one operation looks on the wire and where it runs.

    `instance_frame` is the payload index of the frame with the worker's instance id, None where
    there is none. `negative` is the encoded reply that a stock client reads as an orderly no;
    None where it takes a reply with a mismatched operation (`codec.mismatched_operation`).
    """

    name: str
    wire_id: int | None
    payload: tuple[PayloadField, ...]
    reply: object
    pool: Pool
    life_sign: bool = False
    instance_frame: int | None = None
    negative: bytes | None = None


_TRANSFERRED = tuple[bytes, bool]
"""Reply of a transfer: completion event (empty: nothing is outstanding) and success."""

_NOT_TRANSFERRED = msgspec.msgpack.encode((b"", False))
_NO, _DONE = (msgspec.msgpack.encode(flag) for flag in (False, True))
_NO_CHUNKS = msgspec.msgpack.encode(0)
_NO_SLOTS = msgspec.msgpack.encode({"context": {}})
_NOT_PREPARED = msgspec.msgpack.encode({"success": False, "data": b"", "context": {}})


_BYTES_HEADER = 5
"""What msgpack puts in front of long bytes."""

_TABLE = (
    Operation(
        "register_kv_cache",
        1,
        registration("kv_caches"),
        NoneType,
        Pool.SYNC,
        life_sign=True,
        instance_frame=0,
    ),
    Operation("unregister_kv_cache", 2, (INSTANCE,), NoneType, Pool.SYNC, instance_frame=0),
    Operation(
        "register_q_cache", 3, registration("q_caches"), NoneType, Pool.SYNC, instance_frame=0
    ),
    Operation("unregister_q_cache", 4, (INSTANCE,), NoneType, Pool.SYNC, instance_frame=0),
    Operation(
        "store_q",
        5,
        (KEY, INSTANCE, BLOCKS, EVENT),
        _TRANSFERRED,
        Pool.AFFINITY,
        instance_frame=1,
        negative=_NOT_TRANSFERRED,
    ),
    Operation(
        "store",
        6,
        (KEY, INSTANCE, BLOCKS, EVENT),
        _TRANSFERRED,
        Pool.AFFINITY,
        life_sign=True,
        instance_frame=1,
        negative=_NOT_TRANSFERRED,
    ),
    Operation(
        "retrieve",
        7,
        (KEY, INSTANCE, BLOCKS, EVENT, scalar("skip_first_n_tokens", NonNegative)),
        _TRANSFERRED,
        Pool.AFFINITY,
        life_sign=True,
        instance_frame=1,
        negative=_NOT_TRANSFERRED,
    ),
    Operation("lookup", 8, (KEY, SHARDS), NoneType, Pool.NORMAL),
    Operation("query_prefetch_status", 9, (REQUEST,), int | None, Pool.NORMAL, negative=_NO_CHUNKS),
    Operation(
        "wait_prefetch_status",
        10,
        (REQUEST, scalar("timeout", Annotated[float, Meta(ge=0)])),
        int | None,
        Pool.NORMAL,
        negative=_NO_CHUNKS,
    ),
    # 11 is retired.
    Operation("free_lookup_locks", 12, (KEY, SHARDS), NoneType, Pool.NORMAL),
    Operation("end_session", 13, (REQUEST,), NoneType, Pool.NORMAL),
    Operation(
        "register_kv_cache_engine_driven_context",
        14,
        (document("registration", EngineDrivenRegistration),),
        SharedPoolInfo,
        Pool.SYNC,
        life_sign=True,
        instance_frame=0,
    ),
    Operation(
        "unregister_kv_cache_engine_driven_context",
        15,
        (INSTANCE,),
        NoneType,
        Pool.SYNC,
        instance_frame=0,
    ),
    Operation(
        "prepare_store",
        16,
        (KEY, INSTANCE),
        PrepareStoreReply,
        Pool.AFFINITY,
        life_sign=True,
        instance_frame=1,
        negative=_NO_SLOTS,
    ),
    Operation(
        "commit_store",
        17,
        (KEY, INSTANCE, PayloadField("data", memoryview, LIMITS.max_data_bytes + _BYTES_HEADER)),
        bool,
        Pool.AFFINITY,
        life_sign=True,
        instance_frame=1,
        negative=_NO,
    ),
    Operation(
        "prepare_retrieve",
        18,
        (KEY, INSTANCE),
        PrepareRetrieveReply,
        Pool.AFFINITY,
        life_sign=True,
        instance_frame=1,
        negative=_NOT_PREPARED,
    ),
    Operation(
        "commit_retrieve",
        19,
        (KEY, INSTANCE),
        bool,
        Pool.AFFINITY,
        life_sign=True,
        instance_frame=1,
        negative=_DONE,  # only ends the client's bookkeeping: it is true after failures as well
    ),
    Operation("clear", 20, (scalar("force", bool),), NoneType, Pool.NORMAL),
    Operation("get_chunk_size", 21, (), int, Pool.INLINE),
    Operation(
        "ping",
        22,
        (scalar("instance_id", InstanceNumber | None),),
        bool,
        Pool.INLINE,
        life_sign=True,
        instance_frame=0,
        negative=_NO,
    ),
    Operation(
        "report_block_allocation",
        23,
        (
            scalar("instance_id", InstanceNumber),  # the scheduler's process id, not a worker
            MODEL,
            listed("records", BlockAllocationRecord, LIMITS.max_records, 4 * LIMITS.key_bytes),
        ),
        NoneType,
        Pool.NORMAL,
    ),
    Operation("noop", 24, (), str, Pool.INLINE),
    Operation(
        "cb_register_rope",
        25,
        (
            INSTANCE,
            PayloadField("cos_sin_caches", TENSORS, LIMITS.tensors_bytes),
            scalar("head_size", NonNegative),
            scalar("is_neox_style", bool),
            numbers("group_to_cache"),
            listed("group_rot", list[int], LIMITS.max_tensors, LIMITS.max_document_bytes),
            numbers("group_head_size"),
            text("kv_quant"),
        ),
        NoneType,
        Pool.SYNC,
        life_sign=True,
        instance_frame=0,
    ),
    Operation("cb_unregister_rope", 26, (INSTANCE,), NoneType, Pool.SYNC, instance_frame=0),
    Operation(
        "cb_retrieve_pre_computed",
        27,
        (
            KEY,
            listed("match_results", BlendMatch, LIMITS.max_records, LIMITS.key_bytes),
            BLOCKS,
            INSTANCE,
            EVENT,
        ),
        _TRANSFERRED,
        Pool.AFFINITY,
        life_sign=True,
        instance_frame=3,
        negative=_NOT_TRANSFERRED,
    ),
    Operation("cb_unified_lookup", 28, (KEY, SHARDS), BlendLookupReply | None, Pool.NORMAL),
    Operation(
        "p2p_lookup_and_lock",
        29,
        (
            listed("keys", PeerObjectKey, LIMITS.max_records, LIMITS.key_bytes),
            document("group_layouts", dict[int, MemoryLayout]),
        ),
        int,
        Pool.NORMAL,
    ),
    Operation(
        "p2p_query_lookup_results",
        30,
        (scalar("task_id", int),),
        list[TransferAddress] | None,
        Pool.NORMAL,
    ),
    Operation(
        "p2p_unlock_objects",
        31,
        (listed("keys", PeerObjectKey, LIMITS.max_records, LIMITS.key_bytes),),
        NoneType,
        Pool.NORMAL,
    ),
    Operation("get_experimental", 32, (), list[str], Pool.INLINE),
    Operation(
        "cb_protocol_handshake", 33, (scalar("client_version", int),), tuple[int, bool], Pool.SYNC
    ),
    Operation(
        "cb_reorder_plan",
        None,
        (KEY, scalar("keep_prefix", NonNegative), scalar("budget_ms", NonNegative)),
        list[int],
        Pool.NORMAL,
    ),
    Operation(
        "subscribe_kv_events",
        None,
        (
            INSTANCE,
            MODEL,
            scalar("cursor", NonNegative),
            scalar("max_events", Annotated[int, Meta(ge=1, le=1024)]),
        ),
        KvEventBatch,
        Pool.STREAM,
        instance_frame=0,
    ),
    Operation(
        "server_module_call",
        None,
        (PayloadField("request", ModuleCall, LIMITS.max_message_bytes),),
        ModuleReply,
        Pool.NORMAL,
    ),
)

OPERATIONS: Mapping[str, Operation] = MappingProxyType({entry.name: entry for entry in _TABLE})
"""All operations by name."""

OPERATIONS_BY_ID: Mapping[int, Operation] = MappingProxyType(
    {entry.wire_id: entry for entry in _TABLE if entry.wire_id is not None}
)
"""The numbered operations."""
