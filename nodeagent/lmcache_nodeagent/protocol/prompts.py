"""Cache keys of long prompts, decoded once: their tokens are sent whole with every request.

Lookup, retrieve, store and the next turn of a conversation carry the same tokens again. Making
131,072 Python integers takes milliseconds in which no other thread runs; comparing their encoded
bytes with those of a prompt that was decoded before takes microseconds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import msgspec

from lmcache_nodeagent.protocol.limits import LIMITS
from lmcache_nodeagent.protocol.messages import CacheKey

LONG_KEY_BYTES = 4 * 2**10
"""Shorter keys are decoded faster than they are compared."""

PIECE_TOKENS = 1024
"""Prompts are compared in pieces of this many tokens."""

_REMEMBERED_TOKENS = 3 * 2**17
"""All remembered prompts together: some 50 bytes for each token."""

_REMEMBERED_PROMPTS = 16
"""Each is looked at for every key, and many open alike: with one system prompt."""

_OPENING_BYTES = 2**10

_FIELD = msgspec.msgpack.encode("token_ids")
_PIECE_HEADER_BYTES = 3  # an array16 header, as a piece has more than 15 tokens


@dataclass(frozen=True, slots=True)
class _TokenArray:
    """Where the tokens of a frame are: their array begins at `start`, the first one at `first`."""

    start: int
    first: int
    count: int


class _Prompt:
    """A prompt that was decoded. It is cut up only once another one opens like it."""

    def __init__(self, frame: bytes, array: _TokenArray, tokens: list[int]) -> None:
        self._frame = frame
        self._array = array
        self.tokens = tokens
        self.opening = frame[array.first : array.first + _OPENING_BYTES]

    @cached_property
    def pieces(self) -> tuple[bytes, ...]:
        """Encoded bytes of each full piece, as far as the frame has the shortest encoding.

        Only then do equal bytes mean equally many tokens, and clients send no other.
        """
        pieces: list[bytes] = []
        offset = self._array.first
        for begin in range(0, len(self.tokens) - PIECE_TOKENS + 1, PIECE_TOKENS):
            encoded = msgspec.msgpack.encode(self.tokens[begin : begin + PIECE_TOKENS])
            piece = encoded[_PIECE_HEADER_BYTES:]
            if not self._frame.startswith(piece, offset):
                break
            pieces.append(piece)
            offset += len(piece)
        return tuple(pieces)


class PromptMemory:
    """Decodes cache keys. Threads: any.

    A prompt is recognised by its bytes alone, whoever sends it, and only as far as they are equal:
    the result is always that of `decode`.
    """

    def __init__(self, decode: Callable[[bytes], CacheKey]) -> None:
        self._decode = decode
        # Replaced as a whole, never changed: a race between two threads forgets a prompt, no more.
        self._prompts: tuple[_Prompt, ...] = ()

    def decode(self, frame: bytes) -> CacheKey:
        """Decode a key.

        Raises:
            ValueError: Whatever `decode` raises about it.
        """
        array = _token_array(frame) if len(frame) >= LONG_KEY_BYTES else None
        if array is None or array.count > LIMITS.max_tokens:
            return self._decode(frame)
        known, offset = self._longest_known(frame, array)
        if not known:
            key = self._decode(frame)
        else:
            rest = b"\xdd" + (array.count - len(known)).to_bytes(4, "big")
            try:
                key = self._decode(b"".join((frame[: array.start], rest, frame[offset:])))
            except ValueError:
                return self._decode(frame)  # says where in the whole frame the fault is
            key = msgspec.structs.replace(key, token_ids=known + key.token_ids)
        if len(key.token_ids) - len(known) >= PIECE_TOKENS:
            self._remember(frame, array, key.token_ids)
        return key

    def _longest_known(self, frame: bytes, array: _TokenArray) -> tuple[list[int], int]:
        """Return the tokens that need no decoding, and where in the frame they end."""
        longest: list[int] = []
        end = array.first
        for prompt in self._prompts:
            if not frame.startswith(prompt.opening, array.first):
                continue
            offset, tokens = array.first, 0
            for piece in prompt.pieces:
                if tokens + PIECE_TOKENS > array.count or not frame.startswith(piece, offset):
                    break
                offset += len(piece)
                tokens += PIECE_TOKENS
            if tokens > len(longest):
                longest, end = prompt.tokens[:tokens], offset
        return longest, end

    def _remember(self, frame: bytes, array: _TokenArray, tokens: list[int]) -> None:
        kept = [_Prompt(frame, array, tokens)]
        room = _REMEMBERED_TOKENS - len(tokens)
        for prompt in self._prompts[: _REMEMBERED_PROMPTS - 1]:
            room -= len(prompt.tokens)
            if room < 0:
                break
            kept.append(prompt)
        self._prompts = tuple(kept)


def _token_array(frame: bytes) -> _TokenArray | None:
    """Find the tokens of a key; None for what does not look like one.

    A frame that only looks like one misleads nobody but its sender.
    """
    start = frame.find(_FIELD) + len(_FIELD)
    match frame[start : start + 1]:
        case b"\xdc":  # array16 of the msgpack specification
            first = start + 3
        case b"\xdd":  # array32
            first = start + 5
        case _:
            return None
    return _TokenArray(start, first, int.from_bytes(frame[start + 1 : first], "big"))
