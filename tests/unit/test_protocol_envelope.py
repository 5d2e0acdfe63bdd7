"""What surrounds the payload: operation and uid frames of a request, and what goes back."""

from __future__ import annotations

import pytest
from msgspec.msgpack import Ext, decode, encode

from lmcache_nodeagent.errors import AgentError, MalformedRequest, RequestError, UnknownOperation
from lmcache_nodeagent.protocol.codec import (
    decode_operation,
    encode_reply,
    is_uid,
    mismatched_operation,
)
from lmcache_nodeagent.protocol.messages import EncodedReply
from lmcache_nodeagent.protocol.operations import OPERATIONS


@pytest.mark.parametrize("name", OPERATIONS)
def test_operation_is_found_by_name_and_number(name: str) -> None:
    """Both spellings mean the same operation."""
    operation = OPERATIONS[name]
    assert decode_operation(encode(name)) is operation
    if operation.wire_id is not None:
        assert decode_operation(encode(operation.wire_id)) is operation


@pytest.mark.parametrize("value", [0, 11, *range(34, 61), -1, 999, 2**63, 2**64 - 1, "", "pong"])
def test_operation_outside_the_table(value: object) -> None:
    """Unknown numbers and names are told from garbage, and the refusal names the release."""
    with pytest.raises(UnknownOperation, match=r"LMCache 0\.5\.6 has no operation"):
        decode_operation(encode(value))


@pytest.mark.parametrize(
    "value", [None, True, 6.0, b"store", ["store"], {}, Ext(0x55, b""), "x" * 200]
)
def test_operation_frame_must_name_one(value: object) -> None:
    """An operation is a msgpack integer or a short string."""
    with pytest.raises(MalformedRequest, match="operation frame"):
        decode_operation(encode(value))


@pytest.mark.parametrize("frame", [b"", b"\xc1", b"ack", b"GET / HTTP/1.1"])
def test_operation_frame_that_is_no_msgpack(frame: bytes) -> None:
    """Stray bytes are malformed."""
    with pytest.raises(RequestError):
        decode_operation(frame)


@pytest.mark.parametrize("value", [0, 1, 300, 2**64 - 1, -1])
def test_uid_is_an_integer(value: int) -> None:
    """Any msgpack integer can be a uid."""
    assert is_uid(encode(value))


@pytest.mark.parametrize("frame", [b"", b"\xc1", encode("1"), b"\xc3", encode(1.0), b"\x00" * 9])
def test_other_frames_are_no_uid(frame: bytes) -> None:
    """Stock clients cannot read such a uid back."""
    assert not is_uid(frame)


def test_long_frame_is_no_uid() -> None:
    """It is not even decoded."""
    assert not is_uid(b"\x00" * 1_000_000)


def test_reply_none_has_no_frame() -> None:
    """Operations without a result answer with two frames; a status may do so as well."""
    assert encode_reply(OPERATIONS["lookup"], None) is None
    assert encode_reply(OPERATIONS["query_prefetch_status"], None) is None
    assert encode_reply(OPERATIONS["query_prefetch_status"], 3) == b"\x03"
    document = memoryview(b"encoded where its bytes were")
    assert encode_reply(OPERATIONS["prepare_retrieve"], EncodedReply(document)) is document


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ping", 1),
        ("ping", None),
        ("store", ("", True)),
        ("store", (b"", 1)),
        ("lookup", 0),
        ("get_chunk_size", None),
        ("query_prefetch_status", 1.5),
        ("noop", object()),
    ],
)
def test_reply_of_the_wrong_type_is_our_fault(name: str, value: object) -> None:
    """It never goes out: a stock client could not decode it and would wait for its time-out."""
    with pytest.raises(AgentError, match=rf"^reply of {name}: "):
        encode_reply(OPERATIONS[name], value)


def test_refusal_carries_its_reason_on_one_line() -> None:
    """The frame is a msgpack string that names no operation."""
    assert decode(mismatched_operation("no such\n  device")) == "refused: no such device"


@pytest.mark.parametrize("text", ["ping", "", "\ud800", "x" * 10_000])
def test_refusal_never_looks_like_an_operation(text: str) -> None:
    """Whatever the reason says, it is short and differs from all names."""
    frame = mismatched_operation(text)
    assert decode(frame) not in OPERATIONS
    assert len(frame) < 1000
