"""A worker at a slot of the device plugin: connected, named, and its end proven by the kubelet."""

from __future__ import annotations

import os
import signal
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from lmcache_nodeagent.operator_link.messages import SlotPod
from tests.fakes.agent_process import AgentProcess
from tests.fakes.copying_worker import CHUNK_BYTES, CopyingWorkerProcess
from tests.fakes.link_operator import LinkOperator
from tests.fakes.netns import needs_root
from tests.fakes.slot_container import SLOTS, URL, SlotNode, in_container
from tests.fakes.stub_agent import StubAgent
from tests.fakes.worker_process import WorkerFailed, WorkerProcess
from tests.polling import poll_until

pytestmark = needs_root


@pytest.fixture
def node() -> Generator[SlotNode]:
    """A node whose slots come with shared memory."""
    with SlotNode(shared_memory_bytes=1 << 30) as made:
        yield made


def registered(node: SlotNode, pod: str, instance_id: int) -> tuple[str, WorkerProcess]:
    """Start a worker in a pod of its own, and let it register; return its slot too."""
    admitted = node.kubelet("admit", "team", pod)
    worker = node.container(admitted, instance_id)
    worker.ask("register")
    return admitted["slot"], worker


def starts(agent: AgentProcess, count: int) -> list[dict[str, Any]]:
    """Wait for so many starts of containers in the log."""
    poll_until(lambda: len(agent.log_records("container_started")) >= count)
    return agent.log_records("container_started")


def test_a_worker_is_served_and_named(node: SlotNode) -> None:
    """Its memory is found in its own /dev/shm; the pod is the one that the kubelet lists."""
    slot, worker = registered(node, "engine-0", 1)
    before = worker.ask("digest", 1)
    assert worker.ask("store", 1)
    assert worker.ask("lookup", 1) == 2
    assert worker.ask("retrieve", 1)
    assert worker.ask("digest", 32) == before
    owner = {"namespace": "team", "pod": "engine-0", "container": "engine"}
    poll_until(lambda: node.agent.instances()[1]["slot_pod"] == owner)
    assert node.agent.instances()[1]["slot"] == slot


def test_containers_do_not_see_each_other(node: SlotNode) -> None:
    """Two pods, two slots, two folders: names of shared memory may be the same."""
    (one, first), (other, second) = (registered(node, f"engine-{n}", n) for n in (1, 2))
    assert one != other
    for worker in (first, second):
        assert worker.ask("store", worker.instance_id)
        assert worker.ask("lookup", worker.instance_id) == 2
        before = worker.ask("digest", 1)
        assert worker.ask("retrieve", worker.instance_id)
        assert worker.ask("digest", 32) == before
    assert {len(list((node.shared / slot).iterdir())) for slot in (one, other)} == {2}


def test_workers_that_map_l1() -> None:
    """They find it in their own /dev/shm; one pod loads what another one stored."""
    flags = ["--supported-transfer-mode=auto", f"--shm-name=slots-{os.getpid()}"]
    with SlotNode(flags, shared_memory_bytes=1 << 30) as node:
        workers = []
        for number in range(2):
            mounts = node.kubelet("admit", "team", f"engine-{number}")["mounts"]
            wrapper = in_container(mounts)
            workers.append(node.stack.enter_context(CopyingWorkerProcess(URL, number, wrapper)))
            assert workers[-1].ask("register") is True
        writer, reader = workers
        assert writer.ask("store", 1)
        assert reader.ask("lookup", 1) == 2
        assert reader.ask("load", 1) is True
        assert node.agent.stop() == 0
        assert not any(node.shared.glob("*/lmcache-kube.*"))


def test_a_killed_worker_is_proven_dead_before_its_container_starts_again(node: SlotNode) -> None:
    """By the kernel; the kubelet's call for the restart finds nothing left to wait for."""
    slot, worker = registered(node, "engine-0", 1)
    worker.kill()
    assert node.agent.wait_reaped(1)["reason"] == "process_exit"
    node.kubelet("start", slot)
    assert [start["outcome"] for start in starts(node.agent, 2)] == ["at_once", "at_once"]
    assert list((node.shared / slot).iterdir()) == []


