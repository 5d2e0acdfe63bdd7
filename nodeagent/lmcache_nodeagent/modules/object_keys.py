"""From a request's key to the keys of the objects it means."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmcache_nodeagent.errors import MalformedRequest
from lmcache_nodeagent.storage.objects import ObjectKey, kv_rank

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lmcache_nodeagent.hashing import ChunkHasher
    from lmcache_nodeagent.protocol.messages import CacheKey


def object_keys(
    key: CacheKey, hashes: Sequence[bytes], rank: int, layout_identity: int
) -> list[ObjectKey]:
    """Return one object key for each chunk hash, for one KV rank, in chunk order.

    The layout's id stands where LMCache numbers object groups: there is one group here.
    """
    packed = kv_rank(key.world_size, rank)
    return [
        ObjectKey(chunk_hash, key.model_name, packed, layout_identity, key.cache_salt)
        for chunk_hash in hashes
    ]


def transfer_hashes(key: CacheKey, hasher: ChunkHasher) -> list[bytes]:
    """Return the hashes of the chunks in [start, end) of a store or retrieve.

    Raises:
        MalformedRequest: start or end is no chunk boundary, or end lies beyond the tokens.
    """
    chunk = hasher.chunk_tokens
    if key.start % chunk or key.end % chunk:
        raise MalformedRequest(
            f"range [{key.start}, {key.end}) does not start and end at a chunk boundary;"
            f" a chunk has {chunk} tokens"
        )
    return hasher.hashes(key.token_ids, key.end)[key.start // chunk :]
