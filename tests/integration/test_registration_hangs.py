"""A registration that hangs, as on a file system that does: who waits for it, and who does not."""

from __future__ import annotations

from tests.fakes.agent_process import FAST_WINDOWS
from tests.fakes.stub_agent import StubAgent
from tests.fakes.worker_process import Worker, WorkerProcess
from tests.polling import poll_until


def test_only_registrations_wait_for_one_that_hangs() -> None:
    """Whoever is registered goes on; it shows; and those that wait are served when it ends."""
    with (
        StubAgent(*FAST_WINDOWS) as agent,
        Worker(agent.url, 1) as registered,
        WorkerProcess(agent.url, 2) as hanging,
        WorkerProcess(agent.url, 3) as waiting,
    ):
        registered.register()
        agent.hold("open")
        hanging.tell("register")
        poll_until(lambda: agent.holding("open") == 1)
        waiting.tell("register")
        poll_until(lambda: agent.metric("queued_requests", pool="sync") >= 1)
        assert registered.ping()
        assert registered.store(1)
        assert registered.lookup(1) == 2
        assert registered.retrieve(1)
        agent.let_go("open")
        poll_until(lambda: len(agent.instances()) == 3)
