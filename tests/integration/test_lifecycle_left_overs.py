"""Agents that were killed, and readers that come and go: whose memory stays, whose is removed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.fakes.agent_process import AgentProcess
from tests.fakes.raw_client import regions_of
from tests.fakes.worker_process import WorkerProcess
from tests.polling import PATIENCE_SECONDS, poll_until

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "lmcache-kube.l1."
RESOURCE_TRACKER_SECONDS = 2.0

READER = """
import mmap, os, sys
descriptor = os.open(sys.argv[1], os.O_RDWR)
view = mmap.mmap(descriptor, 0)
os.close(descriptor)
assert len(view) == int(sys.argv[2])
print(view[0], flush=True)
sys.stdin.readline()
view.close()
"""
"""Attaches as the documentation says: no resource tracker learns of the segment."""


def _interpreters() -> list[str]:
    """Return the lowest and the highest supported Python of this machine, and the running one."""
    found = {sys.version_info[1]: sys.executable}
    beside = Path(sys.base_prefix).parent  # where version managers keep the others
    for minor in range(11, 20):
        name = f"python3.{minor}"
        for path in (shutil.which(name), *map(str, beside.glob(f"*/bin/{name}"))):
            if path and _runs(path):
                found.setdefault(minor, path)
    return list(dict.fromkeys([found[min(found)], found[max(found)], sys.executable]))


def _runs(path: str) -> bool:
    return subprocess.run([path, "-c", ""], check=False, capture_output=True).returncode == 0


def region_of(agent: AgentProcess) -> Path:
    """Return the one region that an agent holds."""
    (region,) = regions_of(agent.pid)
    return region


def serves(agent: AgentProcess, seed: int = 1) -> None:
    """See that bytes go into the region and come back out of it."""
    with WorkerProcess(agent.url, 100 + seed) as worker:
        worker.ask("register")
        stored = worker.ask("digest", 1)
        assert worker.ask("store", seed) is True
        assert worker.ask("lookup", seed) == 2
        assert worker.ask("retrieve", seed) is True
        assert worker.ask("digest", 32) == stored
        worker.ask("unregister")


@contextmanager
def attached(interpreter: str, region: Path) -> Iterator[subprocess.Popen[str]]:
    """Run a reader that has mapped the region until it is told to go."""
    with subprocess.Popen(
        [interpreter, "-c", READER, str(region), str(region.stat().st_size)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline().strip().isdigit()
        yield reader


def test_the_next_start_after_sigkill_removes_the_left_over_and_serves() -> None:
    """The same name again: a fresh region, nothing of the old one; clean after the stop."""
    with AgentProcess(f"--shm-name=again-{os.getpid()}") as first:
        region = region_of(first)
        old = region.stat().st_ino
        first.kill()
        assert region.exists()  # this is what is to be cleaned up
    with AgentProcess(f"--shm-name=again-{os.getpid()}") as second:
        assert region_of(second) == region
        assert region.stat().st_ino != old
        serves(second)
        assert second.stop() == 0
    assert not region.exists()


def test_the_next_start_under_another_name_removes_it_as_well() -> None:
    """With a port of its choice each agent has a new name: nobody else would free that memory."""
    with AgentProcess() as first:
        region = region_of(first)
        first.kill()
    with AgentProcess() as second:
        assert not region.exists()
        assert region_of(second).exists()


def test_of_two_agents_on_a_node_only_the_dead_ones_memory_is_removed() -> None:
    """Killed beside a living one; the living one serves on through its own."""
    with (
        AgentProcess(f"--shm-name=lives-{os.getpid()}") as living,
        AgentProcess(f"--shm-name=dies-{os.getpid()}") as dying,
    ):
        kept, left = region_of(living), region_of(dying)
        assert kept != left
        dying.kill()
        serves(living, 1)
        with AgentProcess(f"--shm-name=third-{os.getpid()}") as third:
            assert not left.exists()
            assert kept.exists()
            serves(third, 2)
        serves(living, 3)
        assert living.stop() == 0
        assert not kept.exists()


@pytest.mark.parametrize("name", ["pid", "stale"])
def test_a_left_over_that_names_a_living_process_is_removed(name: str) -> None:
    """Process ids are reused: only a held lock says that the owner lives, no number does."""
    stale = SHARED_MEMORY / f"{PREFIX}{name}-{os.getpid()}"
    stale.write_bytes(os.getpid().to_bytes(8, "little") + bytes(4096))
    try:
        with AgentProcess():
            assert not stale.exists()
    finally:
        stale.unlink(missing_ok=True)


def test_files_of_others_are_not_touched() -> None:
    """Other names, other programs, and what workers share."""
    others = [
        SHARED_MEMORY / name
        for name in (f"lmcache_l1_pool_{os.getpid()}", f"lmcache-kube-{os.getpid()}.l1")
    ]
    for other in others:
        other.write_bytes(b"somebody's")
    try:
        with AgentProcess() as agent, WorkerProcess(agent.url, 3) as worker:
            worker.ask("register")
            shared = list(SHARED_MEMORY.glob(f"lmcache_kv_{worker.pid}_*"))
            assert shared
            agent.kill()
            with AgentProcess() as next_one:
                assert all(path.exists() for path in [*others, *shared])
                assert next_one.stop() == 0
            assert all(path.exists() for path in [*others, *shared])
    finally:
        for other in others:
            other.unlink()


@pytest.mark.parametrize("interpreter", _interpreters(), ids=str)
@pytest.mark.slow
def test_a_reader_that_leaves_or_is_killed_takes_nothing_with_it(interpreter: str) -> None:
    """On the lowest and the highest Python here; a resource tracker would need a second or so."""
    with AgentProcess() as agent:
        region = region_of(agent)
        identity = region.stat().st_ino
        with attached(interpreter, region) as leaving:
            assert leaving.stdin is not None
            leaving.stdin.write("\n")
            leaving.stdin.flush()
            assert leaving.wait(PATIENCE_SECONDS) == 0
        with attached(interpreter, region) as killed:
            killed.kill()
            killed.wait(PATIENCE_SECONDS)
        time.sleep(RESOURCE_TRACKER_SECONDS)  # what must not happen needs this long
        assert region.stat().st_ino == identity
        serves(agent)


def test_a_reader_that_outlives_a_killed_agent_does_not_hold_up_the_next() -> None:
    """It keeps its mapping of the old memory; name and lock are free."""
    with AgentProcess(f"--shm-name=mapped-{os.getpid()}") as first:
        region = region_of(first)
        with attached(sys.executable, region) as reader:
            first.kill()
            with AgentProcess(f"--shm-name=mapped-{os.getpid()}") as second:
                assert region_of(second) == region
                serves(second)
            assert reader.poll() is None
            reader.kill()


def test_a_worker_that_outlives_the_agent_finds_the_next_one_at_its_address() -> None:
    """Killed and started again on the same port: told once, the worker registers and goes on."""
    with AgentProcess() as first, WorkerProcess(first.url, 3) as worker:
        worker.ask("register")
        assert worker.ask("ping") is True
        port = first.port
        first.kill()
        with AgentProcess(port=port) as second:
            assert second.boot_id != first.boot_id
            assert worker.ask("ping") is False
            assert worker.ask("store", 1) is False
            worker.ask("register")
            assert worker.ask("ping") is True
            assert worker.ask("store", 1) is True
            assert set(second.instances()) == {3}


def test_a_stopped_agent_lets_its_workers_memory_go() -> None:
    """No mapping of a worker's segments outlives the registration or the agent."""
    with AgentProcess() as agent, WorkerProcess(agent.url, 3) as worker:
        worker.ask("register")
        process = psutil.Process(agent.pid)

        def mapped() -> bool:
            return any(f"lmcache_kv_{worker.pid}_" in file.path for file in process.memory_maps())

        assert mapped()
        worker.ask("unregister")
        poll_until(lambda: not mapped(), "its memory is unmapped")
        worker.ask("register")
        agent.signal(signal.SIGTERM)
        assert agent.process.wait(PATIENCE_SECONDS) == 0
