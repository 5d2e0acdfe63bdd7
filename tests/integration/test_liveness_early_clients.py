"""Workers that wait for the agent, and connect in the moment in which it opens its port."""

from __future__ import annotations

from pathlib import Path

from tests.fakes.agent_process import AgentProcess
from tests.fakes.worker_process import WorkerProcess
from tests.polling import poll_until

WORKER = 41


def test_a_worker_that_connects_before_the_agent_is_ready_is_known_by_its_process(
    tmp_path: Path,
) -> None:
    """Between the port and readiness lies the allocation of L1; whoever connects then counts."""
    path = tmp_path / "agent.sock"
    with WorkerProcess(f"ipc://{path}", WORKER) as worker:
        worker.tell("ping")  # waits in the worker until there is an agent
        with AgentProcess(f"--ipc-path={path}", l1_size_gb=1.0) as agent:
            assert worker.result() is False  # an id that this agent does not know
            worker.ask("register")
            worker.ask("ping")
            peer = f"unix socket, pid {worker.pid}"
            poll_until(lambda: agent.instances()[WORKER]["peer"] == peer, peer)
            worker.kill()
            # 100 ms are promised; by the closed connection alone it would take 10 s.
            reap = agent.wait_reaped(WORKER)
    assert reap["reason"] == "process_exit"
