"""One line in a worker's spec, on a real kubelet: what it brings, and what it proves."""

from __future__ import annotations

import time
from collections.abc import Generator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from tests.e2e.kube.real_cluster import RealCluster
from tests.e2e.kube.slot_pods import (
    AGENTS,
    RESOURCE,
    SERVER,
    SLOTS,
    WORKERS,
    Death,
    SlotWorld,
    held_sockets,
    seen_in,
    segments_of,
    slot_pod,
)
from tests.e2e.kube.worker_pods import KUBELET_PROOFS, Run, WorkerPod, kill, seconds_until
from tests.polling import poll_until

pytestmark = pytest.mark.timeout(600)

_FEW_SLOTS = {"devicePlugin": {"slots": SLOTS}}
_PROOFS = {"process_exit", "slot_restarted", "slot_released", *KUBELET_PROOFS}
_CHOWN, _DAC_OVERRIDE, _FOWNER = 0, 1, 3


@pytest.fixture(scope="module")
def world(cluster: RealCluster) -> Generator[SlotWorld]:
    """The server and its namespaces; the node offers its slots."""
    began = time.monotonic()
    found = SlotWorld(cluster)
    found.create_namespaces()
    found.apply(transport=_FEW_SLOTS)
    found.wait_ready(SLOTS)
    print(f"\n{SLOTS} of {RESOURCE} on the node {time.monotonic() - began:.1f} s after the start")
    yield found
    cluster.kubectl("delete", "lmcs", SERVER, "-n", AGENTS)


def test_agents_are_root_with_three_capabilities(world: SlotWorld) -> None:
    """Whatever else root may do they may not; and the condition says that it works."""
    status = Path(f"/proc/{world.agents.agent_process_id(SERVER)}/status").read_text()
    lines = (line.partition(":") for line in status.splitlines())
    facts = {name: value.strip() for name, _, value in lines}
    assert set(facts["Uid"].split()) == {"0"}
    allowed = (1 << _CHOWN) | (1 << _DAC_OVERRIDE) | (1 << _FOWNER)
    assert int(facts["CapBnd"], 16) == int(facts["CapEff"], 16) == allowed
    assert facts["NoNewPrivs"] == "1"
    assert facts["Seccomp"] == "2"  # a filter
    found = poll_until(lambda: world.condition().get("status") == "True", "the condition")
    assert found
    assert world.condition()["reason"] == "PluginRegistered"


@pytest.mark.parametrize("mode", ["cpu_shm", "shm_pool"])
def test_a_restricted_worker_stores_and_retrieves(world: SlotWorld, mode: str) -> None:
    """In a namespace that enforces `restricted`, over one socket and one /dev/shm; bytes right.

    Whether the agent maps the worker's memory, or the worker the agent's.
    """
    name = mode.replace("_", "-")
    with world.worker(name, "slot_engine", **({"MODE": mode} if mode == "shm_pool" else {})) as pod:
        run = pod.started()
        poll_until(partial(pod.has_said, "exchanged"), "bytes are exchanged")
        (said,) = [line for line in pod.said() if line["event"] == "exchanged"]
        assert (said["stored"], said["found"], said["loaded"], said["same"]) == (
            True,
            1,
            True,
            True,
        )
        instance = world.instances()[run.instance_id]
        assert instance["slot_pod"]["pod"] == pod.name
        assert instance["slot_pod"]["namespace"] == WORKERS
        seconds = pod.annotated(run.instance_id) - run.registered_at
        mapping = world.instances()[run.instance_id]["mapping"]
        assert (mapping["name"], mapping["container"]) == (pod.name, "engine")
        print(f"\n{mode}: annotated {seconds:.2f} s after the registration, by the kubelet's word")
        assert seen_in(run.process_id, "/run/lmcache-kube").keys() == {"agent.sock"}


