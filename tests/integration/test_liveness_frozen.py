"""A frozen process keeps its connection: silence alone judges it, and it may come back."""

from __future__ import annotations

import signal
import time
from collections.abc import Generator
from contextlib import ExitStack

import pytest

from tests.fakes.agent_process import FAST_WINDOWS, AgentProcess
from tests.fakes.worker_process import Worker, WorkerProcess
from tests.polling import BUSY_SECONDS, poll_until

T = 30.0
UNREAD_REPLIES = 10_000


@pytest.fixture
def agent() -> Generator[AgentProcess]:
    """T = 30 s."""
    with AgentProcess(*FAST_WINDOWS) as agent:
        yield agent


@pytest.mark.slow
def test_a_frozen_worker_is_reaped_between_t_and_a_quarter_more_and_comes_back(
    agent: AgentProcess,
) -> None:
    """Also one with 10,000 replies that it never read; a third one pings and stays throughout."""
    with ExitStack() as stack:
        silent, unread = (
            stack.enter_context(WorkerProcess(agent.url, number)) for number in (1, 2)
        )
        living = stack.enter_context(Worker(agent.url, 3))
        living.register()
        for worker in (silent, unread):
            worker.ask("register")
            assert worker.ask("ping") is True
        unread.ask("flood", UNREAD_REPLIES)
        poll_until(lambda: agent.instances()[2]["last_seen_seconds"] > 0.2)  # all are read

        frozen_at = time.monotonic()
        last_seen = {
            n: time.monotonic() - agent.instances()[n]["last_seen_seconds"] for n in (1, 2)
        }
        for worker in (silent, unread):
            worker.signal(signal.SIGSTOP)
        longest = 1.25 * T + BUSY_SECONDS
        gone_at = ping_until_gone(agent, living, set(last_seen), frozen_at + longest)

        for number, moment in gone_at.items():
            assert T <= moment - last_seen[number] < longest
            assert agent.wait_reaped(number)["reason"] == "heartbeat_timeout"
        assert agent.metric("replies_dropped_total") == 0

        for worker in (silent, unread):
            worker.signal(signal.SIGCONT)
            assert [worker.ask("ping") for _ in range(3)].count(False) == 1
            assert worker.instance_id not in agent.instances()
            worker.ask("register")
            assert worker.ask("ping") is True
            assert worker.ask("store", worker.instance_id)
        assert set(agent.instances()) == {1, 2, 3}
        assert agent.status()["worker_liveness"]["releases"] == []
        assert len(agent.reaps()) == 2


def ping_until_gone(
    agent: AgentProcess, living: Worker, expected: set[int], deadline: float
) -> dict[int, float]:
    """Keep one worker pinging; return the moment at which each expected instance disappeared."""
    gone_at: dict[int, float] = {}
    while len(gone_at) < len(expected) and time.monotonic() < deadline:
        assert living.ping()
        present = set(agent.instances())
        assert 3 in present
        for number in expected - present - set(gone_at):
            gone_at[number] = time.monotonic()
        time.sleep(0.1)
    assert set(gone_at) == expected
    return gone_at
