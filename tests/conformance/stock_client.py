"""The stock LMCache adapters as a process that a test commands; `stock_process` is the other side.

Runs in the stock environment only (`make conformance` makes it) and imports nothing of the
product. One JSON array per line on standard input, [command, arguments, options], one JSON value
back. What the stock code logs goes to standard error.
"""

# mypy: disable-error-code="import-not-found"
# The stock packages are not installed where types are checked.

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import zmq
from lmcache.integration.vllm.vllm_multi_process_adapter import (
    LMCacheMPSchedulerAdapter,
    LMCacheMPWorkerAdapter,
    LoadStoreOp,
    ParallelStrategy,
)
from lmcache.v1.multiprocess.custom_types import BlockAllocationRecord
from lmcache.v1.multiprocess.group_view import EngineGroupInfo
from lmcache.v1.multiprocess.transfer_context import shm

from tests.conformance import refusals
from tests.conformance.stock_layouts import LAYOUTS, Layout, block_axis

MODEL = "demo/model"
LAYERS, BLOCKS, BLOCK_TOKENS, HEADS, HEAD_SIZE = 2, 64, 16, 2, 8
SHAPES = {
    "NHD": (2, BLOCKS, BLOCK_TOKENS, HEADS, HEAD_SIZE),
    "HND": (2, BLOCKS, HEADS, BLOCK_TOKENS, HEAD_SIZE),
}
PATIENCE_SECONDS = 60.0