def test_a_restart_is_proof_whatever_still_holds_the_connection(node: SlotNode) -> None:
    """The process stands still, its connection is open: it is released before the next one runs."""
    slot, worker = registered(node, "engine-0", 1)
    assert worker.ask("ping")
    worker.signal(signal.SIGSTOP)
    node.kubelet("start", slot)
    assert 1 not in node.agent.instances()
    (reap,) = node.agent.reaps()
    assert reap["reason"] == "slot_restarted"
    worker.signal(signal.SIGCONT)
    poll_until(lambda: node.agent.status()["connections"] == 0)


def test_a_restart_gives_no_l1_back_that_a_process_may_still_write() -> None:
    """Only the process's end does, whatever the kubelet says."""
    flags = ["--supported-transfer-mode=auto", f"--shm-name=held-{os.getpid()}"]
    with SlotNode(flags, shared_memory_bytes=1 << 30) as node:
        admitted = node.kubelet("admit", "team", "engine-0")
        wrapper = in_container(admitted["mounts"])
        worker = node.stack.enter_context(CopyingWorkerProcess(URL, 0, wrapper))
        assert worker.ask("register") is True
        assert worker.ask("prepare", 1)
        worker.signal(signal.SIGSTOP)
        node.kubelet("start", admitted["slot"])
        assert node.agent.wait_reaped(worker.instance_id)["reason"] == "slot_restarted"
        poll_until(lambda: node.agent.status()["connections"] == 0)
        assert node.agent.status()["l1"]["quarantined_bytes"] == 2 * CHUNK_BYTES
        worker.kill()
        poll_until(lambda: node.agent.status()["l1"]["quarantined_bytes"] == 0)
        assert node.agent.log_records("malformed_message") == []


def test_who_was_before_never_speaks_again(node: SlotNode) -> None:
    """Its connection is ended, and the folder that it sees has no socket any more."""
    slot, worker = registered(node, "engine-0", 1)
    node.kubelet("start", slot)
    worker.tell("ping")
    poll_until(lambda: node.agent.status()["connections"] == 0)
    admitted = {
        "mounts": {
            "/run/lmcache-kube": f"{node.folder}/agent/slots/{slot}",
            "/dev/shm": str(node.shared / slot),
        }
    }
    successor = node.container(admitted, 1)
    successor.ask("register")  # the same id: a process id, say
    assert successor.ask("store", 5)
    assert successor.ask("ping") is True
    assert node.agent.instances()[1]["slot"] == slot
    assert [reap["reason"] for reap in node.agent.reaps()] == ["slot_restarted"]


def test_another_slot_cannot_use_an_id(node: SlotNode) -> None:
    """Neither while its owner is connected, nor over TCP; it is refused and counted."""
    registered(node, "engine-0", 1)
    admitted = node.kubelet("admit", "team", "thief")
    thief = node.container(admitted, 1)
    with pytest.raises(WorkerFailed):
        thief.ask("register")
    assert thief.ask("store", 9) is False
    assert thief.ask("ping") is True  # as every stranger's; it refreshes nothing
    with WorkerProcess(node.agent.url, 1) as outsider, pytest.raises(WorkerFailed):
        outsider.ask("register")
    assert node.agent.metric("strangers_refused_total", operation="store") == 1


def test_a_pod_that_is_gone_gives_its_slot_back(node: SlotNode) -> None:
    """Its left-overs are removed, and the slot that was free longest is given first."""
    slot, worker = registered(node, "engine-0", 1)
    poll_until(lambda: node.agent.instances()[1]["slot_pod"] is not None)
    worker.kill()
    node.agent.wait_reaped(1)
    node.kubelet("delete", slot)
    poll_until(lambda: not any((node.shared / slot).iterdir()))
    assert node.kubelet("admit", "team", "engine-1")["slot"] != slot


def test_a_slot_taken_back_is_a_hint_while_its_process_lives(node: SlotNode) -> None:
    """A pod deleted by force runs on for its grace period: its worker is not reaped."""
    slot, worker = registered(node, "engine-0", 1)
    poll_until(lambda: node.agent.instances()[1]["slot_pod"] is not None)
    node.kubelet("delete", slot)
    poll_until(
        lambda: any("slot_released" in h for h in node.agent.instances()[1]["evidence"]),
    )
    assert worker.ask("ping") is True
    assert node.agent.reaps() == []