def test_a_killed_container_leaves_nothing_for_the_next(world: SlotWorld) -> None:
    """The kernel proves its end at once, long before the kubelet starts the next container."""
    with world.worker("killed") as pod:
        run = pod.started()
        assert world.mapped()
        its = segments_of(run.process_id)
        agent = world.agents.agent(SERVER)
        held = world.metric('lmcache_kube_container_starts_total{outcome="gave_up"}')
        killed_at = kill(run.process_id)
        gone = seconds_until(killed_at, lambda: run.instance_id not in agent.instances(), "release")
        entry = world.agents.reaped(run.instance_id, SERVER)
        print(f"\ninstance gone {gone * 1000:.0f} ms after SIGKILL: {entry['reason']}")
        assert entry["reason"] == "process_exit"
        second = pod.started(after=run.container_id)
        assert world.metric('lmcache_kube_container_starts_total{outcome="gave_up"}') == held
        assert second.instance_id in world.instances()
        assert its
        assert not its & segments_of(second.process_id)


def test_a_connection_that_outlives_the_process_does_not_save_it(world: SlotWorld) -> None:
    """Somebody still holds it; that the kubelet starts the next container is proof enough."""
    with world.worker("hanging") as pod:
        run = pod.started()
        with held_sockets(run.process_id) as count:
            assert count
            killed_at = kill(run.process_id)
            entry = world.agents.reaped(run.instance_id, SERVER)
            seconds = time.time() - killed_at
            second = pod.started(after=run.container_id)
        print(f"\nreaped {seconds:.2f} s after SIGKILL: {entry['reason']}")
        # The agent ends the connection at the kubelet's word; then the process is known to be gone.
        assert entry["reason"] in {"slot_restarted", "process_exit"}
        assert second.instance_id in world.instances()
        assert run.instance_id not in world.instances()


def test_a_slot_that_changes_hands_at_once(world: SlotWorld) -> None:
    """The next pod waits, Pending, with the scheduler's own words; then nothing is left there."""
    with world.worker("fills") as other, world.worker("leaves") as pod:
        other.started()
        run = pod.started()
        slot = world.instances()[run.instance_id]["slot"]
        its = segments_of(run.process_id)
        with world.workers.worker_of(slot_pod("waits", "slot_engine")) as waiting:
            words = poll_until(waiting.unschedulable, "the scheduler's message")
            print(f"\nthe {SLOTS + 1}rd pod: {words}")
            assert f"Insufficient {RESOURCE}" in words
            pod.delete()
            began = time.time()
            second = waiting.started()
            print(f"it runs {time.time() - began:.1f} s after another was deleted")
            assert world.instances()[second.instance_id]["slot"] == slot
            assert run.instance_id not in world.instances()
            assert its
            assert not its & segments_of(second.process_id)
            poll_until(partial(waiting.has_said, "exchanged"), "bytes are exchanged")
            assert len(world.agents.agent(SERVER).reaps(run.instance_id)) == 1


def test_another_pod_uses_an_id_that_it_has_read(world: SlotWorld) -> None:
    """It is refused, and counted; the rightful owner notices nothing."""
    with world.worker("owner", "slot_engine") as owner:
        run = owner.started()
        before = world.metric("lmcache_kube_strangers_refused_total{")
        owner.annotated(run.instance_id)
        read = owner.annotation()
        with world.worker("thief", "slot_engine", INSTANCE_ID=read) as thief:
            poll_until(partial(thief.has_said, "refused"), "the thief is refused")
        refused = world.metric("lmcache_kube_strangers_refused_total{") - before
        print(f"\nrefused {refused:.0f} messages of another pod")
        assert refused > 0
        assert world.instances()[run.instance_id]["slot_pod"]["pod"] == owner.name
        assert world.agents.agent(SERVER).reaps(run.instance_id) == []


@dataclass(frozen=True)
class Restart:
    """What was restarted under a worker, and when."""

    what: str
    pod: WorkerPod
    run: Run
    began_at: float


@pytest.fixture(scope="module", params=["agent", "kubelet", "both"])
def restart(request: pytest.FixtureRequest, world: SlotWorld) -> Generator[Restart]:
    """A worker that runs while agent, kubelet or both are killed and come back.

    Of the module, since the new kubelet outlives the test.
    """
    what = str(request.param)
    with world.worker(f"survives-{what}") as pod:
        run, began_at = pod.started(), time.time()
        if what != "agent":
            world.cluster.plane.crash("kubelet")
        if what != "kubelet":
            kill(world.agents.agent_process_id(SERVER))
        yield Restart(what, pod, run, began_at)


