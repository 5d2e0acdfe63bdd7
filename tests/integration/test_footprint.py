"""What the agent costs beside its cache."""

from __future__ import annotations

from pathlib import Path

from tests.fakes.agent_process import AgentProcess
from tests.fakes.worker_process import Worker

MOST_BYTES = 100 << 20


def test_the_agent_is_small_beside_its_cache() -> None:
    """Memory of its own, neither L1 nor mapped files, with a worker that stores and loads."""
    with AgentProcess() as agent, Worker(agent.url, 7) as worker:
        worker.register()
        assert worker.store(1)
        assert worker.lookup(1) == 2
        assert worker.retrieve(1)
        lines = Path(f"/proc/{agent.pid}/status").read_text().splitlines()
        (line,) = (line for line in lines if line.startswith("RssAnon:"))
        assert int(line.split()[1]) * 1024 < MOST_BYTES
        assert "libtorch" not in Path(f"/proc/{agent.pid}/maps").read_text()