def test_a_slot_taken_back_is_proof_once_the_connection_is_closed(node: SlotNode) -> None:
    """The worker's process lives on without it."""
    slot, worker = registered(node, "engine-0", 1)
    poll_until(lambda: node.agent.instances()[1]["slot_pod"] is not None)
    node.kubelet("delete", slot)
    worker.tell("close")
    reap = node.agent.wait_reaped(1)
    assert reap["reason"] in {"slot_released", "process_exit"}


def test_a_container_that_takes_too_much_later_is_told_of(node: SlotNode) -> None:
    """It is served on; that it has more than it may is counted, and said with its name."""
    slot, worker = registered(node, "engine-0", 1)
    poll_until(lambda: node.agent.instances()[1]["slot_pod"])
    with (node.shared / slot / "more").open("wb") as more:
        os.truncate(more.fileno(), node.shared_memory_bytes)  # holes
    count = "slot_shared_memory_exceeded_total"
    poll_until(lambda: node.agent.metric(count) == 1)
    (told,) = poll_until(lambda: node.agent.log_records("shared_memory_exceeded"))
    assert (told["slot"], told["pod"]) == (slot, "team/engine-0")
    assert f"may have {node.shared_memory_bytes}" in told["excess"]
    assert worker.ask("store", 1)
    assert node.agent.reaps() == []


def test_all_slots_used(node: SlotNode) -> None:
    """The next pod is Pending, with the scheduler's own words."""
    for number in range(SLOTS):
        assert "slot" in node.kubelet("admit", "team", f"engine-{number}")
    assert node.kubelet("admit", "team", "late") == {"error": "Insufficient lmcache-kube.dev/kv"}


def test_workers_survive_an_agent_that_starts_again(node: SlotNode) -> None:
    """They come back through the path that they have, and so does the kubelet."""
    slot, worker = registered(node, "engine-0", 1)
    assert worker.ask("ping")
    node.agent.kill()
    poll_until(lambda: node.kubelet("devices") == {})
    assert "error" in node.kubelet("admit", "team", "pending")
    agent = node.start_agent()
    node.kubelet.wait_healthy(SLOTS)
    poll_until(lambda: worker.ask("ping") is False or None)
    worker.ask("register")
    assert worker.ask("store", 1)
    assert agent.instances()[1]["slot"] == slot


def test_a_kubelet_that_starts_again_is_registered_with(node: SlotNode) -> None:
    """Running workers do not notice, and nothing is taken for their end."""
    slot, worker = registered(node, "engine-0", 1)
    poll_until(lambda: node.agent.instances()[1]["slot_pod"] is not None)
    node.kubelet.kill()
    assert worker.ask("store", 1)
    node.kubelet.start()
    node.kubelet.wait_healthy(SLOTS)
    assert worker.ask("ping") is True
    assert node.agent.instances()[1]["slot"] == slot
    assert node.agent.reaps() == []
    assert node.agent.metric("device_plugin_registrations_total") == 2


def test_an_agent_that_stops_takes_its_devices_back(node: SlotNode) -> None:
    """And its sockets; the slots' folders stay for the next one."""
    assert node.agent.stop() == 0
    poll_until(lambda: node.kubelet("devices") == {})
    assert not any((node.folder / "agent/sockets").iterdir())
    assert (node.folder / "agent/slots/0").is_dir()


def test_no_kubelet(tmp_path: Path) -> None:
    """The plugin is off, with one line in the log; workers elsewhere are served."""
    flags = (
        f"--device-plugin-folder={tmp_path}/none",
        f"--pod-resources-socket={tmp_path}/none/kubelet.sock",
        "--device-plugin-resource=kv",
        "--device-plugin-slots=2",
        f"--slots-folder={tmp_path}/agent",
    )
    with AgentProcess(*flags) as agent, WorkerProcess(agent.url, 1) as worker:
        worker.ask("register")
        assert worker.ask("store", 1)
        (line,) = poll_until(lambda: agent.log_records("device_plugin_off"))
        assert line["reason"] == "no_kubelet"
        assert agent.status()["device_plugin"]["state"] == "no_kubelet"


