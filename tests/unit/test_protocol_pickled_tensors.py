"""Pickled tensors: what PyTorch writes is read byte for byte, and nothing else is."""

from __future__ import annotations

import collections
import contextlib
import hashlib
import json
import os
import pickle
import pickletools
import struct
import tempfile
import tracemalloc
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lmcache_nodeagent.errors import MalformedRequest
from lmcache_nodeagent.protocol.codec import decode_operation, decode_payload
from lmcache_nodeagent.protocol.messages import PrepareRetrieveReply
from lmcache_nodeagent.protocol.pickle_machine import Called, Name, Persistent, read_pickle
from lmcache_nodeagent.protocol.pickled_tensors import (
    FRAMING_BYTES,
    PICKLED_DTYPES,
    read_tensors,
    write_tensors,
)
from tests.fixtures.wire.recordings import load

_RECORDED = Path(__file__).parent / "recorded/pickled_tensors.json"
CASES: list[dict[str, Any]] = json.loads(_RECORDED.read_text())
WAS_HERE = Path(tempfile.gettempdir()) / f"lmcache-kube-was-here-{os.getpid()}"
STOCK = bytes.fromhex(CASES[0]["payload"])
"""Two bfloat16 tensors of shape [2, 2, 4, 3], as PyTorch pickles them."""


def read(data: bytes, most: int = 1000) -> object:
    """Read one pickle from its beginning."""
    return read_pickle(memoryview(data), 0, most)[0]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['dtype']}-{case['protocol']}")
def test_what_pytorch_pickles_is_read(case: dict[str, Any]) -> None:
    """dtype, shape and bytes of each tensor; `record_pickles.py` made the payloads."""
    tensors = read_tensors(bytes.fromhex(case["payload"]), 2)
    assert [hashlib.sha256(tensor.data).hexdigest() for tensor in tensors] == case["sha256"]
    assert {(tensor.dtype, tensor.shape) for tensor in tensors} == {
        (case["dtype"], tuple(case["shape"]))
    }
    assert case["dtype"] in PICKLED_DTYPES


def test_what_stock_client_and_server_exchange_is_read() -> None:
    """The recorded session: what the worker stored is what the server gave back."""
    recording = load("engine_driven_pickle")
    stored, loaded = b"", b""
    for exchange in recording.exchanges:
        _, operation_frame, *payload = exchange.request_frames()
        operation = decode_operation(operation_frame)
        if operation.name == "commit_store" and not stored:
            stored = cast("bytes", decode_payload(operation, payload)[2])
        elif operation.name == "prepare_retrieve" and not loaded:
            document = exchange.reply_frames()[0][2]
            loaded = msgspec.msgpack.decode(document, type=PrepareRetrieveReply).data
    tensors = read_tensors(stored, 2)
    assert {(tensor.dtype, tensor.shape) for tensor in tensors} == {("bfloat16", (2, 2, 32, 16))}
    assert tensors == read_tensors(loaded, 2)


@given(st.sampled_from(sorted(PICKLED_DTYPES)), st.integers(0, 5), st.binary(min_size=1))
def test_what_is_written_is_read_back(dtype: str, count: int, seed: bytes) -> None:
    """Any number of tensors; `test_sessions.py` of the conformance suite has PyTorch read them."""
    shape = (2, 3, 4)
    nbytes = 24 * {"bool": 1, "uint8": 1, "int8": 1}.get(dtype, 8)
    nbytes = {"bfloat16": 48, "float16": 48, "int16": 48, "float32": 96, "int32": 96}.get(
        dtype, nbytes
    )
    chunks = [memoryview((seed * nbytes)[at : at + nbytes]) for at in range(count)]
    chunks = [chunk if len(chunk) == nbytes else memoryview(bytes(nbytes)) for chunk in chunks]
    written = b"".join(write_tensors(dtype, shape, chunks))
    assert len(written) <= count * (nbytes + FRAMING_BYTES) + FRAMING_BYTES
    read_back = read_tensors(written, count)
    assert [tensor.data for tensor in read_back] == chunks
    assert all((t.dtype, t.shape) == (dtype, shape) for t in read_back)
    list(pickletools.genops(written))


