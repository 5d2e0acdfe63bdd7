"""A worker with KV memory in /dev/shm that can register with several servers."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from benchmarks.dealer import TIMEOUT_SECONDS, Dealer, Frames
from benchmarks.models import CHUNK_TOKENS, Model, block_ids, kept_ids
from lmcache_worker.client import HOST_EVENT
from lmcache_worker.shared_memory import SharedKvCache
from lmcache_worker.wire import CacheKey

VOCABULARY = 128_000
"""Token ids are drawn from a vocabulary of today's size, so that they encode to 1 to 5 bytes."""

_numbers = itertools.count()

_VISIBLE_SECONDS = 5.0  # upstream answers a store before lookups can see it


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
        self._caches = [SharedKvCache.create(layer.shape, layer.dtype) for layer in model.layers]
        for number, blocks in enumerate(self._blocks):
            rest = blocks.shape[1:]
            pattern = np.arange(number, number + math.prod(rest)).reshape(rest)
            for block, content in enumerate(blocks):
                content[...] = (pattern + block).astype(content.dtype)

    @property
    def _blocks(self) -> list[npt.NDArray[np.generic]]:
        """Each layer's memory, blocks first."""
        return [
            np.moveaxis(cache.array, layer.block_axis, 0)
            for cache, layer in zip(self._caches, self.model.layers, strict=True)
        ]

    def register(self, dealer: Dealer, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        """Let a server map the memory.

        Raises:
            TimeoutError: Upstream does not answer a registration that it refuses.
        """
        tensors = [cache.tensor for cache in self._caches]
        request = dealer.request(
            "register_kv_cache",
            self.instance_id,
            tensors,
            self.model.name,
            1,
            "vllm",
            {"kv_layout": self.model.hint},
            list(self.model.groups),
        )
        dealer.exchange(request, timeout_seconds)

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
        key, lists = self.key(tokens, request_id), self._block_lists(blocks)
        return dealer.request("store", key, self.instance_id, lists, HOST_EVENT)

    def retrieve(
        self, dealer: Dealer, tokens: Sequence[int], request_id: str, blocks: Sequence[int]
    ) -> Frames:
        """Encode a retrieve."""
        key, lists = self.key(tokens, request_id), self._block_lists(blocks)
        return dealer.request("retrieve", key, self.instance_id, lists, HOST_EVENT, 0)

    def _block_lists(self, blocks: Sequence[int]) -> list[list[int]]:
        return [block_ids(group, blocks) for group in self.model.block_lists]

    def wait_visible(self, dealer: Dealer, tokens: Sequence[int], request_id: str) -> None:
        """See `wait_visible`."""
        wait_visible(dealer, self.key(tokens, request_id, shard=None))

    def let_go(self, dealer: Dealer, tokens: Sequence[int], request_id: str) -> None:
        """Give up the locks of a lookup and end the request."""
        let_go(dealer, self.key(tokens, request_id, shard=None))

    def blank(self, blocks: Sequence[int]) -> None:
        """Zero some blocks."""
        for layer, ids in self._kept(blocks):
            layer[ids] = 0

    def same(self, blocks: Sequence[int], others: Sequence[int]) -> bool:
        """Tell whether two lists of blocks have the same bytes in all layers."""
        pairs = zip(self._kept(blocks), self._kept(others), strict=True)
        return all(np.array_equal(one[ids], one[others]) for (one, ids), (_, others) in pairs)

    def _kept(self, blocks: Sequence[int]) -> Iterator[tuple[npt.NDArray[np.generic], list[int]]]:
        """Yield each layer with the ids of what is copied of it."""
        layers = self._blocks
        for group in self.model.block_lists:
            for index in group.layer_indices:
                yield layers[index], kept_ids(group, blocks)

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


def wait_visible(dealer: Dealer, key: CacheKey) -> None:
    """Look up until every chunk is a hit; the request then holds its read locks.

    Raises:
        TimeoutError: Not all chunks became visible.
    """
    deadline = time.monotonic() + _VISIBLE_SECONDS
    chunks = key.end // CHUNK_TOKENS
    while look_up(dealer, dealer.request("lookup", key, 1), key.request_id) != chunks:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{chunks} stored chunks are not all found")
        let_go(dealer, key)


def let_go(dealer: Dealer, key: CacheKey) -> None:
    """Give up the locks of a lookup and end the request."""
    dealer.call("free_lookup_locks", key, 1)
    dealer.call("end_session", key.request_id)
