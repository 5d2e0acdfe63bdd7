"""Documents of operations that vLLM's plain connector does not need.

Blend, peer to peer, KV events and server modules. They complete the operation table, so that a
request for one of them is checked and refused by name.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from lmcache_nodeagent.protocol.limits import LIMITS
from lmcache_nodeagent.protocol.messages import CacheSalt, ModelName, NonNegative, Text, TokenIds

ChunkHash = Annotated[bytes, Meta(max_length=64)]


class BlendMatch(Struct, frozen=True):
    """A stored chunk that recurs in the prompt: stored and current token range, and its hash."""

    old_st: NonNegative
    old_ed: NonNegative
    cur_st: NonNegative
    cur_ed: NonNegative
    hash: ChunkHash


class BlendLookupReply(Struct, frozen=True):
    """Prefix coverage in tokens, and the matches beyond it in ascending `cur_st`."""

    prefix_coverage_tokens: int
    non_prefix_segments: list[BlendMatch]
    segmented_prefix_segments: list[BlendMatch]


class PeerObjectKey(Struct, frozen=True):
    """One object of another server's L1."""

    chunk_hash: ChunkHash
    model_name: ModelName
    kv_rank: NonNegative
    object_group_id: NonNegative = 0
    cache_salt: CacheSalt = ""


_Shape = Annotated[list[NonNegative], Meta(max_length=LIMITS.max_dimensions)]


class MemoryLayout(Struct, frozen=True):
    """Shapes and dtypes of the tensors that make up one object."""

    shapes: Annotated[list[_Shape], Meta(max_length=LIMITS.max_tensors)]
    dtypes: Annotated[list[Text], Meta(max_length=LIMITS.max_tensors)]


class TransferAddress(Struct, frozen=True):
    """Where a peer reads an object: offset -1 for an absent one."""

    offset: int
    size: int


class KvEvent(Struct, frozen=True):
    """A change of the cache; a stored chunk comes with its tokens and its parent's hash."""

    seq: int
    kind: Literal["stored", "removed"]
    medium: str
    model_name: str
    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: TokenIds


class KvEventBatch(Struct, frozen=True):
    """One batch of the event stream; a changed incarnation or `lost` withdraws earlier ones."""

    enabled: bool
    incarnation: int
    next_cursor: int
    lost: bool
    events: list[KvEvent]


class ModuleCall(Struct, frozen=True):
    """A call of a server module: a dotted name and bytes that only the module understands."""

    method: Text
    payload: bytes


class ModuleReply(Struct, frozen=True):
    """What the server module answered."""

    success: bool
    payload: bytes
    error: str