@pytest.mark.parametrize("count", [0, 1, 3])
def test_another_number_of_tensors_is_refused(count: int) -> None:
    """A store of n chunks has n tensors."""
    with pytest.raises(MalformedRequest, match=r"2 in place of a list|more than"):
        read_tensors(STOCK, count)


def test_a_payload_that_is_cut_short_anywhere_is_refused() -> None:
    """No prefix is a payload."""
    for end in range(len(STOCK)):
        with pytest.raises(MalformedRequest):
            read_tensors(STOCK[:end], 2)


@given(st.data())
def test_a_changed_payload_is_read_or_refused_and_nothing_else(data: st.DataObject) -> None:
    """Any bytes anywhere: tensors of the declared size, or `MalformedRequest`."""
    at = data.draw(st.integers(0, len(STOCK) - 1))
    length = data.draw(st.integers(0, 8))
    changed = STOCK[:at] + data.draw(st.binary(max_size=8)) + STOCK[at + length :]
    try:
        tensors = read_tensors(changed, 2)
    except MalformedRequest:
        return
    for tensor in tensors:
        elements = 1
        for size in tensor.shape:
            elements *= size
        assert len(tensor.data) % elements == 0


@given(st.binary(max_size=200), st.integers(0, 3))
@example(b"", 0)
@example(b"\x80\x04].", 0)
def test_any_bytes_are_read_or_refused_and_nothing_else(payload: bytes, count: int) -> None:
    """Garbage raises nothing but the refusal."""
    with contextlib.suppress(MalformedRequest):
        read_tensors(payload, count)


class _Evil:
    """Pickles as a call of its own choosing."""

    def __init__(self, *call: Any) -> None:  # noqa: ANN401  # anything
        self._call = call

    def __reduce__(self) -> Any:  # noqa: ANN401  # anything
        return self._call


@pytest.mark.parametrize(
    "value",
    [
        [_Evil(os.system, (f"touch {WAS_HERE}",)), 0],
        [_Evil(eval, ("1",)), _Evil(eval, ("1",))],
        _Evil(exec, ("raise SystemExit",)),
        [collections.OrderedDict(), collections.OrderedDict()],
        [1, 2],
        ["torch._utils", "_rebuild_tensor_v2"],
        {"a": 1},
        None,
    ],
    ids=["system", "eval", "exec", "dictionaries", "numbers", "names", "map", "nothing"],
)
def test_what_wants_to_be_called_is_not(value: object) -> None:
    """Reading calls nothing and makes nothing, it refuses."""
    payload = pickle.dumps(value, protocol=4)
    with pytest.raises(MalformedRequest):
        read_tensors(payload, 2)
    assert not WAS_HERE.exists()


@pytest.mark.parametrize(
    "payload",
    [
        b"\x80\x04" + b"]" * 1_000_000,
        b"\x80\x04" + b"(" * 1_000_000,
        b"\x80\x04]" + b"\x94" * 1_000_000,
        b"\x80\x04)" + b"\x85" * 1_000_000 + b".",
        b"\x80\x04]\x94" + b"h\x00a" * 300_000 + b".",
        b"\x80\x04\x8e" + b"\xff" * 8,
        b"\x80\x04]r\xff\xff\xff\x7f.",
        b"\x80\x04X\xff\xff\xff\xff" + b"a" * 1000,
        b"\x80\x04\x8b\xff\xff\xff\x7f",
    ],
    ids=["lists", "marks", "memo", "nesting", "itself", "length", "index", "text", "number"],
)
def test_a_bomb_costs_nothing(payload: bytes) -> None:
    """However much it asks for: few instructions are read, and nothing is set aside for lengths."""
    tracemalloc.start()
    try:
        with pytest.raises(MalformedRequest):
            read_tensors(payload, 2)
        assert tracemalloc.get_traced_memory()[1] < 500_000
    finally:
        tracemalloc.stop()


