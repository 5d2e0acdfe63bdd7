"""Where the promises of the device plugin end, on a real kubelet: slots and patience."""

from __future__ import annotations

import time
from collections.abc import Generator
from functools import partial
from typing import Any

import pytest

from tests.e2e.kube.limit_pods import SERVER, LimitWorld, started_at
from tests.e2e.kube.real_cluster import RealCluster
from tests.e2e.kube.slot_pods import held_sockets, seen_in
from tests.e2e.kube.worker_pods import Run, WorkerPod, kill
from tests.polling import poll_until

pytestmark = pytest.mark.timeout(600)

_SLOTS = 64  # by default
_PRESTART_WAIT_SECONDS = 20.0  # by default
_SLOW_SECONDS = 3.0
_FILLERS = 4
_TICK_SECONDS = 0.01
_EXCEEDED = "lmcache_kube_slot_shared_memory_exceeded_total"
_TAKE = ("python3", "-c", "open('/dev/shm/more', 'wb').truncate((64 << 30) + 1)")  # all holes
_STARTS = 'lmcache_kube_container_starts_total{outcome="%s"}'


@pytest.fixture(scope="module")
def world(cluster: RealCluster) -> Generator[LimitWorld]:
    """The server with everything as it is by default; the node offers its slots."""
    found = LimitWorld(cluster)
    found.make()
    found.wait_ready(_SLOTS)
    yield found
    cluster.kubectl("delete", "lmcs", SERVER, "-n", found.agents.name)


def test_a_start_waits_for_a_slow_release(world: LimitWorld) -> None:
    """The next container is made once the memory is back, and an Event on its pod says so."""
    with world.worker("slow") as pod:
        run = pod.started()
        its = world.mapped()
        assert its
        before = world.metric(_STARTS % "released")
        with world.slow_releases(_SLOW_SECONDS):
            second, killed_at = _restarted(pod, run)
        closed_at, made_at = world.closed_at(), started_at(second.process_id)
        print(
            f"\nkilled; closed {closed_at - killed_at:.2f} s later, the next container's process "
            f"made {made_at - closed_at:.2f} s after that"
        )
        assert closed_at - killed_at >= _SLOW_SECONDS
        assert made_at >= closed_at - _TICK_SECONDS
        poll_until(lambda: world.metric(_STARTS % "released") == before + 1, "it is counted")
        assert not its & world.mapped()
        event = poll_until(partial(_told_on, world, pod.name, "ContainerStartHeld"), "an Event")
        print(f"{event['type']}: {event['message']}")
        assert event["type"] == "Normal"


def test_a_start_does_not_wait_for_ever(world: LimitWorld) -> None:
    """It goes on after its time, whatever is still mapped, and works; an Event warns."""
    with world.worker("stuck") as pod:
        run = pod.started()
        its = world.mapped()
        assert its
        before = world.metric(_STARTS % "gave_up")
        with world.slow_releases(3600):
            second, killed_at = _restarted(pod, run)
            made_at = started_at(second.process_id)
            print(f"\nthe next container's process made {made_at - killed_at:.2f} s after SIGKILL")
            assert made_at - killed_at >= _PRESTART_WAIT_SECONDS - _TICK_SECONDS
            poll_until(lambda: world.metric(_STARTS % "gave_up") == before + 1, "it is counted")
            assert its <= world.mapped()
            assert second.instance_id in world.instances()
            event = poll_until(partial(_told_on, world, pod.name, "ContainerStartHeld"), "an Event")
            print(f"{event['type']}: {event['message']}")
            assert event["type"] == "Warning"
        poll_until(lambda: not its & world.mapped(), "the memory is back")
        assert second.instance_id in world.instances()


def test_the_pod_after_the_last_slot_waits(world: LimitWorld) -> None:
    """With the scheduler's own words, until a slot is free; then it starts by itself."""
    began = time.monotonic()
    with world.filled(_FILLERS, _SLOTS // _FILLERS) as fillers:
        ids = [one for pod in fillers for one in world.running(pod)]
        print(f"\n{len(ids)} containers run after {time.monotonic() - began:.1f} s")
        poll_until(lambda: world.metric('lmcache_kube_slots{state="free"}') == 0, "all taken")
        sockets = {
            seen_in(pid, "/run/lmcache-kube")["agent.sock"] for pid in _processes(world, ids)
        }
        assert len(ids) == len(sockets) == _SLOTS
        with world.worker("one-more") as pod:
            words = poll_until(pod.unschedulable, "the scheduler's message")
            print(f"pod {_SLOTS + 1}: {words}")
            assert f"Insufficient {world.resource}" in words
            fillers[0].delete("--grace-period=1")
            run = pod.started()
            assert world.instances()[run.instance_id]["slot_pod"]["pod"] == pod.name


def test_more_shared_memory_than_allowed_is_told_on_the_pod(world: LimitWorld) -> None:
    """The agent finds out by itself; the worker goes on."""
    with world.worker("greedy") as pod:
        run = pod.started()
        words = ("exec", "-n", world.workers.name, pod.name, "--", *_TAKE)
        world.cluster.kubectl(*words)
        began = time.monotonic()
        find = partial(_told_on, world, pod.name, "SharedMemoryExceeded")
        event = poll_until(find, "an Event")
        print(f"\n{time.monotonic() - began:.1f} s: {event['type']}: {event['message']}")
        assert event["type"] == "Warning"
        poll_until(lambda: world.metric(_EXCEEDED) == 1, "it is counted")
        assert run.instance_id in world.instances()
        assert pod.last_end() == {}


def _restarted(pod: WorkerPod, run: Run) -> tuple[Run, float]:
    """Kill a worker; return the next run, and when the kill was since the machine started.

    Something else holds its connection, so that its release begins only with the kubelet's word
    that it is about to start the next container.
    """
    with held_sockets(run.process_id) as count:
        assert count
        killed_at = time.clock_gettime(time.CLOCK_BOOTTIME)
        kill(run.process_id)
        return pod.started(after=run.container_id), killed_at


def _told_on(world: LimitWorld, name: str, reason: str) -> dict[str, Any] | None:
    """Return the Event on a pod for a reason, if there is one."""
    found = world.workers.events(reason)
    told = [event for event in found if event["involvedObject"].get("name") == name]
    return next(iter(told), None)


def _processes(world: LimitWorld, ids: list[str]) -> list[int]:
    found = [world.cluster.node.process_id(one) for one in ids]
    return [pid for pid in found if pid is not None]
