"""Device descriptors: the ext 1 documents that say where a worker's KV tensors lie.

Unlike other documents they must have exactly the keys of their kind: a key that is not
understood could mean other memory. Kinds without a context here are recognised and refused by
name where tensors are mapped, not as garbage.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import msgspec
from msgspec.msgpack import Decoder, Ext

from lmcache_nodeagent.protocol.limits import LIMITS
from lmcache_nodeagent.protocol.messages import TensorDescriptor, TensorMetadata

EXT_TENSOR = 1
"""The msgpack ext code of device descriptors."""

DESCRIPTOR_VERSION = 1

_COMMON = frozenset({"type", "version"})
_KEYS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "cpu_shm": _COMMON | {"metadata", "shm_name", "nbytes"},
        "cuda": _COMMON | {"metadata", "handle"},
        "cuda_raw": _COMMON | {"metadata", "ipc_handle", "alloc_offset", "nbytes"},
        "cuda_vmm": _COMMON
        | {"metadata", "export_id", "kind", "fabric_blob", "alloc_size", "alloc_offset", "nbytes"},
        "musa": _COMMON | {"metadata", "handle"},
        "npu": _COMMON | {"bare", "planes"},
    }
)

DTYPE_BYTES: Mapping[str, int] = MappingProxyType(
    {
        **dict.fromkeys(("bool", "int8", "uint8"), 1),
        **dict.fromkeys(("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2"), 1),
        **dict.fromkeys(("float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"), 1),
        **dict.fromkeys(("bfloat16", "float16", "int16", "uint16"), 2),
        **dict.fromkeys(("float32", "int32", "uint32"), 4),
        **dict.fromkeys(("float64", "int64", "uint64"), 8),
    }
)
"""Bytes of one element, by PyTorch dtype name."""


class _Head(msgspec.Struct):
    """What is read first; `type` decides which other keys there must be."""

    type: str
    version: int


_keys = Decoder(dict[str, msgspec.Raw])
_head = Decoder(_Head)
_tensor = Decoder(TensorDescriptor)


def decode_tensor(document: Ext) -> TensorDescriptor:
    """Decode and check one descriptor without touching the memory it names.

    Raises:
        ValueError: Names the key; also msgspec's decode errors, which are ValueErrors.
    """
    body = bytes(document.data)
    if document.code != EXT_TENSOR:
        raise ValueError(f"ext code {document.code:#04x} is not a device descriptor ({EXT_TENSOR})")
    if len(body) > LIMITS.max_tensor_bytes:
        raise ValueError(f"descriptor of {len(body)} bytes; at most {LIMITS.max_tensor_bytes}")
    _check_keys(body)
    tensor = _tensor.decode(body)
    if tensor.metadata is not None:
        _check_view(tensor, tensor.metadata)
    elif "metadata" in _KEYS[tensor.type]:
        raise ValueError("metadata is nil")
    return tensor


def _check_keys(body: bytes) -> None:
    head = _head.decode(body)
    if head.version != DESCRIPTOR_VERSION:
        raise ValueError(f"version {head.version}; only {DESCRIPTOR_VERSION} is understood")
    if head.type not in _KEYS:
        raise ValueError(f"type {head.type[:40]!r} is none of {', '.join(_KEYS)}")
    found = _keys.decode(body).keys()
    if missing := sorted(_KEYS[head.type] - found):
        raise ValueError(f"{head.type} descriptor without {', '.join(missing)}")
    if unknown := sorted(found - _KEYS[head.type]):
        raise ValueError(f"{head.type} descriptor with unknown key {unknown[0][:40]!r}")


def _check_view(tensor: TensorDescriptor, view: TensorMetadata) -> None:
    if view.dtype not in DTYPE_BYTES:
        raise ValueError(f"metadata.dtype {view.dtype[:40]!r} is unknown")
    if len(view.shape) != len(view.stride):
        raise ValueError(
            f"metadata.shape has {len(view.shape)} dimensions, metadata.stride {len(view.stride)}"
        )
    span_bytes = view.span_elements() * DTYPE_BYTES[view.dtype]
    if tensor.type == "cpu_shm" and span_bytes > tensor.nbytes:
        raise ValueError(f"metadata spans {span_bytes} bytes, nbytes is {tensor.nbytes}")
