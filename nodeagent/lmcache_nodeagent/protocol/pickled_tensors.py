"""The pickled tensors of engine-driven workers without a shared pool: read and written by shape.

A payload is a list with one tensor for each chunk. Each is a call of `_rebuild_tensor_v2` on a
storage, which is a call of `_load_from_bytes` on PyTorch's legacy save format: five pickles, an
element count, the bytes. (PyTorch has no typed storage for float8 and unsigned dtypes, and cannot
read back what it pickles of them; such workers need a shared pool.)

Nothing of that is ever executed here; see `pickle_machine` and ADR 0024.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeGuard

import msgspec

from lmcache_nodeagent.errors import MalformedRequest
from lmcache_nodeagent.protocol.descriptors import DTYPE_BYTES
from lmcache_nodeagent.protocol.limits import LIMITS
from lmcache_nodeagent.protocol.messages import PrepareRetrieveReply, SlotContext
from lmcache_nodeagent.protocol.pickle_machine import Called, Name, Persistent, read_pickle

_INSTRUCTIONS = 64
"""More than a storage's pickles have, and more than a payload has beside its tensors."""

_INSTRUCTIONS_PER_TENSOR = 96

FRAMING_BYTES = 640
"""More than what is around the bytes of one tensor."""

_TYPED_STORAGES: Mapping[str, str] = MappingProxyType(
    {
        "BFloat16Storage": "bfloat16",
        "HalfStorage": "float16",
        "FloatStorage": "float32",
        "DoubleStorage": "float64",
        "ByteStorage": "uint8",
        "CharStorage": "int8",
        "ShortStorage": "int16",
        "IntStorage": "int32",
        "LongStorage": "int64",
        "BoolStorage": "bool",
    }
)
"""dtypes by class of the module `torch`; PyTorch's other dtypes have none."""

PICKLED_DTYPES = frozenset(_TYPED_STORAGES.values())

_STORAGE_OF = {dtype: storage for storage, dtype in _TYPED_STORAGES.items()}

_MAGIC = 0x1950A86A20F9469CFC6C
_SAVE_VERSION = 1001

_BEFORE_STORAGE = (
    b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
    b"\x80\x02M\xe9\x03."
    b"\x80\x02}(X\x10\x00\x00\x00protocol_versionM\xe9\x03X\x0d\x00\x00\x00little_endian\x88"
    b"X\x0a\x00\x00\x00type_sizes}(X\x05\x00\x00\x00shortK\x02X\x03\x00\x00\x00intK\x04"
    b"X\x04\x00\x00\x00longK\x04uu."
)
_LONGEST_OPENING = 1024
"""Bytes; stock ones have 137."""

_AFTER_STORAGE = b"\x80\x02]X\x01\x00\x00\x000a."


_BEFORE_DATA, _AFTER_DATA = (
    msgspec.msgpack.encode(PrepareRetrieveReply(success=True, data=b"", context=SlotContext()))
).split(b"\xc4\x00")
"""Of a reply; what it is split at stands for empty bytes (bin 8 of the msgpack specification)."""


