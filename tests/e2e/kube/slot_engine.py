"""A stand-in for vLLM whose bytes can be checked, and that may lie about who it is.

It registers, stores a prompt, loads it into other blocks, says whether the bytes are the same, and
pings on. Variables: `URL`; `MODE`, which is `shm_pool` for one that copies into the mapped L1 by
itself; `INSTANCE_ID` for an id that it did not make up itself.
"""

from __future__ import annotations

import json
import os
import signal
import time

import numpy as np

from lmcache_worker.client import WorkerClient
from lmcache_worker.engine_driven import EngineDrivenClient, MappedPool
from lmcache_worker.shared_memory import SharedKvCache
from lmcache_worker.wire import CacheKey, ChunkDescription, NoReply, RequestRefused

_BLOCKS, _BLOCK_TOKENS, _LAYERS = 64, 16, 2
_CHUNK_TOKENS = 256
_PROMPT_BLOCKS = _CHUNK_TOKENS // _BLOCK_TOKENS
_STORED, _LOADED = slice(1, 1 + _PROMPT_BLOCKS), slice(32, 32 + _PROMPT_BLOCKS)
_MODEL = "demo/model"
_PING_SECONDS = 0.5


def _say(event: str, **facts: object) -> None:
    print(json.dumps({"event": event, "at": time.time(), **facts}), flush=True)


def _key(purpose: str, worker_id: int | None = 0) -> CacheKey:
    first = _CHUNK_TOKENS if os.environ.get("MODE") else 0  # each mode has a prompt of its own
    tokens = list(range(first, first + _CHUNK_TOKENS))
    return CacheKey(_MODEL, 1, worker_id, tokens, 0, len(tokens), f"{purpose}-{os.getpid()}")


def _exchange(client: WorkerClient, instance_id: int, caches: list[SharedKvCache]) -> None:
    """Store, look up, retrieve; and compare."""
    stored = client.store(_key("store"), instance_id, [list(range(64))[_STORED]])[1]
    found = client.hit_chunks(_key("load", worker_id=None))
    loaded = client.retrieve(_key("load"), instance_id, [list(range(64))[_LOADED]])[1]
    same = all(np.array_equal(c.array[:, _STORED], c.array[:, _LOADED]) for c in caches)
    _say("exchanged", stored=stored, found=found, loaded=loaded, same=same)


def _serve_by_copies(client: WorkerClient, instance_id: int, caches: list[SharedKvCache]) -> None:
    """Let the agent map the memory, and copy."""
    client.register_kv_cache(instance_id, [cache.tensor for cache in caches], _MODEL)
    _say("registered", instance_id=str(instance_id))
    _exchange(client, instance_id, caches)


def _serve_by_pool(client: WorkerClient, instance_id: int) -> None:
    """Map the agent's L1, and copy there."""
    transfers = EngineDrivenClient(client, instance_id)
    name, size = transfers.register(
        ChunkDescription(
            instance_id=instance_id,
            model_name=_MODEL,
            world_size=1,
            block_size=_BLOCK_TOKENS,
            num_layers=_LAYERS,
            hidden_dim_size=16,
            dtype_str="float16",
            use_mla=False,
            num_physical_slots=_CHUNK_TOKENS,
        )
    )
    _say("registered", instance_id=str(instance_id))
    with MappedPool.open(name, size) as pool:
        plan = transfers.prepare_store(_key("store"))
        assert plan is not None, "nothing of this prompt is stored yet"
        (slot,) = plan.slots
        written = os.urandom(slot.length)
        pool.slot(slot)[:] = written
        stored = transfers.commit_store(_key("store"))
        found = client.hit_chunks(_key("load", worker_id=None))
        read = transfers.prepare_retrieve(_key("load"))
        places = [] if read is None or isinstance(read, bytes) else list(read)
        same = [bytes(pool.slot(place)) for place in places] == [written]
        transfers.commit_retrieve(_key("load"))
        _say("exchanged", stored=stored, found=found, loaded=bool(places), same=same)


def main() -> None:
    """Be a worker until killed."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    given = os.environ.get("INSTANCE_ID")
    instance_id = int(given) if given else int.from_bytes(os.urandom(6), "big")
    caches = [SharedKvCache.create([2, _BLOCKS, _BLOCK_TOKENS, 2, 8]) for _ in range(_LAYERS)]
    noise = np.random.default_rng(instance_id)
    for cache in caches:
        cache.array[...] = noise.integers(0, 1 << 16, cache.array.shape, dtype=np.uint16)
    with WorkerClient(os.environ["URL"], timeout_seconds=5.0) as client:
        try:
            if os.environ.get("MODE") == "shm_pool":
                _serve_by_pool(client, instance_id)
            else:
                _serve_by_copies(client, instance_id, caches)
        except (NoReply, RequestRefused) as error:
            _say("refused", instance_id=str(instance_id), error=str(error))
        while True:
            client.ping(instance_id)
            time.sleep(_PING_SECONDS)


if __name__ == "__main__":
    main()
