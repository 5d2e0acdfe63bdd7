"""Payloads: what is accepted, and what is refused, how cheaply and with which words."""

from __future__ import annotations

import time

import pytest
from msgspec.msgpack import Ext, encode

from lmcache_nodeagent.errors import MalformedRequest
from lmcache_nodeagent.protocol.codec import (
    decode_payload,
    peek_instance_id,
)
from lmcache_nodeagent.protocol.limits import LIMITS
from lmcache_nodeagent.protocol.messages import CacheKey, EngineGroupInfo, LayoutHints
from lmcache_nodeagent.protocol.operations import OPERATIONS
from tests.fixtures.wire.requests import GROUP, INSTANCE_ID, KEY, PAYLOADS, REGISTRATION_MAP, frames

EVERY = pytest.mark.parametrize("name", OPERATIONS)
EVERY_FIELD = pytest.mark.parametrize(
    ("name", "index"),
    [(name, index) for name, entry in OPERATIONS.items() for index in range(len(entry.payload))],
)
WITH_INSTANCE = pytest.mark.parametrize(
    "name", [name for name, entry in OPERATIONS.items() if entry.instance_frame is not None]
)
CHEAP_SECONDS = 1.0  # of this thread's own work
"""Far above what a refusal takes, far below what decoding the bomb would take."""

BOMBS = {
    "array of 4 billion": bytes.fromhex("ddffffffff"),
    "map of 4 billion": bytes.fromhex("dfffffffff"),
    "4 GiB of bytes": bytes.fromhex("c6ffffffff"),
    "4 GiB of text": bytes.fromhex("dbffffffff"),
    "200,000 arrays deep": b"\x91" * 200_000,
    "200,000 maps deep": b"\x81\xa0" * 200_000,
    "nothing": b"",
    "no msgpack": b"\xc1",
    "unknown ext": encode(Ext(0x55, b"\x00")),
    "two documents": b"\x01\x01",
}


def decode_one(name: str, index: int, frame: bytes) -> object:
    """Decode a well-formed request with one frame replaced; return that frame's value."""
    payload = frames(name)
    payload[index] = frame
    return decode_payload(OPERATIONS[name], payload)[index]


def decode_key(**changes: object) -> CacheKey:
    """Decode a lookup whose key differs in some keys."""
    key = decode_one("lookup", 0, encode({**KEY, **changes}))
    assert isinstance(key, CacheKey)
    return key


def test_bytes_are_read_where_they_are() -> None:
    """The data of a store stay in the frame; whatever else comes as a view is copied out of it."""
    data = bytes(range(256)) * 2
    payload = [memoryview(frame) for frame in (*frames("commit_store")[:2], encode(data))]
    key, instance_id, read = decode_payload(OPERATIONS["commit_store"], payload)
    assert (key, instance_id) == decode_payload(OPERATIONS["commit_store"], [*map(bytes, payload)])[
        :2
    ]
    assert isinstance(read, memoryview)
    assert read.obj is payload[2].obj
    assert read == data


def test_fixture_covers_the_table() -> None:
    """Every operation has a well-formed example."""
    assert PAYLOADS.keys() == OPERATIONS.keys()


@EVERY
def test_well_formed_request_is_accepted(name: str) -> None:
    """Each operation's documented payload decodes."""
    assert len(decode_payload(OPERATIONS[name], frames(name))) == len(PAYLOADS[name])


@EVERY
@pytest.mark.parametrize("change", [-1, 1])
def test_wrong_frame_count_is_refused(name: str, change: int) -> None:
    """A missing or an extra frame is refused, whatever the frames hold."""
    payload = [*frames(name), encode(None)][: len(PAYLOADS[name]) + change]
    if len(payload) == len(PAYLOADS[name]):
        return  # no frame to leave out
    with pytest.raises(MalformedRequest, match=rf"^{name} takes {len(PAYLOADS[name])} payload"):
        decode_payload(OPERATIONS[name], payload)


