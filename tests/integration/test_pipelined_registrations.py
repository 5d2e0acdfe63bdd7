"""A client need not wait for the reply to its registration: what it sends next comes after it."""

from __future__ import annotations

from collections.abc import Generator

import numpy as np
import pytest

from lmcache_worker.client import HOST_EVENT, WorkerClient
from lmcache_worker.shared_memory import SharedKvCache
from lmcache_worker.wire import CacheKey
from tests.fakes.agent_process import AgentProcess

SHAPE = [2, 33, 16, 2, 8]
MODEL, CHUNK = "demo/model", 256
BLOCKS = [list(range(1, 17))]
ROUNDS = 30
REGISTRATION = (MODEL, 1, "vllm", {"kv_layout": "NHD"}, ())


@pytest.fixture(scope="module")
def agent() -> Generator[AgentProcess]:
    """One agent for all."""
    with AgentProcess() as process:
        yield process


def _memory(value: int) -> SharedKvCache:
    cache = SharedKvCache.create(SHAPE, dtype="uint8")
    cache.array[...] = value
    return cache


def _key(prompt: int, worker_id: int | None = 0) -> CacheKey:
    tokens = [prompt * 1000 + position for position in range(CHUNK)]
    return CacheKey(MODEL, 1, worker_id, tokens, 0, CHUNK, f"request-{prompt}")


def test_a_store_right_behind_a_first_registration_is_served(agent: AgentProcess) -> None:
    """As upstream serves it, which registers before it reads on."""
    with WorkerClient(agent.url) as client, _memory(7) as cache:
        for number in range(ROUNDS):
            instance_id = 1000 + number
            client.send("register_kv_cache", instance_id, [cache.tensor], *REGISTRATION)
            stored = client.send("store", _key(number), instance_id, BLOCKS, HOST_EVENT)
            assert client.receive(stored).value == [b"", True]
            client.unregister(instance_id)


def test_a_store_right_behind_a_registration_that_replaces_another_never_takes_its_bytes(
    agent: AgentProcess,
) -> None:
    """The new owner's bytes are stored, or none: never those that the id had before."""
    with WorkerClient(agent.url) as before, WorkerClient(agent.url) as after:
        for number in range(ROUNDS):
            prompt = 5000 + number
            with _memory(1) as old, _memory(2) as new:
                before.register_kv_cache(3, [old.tensor], MODEL)
                after.send("register_kv_cache", 3, [new.tensor], *REGISTRATION)
                stored = after.send("store", _key(prompt), 3, BLOCKS, HOST_EVENT)
                answer = after.receive(stored).value
                loaded = after.retrieve(_key(prompt), 3, [list(range(17, 33))])[1]
                assert isinstance(answer, list)
                assert loaded == answer[1]
                assert np.all(new.array == 2)  # loaded from what was stored, or left alone
                assert np.all(old.array == 1)
                after.unregister(3)