def test_restarts_are_survived(world: SlotWorld, restart: Restart) -> None:
    """The same path leads to the new agent; the kubelet hands slots out again."""
    pod, run = restart.pod, restart.run
    if restart.what != "kubelet":
        poll_until(lambda: pod.registrations() > 1, "it registers again")
        seconds = time.time() - restart.began_at
        print(f"\nregistered again {seconds:.1f} s after the agent's SIGKILL")
    poll_until(lambda: run.instance_id in world.instances(), "it is registered")
    world.agents.wait_ready(SERVER)
    world.wait_allocatable(SLOTS)
    with world.worker(f"comes-after-{restart.what}") as newcomer:
        newcomer.started()
        seconds = time.time() - restart.began_at
        print(f"a new pod runs {seconds:.1f} s after the restart of {restart.what}")
    assert run.instance_id in world.instances()
    assert world.agents.agent(SERVER).reaps(run.instance_id) == []
    assert pod.last_end() == {}


def test_a_second_server_of_the_name_says_that_it_has_no_resource(world: SlotWorld) -> None:
    """On its own condition; the first one and its workers notice nothing."""
    other = "others"
    world.create_namespace(other, "privileged")
    try:
        with world.worker("undisturbed") as pod:
            run = pod.started()
            began = time.time()
            world.apply(other)
            poll_until(
                lambda: world.condition(other).get("reason") == "ResourceTaken", "it says so"
            )
            print(f"\n{time.time() - began:.1f} s: {world.condition(other)['message']}")
            assert world.condition()["reason"] == "PluginRegistered"
            assert run.instance_id in world.instances()
        world.wait_allocatable(SLOTS)
    finally:
        world.cluster.kubectl("delete", "namespace", other)


def test_new_pods_wait_while_the_agent_is_away(world: SlotWorld) -> None:
    """Pending, and they start by themselves when it is back."""
    world.apply(nodeSelector={"nowhere": "yes"}, transport=_FEW_SLOTS)
    try:
        world.wait_allocatable(0)
        with world.worker("early") as pod:
            words = poll_until(pod.unschedulable, "the scheduler's message")
            assert RESOURCE in words
            world.apply(transport=_FEW_SLOTS)
            began = time.time()
            pod.started()
            print(f"\nit runs {time.time() - began:.1f} s after the agent was called back")
    finally:
        world.apply(transport=_FEW_SLOTS)
        world.wait_allocatable(SLOTS)


@pytest.mark.parametrize("operator", [True, False], ids=["operator", "no-operator"])
def test_from_event_to_release(world: SlotWorld, operator: bool) -> None:  # noqa: FBT001
    """What the kernel and the kubelet's slots prove needs nobody else's word."""
    rows: list[tuple[str, float, str]] = []

    def measure() -> None:
        events = ("SIGKILL", "OOM kill", "delete", "force delete")
        rows.extend((event, *_end(world, event)) for event in events)

    if operator:
        measure()
    else:
        with world.agents.without_operator():
            measure()
    who = "with the operator" if operator else "by slot evidence alone (operator scaled to 0)"
    print(f"\n{who}: process's end to memory back")
    for event, seconds, reason in rows:
        print(f"  {event:13} {seconds * 1000:8.1f} ms  {reason}")
    assert rows[0][2] == "process_exit"
    assert {reason for _, _, reason in rows} <= _PROOFS


def _end(world: SlotWorld, event: str) -> tuple[float, str]:
    """End a worker; return how long after its process its memory was back, and the reason."""
    with world.worker(event.lower().replace(" ", "-")) as pod:
        before = world.mapped()
        run = pod.started()
        agent = world.agents.agent_process_id(SERVER)
        its = _mapped(agent) - before
        assert its
        death = Death(run.process_id)
        match event:
            case "SIGKILL":
                kill(run.process_id)
            case "OOM kill":
                words = ("exec", "-n", WORKERS, pod.name, "--", "sh", "-c", "kill -USR1 1")
                world.cluster.kubectl(*words)
            case "delete":
                pod.delete()
            case _:
                pod.delete("--force", "--grace-period=0")
        died_at = death.wait()
        seconds = seconds_until(died_at, lambda: not its & _mapped(agent), "the memory is back")
        return seconds, world.agents.reaped(run.instance_id, SERVER)["reason"]


def _mapped(agent: int) -> set[str]:
    lines = Path(f"/proc/{agent}/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "lmcache_kv_" in line}
