"""Chunk hashes: what decides that two prompts share a prefix of KV cache.

The chain is LMCache 0.5.6's default (`--hash-algorithm blake3`): a chunk's hash covers its own
tokens and the hash before it, so equal hashes mean equal prompts from the first token on. Nothing
but tokens enters; model, rank and salt are parts of the object key (`storage/objects.py`).
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from blake3 import blake3

from lmcache_nodeagent.errors import ConfigError, MalformedRequest

SUPPORTED_ALGORITHM = "blake3"
"""The only value of `--hash-algorithm` served here."""

TOKEN_BYTES = 4
"""A token id enters the hash as an unsigned 32-bit integer, big-endian."""

MAX_TOKEN_ID = 2 ** (8 * TOKEN_BYTES) - 1

_PROMPTS_REMEMBERED = 4
_WORTH_REMEMBERING_CHUNKS = 16

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


@dataclass(frozen=True, slots=True)
class _Remembered:
    """The hashes of a prompt's first chunks, and the packed tokens they stand for."""

    tokens: bytes
    hashes: Sequence[bytes]


class ChunkHasher:
    """Hashes the full chunks of a prompt. Threads: any.

    The last few prompts are remembered by their tokens (never by a request id), because lookup,
    retrieve and store of one request all send the same ones, and the next turn of a conversation
    begins with them.
    """

    def __init__(self, chunk_tokens: int) -> None:
        if chunk_tokens < 1:
            raise ValueError(f"chunk_tokens must be at least 1, not {chunk_tokens}")
        self.chunk_tokens = chunk_tokens
        # Replaced as a whole, never changed: a race between two threads forgets a prompt, no more.
        self._remembered: tuple[_Remembered, ...] = ()

    def hashes(self, token_ids: Sequence[int], end: int) -> list[bytes]:
        """Return one 32-byte hash for each full chunk of `token_ids[:end]`, first chunk first.

        Tokens after the last full chunk are ignored, and are not checked either. 131,072 tokens
        take about 2 ms.

        Raises:
            MalformedRequest: `end` lies outside the prompt, or a token is no unsigned 32-bit
                integer.
        """
        return list(self.chain(token_ids, end))

    def chain(self, token_ids: Sequence[int], end: int) -> Iterator[bytes]:
        """Yield what `hashes` returns one by one, for callers that stop at the first miss.

        Raises:
            MalformedRequest: as `hashes`; before the first hash is asked for.
        """
        if not 0 <= end <= len(token_ids):
            raise MalformedRequest(
                f"end {end} lies outside the prompt of {len(token_ids)} token ids; "
                "send all token ids up to end"
            )
        return self._links(_big_endian(token_ids[: end - end % self.chunk_tokens]))

    def _links(self, tokens: bytes) -> Iterator[bytes]:
        chunk_bytes = self.chunk_tokens * TOKEN_BYTES
        known = self._longest_known(tokens)
        yield from known
        hashes = list(known)
        previous = hashes[-1] if hashes else SEED
        view = memoryview(tokens)
        try:
            for start in range(len(hashes) * chunk_bytes, len(tokens), chunk_bytes):
                previous = blake3(previous + view[start : start + chunk_bytes]).digest()
                hashes.append(previous)
                yield previous
        finally:
            if len(hashes) - len(known) >= _WORTH_REMEMBERING_CHUNKS:
                new = _Remembered(tokens[: len(hashes) * chunk_bytes], hashes)
                others = [r for r in self._remembered if not tokens.startswith(r.tokens)]
                self._remembered = (new, *others[: _PROMPTS_REMEMBERED - 1])

    def _longest_known(self, tokens: bytes) -> Sequence[bytes]:
        """Return the remembered hashes of the longest common prefix, in whole chunks."""
        longest: Sequence[bytes] = ()
        for remembered in self._remembered:
            chunks = self._common_chunks(tokens, remembered)
            if chunks > len(longest):
                longest = remembered.hashes[:chunks]
        return longest

    def _common_chunks(self, tokens: bytes, remembered: _Remembered) -> int:
        """Count the chunks in which both begin alike, by bisection: each step is one memcmp."""
        chunk_bytes = self.chunk_tokens * TOKEN_BYTES
        least, most = 0, min(len(remembered.hashes), len(tokens) // chunk_bytes)
        while least < most:
            middle = (least + most + 1) // 2
            begin, stop = least * chunk_bytes, middle * chunk_bytes
            if tokens.startswith(remembered.tokens[begin:stop], begin):
                least = middle
            else:
                most = middle - 1
        return least


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
