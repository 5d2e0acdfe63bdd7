"""Device descriptors: exactly the documented keys, and a view that fits its memory."""

from __future__ import annotations

import re

import pytest
from msgspec.msgpack import Ext, encode

from lmcache_nodeagent.errors import MalformedRequest
from lmcache_nodeagent.protocol.codec import decode_payload
from lmcache_nodeagent.protocol.descriptors import decode_tensor
from lmcache_nodeagent.protocol.limits import LIMITS
from lmcache_nodeagent.protocol.messages import TensorDescriptor, TensorMetadata
from lmcache_nodeagent.protocol.operations import OPERATIONS
from tests.fixtures.wire.requests import HOST_TENSOR, METADATA, frames, tensor

OTHER_KINDS: dict[str, dict[str, object]] = {
    "cuda": {"handle": [0, b"h" * 66, 4096, 0, b"ref", 0, b"e" * 64, True], "metadata": METADATA},
    "cuda_raw": {
        "ipc_handle": b"h" * 64,
        "alloc_offset": 0,
        "nbytes": 4096,
        "metadata": METADATA,
    },
    "cuda_vmm": {
        "export_id": b"e" * 16,
        "kind": "fabric",
        "fabric_blob": b"f" * 64,
        "alloc_size": 4096,
        "alloc_offset": 0,
        "nbytes": 4096,
        "metadata": METADATA,
    },
    "musa": {"handle": {"any": ["thing"]}, "metadata": METADATA},
    "npu": {"bare": True, "planes": [{"handle": [1], "metadata": METADATA}]},
}


def view(**changes: object) -> Ext:
    """Encode a host tensor whose metadata differ in some keys."""
    return tensor(metadata={**METADATA, **changes})


def test_host_tensor_is_described_in_full() -> None:
    """Everything needed to map a segment is kept."""
    assert decode_tensor(tensor()) == TensorDescriptor(
        type="cpu_shm",
        metadata=TensorMetadata("bfloat16", [2, 4, 16, 2, 8], [1024, 256, 16, 8, 1], 0, "cpu"),
        shm_name="/lmcache_kv_1_0",
        nbytes=4096,
    )


def test_empty_tensor_has_no_segment() -> None:
    """A tensor without elements spans nothing, whatever its strides say."""
    empty = tensor(shm_name="", nbytes=0, metadata={**METADATA, "shape": [2, 0, 16, 2, 8]})
    assert decode_tensor(empty).nbytes == 0


@pytest.mark.parametrize("kind", OTHER_KINDS)
def test_other_memory_is_recognised(kind: str) -> None:
    """A device's descriptor is understood well enough to be refused by name later."""
    found = decode_tensor(Ext(1, encode({"type": kind, "version": 1, **OTHER_KINDS[kind]})))
    assert found.type == kind
    assert (found.metadata is None) == (kind == "npu")


@pytest.mark.parametrize("kind", ["cpu_shm", *OTHER_KINDS])
def test_keys_are_exactly_those_of_the_kind(kind: str) -> None:
    """One key more or less is refused: it could mean other memory."""
    body = {"type": kind, "version": 1, **(OTHER_KINDS.get(kind) or HOST_TENSOR)}
    with pytest.raises(ValueError, match=f"{kind} descriptor with unknown key 'extra'"):
        decode_tensor(Ext(1, encode({**body, "extra": 1})))
    for key in body.keys() - {"type", "version"}:
        short = {name: value for name, value in body.items() if name != key}
        with pytest.raises(ValueError, match=f"{kind} descriptor without {key}"):
            decode_tensor(Ext(1, encode(short)))


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        (Ext(0x55, encode(HOST_TENSOR)), "ext code 0x55"),
        (Ext(-1, encode(HOST_TENSOR)), "ext code"),
        (tensor(version=2), "version 2"),
        (tensor(version=True), "version"),
        (tensor(type="rocm"), "type 'rocm' is none of cpu_shm, cuda"),
        (tensor(type="x" * 1000), "type 'xxx"),
        (tensor(nbytes=-1), "nbytes"),
        (tensor(nbytes=4096.0), "nbytes"),
        (tensor(shm_name=b"/x"), "shm_name"),
        (tensor(metadata=None), "metadata is nil"),
        (tensor(nbytes=4095), "metadata spans 4096 bytes, nbytes is 4095"),
        (tensor(shm_name="/" + "x" * LIMITS.max_tensor_bytes), "descriptor of"),
        (view(storage_offset=1), "metadata spans 4098 bytes"),
        (view(storage_offset=2**62), "metadata spans"),
        (view(dtype="bfloat"), "metadata.dtype 'bfloat' is unknown"),
        (view(shape=[2, 4]), "metadata.shape has 2 dimensions, metadata.stride 5"),
        (view(shape=[2, -4, 16, 2, 8]), "metadata.shape"),
        (view(stride=[2**62, 256, 16, 8, 1]), "metadata spans"),
        (view(shape=[1] * 9, stride=[1] * 9), "metadata.shape"),
        (view(extra=1), "extra"),
        (Ext(1, b""), "truncated"),
        (Ext(1, b"\x80"), "type"),
        (Ext(1, b"\x91" * 2000), "array"),
        (Ext(1, b"\x80\x04\x95pickle"), "type"),
    ],
)
def test_broken_descriptor_is_refused_with_the_reason(document: Ext, reason: str) -> None:
    """Nothing that could address memory outside the segment gets through."""
    with pytest.raises(ValueError, match=re.escape(reason)):
        decode_tensor(document)


def test_registration_names_the_broken_tensor() -> None:
    """One bad layer among many is found by its index."""
    payload = frames("register_kv_cache")
    payload[1] = encode([tensor(), tensor(version=3)])
    with pytest.raises(MalformedRequest, match=r"^register_kv_cache: kv_caches: \[1\]: version 3"):
        decode_payload(OPERATIONS["register_kv_cache"], payload)


def test_deep_nesting_inside_a_descriptor_is_refused() -> None:
    """The ext body is a document of its own, with the same bounds."""
    body = encode({"type": "musa", "version": 1, "metadata": METADATA, "handle": 0})[:-1]
    payload = frames("register_kv_cache")
    payload[1] = encode([Ext(1, body + b"\x91" * 3000 + b"\x00")])
    with pytest.raises(MalformedRequest, match=r"^register_kv_cache: kv_caches: "):
        decode_payload(OPERATIONS["register_kv_cache"], payload)