@dataclass(frozen=True, slots=True)
class PickledTensor:
    """One contiguous tensor; `data` are its bytes, in the payload."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview


@dataclass(frozen=True, slots=True)
class _Storage:
    """The bytes of a storage and the type of its elements."""

    dtype: str
    data: memoryview


class _Openings:
    """Reads what a saved storage begins with: magic number, version, machine. Threads: any.

    PyTorch begins each storage with the same bytes, which take a third of all instructions: of the
    last ones that were right only those are kept that make it known.
    """

    def __init__(self) -> None:
        self._right = _BEFORE_STORAGE  # replaced as a whole

    def end(self, saved: memoryview) -> int:
        """Return where the opening ends.

        Raises:
            MalformedRequest: It is not that of PyTorch's legacy format, of a machine like ours.
        """
        right = self._right
        if saved[: len(right)] == right:
            return len(right)
        values: list[object] = []
        offset = 0
        for _ in range(3):
            value, offset = read_pickle(saved, offset, _INSTRUCTIONS)
            values.append(value)
        match values:
            case [int(magic), int(version), {"little_endian": True}]:
                pass
            case _:
                raise MalformedRequest("a pickled storage that does not begin as PyTorch's do")
        if (magic, version) != (_MAGIC, _SAVE_VERSION):
            raise MalformedRequest("a pickled storage of another version")
        if offset <= _LONGEST_OPENING:
            self._right = bytes(saved[:offset])
        return offset


_openings = _Openings()


def read_tensors(payload: bytes | memoryview, count: int) -> list[PickledTensor]:
    """Read a payload that must have `count` tensors.

    Raises:
        MalformedRequest: it is anything but a list of `count` contiguous tensors of host memory.
    """
    value, end = read_pickle(
        memoryview(payload), 0, _INSTRUCTIONS + count * _INSTRUCTIONS_PER_TENSOR
    )
    if not isinstance(value, list) or len(value) != count:
        found = len(value) if isinstance(value, list) else type(value).__name__
        raise MalformedRequest(f"pickled data has {found} in place of a list of {count} tensors")
    if end != len(payload):
        raise MalformedRequest(f"{len(payload) - end} bytes after the pickled tensors")
    return [_tensor(item) for item in value]


def _tensor(value: object) -> PickledTensor:
    match value:
        case Called(
            Name("torch._utils", "_rebuild_tensor_v2"),
            (Called() as call, int(offset), tuple(shape), tuple(stride), _, _),
        ):
            storage = _storage(call)
        case _:
            raise MalformedRequest("pickled data with something else than a tensor")
    if not _is_contiguous(shape, stride):
        raise MalformedRequest("pickled tensor that is not contiguous; send contiguous ones")
    start = offset * DTYPE_BYTES[storage.dtype]
    stop = start + math.prod(shape) * DTYPE_BYTES[storage.dtype]
    if not 0 <= start <= stop <= len(storage.data):
        raise MalformedRequest(
            f"pickled tensor in bytes {start} to {stop} of a storage of {len(storage.data)} bytes"
        )
    return PickledTensor(storage.dtype, shape, storage.data[start:stop])


def _is_contiguous(
    shape: tuple[object, ...], stride: tuple[object, ...]
) -> TypeGuard[tuple[int, ...]]:
    """Tell whether a shape is one, and its elements lie in order without gaps."""
    if not 1 <= len(shape) <= LIMITS.max_dimensions or len(shape) != len(stride):
        return False
    step = 1
    for size, found in zip(reversed(shape), reversed(stride), strict=True):
        if type(size) is not int or size < 1 or type(found) is not int:
            return False
        if size > 1 and found != step:
            return False
        step *= size
    return True


def _storage(call: Called) -> _Storage:
    match call:
        case Called(Name("torch.storage", "_load_from_bytes"), (memoryview() as saved,)):
            return _saved_storage(saved)
    raise MalformedRequest("a pickled tensor whose storage is none")


def _saved_storage(saved: memoryview) -> _Storage:
    stored, offset = read_pickle(saved, _openings.end(saved), _INSTRUCTIONS)
    keys, offset = read_pickle(saved, offset, _INSTRUCTIONS)
    match stored, keys:
        case (
            Persistent(("storage", Name(module, kind), str(key), "cpu", int(elements), None)),
            [str(listed)],
        ):
            pass
        case _:
            raise MalformedRequest("a pickled storage of another form than PyTorch's legacy one")
    if key != listed:
        raise MalformedRequest("a pickled storage with another key")
    dtype = _TYPED_STORAGES.get(kind) if module == "torch" else None
    if dtype is None:
        raise MalformedRequest("a pickled storage of a class that is no typed storage")
    data = saved[offset + 8 :]
    counted = bytes(saved[offset : offset + 8])
    nbytes = elements * DTYPE_BYTES[dtype]
    if elements < 0 or counted != elements.to_bytes(8, "little") or nbytes != len(data):
        raise MalformedRequest(f"a pickled storage of {nbytes} bytes with {len(data)} bytes")
    return _Storage(dtype, data)


def write_tensors(
    dtype: str, shape: Sequence[int], chunks: Sequence[memoryview]
) -> list[bytes | memoryview]:
    """Write a list of contiguous tensors of one shape, in the form that stock workers read.

    `dtype` is one of `PICKLED_DTYPES`, and each chunk has as many bytes as the shape wants.

    Returns:
        The parts that make up the payload, the chunks themselves among them.
    """
    parts: list[bytes | memoryview] = [b"\x80\x04]("]
    for chunk in chunks:
        parts += _written_tensor(dtype, shape, chunk)
    parts.append(b"e.")
    return parts


def reply_with(pickled: Sequence[bytes | memoryview]) -> list[bytes | memoryview]:
    """Return the parts of the document that answers prepare_retrieve with a payload."""
    nbytes = sum(map(len, pickled))
    return [_BEFORE_DATA + b"\xc6" + struct.pack(">I", nbytes), *pickled, _AFTER_DATA]


def _written_tensor(
    dtype: str, shape: Sequence[int], data: memoryview
) -> tuple[bytes | memoryview, ...]:
    head = _saved_head(_STORAGE_OF[dtype], len(data) // DTYPE_BYTES[dtype])
    stride = [math.prod(shape[position + 1 :]) for position in range(len(shape))]
    return (
        _global("torch._utils", "_rebuild_tensor_v2") + b"(",
        _global("torch.storage", "_load_from_bytes"),
        b"\x8e" + struct.pack("<Q", len(head) + len(data)),
        head,
        data,
        b"\x85RK\x00(" + b"".join(map(_integer, shape)) + b"t",
        b"(" + b"".join(map(_integer, stride)) + b"t\x89",
        _global("collections", "OrderedDict") + b")RtR",
    )


def _saved_head(kind: str, elements: int) -> bytes:
    """Everything of a saved storage that comes before its bytes."""
    return b"".join(
        (
            _BEFORE_STORAGE,
            b"\x80\x02(X\x07\x00\x00\x00storagectorch\n" + kind.encode() + b"\n",
            b"X\x01\x00\x00\x000X\x03\x00\x00\x00cpu" + _integer(elements) + b"NtQ.",
            _AFTER_STORAGE,
            struct.pack("<q", elements),
        )
    )


def _global(module: str, name: str) -> bytes:
    return b"".join(b"\x8c" + bytes([len(text)]) + text.encode() for text in (module, name)) + (
        b"\x93"
    )


def _integer(value: int) -> bytes:
    return b"\x8a\x08" + struct.pack("<q", value)
