"""Chunk hashes: what decides that two prompts share a prefix of KV cache.

The chain is LMCache 0.5.6's default (`--hash-algorithm blake3`): a chunk's hash covers its own
tokens and the hash before it, so equal hashes mean equal prompts from the first token on. Nothing
but tokens enters; model, rank and salt are parts of the object key (`storage/objects.py`).
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence

from blake3 import blake3

from lmcache_nodeagent.errors import ConfigError, MalformedRequest

SUPPORTED_ALGORITHM = "blake3"
"""The only value of `--hash-algorithm` served here."""

TOKEN_BYTES = 4
"""A token id enters the hash as an unsigned 32-bit integer, big-endian."""

MAX_TOKEN_ID = 2 ** (8 * TOKEN_BYTES) - 1

SEED = blake3(bytes(8 + TOKEN_BYTES)).digest()
"""The hash "before" chunk 0: an int64 and a uint32, both zero."""


def require_supported(algorithm: str) -> None:
    """Refuse an algorithm whose chain this agent cannot compute.

    The others that LMCache offers hash Python objects with functions of Python or vLLM; a process
    without that exact code would file the same prompt under other hashes.

    Raises:
        ConfigError: `algorithm` is not `blake3`.
    """
    if algorithm != SUPPORTED_ALGORITHM:
        problem = (
            f"hash algorithm {algorithm!r} is not served: it needs Python's or vLLM's own object "
            f"hashing; set {SUPPORTED_ALGORITHM!r}, the default of LMCache clients"
        )
        raise ConfigError([problem])


class ChunkHasher:
    """Hashes the full chunks of a prompt. Threads: any (it keeps no state between calls)."""

    def __init__(self, chunk_tokens: int) -> None:
        if chunk_tokens < 1:
            raise ValueError(f"chunk_tokens must be at least 1, not {chunk_tokens}")
        self.chunk_tokens = chunk_tokens

    def hashes(self, token_ids: Sequence[int], end: int) -> list[bytes]:
        """Return one 32-byte hash for each full chunk of `token_ids[:end]`, first chunk first.

        Tokens after the last full chunk are ignored, and are not checked either. 131,072 tokens
        take about 2 ms.

        Raises:
            MalformedRequest: `end` lies outside the prompt, or a token is no unsigned 32-bit
                integer.
        """
        if not 0 <= end <= len(token_ids):
            raise MalformedRequest(
                f"end {end} lies outside the prompt of {len(token_ids)} token ids; "
                "send all token ids up to end"
            )
        chunk_bytes = self.chunk_tokens * TOKEN_BYTES
        tokens = memoryview(_big_endian(token_ids[: end - end % self.chunk_tokens]))
        previous = SEED
        hashes = []
        for start in range(0, len(tokens), chunk_bytes):
            previous = blake3(previous + tokens[start : start + chunk_bytes]).digest()
            hashes.append(previous)
        return hashes


def _big_endian(token_ids: Sequence[int]) -> bytes:
    """Pack token ids as the hash wants them; C speed, since a prompt may have 10**6 of them."""
    try:
        packed = array("I", token_ids)
    except OverflowError:
        position, token = next(
            (i, token) for i, token in enumerate(token_ids) if not 0 <= token <= MAX_TOKEN_ID
        )
        raise MalformedRequest(
            f"token id {token} at position {position} lies outside 0..{MAX_TOKEN_ID}"
        ) from None
    if sys.byteorder == "little":
        packed.byteswap()
    return packed.tobytes()