def entry(
    *,
    offset: bytes = b"K\x00",
    shape: bytes = b"K\x02K\x03\x86",
    stride: bytes = b"K\x03K\x01\x86",
    saved: bytes | None = None,
    loader: bytes = b"ctorch.storage\n_load_from_bytes\n",
) -> bytes:
    """A payload of one uint8 tensor [2, 3], with something else in its place."""
    inner = storage() if saved is None else saved
    return (
        b"\x80\x04](ctorch._utils\n_rebuild_tensor_v2\n("
        + loader
        + b"B"
        + struct.pack("<I", len(inner))
        + inner
        + b"\x85R"
        + offset
        + shape
        + stride
        + b"\x89NtRe."
    )


def storage(
    *,
    magic: bytes = b"\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19",
    version: bytes = b"M\xe9\x03",
    machine: bytes = b"}(X\x0d\x00\x00\x00little_endian\x88u",
    kind: bytes = b"ctorch\nByteStorage\n",
    key: bytes = b"0",
    place: bytes = b"X\x03\x00\x00\x00cpu",
    elements: bytes = b"K\x06",
    counted: int = 6,
    data: bytes = b"abcdef",
) -> bytes:
    """PyTorch's legacy save format of six bytes, with something else in its place."""
    return b"".join(
        (
            *(b"\x80\x02" + part + b"." for part in (magic, version, machine)),
            b"\x80\x02(X\x07\x00\x00\x00storage" + kind + b"X\x01\x00\x00\x000" + place,
            elements + b"NtQ.",
            b"\x80\x02]X\x01\x00\x00\x00" + key + b"a.",
            struct.pack("<q", counted) + data,
        )
    )


def test_the_forms_below_are_right_but_for_their_fault() -> None:
    """The unchanged form is read, also in a part of its storage and with sizes of one."""
    (tensor,) = read_tensors(entry(), 1)
    assert (tensor.dtype, tensor.shape, bytes(tensor.data)) == ("uint8", (2, 3), b"abcdef")
    part = entry(offset=b"K\x03", shape=b"K\x01K\x03\x86", stride=b"M\xff\xffK\x01\x86")
    assert bytes(read_tensors(part, 1)[0].data) == b"def"


@pytest.mark.parametrize(
    "payload",
    [
        entry(offset=b"K\x01"),
        entry(offset=b"J\xff\xff\xff\xff"),
        entry(shape=b")", stride=b")"),
        entry(shape=b"K\x02\x85"),
        entry(shape=b"K\x00K\x03\x86"),
        entry(shape=b"J\xfe\xff\xff\xffJ\xfd\xff\xff\xff\x86"),
        entry(shape=b"K\x02\x88\x86"),
        entry(shape=b"K\x03K\x02\x86"),
        entry(stride=b"K\x01K\x02\x86"),
        entry(stride=b"K\x03\x88\x86"),
        entry(stride=b"NK\x01\x86"),
        entry(shape=b"(" + b"K\x01" * 9 + b"t", stride=b"(" + b"K\x01" * 9 + b"t"),
        entry(loader=b"cos\nsystem\n"),
        entry(saved=b""),
        entry(saved=storage(magic=b"K\x01")),
        entry(saved=storage(magic=b"N")),
        entry(saved=storage(version=b"M\xea\x03")),
        entry(saved=storage(machine=b"}(X\x0d\x00\x00\x00little_endian\x89u")),
        entry(saved=storage(machine=b"}")),
        entry(saved=storage(kind=b"ctorch\nNoStorage\n")),
        entry(saved=storage(kind=b"cos\nByteStorage\n")),
        entry(saved=storage(key=b"1")),
        entry(saved=storage(place=b"X\x04\x00\x00\x00cuda")),
        entry(saved=storage(elements=b"J\xff\xff\xff\xff", counted=-1)),
        entry(saved=storage(counted=7)),
        entry(saved=storage(data=b"abcde")),
        entry(saved=storage(data=b"abcdefg")),
        entry() + b".",
    ],
)
def test_a_tensor_that_is_not_quite_one_is_refused(payload: bytes) -> None:
    """Offsets, shapes, strides and storages that do not fit each other or this machine."""
    with pytest.raises(MalformedRequest):
        read_tensors(payload, 1)


