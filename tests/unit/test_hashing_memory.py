"""Prompts that were hashed before are not hashed again, and their hashes are the same ones."""

from __future__ import annotations

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_nodeagent.errors import MalformedRequest
from lmcache_nodeagent.hashing import ChunkHasher

CHUNK = 4


def prompt(branch: int, chunks: int) -> list[int]:
    """Make a prompt; all branches share their first 20 chunks."""
    return [token + (branch if token >= 20 * CHUNK else 0) for token in range(chunks * CHUNK + 1)]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 60), st.integers(0, 60)), max_size=12))
def test_hashes_do_not_depend_on_what_was_hashed_before(
    requests: list[tuple[int, int, int]],
) -> None:
    """Whatever prefixes earlier prompts share, and wherever their readers stopped."""
    hasher = ChunkHasher(CHUNK)
    for branch, chunks, read in requests:
        tokens = prompt(branch, chunks)
        fresh = ChunkHasher(CHUNK).hashes(tokens, len(tokens))
        assert list(islice(hasher.chain(tokens, len(tokens)), read)) == fresh[:read]
        assert hasher.hashes(tokens, len(tokens)) == fresh


def test_tokens_are_checked_before_the_first_hash() -> None:
    """A caller that stops early refuses the same prompts."""
    with pytest.raises(MalformedRequest, match="position 5"):
        ChunkHasher(CHUNK).chain([0, 1, 2, 3, 4, -1, 6, 7], 8)
