"""A busy agent and a starved heartbeat are no death (field case: heartbeats queue behind work)."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import ExitStack
from statistics import median

import pytest

from lmcache_worker.wire import CacheKey, NoReply
from tests.fakes.agent_process import FAST_WINDOWS
from tests.fakes.stub_agent import StubAgent
from tests.fakes.worker_process import Worker
from tests.polling import BUSY_SECONDS, poll_until

T = 30.0
THREADS = 2
STORE_SECONDS = 5.0
NORMAL_QUEUE = 64
LOOKUP_TOKENS = list(range(16_384))
MODEL = "demo/model"


@pytest.fixture
def stack() -> Generator[ExitStack]:
    """Everything that the test starts."""
    with ExitStack() as stack:
        yield stack


@pytest.mark.slow
def test_workers_survive_full_pools_and_starved_heartbeats(stack: ExitStack) -> None:
    """Pings are answered in under a second throughout, and signs of life are any transfers.

    Four workers ping while four times as many slow stores as there are threads wait, and a flood
    of long lookups fills the NORMAL pool; a fifth one only transfers and never pings; a sixth
    pinged once, and then its heartbeat starves behind its transfers for more than T.
    """
    flags = (
        *FAST_WINDOWS,
        f"--max-workers={THREADS}",
        f"--normal-queue-size={NORMAL_QUEUE}",
    )
    agent = stack.enter_context(StubAgent(*flags))
    workers = [stack.enter_context(Worker(agent.url, number)) for number in range(1, 7)]
    *pinging, never_pings, starved = workers
    for worker in workers:
        worker.register()
    assert starved.ping()
    agent.delay("gather", STORE_SECONDS)
    for number in range(4 * THREADS):
        workers[number % len(workers)].begin_store(number)
    crowd = stack.enter_context(Worker(agent.url, 99))
    poll_until(lambda: agent.status()["queued_requests"]["affinity"] >= THREADS)
    assert agent.metric("queued_requests", pool="affinity") >= THREADS

    took: list[float] = []
    refused, seed = 0, 100
    next_transfer = started = time.monotonic()
    while time.monotonic() < started + 1.25 * T + 2:
        refused += flood_with_lookups(crowd, 2 * NORMAL_QUEUE)
        for worker in pinging:
            asked_at = time.monotonic()
            assert worker.ping()
            took.append(time.monotonic() - asked_at)
        if time.monotonic() >= next_transfer:
            next_transfer += T / 3
            seed += 1
            for worker in (never_pings, starved):
                worker.begin_store(seed)
        assert set(agent.instances()) == {1, 2, 3, 4, 5, 6}
        time.sleep(0.3)  # leave the two cores to the tests beside this one
    assert median(took) < 1
    assert max(took) < BUSY_SECONDS
    assert refused > 0  # the pool was full, and said so
    assert agent.reaps() == []
    assert agent.instances()[5]["has_liveness_signal"] is False
    agent.delay("gather", 0)


def flood_with_lookups(worker: Worker, count: int) -> int:
    """Send lookups with long keys, faster than they are served; return how many were refused."""
    for _ in range(count):
        key = CacheKey(MODEL, 1, None, LOOKUP_TOKENS, 0, len(LOOKUP_TOKENS), "flood")
        worker.client.send("lookup", key, 1)
    return drain(worker)


def drain(worker: Worker) -> int:
    """Read the replies that are there; count the refusals."""
    refused = 0
    while True:
        try:
            refused += worker.client.receive(timeout_seconds=0).refusal is not None
        except NoReply:
            return refused