@pytest.mark.parametrize("words", [1, 10])
def test_a_storage_may_begin_in_other_words(words: int) -> None:
    """Of another machine or release, also longer than what is remembered of the last one."""
    told = b"".join(
        b"X" + struct.pack("<I", 200) + b"%03d" % word + b"m" * 197 + b"K\x01"
        for word in range(words)
    )
    machine = b"}(X\x0d\x00\x00\x00little_endian\x88" + told + b"u"
    payload = entry(saved=storage(machine=machine))
    for _ in range(2):
        assert bytes(read_tensors(payload, 1)[0].data) == b"abcdef"
        assert bytes(read_tensors(entry(), 1)[0].data) == b"abcdef"
        with pytest.raises(MalformedRequest, match="version"):
            read_tensors(entry(saved=storage(version=b"M\xea\x03", machine=machine)), 1)


def test_values_are_read_as_python_would() -> None:
    """All instructions, in both their short and their long forms."""
    plain = [
        1,
        -1,
        300,
        70_000,
        -(10**20),
        True,
        False,
        None,
        "text",
        b"bytes",
        {"key": ("a", 1), "other": 2},
    ]
    for protocol in (3, 4, 5):
        assert read(pickle.dumps(plain, protocol)) == plain
    once = ["x"]
    shared = read(pickle.dumps([once] * 300, 4))
    assert isinstance(shared, list)
    assert shared[0] is shared[-1]
    many = [str(number) for number in range(600)]  # memo indices of more than a byte
    assert read(pickle.dumps([*many, *many], 3), 5000) == [*many, *many]
    assert read(pickle.dumps(many[:1], 3)) == many[:1]
    large = read(pickle.dumps(b"x" * 300, 4))
    assert large == b"x" * 300
    assert read(b"\x80\x04\x8e\x01" + bytes(7) + b"x.") == b"x"
    called = read(pickle.dumps(collections.OrderedDict(), 4))
    assert isinstance(called, Called)
    assert called.function == Name("collections", "OrderedDict")
    reference = read(b"K\x01Q.")
    assert isinstance(reference, Persistent)
    assert reference.reference == 1
    assert read(b"K\x01K\x02K\x03\x87.") == (1, 2, 3)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\x80\x06.", "protocol 6"),
        (b".", "empty stack"),
        (b"NN.", "leaves more"),
        (b"(N.", "leaves more"),
        (b"t.", "without a mark"),
        (b"Ne.", "without a mark"),
        (b"NNa.", "NoneType in place of list"),
        (b"N(Nu.", "no value"),
        (b"N(NNu.", "NoneType in place of dict"),
        (b"}(NNu.", "NoneType in place of str"),
        (b"h\x00.", "memo 0"),
        (b"NN\x93.", "NoneType in place of str"),
        (b"X\x01\x00\x00\x00\xff.", "no UTF-8"),
        (b"X\x01\x01\x00\x00" + b"a" * 257 + b".", "257 bytes"),
        (b"c" + b"a" * 300, "more than 256 bytes"),
        (b"cos\nsystem", "more than 256 bytes"),
        (b"i", "instruction 0x69"),
        (b"\x81", "instruction 0x81"),
        (b"N" * 2000, "more than 1000 instructions"),
        (b"K", "cut short"),
    ],
)
def test_what_is_wrong_is_said(data: bytes, reason: str) -> None:
    """Each refusal has its words."""
    with pytest.raises(MalformedRequest, match=reason):
        read(data)
