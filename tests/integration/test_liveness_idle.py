"""Silence of a worker that never pinged: stock ones ping only after their first transfer."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import ExitStack

import pytest

from lmcache_worker.wire import RequestRefused
from tests.fakes.agent_process import AgentProcess
from tests.fakes.worker_process import Worker
from tests.polling import BUSY_SECONDS, poll_until

GRACE = 30.0
"""The smallest: no shorter than the smallest T."""

FLAGS = (
    "--worker-reap-timeout-seconds=30",
    f"--worker-registration-grace-seconds={GRACE:.0f}",
    "--close-confirm-seconds=3",
    "--hint-confirm-seconds=5",
)
RANKS = range(1, 9)


@pytest.fixture
def stack() -> Generator[ExitStack]:
    """Everything that a test starts."""
    with ExitStack() as stack:
        yield stack


@pytest.mark.slow
def test_an_idle_worker_is_never_reaped_while_its_connection_is_open(stack: ExitStack) -> None:
    """Only one of eight ranks pings, and a prober pings for nobody; all eight stay."""
    agent = stack.enter_context(AgentProcess(*FLAGS))
    ranks = [stack.enter_context(Worker(agent.url, number)) for number in RANKS]
    prober = stack.enter_context(Worker(agent.url, 99))
    for rank in ranks:
        rank.register()
    registered_at = time.monotonic()
    while time.monotonic() < registered_at + 1.25 * GRACE + 2:
        assert ranks[0].ping()
        assert prober.ping_nil()
        assert agent.status()["worker_liveness"]["tracked_instances"] == len(RANKS)
        time.sleep(0.5)

    for number, seen in agent.instances().items():
        if number == 1:
            assert seen["state"] == "active"
            continue
        assert seen["state"] == "idle"
        assert seen["held_by"] == "open connection"
        assert seen["deadline_seconds"] is None
        assert seen["last_seen_seconds"] > GRACE  # the prober refreshes nobody
        assert seen["has_liveness_signal"] is False
    assert agent.metric("instances", state="idle") == len(RANKS) - 1
    assert ranks[7].store(1)
    assert ranks[7].lookup(1) == 2
    assert ranks[7].retrieve(1)
    assert agent.reaps() == []


@pytest.mark.slow
def test_if_asked_to_the_agent_reaps_idle_workers_at_their_grace(stack: ExitStack) -> None:
    """Logged and counted; a retrieve is told no in under a second, a registration starts anew."""
    agent = stack.enter_context(AgentProcess(*FLAGS, "--reap-idle-connected"))
    pinging, idle = (stack.enter_context(Worker(agent.url, number)) for number in (1, 2))
    pinging.register()
    idle.register()
    registered_at = time.monotonic()
    assert agent.instances()[2]["window"] == "registration_grace"
    while 2 in agent.instances():
        assert pinging.ping()
        assert time.monotonic() < registered_at + GRACE + BUSY_SECONDS
        time.sleep(0.2)
    assert time.monotonic() >= registered_at + GRACE

    reap = agent.wait_reaped(2)
    assert reap["reason"] == "registration_grace"
    poll_until(lambda: agent.metric("instances_reaped_total", reason="registration_grace") == 1)
    (logged,) = poll_until(lambda: agent.log_records("instance_reaped"))
    assert logged["instance_id"] == "2"
    assert logged["level"] == "warning"
    assert GRACE <= logged["silent_seconds"] <= GRACE + BUSY_SECONDS

    assert refused(idle)
    idle.register()
    assert idle.store(1)
    assert set(agent.instances()) == {1, 2}


def refused(worker: Worker) -> bool:
    """Tell whether a retrieve fails at once, in whatever way."""
    try:
        return not worker.retrieve(1)
    except RequestRefused:
        return True
