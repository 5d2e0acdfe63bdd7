"""Workers that map L1, as real processes: killed, frozen and thawed in the middle of transfers."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.agent_process import FAST_WINDOWS, AgentProcess
from tests.fakes.copying_worker import CHUNK_BYTES, CopyingWorkerProcess
from tests.polling import poll_until

POOL = f"engine-driven-{os.getpid()}"


@pytest.fixture
def flags(tmp_path: Path) -> tuple[str, ...]:
    """An agent whose L1 workers map, over both transports."""
    socket = f"--ipc-path={tmp_path}/agent.sock"
    return (*FAST_WINDOWS, "--supported-transfer-mode=auto", f"--shm-name={POOL}", socket)


@pytest.fixture
def agent(flags: tuple[str, ...]) -> Iterator[AgentProcess]:
    """A running agent."""
    with AgentProcess(*flags) as process:
        yield process


@pytest.fixture(params=["tcp", "ipc"])
def url(request: pytest.FixtureRequest, agent: AgentProcess, tmp_path: Path) -> str:
    """Where workers connect."""
    return agent.url if request.param == "tcp" else f"ipc://{tmp_path}/agent.sock"


def l1(agent: AgentProcess) -> dict[str, Any]:
    """What L1 holds."""
    figures: dict[str, Any] = agent.status()["l1"]
    return figures


def registered(url: str, number: int = 0) -> CopyingWorkerProcess:
    """A worker that maps the pool."""
    worker = CopyingWorkerProcess(url, number)
    assert worker.ask("register") is True
    assert worker.ask("ping") is True
    return worker


def test_workers_share_what_they_store(agent: AgentProcess, url: str) -> None:
    """One stores, another one that maps the same pool loads the same bytes."""
    with registered(url) as writer, registered(url, 1) as reader:
        assert reader.ask("load", 1) is None
        assert writer.ask("store", 1)
        assert reader.ask("lookup", 1) == 2
        assert reader.ask("load", 1) is True
        assert l1(agent)["objects"] == 2
        writer.ask("unregister")
        assert reader.ask("load", 1) is True
        poll_until(lambda: l1(agent)["pinned_bytes"] == l1(agent)["staging_bytes"] == 0)
    assert agent.metric("retrieves_total", ok="true") == 2


@pytest.mark.parametrize("written", ["nothing", "half", "all"])
def test_a_worker_killed_in_the_middle_of_a_store_leaves_nothing(
    agent: AgentProcess, url: str, written: str
) -> None:
    """Between prepare and commit, or during the copy: nobody sees it, and its room is back."""
    with registered(url) as victim, registered(url, 1) as other:
        assert victim.ask("prepare", 1) == [0, 1]
        if written != "nothing":
            victim.ask("write", 1, written)
        assert l1(agent)["staging_bytes"] == 2 * CHUNK_BYTES
        assert other.ask("lookup", 1) == 0
        victim.kill()
        agent.wait_reaped(victim.instance_id)
        poll_until(lambda: l1(agent)["staging_bytes"] == l1(agent)["quarantined_bytes"] == 0)
        assert other.ask("lookup", 1) == 0
        assert other.ask("load", 1) is None
        assert other.ask("store", 1)
        assert other.ask("load", 1) is True


def test_a_worker_killed_in_the_middle_of_a_load_leaves_nothing(
    agent: AgentProcess, url: str
) -> None:
    """What it had pinned is free again."""
    with registered(url) as victim, registered(url, 1) as other:
        assert other.ask("store", 1)
        assert victim.ask("start_reading", 1)
        assert l1(agent)["pinned_objects"] == 2
        victim.kill()
        agent.wait_reaped(victim.instance_id)
        poll_until(lambda: l1(agent)["pinned_objects"] == 0)
        assert other.ask("load", 1) is True
    assert (Path("/dev/shm") / f"lmcache-kube.l1.{POOL}").exists()


@pytest.mark.slow
def test_a_frozen_worker_writes_and_reads_where_it_was_told_to(flags: tuple[str, ...]) -> None:
    """Reaped in the middle of both, it thaws: nobody's bytes change, and what it reads is right.

    L1 is small, so that whatever room there is gets used meanwhile.
    """
    with (
        AgentProcess(*flags, l1_size_gb=0.001) as agent,
        registered(agent.url) as frozen,
        registered(agent.url, 1) as other,
    ):
        assert other.ask("store", 1)
        assert frozen.ask("start_reading", 1)
        assert frozen.ask("prepare", 2) == [0, 1]
        frozen.signal(signal.SIGSTOP)
        poll_until(lambda: other.ask("ping") and agent.reaps())
        assert agent.reaps()[0]["reason"] == "heartbeat_timeout"
        assert poll_until(lambda: agent.log_records("slots_quarantined"))
        assert l1(agent)["quarantined_bytes"] == 2 * CHUNK_BYTES
        assert l1(agent)["pinned_objects"] == 2
        for prompt in range(10, 30):
            assert other.ask("store", prompt)
        assert other.ask("store", 2)
        frozen.signal(signal.SIGCONT)
        frozen.ask("write", 2)
        assert frozen.ask("commit", 2) is False
        assert frozen.ask("finish_reading", 1) is True
        assert other.ask("load", 2) is True
        poll_until(lambda: l1(agent)["staging_bytes"] == l1(agent)["pinned_objects"] == 0)
        assert frozen.ask("ping") is False
        assert frozen.ask("register") is True
        assert frozen.ask("store", 3)
        assert other.ask("load", 3) is True


def test_an_agent_that_is_killed_leaves_no_wrong_byte_to_its_successor(
    flags: tuple[str, ...], agent: AgentProcess
) -> None:
    """A worker that still maps the old pool cannot make the new one show anything."""
    with registered(agent.url) as worker:
        assert worker.ask("prepare", 1) == [0, 1]
        worker.ask("write", 1)
        agent.kill()
        with AgentProcess(*flags, port=agent.port) as successor:
            assert worker.ask("commit", 1) is False
            assert worker.ask("prepare", 2) is None
            assert worker.ask("load", 1) is None
            assert successor.instances() == {}
            assert worker.ask("register") is True
            assert worker.ask("store", 1)
            assert worker.ask("load", 1) is True


def test_a_request_is_answered_while_another_one_never_commits(agent: AgentProcess) -> None:
    """Open stores and loads of one worker hold up nobody."""
    with registered(agent.url) as slow, registered(agent.url, 1) as other:
        assert other.ask("store", 1)
        assert slow.ask("start_reading", 1)
        assert slow.ask("prepare", 2) == [0, 1]
        assert other.ask("prepare", 2) is None
        assert other.ask("commit", 2) is False
        assert other.ask("load", 1) is True
        slow.ask("write", 2)
        assert slow.ask("commit", 2) is True
        assert other.ask("load", 2) is True
