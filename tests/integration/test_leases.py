"""What look-ups keep from eviction, in a real agent."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.fakes.agent_process import FAST_WINDOWS, AgentProcess
from tests.fakes.tcp_proxy import TcpProxy
from tests.fakes.worker_process import Worker, WorkerProcess
from tests.polling import poll_until

WITH_NOTHING_TO_JUDGE_SECONDS = 28.0
"""The reaper looks at everything after 30 s at the latest; a lease of 2 s does not wait for it."""


def test_a_lease_ends_in_time_though_nothing_else_happens() -> None:
    """No look-up comes, nobody's life is in doubt: the chunks can be evicted all the same."""
    with AgentProcess("--l1-read-ttl-seconds=2") as agent, Worker(agent.url, 1) as worker:
        worker.register()
        assert worker.store(1)
        assert worker.lookup(1) == 2
        asked_at = time.monotonic()
        poll_until(lambda: agent.metric("l1_pinned_objects") == 0)
        assert time.monotonic() - asked_at < WITH_NOTHING_TO_JUDGE_SECONDS
        assert agent.metric("sessions") == 1


@pytest.mark.parametrize("transport", ["tcp", "ipc"])
def test_what_a_killed_client_had_looked_up_is_not_kept(transport: str, tmp_path: Path) -> None:
    """It has no instance that could be reaped; its process tells, or that nobody comes back."""
    socket = tmp_path / "agent.sock"
    with AgentProcess(*FAST_WINDOWS, f"--ipc-path={socket}") as agent, Worker(agent.url, 1) as kept:
        kept.register()
        assert kept.store(1)
        assert kept.lookup(1) == 2
        with WorkerProcess(agent.url if transport == "tcp" else f"ipc://{socket}", 2) as victim:
            assert victim.ask("lookup", 1) == 2
            assert agent.metric("leases") == 2
            victim.kill()
        poll_until(lambda: agent.metric("leases_dropped_total") == 1)
        assert agent.metric("leases") == 1
        assert kept.retrieve(1)
        poll_until(lambda: agent.metric("l1_pinned_objects") == 0)


def test_a_client_that_comes_back_finds_what_it_had_looked_up() -> None:
    """Its connection was cut; another one's was killed after it, and is given up."""
    with (
        AgentProcess(*FAST_WINDOWS) as agent,
        TcpProxy(agent.port) as proxy,
        Worker(proxy.url, 1) as cut,
        WorkerProcess(agent.url, 2) as victim,
    ):
        cut.register()
        assert cut.store(1)
        assert cut.lookup(1) == 2
        proxy.cut()
        poll_until(lambda: proxy.connections() == 1, "it is back")
        assert cut.ping()
        assert victim.ask("lookup", 1) == 2
        victim.kill()
        poll_until(lambda: agent.metric("leases_dropped_total") == 1)
        assert agent.metric("leases") == 1
        assert cut.retrieve(1)
        poll_until(lambda: agent.metric("l1_pinned_objects") == 0)
