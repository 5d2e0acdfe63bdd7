"""A worker with KV memory in /dev/shm that can register with several servers."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.dealer import Dealer, Frames
from lmcache_worker.client import HOST_EVENT
from lmcache_worker.shared_memory import SharedKvCache
from lmcache_worker.wire import CacheKey

CHUNK_TOKENS = 256
BLOCK_TOKENS = 16
BLOCKS_PER_CHUNK = CHUNK_TOKENS // BLOCK_TOKENS
VOCABULARY = 128_000
"""Token ids are drawn from a vocabulary of today's size, so that they encode to 1 to 5 bytes."""

_numbers = itertools.count()

_VISIBLE_SECONDS = 5.0  # upstream answers a store before lookups can see it


@dataclass(frozen=True, slots=True)
class Model:
    """A KV layout: layers of [2, blocks, 16, heads, head size], bfloat16."""

    name: str
    layers: int
    heads: int
    head_size: int
    blocks: int

    @property
    def token_bytes(self) -> int:
        """KV bytes of one token."""
        return 2 * 2 * self.heads * self.head_size * self.layers


class Prompts:
    """Makes prompts that were never seen before, the same ones in each run."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)

    def tokens(self, count: int) -> list[int]:
        """Return new token ids."""
        drawn: list[int] = self._random.integers(0, VOCABULARY, count).tolist()
        return drawn

    def request_id(self) -> str:
        """Return a new request id: upstream keeps the hashes of one that was used before."""
        return f"request-{next(_numbers)}"


class Worker:
    """KV memory, and the requests of the one worker that owns it."""

    def __init__(self, model: Model, instance_id: int) -> None:
        self.model = model
        self.instance_id = instance_id
        shape = [2, model.blocks, BLOCK_TOKENS, model.heads, model.head_size]
        self._caches = [SharedKvCache.create(shape) for _ in range(model.layers)]
        for number, cache in enumerate(self._caches):
            pattern = np.arange(cache.array[0, 0].size, dtype=np.uint16) + number
            blocks = np.arange(model.blocks, dtype=np.uint16)[:, None]
            cache.array.reshape(2, model.blocks, -1)[...] = pattern + blocks

    def register(self, dealer: Dealer) -> None:
        """Let a server map the memory."""
        tensors = [cache.tensor for cache in self._caches]
        dealer.call(
            "register_kv_cache",
            self.instance_id,
            tensors,
            self.model.name,
            1,
            "vllm",
            {"kv_layout": "NHD"},
            [],
        )

    def unregister(self, dealer: Dealer) -> None:
        """Let a server unmap it."""
        dealer.call("unregister_kv_cache", self.instance_id)

    def key(self, tokens: Sequence[int], request_id: str, *, shard: int | None = 0) -> CacheKey:
        """Name all full chunks of a prompt; `shard` None as schedulers do."""
        end = len(tokens) // CHUNK_TOKENS * CHUNK_TOKENS
        return CacheKey(self.model.name, 1, shard, tokens, 0, end, request_id)

    def store(
        self, dealer: Dealer, tokens: Sequence[int], request_id: str, blocks: Sequence[int]
    ) -> Frames:
        """Encode a store."""
        key = self.key(tokens, request_id)
        return dealer.request("store", key, self.instance_id, [list(blocks)], HOST_EVENT)

    def retrieve(
        self, dealer: Dealer, tokens: Sequence[int], request_id: str, blocks: Sequence[int]
    ) -> Frames:
        """Encode a retrieve."""
        key = self.key(tokens, request_id)
        return dealer.request("retrieve", key, self.instance_id, [list(blocks)], HOST_EVENT, 0)

    def wait_visible(self, dealer: Dealer, tokens: Sequence[int], request_id: str) -> None:
        """Look up until every chunk is a hit; the request then holds its read locks.

        Raises:
            TimeoutError: Not all chunks became visible.
        """
        key = self.key(tokens, request_id, shard=None)
        deadline = time.monotonic() + _VISIBLE_SECONDS
        while look_up(dealer, dealer.request("lookup", key, 1), request_id) != key.end // 256:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{key.end // CHUNK_TOKENS} stored chunks are not all found")
            self.let_go(dealer, tokens, request_id)

    def let_go(self, dealer: Dealer, tokens: Sequence[int], request_id: str) -> None:
        """Give up the locks of a lookup and end the request."""
        dealer.call("free_lookup_locks", self.key(tokens, request_id, shard=None), 1)
        dealer.call("end_session", request_id)

    def blank(self, blocks: Sequence[int]) -> None:
        """Zero some blocks."""
        for cache in self._caches:
            cache.array[:, list(blocks)] = 0

    def same(self, blocks: Sequence[int], others: Sequence[int]) -> bool:
        """Tell whether two lists of blocks have the same bytes in all layers."""
        return all(
            np.array_equal(cache.array[:, list(blocks)], cache.array[:, list(others)])
            for cache in self._caches
        )

    def close(self) -> None:
        """Remove the memory."""
        for cache in self._caches:
            cache.close()


@contextlib.contextmanager
def working(model: Model, dealers: Sequence[Dealer], instance_id: int) -> Iterator[Worker]:
    """Make a worker, register it with every server, and take it back at the end."""
    worker = Worker(model, instance_id)
    try:
        for dealer in dealers:
            worker.register(dealer)
        yield worker
        for dealer in dealers:
            worker.unregister(dealer)
    finally:
        worker.close()


def look_up(dealer: Dealer, lookup: Frames, request_id: str) -> int:
    """Send a lookup and ask for its result until it is there: hit chunks."""
    dealer.exchange(lookup)
    while True:
        found = dealer.call("query_prefetch_status", request_id)
        if found is not None:
            assert isinstance(found, int)
            return found
