"""Frames recorded from the stock release: what we read of them and what we would answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import msgspec
import pytest

from lmcache_nodeagent.protocol.codec import (
    decode_operation,
    decode_payload,
    encode_reply,
    is_uid,
    peek_instance_id,
)
from lmcache_nodeagent.protocol.messages import (
    BlockAllocationRecord,
    CacheKey,
    EngineDrivenRegistration,
    EngineGroupInfo,
    EngineType,
    LayoutHints,
    TensorDescriptor,
    TensorMetadata,
)
from lmcache_worker import wire
from tests.fixtures.wire.recordings import SESSIONS, Exchange, Recording, load

MODEL = "demo/model"
HOST_EVENT = b"stub_ipc_handle"
STRANGER = 7

RECORDINGS = {session: load(session) for session in SESSIONS}
EXCHANGES = [
    pytest.param(recording, exchange, id=f"{session}-{index}")
    for session, recording in RECORDINGS.items()
    for index, exchange in enumerate(recording.exchanges)
]
EVERY_EXCHANGE = pytest.mark.parametrize(("recording", "exchange"), EXCHANGES)


def prompt_key(request_id: str, worker_id: int | None = None) -> CacheKey:
    """Build the key that the recorded adapters use for their one prompt."""
    return CacheKey(
        model_name=MODEL,
        world_size=1,
        worker_id=worker_id,
        token_ids=list(range(70_000, 70_075)),
        start=0,
        end=64,
        request_id=request_id,
        num_kv_readers=1,
    )


ABSENT_KEY = CacheKey(
    model_name=MODEL,
    world_size=1,
    worker_id=0,
    token_ids=list(range(40)),
    start=0,
    end=32,
    request_id="absent",
    cache_salt="tenant-1",
    request_configs={"lmcache.tag": "x", "lmcache.list": [1, 2.5, None, True]},
    num_kv_readers=1,
)


def tensors(recording: Recording) -> list[TensorDescriptor]:
    """Build the two layers that the recorded worker registers."""
    view = TensorMetadata("bfloat16", [2, 8, 16, 2, 8], [2048, 256, 16, 8, 1], 0, "cpu")
    return [
        TensorDescriptor("cpu_shm", view, f"/lmcache_kv_{recording.scheduler_pid}_{layer}", 8192)
        for layer in range(2)
    ]


def expected_payloads(recording: Recording) -> dict[str, list[tuple[object, ...]]]:
    """List what each operation's recorded requests say, in no order between operations."""
    instance = int(recording.instance_id)
    driven = recording.transfer_mode == "lmcache_driven"
    common: dict[str, list[tuple[object, ...]]] = {
        "get_chunk_size": [()],
        "get_experimental": [()],
        "noop": [()],
        "ping": [(None,), (instance,)],
        "lookup": [(prompt_key(request), 1) for request in ("cold", "warm", "freed")],
        "query_prefetch_status": [(request,) for request in ("cold", "warm", "freed")],
        "end_session": [("cold",), ("warm",)],
        "free_lookup_locks": [(prompt_key("freed"), 1)],
        "report_block_allocation": [
            (
                recording.scheduler_pid,
                MODEL,
                [BlockAllocationRecord("freed", [1, 2], [5, 6, 7])],
            )
        ],
        "clear": [(False,)],
    }
    return common | (_lmcache_driven if driven else _engine_driven)(recording, instance)


def _lmcache_driven(recording: Recording, instance: int) -> dict[str, list[tuple[object, ...]]]:
    group = EngineGroupInfo(0, [0, 1], 16, -1, 0, recurrent_state=False)
    return {
        "register_kv_cache": [
            (
                instance,
                tensors(recording),
                MODEL,
                1,
                EngineType.VLLM,
                LayoutHints(kv_layout="NHD"),
                [group],
            )
        ],
        "store": [
            (prompt_key("cold", 0), instance, [[1, 2, 3, 4]], HOST_EVENT),
            (ABSENT_KEY, STRANGER, [[1, 2]], b""),
        ],
        "retrieve": [
            (prompt_key("warm", 0), instance, [[5, 6, 7, 0]], HOST_EVENT, 16),
            (ABSENT_KEY, STRANGER, [[1, 2]], b"", 0),
        ],
        "wait_prefetch_status": [("absent", 0.5)],
        "unregister_kv_cache": [(instance,)],
    }


def _engine_driven(recording: Recording, instance: int) -> dict[str, list[tuple[object, ...]]]:
    del recording
    return {
        "register_kv_cache_engine_driven_context": [
            (
                EngineDrivenRegistration(
                    instance, MODEL, 1, 16, 2, 16, "bfloat16", use_mla=False, num_physical_slots=32
                ),
            )
        ],
        "prepare_store": [(prompt_key("cold", 0), instance)],
        "commit_store": [(prompt_key("cold", 0), instance, b""), (ABSENT_KEY, instance, b"")],
        "prepare_retrieve": [(prompt_key("warm", 0), instance), (ABSENT_KEY, instance)],
        "commit_retrieve": [(prompt_key("warm", 0), instance)],
        "subscribe_kv_events": [(instance, MODEL, 0, 16)],
        "unregister_kv_cache_engine_driven_context": [(instance,)],
    }


