"""Nobody pays for it when the agent itself was away: stopped, restarted, or its clock jumped."""

from __future__ import annotations

import signal
import time
from contextlib import ExitStack

import pytest

from tests.fakes.agent_process import FAST_WINDOWS, AgentProcess
from tests.fakes.stub_agent import StubAgent
from tests.fakes.worker_process import Worker, WorkerProcess
from tests.polling import poll_until

T = 30.0
GRACE = 60.0


@pytest.mark.slow
def test_an_agent_stopped_for_longer_than_t_reaps_nobody_when_it_continues() -> None:
    """Their pings lie unread meanwhile; one worker sends none at all until it is over."""
    with ExitStack() as stack:
        agent = stack.enter_context(AgentProcess(*FAST_WINDOWS))
        pinging = stack.enter_context(WorkerProcess(agent.url, 1))
        pinging.ask("register")
        silent, idle = (stack.enter_context(Worker(agent.url, number)) for number in (2, 3))
        for worker in (silent, idle):
            worker.register()
        assert silent.ping()
        agent.signal(signal.SIGSTOP)
        pinging.tell("flood", 20)
        time.sleep(T + 3)
        agent.signal(signal.SIGCONT)

        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            assert set(agent.instances()) == {1, 2, 3}
            time.sleep(0.1)
        assert pinging.result() is None
        assert pinging.ask("ping") is True
        assert silent.ping()
        assert idle.ping()
        assert agent.reaps() == []


@pytest.mark.parametrize("seconds", [T + 1, 1000.0, 10 * GRACE])
def test_a_clock_that_jumps_forward_reaps_nobody(seconds: float) -> None:
    """Time in which the agent did not run counts for no window, a running close window included."""
    with ExitStack() as stack:
        agent = stack.enter_context(StubAgent(*FAST_WINDOWS))
        silent, idle, leaving = (stack.enter_context(Worker(agent.url, n)) for n in (1, 2, 3))
        for worker in (silent, idle, leaving):
            worker.register()
        assert silent.ping()
        leaving.close()
        poll_until(lambda: agent.instances()[3]["state"] == "closed")
        agent.jump(seconds)
        deadline = time.monotonic() + 1.5
        while time.monotonic() < deadline:
            assert set(agent.instances()) == {1, 2, 3}
            time.sleep(0.05)
        assert silent.ping()
        assert idle.ping()
        assert agent.wait_reaped(3)["reason"] == "connection_closed"
        assert len(agent.reaps()) == 1


def test_a_worker_is_told_once_that_the_agent_restarted_and_is_served_again() -> None:
    """The restart lies between two pings, and the worker's connection finds its way back."""
    with AgentProcess(*FAST_WINDOWS) as first, WorkerProcess(first.url, 1) as worker:
        worker.ask("register")
        assert worker.ask("ping") is True
        assert worker.ask("store", 1)
        first.kill()
        with AgentProcess(*FAST_WINDOWS, port=first.port) as second:
            assert second.boot_id != first.boot_id
            assert worker.ask("ping") is False
            poll_until(lambda: second.metric("unknown_instances_told_total") == 1)
            assert worker.ask("ping") is True  # told once: the next registers or not
            assert worker.ask("retrieve", 1) is False
            worker.ask("register")
            assert worker.ask("ping") is True
            assert worker.ask("lookup", 1) == 0
            assert worker.ask("store", 1)
            assert worker.ask("lookup", 1) == 2
            assert worker.ask("retrieve", 1)
            assert set(second.instances()) == {1}
            assert second.reaps() == []
