"""What look-ups keep from eviction, in a real agent."""

from __future__ import annotations

from tests.fakes.agent_process import AgentProcess
from tests.fakes.worker_process import Worker
from tests.polling import poll_until

SOON_SECONDS = 20.0
"""Longer than the lease, and shorter than the reaper sleeps with nothing to judge."""


def test_a_lease_ends_in_time_though_nothing_else_happens() -> None:
    """No look-up comes, nobody's life is in doubt: the chunks can be evicted all the same."""
    with AgentProcess("--l1-read-ttl-seconds=2") as agent, Worker(agent.url, 1) as worker:
        worker.register()
        assert worker.store(1)
        assert worker.lookup(1) == 2
        poll_until(lambda: agent.metric("l1_pinned_objects") == 0, SOON_SECONDS)
        assert agent.metric("sessions") == 1
