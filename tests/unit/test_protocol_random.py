"""Random input: nothing that a peer can send raises anything but a refusal."""

from __future__ import annotations

import contextlib

from hypothesis import given
from hypothesis import strategies as st
from msgspec.msgpack import Ext, encode

from lmcache_nodeagent.errors import RequestError
from lmcache_nodeagent.protocol.codec import (
    decode_operation,
    decode_payload,
    is_uid,
    peek_instance_id,
)
from lmcache_nodeagent.protocol.operations import OPERATIONS
from tests.fixtures.wire.requests import GROUP, KEY, frames

# Wide enough to hit every branch of msgpack, small enough to stay fast.
_SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8)
    | st.builds(Ext, st.integers(-128, 127), st.binary(max_size=8))
)
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from([*KEY, *GROUP, "version", "type"]), inner, max_size=4)
    ),
    max_leaves=12,
)
_NAMES = st.sampled_from(sorted(OPERATIONS))


def _survives(name: str, payload: list[bytes]) -> None:
    operation = OPERATIONS[name]
    for attempt in (decode_payload, peek_instance_id):
        with contextlib.suppress(RequestError):
            attempt(operation, payload)


@given(_NAMES, st.data())
def test_random_documents_raise_nothing_but_refusals(name: str, data: st.DataObject) -> None:
    """Well-formed msgpack of any shape is decoded or refused."""
    count = len(OPERATIONS[name].payload)
    values = data.draw(st.lists(_VALUES, min_size=count, max_size=count))
    _survives(name, [encode(value) for value in values])


@given(_NAMES, st.data())
def test_random_bytes_raise_nothing_but_refusals(name: str, data: st.DataObject) -> None:
    """So are bytes that are no msgpack."""
    count = len(OPERATIONS[name].payload)
    _survives(name, data.draw(st.lists(st.binary(max_size=64), min_size=count, max_size=count)))


@given(_NAMES, st.data())
def test_damaged_requests_raise_nothing_but_refusals(name: str, data: st.DataObject) -> None:
    """So are requests with a few wrong bytes, which get past the first checks."""
    payload = frames(name)
    if not payload:
        return
    index = data.draw(st.integers(0, len(payload) - 1))
    damaged = bytearray(payload[index])
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    payload[index] = bytes(damaged)
    _survives(name, payload)


@given(st.binary(max_size=200))
def test_random_envelope_raises_nothing_but_refusals(frame: bytes) -> None:
    """The first two frames of a message may be anything."""
    assert is_uid(frame) in (True, False)
    with contextlib.suppress(RequestError):
        decode_operation(frame)