@EVERY_FIELD
@pytest.mark.parametrize("frame", BOMBS.values(), ids=BOMBS)
def test_bomb_is_refused_cheaply_with_the_name_of_the_field(
    name: str, index: int, frame: bytes
) -> None:
    """A frame that announces or nests far more than it may costs nothing."""
    field = OPERATIONS[name].payload[index].name
    started = time.thread_time()
    with pytest.raises(MalformedRequest, match=rf"^{name}: {field}: "):
        decode_one(name, index, frame)
    assert time.thread_time() - started < CHEAP_SECONDS


@EVERY_FIELD
def test_oversized_frame_is_refused_before_it_is_decoded(name: str, index: int) -> None:
    """Each frame has a size that no honest client needs to pass."""
    field = OPERATIONS[name].payload[index]
    if field.max_bytes > 32 * 2**20:
        return  # bulk data: the socket's own limit comes first
    with pytest.raises(MalformedRequest, match=rf"{field.name}: frame of \d+ bytes; at most"):
        decode_one(name, index, b"\x00" * (field.max_bytes + 1))


def test_real_binary_beyond_the_message_limit_is_refused() -> None:
    """A payload larger than a message may be is refused by its size."""

    class Huge(bytes):
        """Stands for a frame of 5 GB: only its length is looked at."""

        __slots__ = ()

        def __len__(self) -> int:
            return 5_000_000_000

    with pytest.raises(MalformedRequest, match="data: frame of 5000000000 bytes"):
        decode_one("commit_store", 2, Huge())


def test_two_million_tokens_are_refused_cheaply() -> None:
    """More tokens than a prompt may have are refused by their count."""
    frame = encode({**KEY, "token_ids": [1] * 2_000_000})
    started = time.thread_time()
    with pytest.raises(MalformedRequest, match="token_ids"):
        decode_one("store", 0, frame)
    assert time.thread_time() - started < CHEAP_SECONDS


def test_ten_thousand_tensors_are_refused() -> None:
    """More tensors than a model has layers are refused by their count."""
    frame = encode([Ext(1, b"\x80")] * 10_000)
    with pytest.raises(MalformedRequest, match=r"kv_caches: .*length <= 4096"):
        decode_one("register_kv_cache", 1, frame)


def test_a_million_tokens_are_accepted() -> None:
    """The limit leaves room for the longest contexts."""
    assert len(decode_key(token_ids=[2**32 - 1] * LIMITS.max_tokens).token_ids) == 2**20


def test_nesting_under_an_unknown_key_is_refused() -> None:
    """Skipping what is not understood is bounded too."""
    frame = encode(KEY)
    bomb = bytes([frame[0] + 1]) + frame[1:] + encode("later") + b"\x91" * 200_000
    with pytest.raises(MalformedRequest, match=r"^lookup: key: nested too deeply"):
        decode_one("lookup", 0, bomb)


@WITH_INSTANCE
@pytest.mark.parametrize("value", [0, 1, 2**63 - 1])
def test_instance_id_domain(name: str, value: int) -> None:
    """Ids are 0..2**63-1, in every operation alike."""
    assert _peek(name, value) == value
    decode_payload(OPERATIONS[name], _with_instance(name, value))


@WITH_INSTANCE
@pytest.mark.parametrize("value", [2**63, 2**64 - 1, -1, 1.0, True, "1", b"\x01" * 16, [1]])
def test_anything_else_is_no_instance_id(name: str, value: object) -> None:
    """True is not worker 1, and two ids never become one; both readers agree."""
    with pytest.raises(MalformedRequest, match="instance_id"):
        _peek(name, value)
    with pytest.raises(MalformedRequest, match="instance_id"):
        decode_payload(OPERATIONS[name], _with_instance(name, value))


@WITH_INSTANCE
def test_nil_instance_id(name: str) -> None:
    """Only a ping may leave the id out."""
    if name == "ping":
        assert _peek(name, None) is None
        assert decode_payload(OPERATIONS[name], [encode(None)]) == (None,)
        return
    with pytest.raises(MalformedRequest, match="instance_id"):
        _peek(name, None)


