"""A killed worker's memory is back soon, whatever the reap timeout is; nobody else is touched."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from statistics import median

import pytest

from tests.fakes.agent_process import FAST_WINDOWS, AgentProcess
from tests.fakes.netns import needs_root
from tests.fakes.worker_process import Worker, WorkerProcess
from tests.polling import BUSY_SECONDS, poll_until

SMALLEST_CLOSE_SECONDS = 3
IN_A_PID_NAMESPACE = ("unshare", "--pid", "--fork")

StartWorkers = Callable[[AgentProcess, int], list[WorkerProcess]]


@pytest.fixture
def start_workers() -> Generator[StartWorkers]:
    """Workers of one address; a test may kill them."""
    with ExitStack() as stack:

        def start(agent: AgentProcess, count: int) -> list[WorkerProcess]:
            workers = [
                stack.enter_context(WorkerProcess(agent.url, instance_id))
                for instance_id in range(1, count + 1)
            ]
            for worker in workers:
                worker.ask("register")
            return workers

        yield start


def seconds_to_release(agent: AgentProcess, workers: list[WorkerProcess]) -> float:
    """Kill all at once; return when the last of them is gone, context and all."""
    mapped = {w.instance_id: agent.instances()[w.instance_id]["bytes"] for w in workers}
    started = time.monotonic()
    for worker in workers:
        worker.kill()
    for worker in workers:
        reap = agent.wait_reaped(worker.instance_id)
        assert reap["reason"] == "connection_closed"
        assert reap["bytes"] == mapped[worker.instance_id] > 0
        assert reap["release_seconds"] < BUSY_SECONDS
        assert worker.instance_id not in agent.instances()
    return time.monotonic() - started


def assert_served(agent: AgentProcess, worker: WorkerProcess, seed: int) -> None:
    """Check that a worker is where it was, and that its bytes come back."""
    assert worker.instance_id in agent.instances()
    assert worker.ask("ping") is True
    before = worker.ask("digest", 1)
    assert worker.ask("store", seed)
    assert worker.ask("lookup", seed) == 2
    assert worker.ask("retrieve", seed)
    assert worker.ask("digest", 32) == before


@pytest.mark.parametrize("reap_timeout", [30, 3600])
def test_killed_workers_are_gone_when_the_close_window_ends(
    reap_timeout: int, start_workers: StartWorkers
) -> None:
    """One killed after serving and one before its first ping, whatever T is; the others serve."""
    flags = (
        f"--worker-reap-timeout-seconds={reap_timeout}",
        "--worker-registration-grace-seconds=3600",
        f"--close-confirm-seconds={SMALLEST_CLOSE_SECONDS}",
    )
    with AgentProcess(*flags) as agent:
        pinged, never_pinged, serving, idle = start_workers(agent, 4)
        for seed, worker in enumerate((pinged, serving), 1):
            assert_served(agent, worker, seed)

        seconds = seconds_to_release(agent, [pinged, never_pinged])

        assert SMALLEST_CLOSE_SECONDS <= seconds <= SMALLEST_CLOSE_SECONDS + BUSY_SECONDS
        assert set(agent.instances()) == {serving.instance_id, idle.instance_id}
        assert_served(agent, serving, 3)
        assert_served(agent, idle, 4)
        assert len(agent.reaps()) == 2


@pytest.mark.slow
def test_with_the_defaults_a_killed_worker_is_gone_in_seconds(
    start_workers: StartWorkers,
) -> None:
    """The default close window is 10 s."""
    with AgentProcess() as agent:
        dying, idle = start_workers(agent, 2)
        assert_served(agent, dying, 1)
        assert seconds_to_release(agent, [dying]) <= 10 + BUSY_SECONDS
        assert_served(agent, idle, 2)


@needs_root
def test_over_a_unix_socket_the_kernel_tells_of_a_death_across_pid_namespaces(
    tmp_path: Path,
) -> None:
    """Each is gone before any window ends; pinged or not, in PID namespaces of their own."""
    path = tmp_path / "agent.sock"
    with AgentProcess(f"--ipc-path={path}") as agent, Worker(agent.url, 99) as bystander:
        bystander.register()
        seconds = [seconds_to_process_exit(agent, path, number) for number in range(1, 6)]
        assert median(seconds) < SMALLEST_CLOSE_SECONDS, seconds
        assert set(agent.instances()) == {99}


def seconds_to_process_exit(agent: AgentProcess, path: Path, instance_id: int) -> float:
    """Kill a worker at the Unix socket; return the time to its released memory."""
    with WorkerProcess(f"ipc://{path}", instance_id, wrapper=IN_A_PID_NAMESPACE) as worker:
        worker.ask("register")
        if instance_id % 2:
            assert worker.ask("ping") is True
        # Its descriptor may be one that the last worker had a moment ago: proven a second later.
        poll_until(lambda: "unix socket" in agent.instances()[instance_id]["peer"], "its process")
        killed_at = time.time()
        worker.kill()
        reap = agent.wait_reaped(instance_id)
    assert reap["reason"] == "process_exit"
    detected_at = datetime.fromisoformat(reap["detected_at"]).timestamp()
    return detected_at + float(reap["release_seconds"]) - killed_at


@pytest.mark.slow
def test_a_newcomer_that_speaks_once_does_not_hold_a_dead_workers_memory(
    start_workers: StartWorkers,
) -> None:
    """It comes so soon that it has the dead one's descriptor, and is silent ever after."""
    with AgentProcess(*FAST_WINDOWS) as agent, ExitStack() as newcomers:
        (worker,) = start_workers(agent, 1)
        worker.kill()
        poll_until(lambda: agent.instances()[1]["state"] == "closed")
        newcomer = newcomers.enter_context(Worker(agent.url, 2))
        assert newcomer.ping_nil() is True
        assert agent.wait_reaped(1)["reason"] == "connection_closed"
        assert newcomer.ping_nil() is True
