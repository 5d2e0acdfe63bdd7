"""Keys of long prompts are decoded once, and never to anything else than without the memory."""

from __future__ import annotations

import struct

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_nodeagent.protocol.messages import CacheKey
from lmcache_nodeagent.protocol.prompts import PIECE_TOKENS, PromptMemory

PLAIN = msgspec.msgpack.Decoder(CacheKey).decode


class CountingDecoder:
    """Counts the tokens that are really decoded."""

    def __init__(self) -> None:
        self.tokens = 0

    def __call__(self, frame: bytes) -> CacheKey:
        """Decode and count."""
        key = PLAIN(frame)
        self.tokens += len(key.token_ids)
        return key


def key_frame(body: bytes, count: int, request_id: str = "r", first: bytes = b"\xa1m") -> bytes:
    """Encode a key around an encoded token list."""
    pack = msgspec.msgpack.encode
    fields = {
        "model_name": first,
        "world_size": pack(1),
        "worker_id": pack(None),
        "token_ids": b"\xdd" + struct.pack(">I", count) + body,
        "start": pack(0),
        "end": pack(count),
        "request_id": pack(request_id),
    }
    return bytes([0x80 + len(fields)]) + b"".join(pack(n) + v for n, v in fields.items())


def shortest(tokens: list[int]) -> bytes:
    """Encode tokens as clients do, without a header."""
    return b"".join(map(msgspec.msgpack.encode, tokens))


def prompt(seed: int, pieces: float) -> list[int]:
    """Make tokens of all encoded widths."""
    return [(seed + n * 7919) % 200_000 for n in range(int(pieces * PIECE_TOKENS))]


def test_the_same_prompt_is_not_decoded_again() -> None:
    """Neither by another request, nor by the next turn that begins with it."""
    decode = CountingDecoder()
    memory = PromptMemory(decode)
    tokens = prompt(1, 4)
    memory.decode(key_frame(shortest(tokens), len(tokens)))
    decode.tokens = 0
    longer = [*tokens, 5, 6, 7]
    assert memory.decode(key_frame(shortest(tokens), len(tokens), "r2")).token_ids == tokens
    assert memory.decode(key_frame(shortest(longer), len(longer), "r3")).token_ids == longer
    assert decode.tokens == 3


@pytest.mark.parametrize("count", [2 * PIECE_TOKENS, 70_000])
def test_both_headers_of_token_lists_are_read(count: int) -> None:
    """Lists of up to 65,535 tokens have a shorter one than longer lists."""
    decode = CountingDecoder()
    memory = PromptMemory(decode)
    key = CacheKey("m", 1, None, prompt(1, count / PIECE_TOKENS), 0, count, "r")
    frame = msgspec.msgpack.encode(key)
    assert memory.decode(frame) == key
    decode.tokens = 0
    assert memory.decode(frame) == key
    assert decode.tokens < PIECE_TOKENS


def test_a_prompt_that_ends_inside_a_remembered_one_keeps_its_length() -> None:
    """What follows the tokens in the frame is never taken for tokens."""
    memory = PromptMemory(PLAIN)
    tokens = prompt(1, 6)
    memory.decode(key_frame(shortest(tokens), len(tokens)))
    for count in (4 * PIECE_TOKENS - 1, 4 * PIECE_TOKENS, 4 * PIECE_TOKENS + 1):
        frame = key_frame(shortest(tokens[:count]), count)
        assert memory.decode(frame) == PLAIN(frame)


def test_longer_encodings_of_numbers_are_never_mistaken_for_other_tokens() -> None:
    """A sender that pads its numbers cannot make another's bytes mean its own tokens."""
    memory = PromptMemory(PLAIN)
    tokens = prompt(3, 5)
    padded = b"".join(b"\xce" + struct.pack(">I", token) for token in tokens)
    frame = key_frame(padded, len(tokens))
    assert memory.decode(frame).token_ids == tokens
    for body in (padded, shortest(tokens)):
        frame = key_frame(body, len(tokens))
        assert memory.decode(frame) == PLAIN(frame)


@pytest.mark.parametrize("broken", [b"\xc0", b"\xa1x", b"\xcb" + bytes(8)])
def test_a_fault_behind_a_known_prefix_is_refused_as_without_the_memory(broken: bytes) -> None:
    """The text names the same place."""
    memory = PromptMemory(PLAIN)
    tokens = prompt(4, 4)
    memory.decode(key_frame(shortest(tokens), len(tokens)))
    frame = key_frame(shortest(tokens) + broken, len(tokens) + 1)
    with pytest.raises(ValueError, match="token_ids") as plain:
        PLAIN(frame)
    with pytest.raises(ValueError, match="token_ids") as remembered:
        memory.decode(frame)
    assert str(remembered.value) == str(plain.value)


def test_remembered_prompts_are_bounded() -> None:
    """The oldest are forgotten: by their tokens, and many short ones by their number."""
    memory = PromptMemory(PLAIN)
    for pieces in (64, 2):
        for seed in range(20):
            tokens = prompt(seed * 31, pieces)
            memory.decode(key_frame(shortest(tokens), len(tokens)))
        assert sum(len(kept.tokens) for kept in memory._prompts) <= 3 * 2**17
    assert len(memory._prompts) == 16


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.floats(2.5, 5), st.integers(0, 4)), max_size=6))
def test_every_sequence_of_prompts_decodes_as_without_the_memory(
    requests: list[tuple[int, float, int]],
) -> None:
    """Shared prefixes, cuts and changed tails in any order."""
    memory = PromptMemory(PLAIN)
    for seed, pieces, changed in requests:
        tokens = prompt(seed, pieces)
        for position in range(changed):
            tokens[-1 - position * PIECE_TOKENS * 3 // 4] ^= 1
        frame = key_frame(shortest(tokens), len(tokens))
        assert memory.decode(frame) == PLAIN(frame)