@EVERY_EXCHANGE
def test_recorded_request_decodes_to_what_was_sent(
    recording: Recording, exchange: Exchange
) -> None:
    """Every stock request is understood in full."""
    uid, operation_frame, *payload = exchange.request_frames()
    operation = decode_operation(operation_frame)
    assert is_uid(uid)
    assert decode_payload(operation, payload) in expected_payloads(recording)[operation.name]


@pytest.mark.parametrize("recording", RECORDINGS.values(), ids=SESSIONS)
def test_every_expected_request_was_recorded(recording: Recording) -> None:
    """The recordings lack nothing that the tests believe they cover."""
    seen: dict[str, list[tuple[object, ...]]] = {}
    for exchange in recording.exchanges:
        _, operation_frame, *payload = exchange.request_frames()
        operation = decode_operation(operation_frame)
        seen.setdefault(operation.name, []).append(decode_payload(operation, payload))
    for name, payloads in expected_payloads(recording).items():
        assert all(payload in seen[name] for payload in payloads)


@EVERY_EXCHANGE
def test_recorded_reply_is_what_we_would_send(recording: Recording, exchange: Exchange) -> None:
    """Encoding the value of a stock reply gives the stock bytes."""
    del recording
    operation = decode_operation(exchange.request_frames()[1])
    for uid, echoed, *document in exchange.reply_frames():
        assert [uid, echoed] == exchange.request_frames()[:2]
        if not document:
            continue
        kind = cast("type[object]", operation.reply)
        value = msgspec.msgpack.decode(document[0], type=kind)
        assert encode_reply(operation, value) == document[0]


@EVERY_EXCHANGE
def test_reply_without_document_is_none(recording: Recording, exchange: Exchange) -> None:
    """Where the stock server sends two frames, so do we; the end of a stream is its own case."""
    del recording
    operation = decode_operation(exchange.request_frames()[1])
    if exchange.reply_frames()[0][2:] == []:
        assert encode_reply(operation, None) is None


@EVERY_EXCHANGE
def test_recorded_instance_id_is_peeked(recording: Recording, exchange: Exchange) -> None:
    """The router learns the worker of a stock request without decoding it."""
    _, operation_frame, *payload = exchange.request_frames()
    operation = decode_operation(operation_frame)
    expected: set[int | None] = {None}
    if operation.instance_frame is not None and payload[operation.instance_frame] != b"\xc0":
        expected = {int(recording.instance_id), STRANGER}
    assert peek_instance_id(operation, payload) in expected


def worker_key(request_id: str, worker_id: int | None) -> wire.CacheKey:
    """Build the prompt's key with the worker's own types."""
    tokens = range(70_000, 70_075)
    return wire.CacheKey(MODEL, 1, worker_id, tokens, 0, 64, request_id)


def _client_register(recording: Recording) -> list[object]:
    view = wire.TensorMetadata("bfloat16", (2, 8, 16, 2, 8), (2048, 256, 16, 8, 1))
    layers = [
        wire.SharedTensor(f"/lmcache_kv_{recording.scheduler_pid}_{layer}", 8192, view)
        for layer in range(2)
    ]
    groups = [wire.EngineGroup(0, [0, 1], 16)]
    return [int(recording.instance_id), layers, MODEL, 1, "vllm", {"kv_layout": "NHD"}, groups]


def _client_store(recording: Recording) -> list[object]:
    return [worker_key("cold", 0), int(recording.instance_id), [[1, 2, 3, 4]], HOST_EVENT]


def _client_report(recording: Recording) -> list[object]:
    records = [wire.BlockAllocation("freed", [1, 2], [5, 6, 7])]
    return [recording.scheduler_pid, MODEL, records]


@pytest.mark.parametrize(
    ("operation", "payload"),
    [
        ("register_kv_cache", _client_register),
        ("store", _client_store),
        ("report_block_allocation", _client_report),
        ("lookup", lambda _: [worker_key("cold", None), 1]),
        ("clear", lambda _: [False]),
        ("get_chunk_size", lambda _: []),
    ],
)
def test_worker_client_sends_the_stock_bytes(
    operation: str, payload: Callable[[Recording], list[object]]
) -> None:
    """The project's own client is indistinguishable from a stock one on the wire."""
    recording = RECORDINGS["lmcache_driven"]
    sent = wire.encode_request(0, operation, payload(recording))[1:]
    assert sent in [exchange.request_frames()[1:] for exchange in recording.exchanges]
