"""Chunk hashes: recorded vectors, the chain's properties, and refusals."""

from __future__ import annotations

import struct
from itertools import pairwise

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from lmcache_nodeagent.errors import ConfigError, MalformedRequest
from lmcache_nodeagent.hashing import MAX_TOKEN_ID, SEED, ChunkHasher, require_supported

CHUNK_TOKENS = 256

tokens = st.lists(st.integers(0, MAX_TOKEN_ID), max_size=40)


def test_matches_hashes_recorded_from_the_release_we_speak() -> None:
    """The seed and the first two chunks of a prompt hash as LMCache 0.5.6 hashes them."""
    hashes = ChunkHasher(CHUNK_TOKENS).hashes(range(1000, 1512), 512)
    assert SEED.hex() == "7e3eff9ef7613a50340eb12677ee03b83ac759fcba9bb32705f07248d56d473b"
    assert [value.hex() for value in hashes] == [
        "d526d88f0c387e4049f866a4c572cbf658276fcae250b069051fd1fff3ad0579",
        "8be5f115945ff3c4eb943172f8edfdcdf3432274c3d3dbd2436fed9a9fe494f5",
    ]


@given(tokens, st.integers(1, 7))
def test_equals_the_formula_written_out(token_ids: list[int], chunk_tokens: int) -> None:
    """Each hash is blake3 over the hash before it and the chunk's tokens, big-endian."""
    expected, previous = [], SEED
    for end in range(chunk_tokens, len(token_ids) + 1, chunk_tokens):
        chunk = token_ids[end - chunk_tokens : end]
        previous = blake3(previous + struct.pack(f">{chunk_tokens}I", *chunk)).digest()
        expected.append(previous)
    assert ChunkHasher(chunk_tokens).hashes(token_ids, len(token_ids)) == expected


@given(tokens, st.data())
def test_a_shorter_prompt_has_a_prefix_of_the_hashes(
    token_ids: list[int], data: st.DataObject
) -> None:
    """What is asked up to an earlier end is the beginning of what is asked up to a later one."""
    end = data.draw(st.integers(0, len(token_ids)))
    hasher = ChunkHasher(4)
    everything = hasher.hashes(token_ids, len(token_ids))
    assert hasher.hashes(token_ids, end) == everything[: end // 4]


@given(st.lists(st.integers(0, MAX_TOKEN_ID), min_size=12, max_size=12), st.integers(0, 11))
def test_one_other_token_changes_its_chunk_and_all_later_ones(
    token_ids: list[int], position: int
) -> None:
    """Prompts that differ share the hashes before the first difference and none after it."""
    others = token_ids.copy()
    others[position] ^= 1
    ours, theirs = (ChunkHasher(3).hashes(prompt, 12) for prompt in (token_ids, others))
    same = [a == b for a, b in zip(ours, theirs, strict=True)]
    assert same == [index < position // 3 for index in range(4)]


def test_trailing_tokens_of_a_part_chunk_do_not_count() -> None:
    """A chunk that is not full has no hash."""
    hasher = ChunkHasher(CHUNK_TOKENS)
    assert hasher.hashes([1] * 255, 255) == []
    assert hasher.hashes([1] * 511, 511) == hasher.hashes([1] * 256, 256)
    assert hasher.hashes([], 0) == []


@pytest.mark.parametrize("bad", [-1, MAX_TOKEN_ID + 1, 2**64])
def test_a_token_that_is_no_uint32_is_refused_by_value_and_place(bad: int) -> None:
    """The message names the token and where it stands."""
    with pytest.raises(MalformedRequest, match=f"token id {bad} at position 2 "):
        ChunkHasher(4).hashes([0, MAX_TOKEN_ID, bad, 0], 4)


@pytest.mark.parametrize("end", [-1, 5])
def test_an_end_outside_the_prompt_is_refused(end: int) -> None:
    """A range that the token ids do not cover has no hashes to give."""
    with pytest.raises(MalformedRequest, match=f"end {end} lies outside the prompt of 4"):
        ChunkHasher(2).hashes([1, 2, 3, 4], end)


def test_a_chunk_has_at_least_one_token() -> None:
    """A chunk size below one is a programming error."""
    with pytest.raises(ValueError, match="at least 1"):
        ChunkHasher(0)


def test_hashes_of_a_long_prompt_are_distinct() -> None:
    """Equal chunks at different places are different prefixes."""
    hashes = ChunkHasher(16).hashes([7] * 4096, 4096)
    assert len(set(hashes)) == 256
    assert all(before != after for before, after in pairwise(hashes))


def test_only_the_default_algorithm_is_served() -> None:
    """Any other algorithm is refused with the reason and what to set."""
    require_supported("blake3")
    with pytest.raises(ConfigError, match=r"'sha256_cbor' is not served: .* set 'blake3'"):
        require_supported("sha256_cbor")