def _with_instance(name: str, value: object) -> list[bytes]:
    payload = frames(name)
    index = OPERATIONS[name].instance_frame
    assert index is not None
    whole = {**REGISTRATION_MAP, "instance_id": value} if "engine_driven_context" in name else value
    inside_map = name == "register_kv_cache_engine_driven_context"
    payload[index] = encode(whole if inside_map else value)
    return payload


def _peek(name: str, value: object) -> int | None:
    return peek_instance_id(OPERATIONS[name], _with_instance(name, value))


def test_peek_reads_nothing_but_the_id() -> None:
    """A transfer's key may be anything: it is not looked at."""
    payload = [b"\xc1" * 1000, encode(INSTANCE_ID), b"", b""]
    assert peek_instance_id(OPERATIONS["store"], payload) == INSTANCE_ID


@pytest.mark.parametrize("name", ["lookup", "report_block_allocation", "noop"])
def test_peek_of_an_operation_without_an_instance(name: str) -> None:
    """Scheduler requests speak for no worker; report_block_allocation's number is a process id."""
    assert peek_instance_id(OPERATIONS[name], frames(name)) is None


def test_peek_leaves_missing_frames_to_the_decoder() -> None:
    """A request without its id frame names nobody."""
    assert peek_instance_id(OPERATIONS["ping"], []) is None


def test_peek_refuses_a_big_frame_unread() -> None:
    """An id never takes more than nine bytes."""
    with pytest.raises(MalformedRequest, match="instance_id: frame of 10 bytes; at most 9"):
        peek_instance_id(OPERATIONS["ping"], [b"\x00" * 10])


@pytest.mark.parametrize(("value", "force"), [(True, True), (False, False), (1, True), (0, False)])
def test_plain_flag_may_be_a_number(value: object, force: object) -> None:
    """0 and 1 count as false and true, as upstream."""
    assert decode_one("clear", 0, encode(value)) is force


@pytest.mark.parametrize("value", ["false", "true", "", 2, -1, None, 1.0, b"\x01"])
def test_other_values_are_no_flag(value: object) -> None:
    """The string "false" does not clear a cache by force."""
    with pytest.raises(MalformedRequest, match=r"^clear: force: "):
        decode_one("clear", 0, encode(value))


def test_flag_inside_a_map_is_strict() -> None:
    """Inside documents a number is no boolean, as upstream."""
    with pytest.raises(MalformedRequest, match="recurrent_state"):
        decode_one("register_kv_cache", 6, encode([{**GROUP, "recurrent_state": 1}]))


def test_unknown_keys_are_ignored() -> None:
    """A newer client's additions do no harm, not even values of an ext type."""
    assert decode_key(added_later=Ext(0x55, b"\x00")) == decode_key()
    groups = decode_one("register_kv_cache", 6, encode([{**GROUP, "added_later": [1]}]))
    assert groups == [EngineGroupInfo(**GROUP)]  # type: ignore[arg-type]


def test_missing_optional_keys_take_their_defaults() -> None:
    """Keys that older clients do not send have a default."""
    optional = ("cache_salt", "request_configs", "num_kv_readers")
    short = {name: value for name, value in KEY.items() if name not in optional}
    key = decode_one("lookup", 0, encode(short))
    assert isinstance(key, CacheKey)
    assert (key.cache_salt, key.request_configs, key.num_kv_readers) == ("", None, 0)
    assert decode_one("register_kv_cache", 5, encode({})) == LayoutHints()
    groups = decode_one(
        "register_kv_cache", 6, encode([{"engine_group_id": 0, "layer_indices": []}])
    )
    assert groups == [EngineGroupInfo(0, [], 0, -1, 0, recurrent_state=False)]