class StockClient:
    """One scheduler and one worker as vLLM makes them, in one process or alone."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._scheduler: Any = None
        self._worker: Any = None
        self._caches: dict[str, torch.Tensor] = {}
        self._layout: Layout | None = None
        self._ranks: dict[int, StockClient] = {}

    def on(self, rank: int, command: str, /, *arguments: Any, **options: Any) -> Any:  # noqa: ANN401  # JSON
        """Give a command to another rank of this process, which has adapters of its own."""
        client = self._ranks.setdefault(rank, StockClient())
        return getattr(client, command)(*arguments, **options)

    def open(
        self,
        url: str,
        mode: str = "lmcache_driven",
        heartbeat: float = 2.0,
        timeout: float = 60.0,
        world_size: int = 1,
        rank: int = 0,
        *,
        kv_events: bool = False,
        mla: bool = False,
    ) -> int:
        """Connect a scheduler and a worker; return the agent's chunk size.

        With a context of their own each time: the stock code watches its sockets over `inproc`
        names made of descriptors, and the next socket with a descriptor may come before libzmq
        has given up the name of the last one.
        """
        self._renew_context()
        config = {
            "lmcache.mp.mq_timeout": timeout,
            "lmcache.mp.heartbeat_interval": heartbeat,
            "lmcache.mp.mp_transfer_mode": mode,
        }
        strategy = ParallelStrategy(
            mla_only=mla,
            vllm_world_size=world_size,
            vllm_worker_id=rank,
            tp_size=world_size,
            pp_size=1,
            n_servers=1,
        )
        common = (self._context, MODEL, BLOCK_TOKENS, strategy)
        self._scheduler = LMCacheMPSchedulerAdapter([url], *common, extra_config=config)
        self._worker = LMCacheMPWorkerAdapter(
            url, *common, extra_config=config, enable_kv_events=kv_events
        )
        return int(self._worker.lmcache_tokens_per_chunk)

    def _renew_context(self) -> None:
        """Leave the old one to end when its last socket has."""
        threading.Thread(target=self._context.term, daemon=True).start()
        self._context = zmq.Context()

    def hide_pools(self) -> None:
        """Have the next registration find no shared pool, as in another mount namespace."""
        hidden = self._worker

        def no_pool(*_: object, **__: object) -> None:
            raise FileNotFoundError("hidden by the test")

        original, shm.shared_memory.SharedMemory = shm.shared_memory.SharedMemory, no_pool
        register = hidden.register_kv_caches

        def register_blind(*arguments: object) -> None:
            try:
                register(*arguments)
            finally:
                shm.shared_memory.SharedMemory = original

        hidden.register_kv_caches = register_blind

    def register(self, layout: str = "NHD", dtype: str = "bfloat16", seed: int = 1) -> str:
        """Make KV memory with known content and register it; return the instance id."""
        noise = torch.Generator().manual_seed(seed)
        self._caches = {
            f"layer.{layer}": torch.randn(SHAPES[layout], generator=noise).to(getattr(torch, dtype))
            for layer in range(LAYERS)
        }
        groups = [EngineGroupInfo(0, list(range(LAYERS)), BLOCK_TOKENS)]
        try:
            self._worker.register_kv_caches(self._caches, groups, {"kv_layout": layout})
        except Exception:
            self._worker.transfer_ctx = None  # a worker that fails to start never unregisters
            raise
        return str(self._worker.instance_id)

    def register_layout(self, name: str, seed: int = 1) -> str:
        """Register memory that lies as one of `LAYOUTS`; return the instance id."""
        self._layout = layout = LAYOUTS[name]
        noise = torch.Generator().manual_seed(seed)
        self._caches = {
            f"layer.{number}": (torch.randn(shape, generator=noise) * 50).to(getattr(torch, dtype))
            for number, (shape, dtype) in enumerate(layout.layers)
        }
        groups = [
            EngineGroupInfo(group.group, group.layers, group.tokens_per_block, group.window)
            for group in layout.groups
        ]
        self._worker.register_kv_caches(self._caches, groups, {"kv_layout": layout.hint})
        return str(self._worker.instance_id)

    def contents(self, first_token: int, tokens: int) -> list[str]:
        """Hash, for each layer, the blocks that hold these tokens of the memory, window or not."""
        assert self._layout is not None
        hashes = []
        for group in self._layout.groups:
            first, count = first_token // group.tokens_per_block, tokens // group.tokens_per_block
            kept = range(count)
            if group.window > 0:  # of each chunk only the last window is kept
                chunk = 4 * BLOCK_TOKENS // group.tokens_per_block
                window = group.window // group.tokens_per_block
                kept = [block for block in kept if block % chunk >= chunk - window]  # type: ignore[assignment]
            index = torch.tensor([first + block for block in kept])
            for layer in group.layers:
                cache = self._caches[f"layer.{layer}"]
                part = cache.index_select(block_axis(self._layout.layers[layer][0]), index)
                raw = part.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
                hashes.append(hashlib.sha256(raw).hexdigest())
        return hashes

    def lookup(self, request: str, seed: int, chunks: int, salt: str = "") -> int:
        """Return how many tokens of a prompt the agent has; the request stays open."""
        self._scheduler.maybe_submit_lookup_request(
            request, self._tokens(seed, chunks), cache_salt=salt
        )
        self._until(lambda: self._scheduler.check_lookup_result(request) is not None)
        return int(self._scheduler.check_lookup_result(request))

    def store(self, request: str, seed: int, chunks: int, first_block: int, salt: str = "") -> bool:
        """Store blocks as a prompt's chunks; False also when the adapter drops the request."""
        operation = self._operation(seed, chunks, first_block)
        event = self._worker.create_recorded_event()
        self._worker.submit_store_request(request, operation, event, cache_salt=salt)
        future = self._worker.store_futures.get(request)
        self._until(lambda: self._no_longer_stored(request))
        return future is not None and future.query() and bool(future.result(timeout=0))

    def retrieve(
        self,
        request: str,
        seed: int,
        chunks: int,
        first_block: int,
        skip_tokens: int = 0,
        salt: str = "",
    ) -> list[int]:
        """Load a prompt's chunks into blocks; return the blocks that were not loaded."""
        operation = self._operation(seed, chunks, first_block, skip_tokens)
        event = self._worker.create_recorded_event()
        self._worker.submit_retrieve_request(request, operation, event, cache_salt=salt)
        self._until(lambda: request in (self._worker.get_finished(set())[1] or ()))
        return sorted(self._worker.get_block_ids_with_load_errors())

    def end(self, request: str) -> None:
        """Finish or abort a request, as vLLM's scheduler does."""
        self._scheduler.end_session(request)
        self._scheduler.cleanup_lookup_result(request)

    def free(self, request: str, seed: int, chunks: int) -> None:
        """Give back the locks of a lookup without loading anything."""
        tokens = self._tokens(seed, chunks)
        self._scheduler.free_lookup_locks(tokens, 0, len(tokens), request)

    def report(self, request: str) -> None:
        """Report block allocations, to which nobody awaits an answer."""
        record = BlockAllocationRecord(request, [1, 2], [3, 4, 5])
        self._scheduler.report_block_allocations([record])

    def reset(self) -> bool:
        """Clear the cache, as vLLM's reset_prefix_cache does."""
        return bool(self._scheduler.reset_cache())

    def digest(self, first_block: int, blocks: int) -> str:
        """Hash the bytes of some blocks, all layers."""
        seen = hashlib.sha256()
        for cache in self._caches.values():
            part = cache[:, first_block : first_block + blocks].contiguous()
            seen.update(part.view(-1).view(torch.uint8).numpy().tobytes())
        return seen.hexdigest()

    def wipe(self, first_block: int, blocks: int) -> None:
        """Zero some blocks, all layers."""
        for cache in self._caches.values():
            cache[:, first_block : first_block + blocks] = 0

    def kv_events(self, count: int) -> list[list[Any]]:
        """Wait for this many events; return the kind, parent, hashes and first token of each."""
        events: list[Any] = []

        def enough() -> bool:
            events.extend(self._worker.get_kv_events())
            return len(events) >= count

        self._until(enough)
        return [
            [
                type(event).__name__,
                (getattr(event, "parent_block_hash", None) or b"").hex(),
                [block_hash.hex() for block_hash in event.block_hashes],
                getattr(event, "token_ids", [None])[0],
            ]
            for event in events
        ]

    def healthy(self) -> list[bool]:
        """What scheduler and worker think of the agent."""
        return [bool(self._scheduler.is_healthy), bool(self._worker.is_healthy)]

    def await_healthy(self) -> None:
        """Wait until scheduler and worker both find the agent healthy."""
        self._until(lambda: self.healthy() == [True, True])

    def await_unhealthy(self) -> None:
        """Wait until neither does."""
        self._until(lambda: self.healthy() == [False, False])

    def ping(self) -> bool:
        """Ping by hand, with the worker's id."""
        return bool(
            self._worker.req_client.ping(self._worker.instance_id).result(timeout=PATIENCE_SECONDS)
        )

    def refused_calls(self) -> dict[str, Any]:
        """Call every operation as a stranger; see `refusals`."""
        return refusals.as_stranger(self._worker.req_client)

    def malformed_calls(self, kind: str) -> dict[str, Any]:
        """Send every operation with broken payload frames; see `refusals`."""
        return refusals.malformed(self._worker.req_client, kind)

    def unknown_calls(self) -> dict[str, Any]:
        """Send operations that no release knows; see `refusals`."""
        return refusals.unknown(self._worker.req_client)

    def flood(self, count: int) -> int:
        """Send retrieves for an unknown instance at once; return how many were declined."""
        return refusals.flood(self._worker.req_client, count)

    def close(self) -> None:
        """Shut both adapters down as vLLM does, if they are open; twice would hang for ever."""
        adapters = (self._worker, self._scheduler)
        self._worker = self._scheduler = None
        for adapter in adapters:
            if adapter is not None:
                adapter.shutdown()
        self._caches = {}
        self._layout = None
        for client in self._ranks.values():
            client.close()
        self._ranks = {}

    def _no_longer_stored(self, request: str) -> bool:
        self._worker.get_finished({request})  # which forgets stores that ended
        return request not in self._worker.store_futures

    @staticmethod
    def _tokens(seed: int, chunks: int) -> list[int]:
        tokens_per_chunk = 4 * BLOCK_TOKENS
        return [seed * 10_000 + position for position in range(chunks * tokens_per_chunk)]

    def _operation(self, seed: int, chunks: int, first_block: int, skip: int = 0) -> LoadStoreOp:
        tokens = self._tokens(seed, chunks)
        sizes = [BLOCK_TOKENS] if self._layout is None else self._layout.block_lists
        lists = []
        for size in sizes:  # `first_block` counts in blocks of 16 tokens
            first = first_block * BLOCK_TOKENS // size
            lists.append(list(range(first, first + len(tokens) // size)))
        if self._layout is None:  # more than there is memory for begins again at its start
            lists = [[block % BLOCKS for block in lists[0]]]
        return LoadStoreOp(tokens, lists, 0, len(tokens), skip_first_n_tokens=skip)

    @staticmethod
    def _until(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"the stock side saw nothing in {PATIENCE_SECONDS} s")
            time.sleep(0.005)


def main() -> None:
    """Answer commands until standard input ends."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # the stock code logs to standard output
    client = StockClient()
    print(os.getpid(), file=replies)
    for line in sys.stdin:
        command, arguments, options = json.loads(line)
        try:
            result = getattr(client, command)(*arguments, **options)
        except Exception as error:  # noqa: BLE001  # the parent raises it
            result = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(result), file=replies)


if __name__ == "__main__":
    main()
