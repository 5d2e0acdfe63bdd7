"""Messages that are no good: each is answered once and says why, and changes nothing.

The good neighbour's pings stay below a second meanwhile; `SteadyPinger` sees to that.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import pytest
from msgspec import msgpack

from lmcache_nodeagent.protocol.operations import OPERATIONS
from lmcache_worker.shared_memory import SharedKvCache
from lmcache_worker.wire import encode_request
from tests.fakes.agent_process import FAST_WINDOWS, AgentProcess
from tests.fakes.raw_client import (
    Footprint,
    Frames,
    RawDealer,
    SteadyPinger,
    counted,
    encoded,
    says_no,
)
from tests.fixtures.wire import requests
from tests.polling import PATIENCE_SECONDS, poll_until

MIB = 1 << 20
GROWTH_BYTES = 50 * MIB

PING = b"\x16"
NO_REPLY: dict[str, list[bytes]] = {
    "one empty frame": [b""],
    "one frame": [b"\x00"],
    "uid is text": [b"\xa1x", PING, b"\xc0"],
    "uid is a float": [b"\xca\x00\x00\x00\x00", PING, b"\xc0"],
    "uid is a boolean": [b"\xc3", PING, b"\xc0"],
    "uid is nil": [b"\xc0", PING, b"\xc0"],
    "uid is bytes": [b"\xc4\x01\x00", PING, b"\xc0"],
    "uid is an array": [b"\x91\x00", PING, b"\xc0"],
    "uid is empty": [b"", PING, b"\xc0"],
    "uid with bytes after it": [b"\x00\x00", PING, b"\xc0"],
    "uid is cut short": [b"\xcd\x00", PING, b"\xc0"],
    "uid is not msgpack": [b"\xc1", PING, b"\xc0"],
    "uid of a megabyte": [bytes(MIB), PING, b"\xc0"],
}

REFUSED_OPERATIONS: dict[str, bytes] = {
    "empty": b"",
    "nil": b"\xc0",
    "float": b"\xcb" + bytes(8),
    "boolean": b"\xc3",
    "bytes": b"\xc4\x04ping",
    "array": b"\x91\x16",
    "map": b"\x81\x16\x16",
    "not msgpack": b"\xc1",
    "cut short": b"\xa9pin",
    "two documents": b"\x16\x16",
    "not UTF-8": b"\xa4p\xffng",
    "a megabyte of text": msgpack.encode("x" * MIB),
    "nested without end": b"\x91" * 200_000,
}

BOMBS: dict[str, bytes] = {
    "array of 2^32": b"\xdd\xff\xff\xff\xff",
    "map of 2^32": b"\xdf\xff\xff\xff\xff",
    "bytes of 2^32": b"\xc6\xff\xff\xff\xff",
    "text of 2^32": b"\xdb\xff\xff\xff\xff",
    "ext of 2^32": b"\xc9\xff\xff\xff\xff\x01",
    "nested 200,000 deep": b"\x91" * 200_000,
    "maps nested 100,000 deep": b"\x81\xa1a" * 100_000,
    "nothing": b"",
    "not msgpack": b"\xc1",
    "unknown ext code": b"\xc7\x01\x55\x00",
}

WRONG_IDS: dict[str, object] = {
    "2^63": 1 << 63,
    "2^64-1": (1 << 64) - 1,
    "-1": -1,
    "1.0": 1.0,
    "true": True,
    "text": "1",
    "bytes": b"x" * 16,
    "array": [1],
    "map": {},
}


@pytest.fixture(scope="module")
def agent() -> Iterator[AgentProcess]:
    """Run one agent for the whole file."""
    with AgentProcess(*FAST_WINDOWS) as process:
        process.status()
        yield process


@pytest.fixture
def dealer(agent: AgentProcess) -> Iterator[RawDealer]:
    """Connect a client that leaves the frames to the test."""
    with RawDealer(agent.url) as client:
        yield client


def refused(dealer: RawDealer, operation: str, payload: list[bytes]) -> Frames:
    """Send a request, which must be answered no in time; return the answer."""
    reply = dealer.reply_to(dealer.request(operation, *payload))
    assert says_no(operation, reply), (operation, reply)
    return reply


def registration(cache: SharedKvCache, instance_id: object, model: str = "m") -> list[bytes]:
    """Encode the payload of a registration that is good but for what the test puts in."""
    tensors = [cache.tensor]
    payload = [instance_id, tensors, model, 1, "vllm", {"kv_layout": "NHD"}, []]
    return encode_request(0, "register_kv_cache", payload)[2:]


@pytest.fixture
def cache() -> Iterator[SharedKvCache]:
    """Make worker memory."""
    with SharedKvCache.create([2, 16, 16, 2, 8]) as made:
        yield made


@pytest.mark.parametrize("frames", NO_REPLY.values(), ids=NO_REPLY)
def test_a_message_without_a_usable_uid_is_counted_and_not_answered(
    agent: AgentProcess, dealer: RawDealer, frames: list[bytes]
) -> None:
    """There is nothing that a reply could carry for the client to know it by."""
    before = counted(agent.http_port, "malformed_messages_total", reason="framing")
    dealer.send(*frames)
    assert dealer.silent()
    poll_until(
        lambda: counted(agent.http_port, "malformed_messages_total", reason="framing") > before
    )


@pytest.mark.parametrize("operation", REFUSED_OPERATIONS.values(), ids=REFUSED_OPERATIONS)
def test_an_operation_frame_that_is_none_is_refused_with_the_reason(
    dealer: RawDealer, operation: bytes
) -> None:
    """The uid is good, so the client learns at once."""
    for payload in ([], [b"\xc0"], [b"\xc0"] * 20):
        dealer.send(b"\x07", operation, *payload)
        reply = dealer.reply_to(7)
        assert reply.refusal is not None
        assert len(reply) == 2
    assert dealer.silent()


def test_every_integer_that_msgpack_can_write_is_a_uid(dealer: RawDealer) -> None:
    """It comes back byte for byte, also in a form longer than need be."""
    for uid in (b"\x7f", b"\xff", b"\xcc\x05", b"\xcd\x00\x05", b"\xcf" + b"\xff" * 8, b"\xd3" * 9):
        dealer.send(uid, PING, b"\xc0")
        assert dealer.receive(PATIENCE_SECONDS) == [uid, PING, b"\xc3"]


@pytest.mark.parametrize("operation", sorted(requests.PAYLOADS))
def test_a_wrong_number_of_frames_is_refused(dealer: RawDealer, operation: str) -> None:
    """None, one too few, one too many, a thousand; also for operations nobody serves here."""
    good = requests.frames(operation)
    wrong = [[*good, b"\xc0"], [*good, *[b"\xc0"] * 1000]]
    wrong += [good[:-1], []] if good else []
    for payload in wrong:
        refused(dealer, operation, payload)
    assert dealer.silent()


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS)
def test_bombs_in_any_field_of_any_operation_are_refused(agent: AgentProcess, bomb: bytes) -> None:
    """Lengths that the bytes do not keep, and depth: cheap for the agent, a no for the sender."""
    with SteadyPinger(agent.url), RawDealer(agent.url) as dealer:
        footprint = Footprint(agent.pid)
        for operation in requests.PAYLOADS:
            good = requests.frames(operation)
            for index in range(len(good)):
                payload = [*good[:index], bomb, *good[index + 1 :]]
                refused(dealer, operation, payload)
        assert dealer.silent()
        footprint.growth_stays_below(GROWTH_BYTES)
        footprint.assert_threads_live()


def test_two_million_tokens_are_refused(agent: AgentProcess) -> None:
    """In every operation that carries a key; the limit is told where the reply can carry it."""
    key = {**requests.KEY, "token_ids": [1] * 2_000_000}
    with SteadyPinger(agent.url), RawDealer(agent.url) as dealer:
        footprint = Footprint(agent.pid)
        for operation, payload in requests.PAYLOADS.items():
            if payload[:1] != [requests.KEY]:
                continue
            frames = [msgpack.encode(key), *requests.frames(operation)[1:]]
            reply = refused(dealer, operation, frames)
            if operation == "lookup":
                assert "1048576" in str(reply.refusal)
        footprint.growth_stays_below(GROWTH_BYTES)


def test_registrations_of_ten_thousand_tensors_are_refused(agent: AgentProcess) -> None:
    """A hundred of them in a row, 1.5 MB each: all answered, nothing registered."""
    frames = requests.frames("register_kv_cache")
    frames[1] = msgpack.encode([requests.tensor()] * 10_000)
    with SteadyPinger(agent.url), RawDealer(agent.url) as dealer:
        footprint = Footprint(agent.pid)
        for _ in range(100):
            dealer.request("register_kv_cache", *frames)
        replies = dealer.replies(100)
        assert [reply.uid for reply in replies] == list(range(100))
        assert all("4096" in str(reply.refusal) for reply in replies)
        assert agent.instances() == {}
        footprint.growth_stays_below(GROWTH_BYTES)


@pytest.mark.parametrize("wrong", WRONG_IDS.values(), ids=WRONG_IDS)
def test_an_instance_id_outside_its_domain_is_refused_everywhere(
    agent: AgentProcess, dealer: RawDealer, cache: SharedKvCache, wrong: object
) -> None:
    """0..2^63-1, no booleans, no floats, no text: nothing is registered, nobody refreshed."""
    for operation, known in OPERATIONS.items():
        if known.instance_frame is None or operation == "register_kv_cache_engine_driven_context":
            continue
        payload = requests.frames(operation)
        payload[known.instance_frame] = msgpack.encode(wrong)
        refused(dealer, operation, payload)
    reply = refused(dealer, "register_kv_cache", registration(cache, wrong))
    assert "instance_id" in str(reply.refusal)
    assert agent.instances() == {}


@pytest.mark.parametrize("instance_id", [0, 1, (1 << 63) - 1])
def test_the_ends_of_the_id_domain_work_and_are_written_as_text(
    agent: AgentProcess, dealer: RawDealer, cache: SharedKvCache, instance_id: int
) -> None:
    """A number would lose its last digits in JavaScript and jq."""
    uid = dealer.request("register_kv_cache", *registration(cache, instance_id))
    assert dealer.reply_to(uid).refusal is None
    assert dealer.call("ping", instance_id).value is True
    (entry,) = agent.get("/v1/instances")["instances"]
    assert entry["instance_id"] == str(instance_id)
    assert dealer.call("unregister_kv_cache", instance_id).refusal is None
    poll_until(
        lambda: (
            str(instance_id)
            in [record["instance_id"] for record in agent.log_records("instance_unregistered")]
        ),
        "it is logged as text",
    )


NO_PINGS: dict[str, list[bytes]] = {
    "no argument": [],
    "two arguments": encoded(1, 1),
    "argument and nil": encoded(1, None),
    "arguments in one array": encoded([1]),
    "arguments in one map": encoded({"instance_id": 1}),
    "two documents in one frame": [b"\x01\x01"],
    "empty frame": [b""],
    "unknown ext code": [b"\xd4\x55\x01"],
    **{name: encoded(value) for name, value in WRONG_IDS.items()},
}


@pytest.mark.parametrize("payload", NO_PINGS.values(), ids=NO_PINGS)
def test_a_refused_ping_is_no_heartbeat(
    agent: AgentProcess, dealer: RawDealer, cache: SharedKvCache, payload: list[bytes]
) -> None:
    """It is answered false, and last-seen goes on counting; `true` is never the id 1."""
    uid = dealer.request("register_kv_cache", *registration(cache, 1))
    assert dealer.reply_to(uid).refusal is None
    registered_at = time.monotonic()
    silent = poll_until(lambda: agent.instances()[1]["last_seen_seconds"], "time is counted")
    assert dealer.reply_to(dealer.request("ping", *payload)).value is False
    refused = agent.instances()[1]
    assert refused["last_seen_seconds"] >= silent
    assert refused["has_liveness_signal"] is False
    assert dealer.call("ping", None).value is True  # a scheduler's: refreshes nobody
    assert agent.instances()[1]["has_liveness_signal"] is False
    assert dealer.call("ping", 1).value is True
    good = agent.instances()[1]
    assert good["has_liveness_signal"] is True
    assert good["last_seen_seconds"] < time.monotonic() - registered_at
    assert dealer.call("unregister_kv_cache", 1).refusal is None


def test_unknown_keys_are_ignored_and_optional_ones_have_defaults(
    agent: AgentProcess, dealer: RawDealer, cache: SharedKvCache
) -> None:
    """A newer client may say more, an older one less."""
    payload = registration(cache, 5)
    group = {"engine_group_id": 0, "layer_indices": [0], "from_the_future": {"a": [1]}}
    payload[5], payload[6] = encoded({"kv_layout": "NHD", "from_the_future": 1}, [group])
    assert dealer.reply_to(dealer.request("register_kv_cache", *payload)).refusal is None
    assert 5 in agent.instances()
    assert dealer.call("unregister_kv_cache", 5).refusal is None


def test_what_is_missing_or_unknown_is_named_in_the_refusal(
    agent: AgentProcess, dealer: RawDealer, cache: SharedKvCache
) -> None:
    """A required key that is missing, a tensor with an unknown key or ext code."""
    good = registration(cache, 5)
    wrong = {
        "engine_group_id": (6, msgpack.encode([{"layer_indices": [0]}])),
        "layer_indices": (6, msgpack.encode([{"engine_group_id": 0}])),
        "kv_layout": (5, msgpack.encode({"kv_layout": "XYZ"})),
        "shape": (1, msgpack.encode([requests.tensor(metadata={"dtype": "bfloat16"})])),
        "surprise": (1, msgpack.encode([requests.tensor(surprise=1)])),
        "0x55": (1, msgpack.encode([msgpack.Ext(0x55, b"x")])),
    }
    for name, (index, frame) in wrong.items():
        payload = [*good[:index], frame, *good[index + 1 :]]
        reply = refused(dealer, "register_kv_cache", payload)
        assert name in str(reply.refusal), reply.refusal
    assert agent.instances() == {}


WRONG_TRANSFERS: dict[str, dict[str, object]] = {
    "negative start": {"start": -256},
    "start beyond end": {"start": 512, "end": 256},
    "start beyond 2^31": {"start": 1 << 31, "end": (1 << 31) + 256},
    "end beyond 2^62": {"end": 1 << 62},
    "range inside a chunk": {"start": 1, "end": 257},
    "no tokens": {"token_ids": []},
    "token below 0": {"token_ids": [-1] * 256},
    "token of 2^32": {"token_ids": [1 << 32] * 256},
    "another world size": {"world_size": 2},
    "world size of 2^62": {"world_size": 1 << 62, "worker_id": (1 << 62) - 1},
    "worker outside its world": {"worker_id": 1},
    "no shard": {"worker_id": None},
    "another model": {"model_name": "other"},
    "salt with a slash": {"cache_salt": "a/b"},
    "salt of 129 characters": {"cache_salt": "x" * 129},
    "model with an at sign": {"model_name": "a@b"},
}

WRONG_BLOCKS: dict[str, object] = {
    "none": [],
    "an empty list": [[]],
    "too few": [[1]],
    "too many lists": [[1] * 16, [1] * 16],
    "negative": [[-1] * 16],
    "beyond the memory": [[16] * 16],
    "of 2^62": [[1 << 62] * 16],
    "floats": [[1.0] * 16],
    "booleans": [[True] * 16],
}


def test_transfers_that_cannot_be_are_answered_false_and_write_nothing(
    agent: AgentProcess, dealer: RawDealer, cache: SharedKvCache
) -> None:
    """Ranges, tokens and block ids at and beyond every edge; the next good one works."""
    key = {**requests.KEY, "model_name": "m", "world_size": 1, "worker_id": 0}
    key |= {"token_ids": list(range(256))}
    blocks = [list(range(16))]
    uid = dealer.request("register_kv_cache", *registration(cache, 5))
    assert dealer.reply_to(uid).refusal is None
    wrong = [({**key, **change}, blocks) for change in WRONG_TRANSFERS.values()]
    wrong += [(key, ids) for ids in WRONG_BLOCKS.values()]  # type: ignore[misc]  # wrong on purpose
    for wrong_key, ids in wrong:
        assert dealer.call("store", wrong_key, 5, ids, b"").value == [b"", False], wrong_key
        assert dealer.call("retrieve", wrong_key, 5, ids, b"", 0).value == [b"", False]
    l1 = agent.status()["l1"]
    assert (l1["objects"], l1["staging_bytes"], l1["pinned_bytes"]) == (0, 0, 0)
    assert dealer.call("store", key, 5, blocks, b"").value == [b"", True]
    assert dealer.call("unregister_kv_cache", 5).refusal is None
    assert dealer.call("clear", 1).value is None
    assert agent.status()["l1"]["used_bytes"] == 0


def _mutated(frame: bytes, choice: random.Random) -> bytes:
    """Change, drop, add or cut off a few bytes."""
    changed = bytearray(frame)
    for _ in range(choice.randint(1, 4)):
        at = choice.randrange(len(changed) + 1)
        match choice.randrange(4):
            case 0:
                changed[at : at + 1] = choice.randbytes(1)
            case 1:
                del changed[at : at + 1]
            case 2:
                changed[at:at] = choice.randbytes(1)
            case _:
                del changed[at:]
    return bytes(changed)


@pytest.mark.parametrize("seed", [1, 2])
def test_any_mutation_of_any_request_is_answered_exactly_once(
    agent: AgentProcess, cache: SharedKvCache, seed: int
) -> None:
    """10,000 of them beside a registered worker: none is a failure of ours, no thread ends."""
    choice = random.Random(seed)  # noqa: S311  # repeatable
    operations = requests.PAYLOADS.keys() - {"subscribe_kv_events"}  # a stream goes on answering
    good = {operation: requests.frames(operation) for operation in sorted(operations)}
    good["register_kv_cache"] = registration(cache, requests.INSTANCE_ID, "demo/model")
    footprint = Footprint(agent.pid)
    with SteadyPinger(agent.url), RawDealer(agent.url) as dealer:
        for _ in range(100):
            sent = []
            for _ in range(100):
                operation = choice.choice(list(good))
                frames = [
                    _mutated(frame, choice) if choice.random() < 0.35 else frame
                    for frame in good[operation]
                ]
                sent.append(dealer.request(operation, *frames))
            assert sorted(str(reply.uid) for reply in dealer.replies(100)) == sorted(
                str(uid) for uid in sent
            )
        assert dealer.silent()
        dealer.call("unregister_kv_cache", requests.INSTANCE_ID)
    footprint.assert_threads_live()
    footprint.growth_stays_below(GROWTH_BYTES)
    assert counted(agent.http_port, "requests_failed_total") == 0
    assert agent.get("/healthz")["healthy"] is True
