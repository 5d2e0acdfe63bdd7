"""Workers that take their memory away while the agent has it mapped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.fakes.agent_process import AgentProcess
from tests.fakes.worker_process import Worker
from tests.polling import PATIENCE_SECONDS

NOT_WATCHED = """
import mmap, os, resource, sys
from lmcache_nodeagent.contexts.bus_errors import survive_bus_errors
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
survive_bus_errors()
with open(sys.argv[1], "r+b") as file:
    mapped = mmap.mmap(file.fileno(), 4096)
os.truncate(sys.argv[1], 0)
mapped[0]
"""


def test_a_worker_that_cuts_its_memory_short_harms_nobody_else() -> None:
    """Whenever it happens: each of its stores is answered, the others' bytes are right."""
    with AgentProcess() as agent, Worker(agent.url, 1) as worker, Worker(agent.url, 2) as other:
        worker.register()
        other.register("other/model")
        stores = [worker.begin_store(seed) for seed in range(20)]
        for name in worker.segments:
            os.truncate(f"/dev/shm/{name.lstrip('/')}", 0)
        replies = [worker.client.receive(uid).result() for uid in stores]
        assert all(reply in ([b"", True], [b"", False]) for reply in replies)
        assert not worker.store(99)
        assert worker.ping()
        assert other.ping()
        assert _catches(agent.pid, signal.SIGBUS)


def test_other_bus_errors_end_the_process_as_ever(tmp_path: Path) -> None:
    """What is not a worker's memory is nothing to go on with."""
    (tmp_path / "file").write_bytes(bytes(4096))
    command = [sys.executable, "-c", NOT_WATCHED, str(tmp_path / "file")]
    ended = subprocess.run(command, check=False, timeout=PATIENCE_SECONDS)
    assert ended.returncode == -signal.SIGBUS


def _catches(pid: int, number: signal.Signals) -> bool:
    """See proc_pid_status(5)."""
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    caught = next(line for line in status if line.startswith("SigCgt:")).split()[1]
    return bool(int(caught, 16) >> (number - 1) & 1)
