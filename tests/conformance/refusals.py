"""Requests that an agent must decline, sent and read by the stock client's own code.

Part of `stock_client`, in the stock environment. Each call's outcome is [what, detail, seconds]:
"value" is a reply that the stock client decoded, "refused" an exception that it raised from one,
"silence" no reply at all.
"""

# mypy: disable-error-code="import-not-found"
# The stock packages are not installed where types are checked.

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
from lmcache.utils import EngineType
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.multiprocess.custom_types import (
    BlockAllocationRecord,
    IPCCacheServerKey,
    RegisterEngineDrivenContextPayload,
)
from lmcache.v1.multiprocess.futures import MessagingFuture
from lmcache.v1.multiprocess.group_view import EngineGroupInfo
from lmcache.v1.multiprocess.protocols.server_module import ServerModuleCallRequest
from lmcache.v1.multiprocess.rpc import get_rpc_spec, get_rpc_specs
from lmcache.v1.multiprocess.transport.zmq_impl.wire import encode_operation
from lmcache.v1.platform.devices.cpu.shm import CpuShmTensorWrapper

Outcome = tuple[str, str, float]

SILENCE_SECONDS = 30.0
FLOOD_SECONDS = 40.0
STRANGER = 7
KEY = IPCCacheServerKey(
    "demo/model", 1, 0, tuple(range(128)), 0, 64, request_id="absent", num_kv_readers=1
)
RETIRED_ID = 11
NESTING = 200_000

_uids = itertools.count(1_000_000)  # far above what the client counts itself


def as_stranger(client: Any) -> dict[str, Outcome]:  # noqa: ANN401  # a stock object
    """Call every operation with valid arguments of a worker that the agent does not know."""
    arguments = _arguments()
    outcomes = {}
    for name, spec in get_rpc_specs().items():
        call = getattr(client, name)
        values = [arguments[parameter] for parameter in spec.signature.parameters]
        if spec.streaming:
            outcomes[name] = _stream_outcome(call(*values))
        else:
            outcomes[name] = _outcome(call(*values))
    return outcomes


def malformed(client: Any, kind: str) -> dict[str, Outcome]:  # noqa: ANN401  # a stock object
    """Send every operation that is not a stream with payload frames that do not fit it."""
    outcomes = {}
    for name, spec in get_rpc_specs().items():
        if not spec.streaming:
            frames = BREAKS[kind](len(spec.payload_types))
            outcomes[name] = _outcome(_send(client, name, encode_operation(name), frames))
    return outcomes


def unknown(client: Any) -> dict[str, Outcome]:  # noqa: ANN401  # a stock object
    """Send operations that do not exist, awaited as if they were `noop`."""
    operations: list[object] = ["no_such_operation", RETIRED_ID, 999, -1, None, 1.5]
    return {
        repr(operation): _outcome(_send(client, "noop", msgspec.msgpack.encode(operation), []))
        for operation in operations
    }


def flood(client: Any, count: int) -> int:  # noqa: ANN401  # a stock object
    """Send retrieves for an unknown instance at once; return how many were declined in-band."""
    futures = [client.retrieve(KEY, STRANGER, [[1, 2, 3, 4]], b"", 0) for _ in range(count)]
    return sum(future.result(timeout=FLOOD_SECONDS)[1] is False for future in futures)


BREAKS: dict[str, Callable[[int], list[bytes]]] = {
    "a frame too few or too many": lambda count: [b"\xc0"] * (count - 1 if count else 1),
    "other types": lambda count: [msgspec.msgpack.encode({"odd": [1.5]})] * max(count, 1),
    "not msgpack": lambda count: [b"\xc1\xff"] * max(count, 1),
    "cut short": lambda count: [b"\xdd\xff\xff\xff\xff"] * max(count, 1),
    "nested too deeply": lambda count: [b"\x91" * NESTING + b"\xc0"] * max(count, 1),
    "empty frames": lambda count: [b""] * max(count, 1),
}


def _send(
    client: Any,  # noqa: ANN401  # a stock object
    reply_of: str,
    operation: bytes,
    frames: list[bytes],
) -> MessagingFuture[Any]:
    """Put frames on the client's socket as they are; its own loop reads the reply."""
    queue = client._message_queue_client  # there is no public way
    uid, future = next(_uids), MessagingFuture()
    queue.pending_futures[uid] = (future, get_rpc_spec(reply_of))
    queue.input_queue.put([msgspec.msgpack.encode(uid), operation, *frames])
    queue._polling_loop.notify()
    return future


def _outcome(future: MessagingFuture[Any]) -> Outcome:
    started = time.monotonic()
    try:
        what, detail = "value", repr(future.result(timeout=SILENCE_SECONDS))
    except TimeoutError:
        what, detail = "silence", ""
    except Exception as error:  # noqa: BLE001  # whatever the stock code makes of it
        what, detail = "refused", f"{type(error).__name__}: {error}"
    return what, detail, time.monotonic() - started


def _stream_outcome(stream: Any) -> Outcome:  # noqa: ANN401  # a stock object
    """Read a stream in a thread: without a reply it would block for ever."""
    started, seen = time.monotonic(), ["silence"]

    def read() -> None:
        try:
            seen[0] = repr(next(stream))
        except Exception as error:  # noqa: BLE001  # how it ended
            seen[0] = f"ended: {type(error).__name__}"

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    reader.join(SILENCE_SECONDS)
    what = "refused" if seen[0].startswith("ended") else "silence" if reader.is_alive() else "value"
    return what, seen[0], time.monotonic() - started


def _arguments() -> dict[str, Any]:
    """A valid value for every parameter name of the stock contract."""
    gone = CpuShmTensorWrapper.wrap(torch.zeros(2, 8, 16, 2, 8))
    Path("/dev/shm", gone.shm_name.lstrip("/")).unlink(missing_ok=True)
    registration = RegisterEngineDrivenContextPayload(
        STRANGER, KEY.model_name, 1, 16, 2, 16, "bfloat16", use_mla=False
    )
    return {
        "instance_id": STRANGER,
        "kv_cache": [gone],
        "q_cache": [gone],
        "model_name": KEY.model_name,
        "world_size": 1,
        "engine_type": EngineType.VLLM,
        "layout_hints": {"kv_layout": "NHD"},
        "engine_group_infos": [EngineGroupInfo(0, [0], 16)],
        "key": KEY,
        "keys": [ObjectKey(bytes(32), KEY.model_name, 0)],
        "block_ids": [[1, 2, 3, 4]],
        "event_ipc_handle": b"",
        "skip_first_n_tokens": 0,
        "tp_size": 1,
        "request_id": "absent",
        "timeout": 0.2,
        "payload": registration,
        "data": bytes(16),
        "force": False,
        "records": [BlockAllocationRecord("absent", [1], [2])],
        "cos_sin_caches_ipc": [gone],
        "head_size": 8,
        "is_neox_style": True,
        "group_to_cache": [0],
        "group_rot": [[0, 8]],
        "group_head_size": [8],
        "kv_quant": "",
        "match_results": [],
        "client_version": 1,
        "keep_prefix": 0,
        "budget_ms": 1,
        "group_layout_descs": {},
        "task_id": 1,
        "cursor": 0,
        "max_events": 16,
        "request": ServerModuleCallRequest("demo.echo", b"x"),
    }