@pytest.mark.parametrize(
    "missing",
    ["model_name", "world_size", "worker_id", "token_ids", "start", "end", "request_id"],
)
def test_missing_required_key_is_named(missing: str) -> None:
    """The refusal tells which key the client forgot."""
    short = {name: value for name, value in KEY.items() if name != missing}
    with pytest.raises(MalformedRequest, match=missing):
        decode_one("lookup", 0, encode(short))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_name": "a@b"}, "model_name"),
        ({"model_name": "a@b\n"}, "model_name"),
        ({"model_name": "m" * 5000}, "model_name"),
        ({"cache_salt": "a/b"}, "cache_salt"),
        ({"cache_salt": "a\\b"}, "cache_salt"),
        ({"cache_salt": "a@b"}, "cache_salt"),
        ({"cache_salt": "a\0"}, "cache_salt"),
        ({"cache_salt": "s" * 129}, "cache_salt"),
        ({"start": 512}, "start 512 is beyond end 256"),
        ({"start": -1}, "start"),
        ({"start": 1.0}, "start"),
        ({"end": True}, "end"),
        ({"world_size": 0}, "world_size"),
        ({"world_size": 1}, "worker_id 1 is outside world_size 1"),
        ({"worker_id": -1}, "worker_id"),
        ({"worker_id": True}, "worker_id"),
        ({"worker_id": 0.0}, "worker_id"),
        ({"token_ids": [1, True]}, r"token_ids\[\.\.\.\]|token_ids\[1\]"),
        ({"token_ids": [1.5]}, "token_ids"),
        ({"token_ids": b"\x01\x02"}, "token_ids"),
        ({"token_ids": [Ext(0x55, b"\x00")]}, "token_ids"),
        ({"request_id": 7}, "request_id"),
        ({"request_configs": {"a": Ext(0x55, b"\x00")}}, "request_configs"),
        ({"request_configs": [1]}, "request_configs"),
        ({"request_configs": {"a": [[[[1]]]]}}, "request_configs"),
        ({"num_kv_readers": -1}, "num_kv_readers"),
    ],
)
def test_broken_key_is_refused_by_name(changes: dict[str, object], named: str) -> None:
    """Each rule of a cache key names the field it concerns."""
    with pytest.raises(MalformedRequest, match=named):
        decode_key(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"cache_salt": "s" * 128},
        {"cache_salt": "µ-tenant one.2"},
        {"start": 2**31, "end": 2**40},
        {"start": 256},
        {"token_ids": [], "start": 0, "end": 0},
        {"token_ids": [-1, 2**32]},  # refused where tokens are hashed
        {"worker_id": None},
        {"model_name": "org/model-7B_v1.0"},
        {"request_configs": {}},
    ],
)
def test_unusual_key_is_accepted(changes: dict[str, object]) -> None:
    """The rules do not reach further than they must."""
    decode_key(**changes)


@pytest.mark.parametrize(
    "block_ids", [[1, 2], [[-1]], [[1.0]], [[True]], [["1"]], {"0": [1]}, [[1]] * 257, None]
)
def test_broken_block_ids_are_refused(block_ids: object) -> None:
    """Block ids are lists of non-negative integers, one list for each group."""
    with pytest.raises(MalformedRequest, match=r"^store: block_ids: "):
        decode_one("store", 2, encode(block_ids))


@pytest.mark.parametrize("hints", [{"kv_layout": "NHDX"}, {"num_kv_heads": 0}, {"head_dim": "64"}])
def test_unknown_layout_hint_values_are_refused(hints: dict[str, object]) -> None:
    """A layout that is not understood must not be guessed."""
    with pytest.raises(MalformedRequest, match=next(iter(hints))):
        decode_one("register_kv_cache", 5, encode(hints))


def test_unknown_engine_is_refused() -> None:
    """Only known engines register."""
    with pytest.raises(MalformedRequest, match="engine_type"):
        decode_one("register_kv_cache", 4, encode("other"))


@pytest.mark.parametrize("timeout", [float("nan"), -1.0, "1", True])
def test_timeout_is_a_sane_number(timeout: object) -> None:
    """A wait has a length."""
    with pytest.raises(MalformedRequest, match="timeout"):
        decode_one("wait_prefetch_status", 1, encode(timeout))