def test_a_kubelet_that_answers_nobody_stops_nobody(node: SlotNode) -> None:
    """Frozen, or dead with its sockets left behind: workers that are there are served."""
    slot, worker = registered(node, "engine-0", 1)
    node.kubelet.signal(signal.SIGSTOP)
    assert worker.ask("store", 1)
    node.agent.kill()
    agent = node.start_agent()
    poll_until(lambda: worker.ask("ping") is False or None)
    worker.ask("register")
    assert agent.instances()[1]["slot"] == slot
    poll_until(lambda: agent.log_records("pod_resources_unread"))
    poll_until(lambda: agent.status()["device_plugin"]["state"] == "failing")
    assert worker.ask("store", 2)
    node.kubelet.signal(signal.SIGCONT)
    node.kubelet.wait_healthy(SLOTS)


def test_two_agents_of_one_name(node: SlotNode) -> None:
    """The one that was first stays; the other waits, says so, and takes over when it is alone."""
    flags = (
        *node.kubelet.flags,
        "--device-plugin-resource=kv",
        f"--device-plugin-slots={SLOTS}",
        f"--slots-folder={node.folder}/other",
    )
    with AgentProcess(*flags) as other:
        poll_until(lambda: other.status()["device_plugin"]["state"] == "conflict")
        assert node.agent.status()["device_plugin"]["state"] == "registered"
        assert node.agent.stop() == 0  # a killed one would leave its L1
        poll_until(lambda: other.status()["device_plugin"]["state"] == "registered")


def test_the_plugin_serves_no_unknown_slot(node: SlotNode) -> None:
    """A kubelet's checkpoint may name slots that there are no longer."""
    assert node.kubelet("start_error", "99").startswith("NOT_FOUND")


@pytest.fixture
def stub_node() -> Generator[tuple[SlotNode, StubAgent]]:
    """An agent whose releases can be held, and starts of containers that wait up to 2 s."""
    with SlotNode(["--prestart-wait-seconds=2"], make_agent=StubAgent) as node:
        assert isinstance(node.agent, StubAgent)
        yield node, node.agent


def test_a_start_waits_until_memory_is_back(stub_node: tuple[SlotNode, StubAgent]) -> None:
    """The kubelet is answered once the earlier run's memory is released."""
    node, agent = stub_node
    slot, worker = registered(node, "engine-0", 1)
    agent.hold("close", 1)
    worker.kill()
    poll_until(lambda: agent.holding("close") == 1)
    node.kubelet.tell("start", slot)
    agent.let_go("close")
    node.kubelet.result()
    assert agent.instances() == {}
    start = starts(agent, 2)[-1]
    assert start["outcome"] in {"released", "at_once"}


def test_a_start_waits_no_longer_than_it_may(stub_node: tuple[SlotNode, StubAgent]) -> None:
    """It fails open: the container starts, and people are told."""
    node, agent = stub_node
    slot, worker = registered(node, "engine-0", 1)
    agent.hold("close", 1)
    worker.kill()
    poll_until(lambda: agent.holding("close") == 1)
    assert node.kubelet("start", slot) >= 2
    start = starts(agent, 2)[-1]
    assert (start["outcome"], start["instances"]) == ("gave_up", ["1"])
    assert agent.metric("container_starts_total", outcome="gave_up") == 1
    agent.let_go("close")
    agent.wait_reaped(1)


def test_the_operator_is_told(tmp_path: Path) -> None:
    """Whose slot it is, where the plugin stands, and which start was held, and for whose sake."""
    pod = SlotPod(namespace="team", name="engine-0", container="engine")
    with (
        LinkOperator(tmp_path) as operator,
        SlotNode(["--prestart-wait-seconds=2", *operator.flags], make_agent=StubAgent) as node,
    ):
        operator.announce()
        slot, worker = registered(node, "engine-0", 1)
        stream = operator.stream()
        poll_until(lambda: stream.instance(1).slot_pod == pod)
        assert stream.instance(1).slot == slot
        poll_until(lambda: stream.state.device_plugin == "registered")
        assert isinstance(node.agent, StubAgent)
        node.agent.hold("close", 1)
        worker.kill()
        node.kubelet("start", slot)
        held = stream.entry("start_held", 1)
        assert (held.reason, held.slot) == ("gave_up", slot)
        node.agent.let_go("close")
        reaped = stream.entry("reaped", 1)
        assert (reaped.slot, reaped.slot_pod) == (slot, pod)
