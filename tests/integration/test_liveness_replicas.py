"""What workers of one model share stays until the last of them leaves, in whatever way."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack

import pytest

from tests.fakes.agent_process import FAST_WINDOWS, AgentProcess
from tests.fakes.worker_process import WorkerProcess
from tests.polling import poll_until

Leave = Callable[[AgentProcess, WorkerProcess], None]


def by_unregister(agent: AgentProcess, worker: WorkerProcess) -> None:
    """A goodbye."""
    worker.ask("unregister")
    assert worker.instance_id not in agent.instances()


def by_unregister_twice(agent: AgentProcess, worker: WorkerProcess) -> None:
    """A goodbye that is repeated, as after a lost reply."""
    by_unregister(agent, worker)
    worker.ask("unregister")


def by_reap(agent: AgentProcess, worker: WorkerProcess) -> None:
    """A death."""
    worker.kill()
    agent.wait_reaped(worker.instance_id)


@pytest.fixture
def agent() -> Generator[AgentProcess]:
    """Close window 3 s."""
    with AgentProcess(*FAST_WINDOWS) as agent:
        yield agent


@pytest.mark.parametrize("leave", [by_unregister, by_unregister_twice, by_reap])
def test_a_replica_that_leaves_does_not_break_the_other_ones_lookups(
    leave: Leave, agent: AgentProcess
) -> None:
    """After the last one left, a lookup is a clean miss and nothing of the model is kept."""
    with ExitStack() as stack:
        first, second, asking = (
            stack.enter_context(WorkerProcess(agent.url, number)) for number in (1, 2, 3)
        )
        for worker in (first, second):
            worker.ask("register")
        asking.ask("ping_nil")  # a silent connection might be a dead worker's new one: it holds
        assert first.ask("store", 1)
        stored = first.ask("digest", 1)
        assert agent.status()["models"] == 1

        leave(agent, first)
        assert agent.status()["models"] == 1
        assert second.ask("lookup", 1) == 2
        assert second.ask("retrieve", 1)
        assert second.ask("digest", 32) == stored

        leave(agent, second)
        assert agent.status()["models"] == 0
        assert agent.metric("models") == 0
        assert asking.ask("lookup", 1) == 0
        asking.ask("end_session", 1)
        poll_until(lambda: agent.status()["l1"]["pinned_bytes"] == 0)
