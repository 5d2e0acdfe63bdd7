"""A copy whose end never comes costs its own request, and nobody else's time."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import ExitStack

import pytest

from tests.fakes.agent_process import FAST_WINDOWS
from tests.fakes.stub_agent import StubAgent
from tests.fakes.worker_process import Worker
from tests.polling import poll_until

DEADLINE_SECONDS = 2.0


@pytest.fixture
def agent() -> Generator[StubAgent]:
    """One transfer thread, so that a hanging copy would stop everybody."""
    flags = (f"--transfer-deadline-seconds={DEADLINE_SECONDS}", "--max-gpu-workers=1")
    with StubAgent(*FAST_WINDOWS, *flags) as agent:
        yield agent


@pytest.fixture
def workers(agent: StubAgent) -> Generator[list[Worker]]:
    """Five registered workers; the prompts 1 to 5 are stored."""
    with ExitStack() as stack:
        workers = [stack.enter_context(Worker(agent.url, number)) for number in range(1, 6)]
        for worker in workers:
            worker.register()
        for seed in range(1, 6):
            assert workers[0].store(seed)
        yield workers


def test_a_retrieve_that_hangs_fails_at_its_deadline(
    agent: StubAgent, workers: list[Worker]
) -> None:
    """The others are served as soon as its thread is replaced, its locks are free, health tells."""
    hanging, *others = workers
    assert hanging.lookup(1) == 2
    agent.hold("scatter")
    asked_at = time.monotonic()
    uids = [hanging.begin_retrieve(1)]
    poll_until(lambda: agent.holding("scatter"))
    uids.append(hanging.begin_store(9))
    for uid in uids:
        assert hanging.client.receive(uid).value == [b"", False]
    assert time.monotonic() - asked_at >= DEADLINE_SECONDS
    assert not hanging.store(9), "refused at once while its earlier copy may still write"

    for seed, worker in enumerate(others, start=2):
        assert worker.lookup(seed) == 2
        assert worker.retrieve(seed)
    assert agent.metric("transfers_hanging") == 1
    assert agent.metric("transfers_overdue_total") == 2
    assert agent.metric("oldest_transfer_seconds") >= DEADLINE_SECONDS
    health = agent.get("/healthz")
    assert health["healthy"]
    assert "1 transfers hang" in health["reason"]

    agent.let_go("scatter")
    poll_until(lambda: agent.metric("transfers_hanging") == 0)
    assert agent.get("/healthz")["reason"] == "requests are served"
    assert hanging.store(9)
    poll_until(lambda: agent.status()["l1"]["pinned_objects"] == 0)
    assert agent.stop() == 0
