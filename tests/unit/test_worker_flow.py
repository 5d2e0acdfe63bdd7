"""Agents are told where their workers run and which of them have ended, once, and rightly."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from lmcache_nodeagent.operator_link.messages import InstanceReport, SlotPod
from lmcache_operator.agents.registry import ServerRef
from lmcache_operator.errors import Forbidden
from tests.fakes.flow_world import BEGAN, SERVER, FlowWorld
from tests.fakes.pods import LOST, Json, container_status, running, terminated
from tests.fakes.scripted_agent import ScriptedAgent
from tests.fakes.virtual_loop import in_virtual_time

RUNS = container_status("engine", running(BEGAN - 100), run="containerd://a")
ENDED = container_status("engine", terminated(BEGAN - 100, BEGAN + 50, run="containerd://a"))


def triggers(agent: ScriptedAgent, report: InstanceReport) -> list[tuple[str, bool]]:
    """Return trigger and proof of each piece of evidence about a registration."""
    return [(each.trigger, each.proof) for each in agent.of(report)]


async def started(*, uid: str = "uid-w", **spec: object) -> tuple[FlowWorld, ScriptedAgent]:
    """Start an operator with one node and one worker pod that runs."""
    world = FlowWorld(**spec)
    world.put_pod(uid=uid)
    await world.start_operator()
    return world, world.agent()


class TestMapping:
    """Where a registration runs."""

    @in_virtual_time
    async def test_it_is_told_once(self) -> None:
        """The pod, its container and its run; the agent repeats it, the operator does not."""
        world, agent = await started()
        report = agent.register(7, at=BEGAN)
        await world.settle()
        (told,) = agent.mappings
        assert told.pod is not None
        assert (told.pod.namespace, told.pod.name, told.pod.uid) == ("default", "w", "uid-w")
        assert (told.pod.container, told.pod.run) == ("engine", "containerd://a")
        agent.change(agent.reports[7, report.registration])
        await world.settle(seconds=400)
        assert len(agent.mappings) == 1
        assert agent.evidence == []

    @in_virtual_time
    async def test_it_names_the_pods_owner(self) -> None:
        """The agent keeps it for the time when the pod is gone, and nobody could say it."""
        world, agent = await started()

        def adopt(document: Json) -> None:
            owner = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "rs", "uid": "u"}
            document["metadata"]["ownerReferences"] = [{**owner, "controller": True}]

        world.pods.change("default", "w", adopt)
        await world.settle()
        agent.register(7, at=BEGAN)
        await world.settle()
        (told,) = agent.mappings
        assert told.pod is not None
        assert told.pod.owner is not None
        assert (told.pod.owner.kind, told.pod.owner.name) == ("ReplicaSet", "rs")

    @in_virtual_time
    async def test_a_registration_comes_before_its_pod_has_an_address(self) -> None:
        """It is mapped as soon as the cluster catches up; until then it is counted."""
        world = FlowWorld()
        await world.start_operator()
        agent = world.agent()
        report = agent.register(7, at=BEGAN)
        await world.settle()
        assert world.flow.summary(SERVER).unmapped == {"nobody": 1}
        world.put_pod(phase="Pending", addresses=())
        await world.settle()
        assert agent.mapped_to(report) == ""
        world.put_pod()
        await world.settle()
        assert agent.mapped_to(report) == "uid-w"
        assert world.flow.summary(SERVER).unmapped == {}

    @in_virtual_time
    async def test_the_kubelet_names_the_pod_a_moment_later(self) -> None:
        """Over a slot there is no address; the pod is annotated as soon as the slot is listed."""
        world, agent = await started()
        report = agent.register(7, at=BEGAN, peer="", slot="5")
        await world.settle()
        assert world.flow.summary(SERVER).unmapped == {"slot_unlisted": 1}
        owner = SlotPod(namespace="default", name="w", container="engine")
        agent.change(msgspec.structs.replace(report, slot_pod=owner))
        await world.settle()
        assert agent.mapped_to(report) == "uid-w"
        assert world.annotation() == "7"
        assert world.flow.summary(SERVER).unmapped == {}

    @in_virtual_time
    async def test_nothing_is_mapped_before_every_namespace_is_listed(self) -> None:
        """Another namespace may hold a second owner of the address."""
        world = FlowWorld(workers={"namespaces": ["default", "other"]})
        world.put_pod()
        world.pods.reachable = False
        await world.start_operator()
        agent = world.agent()
        report = agent.register(7, at=BEGAN)
        await world.settle()
        assert agent.mapped_to(report) == ""
        world.pods.reachable = True
        await world.settle(seconds=5)
        assert agent.mapped_to(report) == "uid-w"

    @in_virtual_time
    async def test_a_mapping_outlives_the_operator(self) -> None:
        """The agent has kept it; a new operator has nothing to add."""
        world, agent = await started()
        agent.register(7, at=BEGAN)
        await world.settle()
        await world.stop_operator()
        await world.start_operator()
        await world.settle()
        assert len(agent.mappings) == 1

    @in_virtual_time
    async def test_the_owner_of_an_address_is_found_out_later(self) -> None:
        """Mapped to the pod that had the address; then it shows that another one has it now."""
        world, agent = await started()
        report = agent.register(7, at=BEGAN + 60)
        await world.settle()
        assert agent.mapped_to(report) == "uid-w"
        newer = container_status("engine", running(BEGAN + 55), run="containerd://b")
        world.put_pod("newer", newer)
        await world.settle()
        assert agent.mapped_to(report) == ""
        assert world.flow.summary(SERVER).unmapped == {"several": 1}
        world.put_pod("w", ENDED, phase="Failed")
        await world.settle()
        assert agent.mapped_to(report) == "uid-newer"
        assert agent.evidence == []

    @in_virtual_time
    async def test_an_agent_cannot_claim_another_nodes_pod(self) -> None:
        """What it repeats as its mapping counts only for pods of its node."""
        world = FlowWorld()
        world.put_pod("victim", node="n2", addresses=("10.2.0.1",))
        await world.start_operator()
        other = world.agent("n2")
        victims = other.register(1, at=BEGAN, peer="10.2.0.1")
        await world.settle()
        mapping = other.reports[1, victims.registration].mapping
        liar = world.agent("n1")
        lie = InstanceReport(
            instance_id=666,
            registration=1,
            registered_at=BEGAN,
            model="",
            peer="10.9.9.9",
            connected=True,
            state="active",
            bytes=0,
            mapping=mapping,
        )
        liar.change(lie)
        await world.settle()
        assert liar.mapped_to(lie) == ""
        assert world.annotation("victim") == "1"

    @in_virtual_time
    async def test_a_container_is_named_later(self) -> None:
        """With two containers and no name, only the pod is known; the name adds the rest."""
        world = FlowWorld()
        world.put_pod(
            "w",
            RUNS,
            container_status("proxy", running(BEGAN - 100)),
            containers=("engine", "proxy"),
        )
        await world.start_operator()
        agent = world.agent()
        agent.register(7, at=BEGAN)
        await world.settle()
        world.edit(workers={"containerName": "engine"})
        await world.settle()
        first, second = agent.mappings
        assert first.pod is not None
        assert second.pod is not None
        assert (first.pod.container, first.pod.run) == ("", "")
        assert (second.pod.container, second.pod.run) == ("engine", "containerd://a")


class TestEvidence:
    """What the cluster says of a registration's end."""

    @in_virtual_time
    async def test_a_container_ends(self) -> None:
        """Proof at once, of that run's registrations alone, and never again on that stream."""
        world, agent = await started()
        reports = [agent.register(n, at=BEGAN) for n in (7, 8)]
        world.put_pod("other", uid="uid-2", addresses=("10.1.0.2",))
        other = agent.register(9, at=BEGAN, peer="10.1.0.2")
        await world.settle()
        world.put_pod("w", ENDED)
        await world.settle()
        for report in reports:
            assert triggers(agent, report) == [("container_terminated", True)]
        assert triggers(agent, other) == []
        await world.settle(seconds=700)
        assert len(agent.evidence) == 2

    @in_virtual_time
    async def test_what_the_evidence_says(self) -> None:
        """Which registration of which boot, which run of which pod, and when it ended."""
        world, agent = await started()
        report = agent.register(7, at=BEGAN)
        await world.settle()
        world.put_pod("w", ENDED)
        await world.settle()
        (found,) = agent.evidence
        assert (found.boot_id, found.instance_id, found.registration) == (
            agent.boot_id,
            7,
            report.registration,
        )
        assert (found.pod_uid, found.container, found.run) == (
            "uid-w",
            "engine",
            "containerd://a",
        )
        assert found.finished_at == BEGAN + 50

    @in_virtual_time
    async def test_a_restart_within_the_second_of_the_registration(self) -> None:
        """The kubelet's seconds cannot tell the runs apart; their ids can."""
        world = FlowWorld()
        world.put_pod("w", container_status("engine", running(BEGAN), run="containerd://a"))
        await world.start_operator()
        agent = world.agent()
        report = agent.register(7, at=BEGAN + 0.3)
        await world.settle()
        last = terminated(BEGAN, BEGAN + 0.6, run="containerd://a")
        restarted = container_status(
            "engine", running(BEGAN + 0.8), last=last, run="containerd://b"
        )
        world.put_pod("w", restarted)
        await world.settle()
        assert triggers(agent, report) == [("container_terminated", True)]
        newer = agent.register(7, at=BEGAN + 0.9)
        await world.settle()
        assert triggers(agent, newer) == []

    @in_virtual_time
    async def test_a_run_is_replaced_and_its_start_is_not(self) -> None:
        """No kubelet says this; it is taken as a hint, and only about who was there before."""
        world, agent = await started()
        report = agent.register(7, at=BEGAN)
        await world.settle()
        world.put_pod("w", container_status("engine", running(BEGAN - 100), run="containerd://b"))
        await world.settle()
        newer = agent.register(8, at=BEGAN + 1)
        await world.settle()
        assert triggers(agent, report) == [("ended_unreported", False)]
        assert triggers(agent, newer) == []

    @in_virtual_time
    async def test_a_forced_deletion(self) -> None:
        """A hint: the object is gone, and nobody has seen the process end."""
        world, agent = await started()
        report = agent.register(7, at=BEGAN)
        await world.settle()
        world.pods.delete("default", "w")
        await world.settle()
        assert triggers(agent, report) == [("pod_gone", False)]

    @in_virtual_time
    async def test_deletions_nobody_asks_about_cost_nothing(self) -> None:
        """Only pods that something is registered in are asked for."""
        world = FlowWorld()
        world.put_pod()
        await world.start_operator()
        world.pods.delete("default", "w")
        await world.settle(seconds=5)
        assert world.pods.reads == 0

    @in_virtual_time
    async def test_a_finished_pod_is_deleted_later(self) -> None:
        """The evidence was given at the transition; the deletion is no news."""
        world, agent = await started()
        report = agent.register(7, at=BEGAN)
        await world.settle()
        world.put_pod("w", ENDED, phase="Failed")
        await world.settle()
        world.pods.delete("default", "w")
        await world.settle(seconds=5)
        assert triggers(agent, report) == [("pod_terminated", True)]

    @pytest.mark.parametrize(
        "document",
        [
            {"phase": "Failed", "reason": "Evicted"},
            {"phase": "Unknown"},
            {"conditions": ({"type": "Ready", "status": "False"},)},
        ],
        ids=["evicted", "phase unknown", "not ready"],
    )
    @in_virtual_time
    async def test_nothing_else_is_proof(self, document: Json) -> None:
        """An eviction without a word on the containers is a hint; the rest says nothing."""
        world, agent = await started()
        report = agent.register(7, at=BEGAN)
        await world.settle()
        statuses = () if document.get("reason") else (RUNS,)
        world.put_pod("w", *(statuses or ({"name": "none"},)), **document)
        await world.settle()
        expected = [("ended_unreported", False)] if "reason" in document else []
        assert triggers(agent, report) == expected

    @in_virtual_time
    async def test_a_lost_container(self) -> None:
        """The kubelet found it gone and does not know how: a hint."""
        world, agent = await started()
        report = agent.register(7, at=BEGAN)
        await world.settle()
        world.put_pod("w", container_status("engine", LOST, run=""), phase="Failed")
        await world.settle()
        assert triggers(agent, report) == [("ended_unreported", False)]

    @in_virtual_time
    async def test_a_label_is_edited(self) -> None:
        """The pod is no worker of ours any more, and runs on: its mapping is taken back."""
        world, agent = await started()
        report = agent.register(7, at=BEGAN)
        await world.settle()
        world.put_pod("w", labels={"app": "x"})
        await world.settle()
        assert agent.mapped_to(report) == ""
        assert agent.evidence == []
        world.put_pod("w")
        await world.settle()
        assert agent.mapped_to(report) == "uid-w"

    @in_virtual_time
    async def test_a_namespace_leaves_the_spec(self) -> None:
        """Its pods are no workers of this server any more, and nobody asks how they are."""
        world, agent = await started()
        report = agent.register(7, at=BEGAN)
        await world.settle()
        world.edit(workers={"namespaces": ["other"]})
        await world.settle(seconds=3)
        assert agent.mapped_to(report) == ""
        assert agent.evidence == []

    @in_virtual_time
    async def test_hints_are_disabled(self) -> None:
        """Nothing is told of ends, and everything once they are enabled."""
        world, agent = await started(reaping={"hints": {"mode": "Disabled"}})
        report = agent.register(7, at=BEGAN)
        await world.settle()
        world.put_pod("w", ENDED, phase="Failed")
        await world.settle()
        assert agent.mapped_to(report) == "uid-w"
        assert agent.evidence == []
        assert world.flow.summary(SERVER).registered_workers == 0
        world.edit()
        await world.settle()
        assert triggers(agent, report) == [("pod_terminated", True)]

    @in_virtual_time
    async def test_a_registration_after_the_end_that_is_reported(self) -> None:
        """It is of a run that is not reported yet: nothing is told, and it is counted."""
        world = FlowWorld()
        world.put_pod(
            "w", container_status("engine", running(BEGAN - 100)), containers=("engine", "proxy")
        )
        await world.start_operator()
        world.edit(workers={"containerName": "engine"})
        agent = world.agent()
        report = agent.register(7, at=BEGAN + 60)
        await world.settle()
        world.put_pod("w", ENDED, containers=("engine", "proxy"))
        await world.settle()
        assert agent.mapped_to(report) == "uid-w"
        assert agent.evidence == []
        assert world.flow.counts()["told"]["contradicted"] == 1


class TestOutages:
    """Whoever was away is told what holds now."""

    @in_virtual_time
    async def test_a_new_stream_is_told_everything_again(self) -> None:
        """The same evidence by its id, since the first may not have arrived."""
        world, agent = await started()
        report = agent.register(7, at=BEGAN)
        await world.settle()
        world.put_pod("w", ENDED)
        await world.settle()
        agent.connect(world.registry)
        await world.settle()
        first, second = agent.of(report)
        assert first.id == second.id

    @in_virtual_time
    async def test_the_operator_was_away(self) -> None:
        """Deleted meanwhile, deleted and made anew, ending, and untouched: each as it is."""
        world = FlowWorld()
        for n, name in enumerate(("gone", "anew", "ending", "kept"), 1):
            world.put_pod(name, addresses=(f"10.1.0.{n}",))
        await world.start_operator()
        agent = world.agent()
        gone, anew, ending, kept = (
            agent.register(n, at=BEGAN, peer=f"10.1.0.{n}") for n in range(1, 5)
        )
        await world.settle()
        await world.stop_operator()
        world.pods.delete("default", "gone")
        world.pods.delete("default", "anew")
        later = container_status("engine", running(BEGAN + 2), run="containerd://z")
        world.put_pod("anew", later, uid="uid-anew-2", addresses=("10.1.0.9",))
        newer = agent.register(9, at=BEGAN + 3, peer="10.1.0.9")

        def mark(document: Json) -> None:
            document["metadata"]["deletionTimestamp"] = "2030-01-01T00:00:00Z"

        world.pods.change("default", "ending", mark)
        await world.start_operator()
        await world.settle(seconds=5)
        assert triggers(agent, gone) == triggers(agent, anew) == [("pod_gone", False)]
        assert triggers(agent, ending) == triggers(agent, kept) == triggers(agent, newer) == []
        assert agent.mapped_to(newer) == "uid-anew-2"

    @in_virtual_time
    async def test_agent_and_operator_were_away(self) -> None:
        """Nothing is registered with the new agent: nothing is told."""
        world, agent = await started()
        agent.register(7, at=BEGAN)
        await world.settle()
        await world.stop_operator()
        agent.restart()
        world.pods.delete("default", "w")
        await world.start_operator()
        await world.settle(seconds=5)
        assert agent.evidence == []

    @in_virtual_time
    async def test_history_was_lost(self) -> None:
        """A pod deleted, another replaced by one of its name: the list tells, with one more."""
        world = FlowWorld()
        for n, name in enumerate(("p1", "p2"), 1):
            world.put_pod(name, addresses=(f"10.1.0.{n}",))
        await world.start_operator()
        agent = world.agent()
        first, second = (agent.register(n, at=BEGAN, peer=f"10.1.0.{n}") for n in (1, 2))
        await world.settle()
        lists = world.pods.lists
        world.pods.reachable = False
        world.pods.cut()
        world.pods.delete("default", "p1")
        world.pods.delete("default", "p2")
        later = container_status("engine", running(BEGAN + 2), run="containerd://z")
        world.put_pod("p2", later, uid="uid-p2-2", addresses=("10.1.0.3",))
        world.pods.expire()
        await world.settle(seconds=60)
        third = agent.register(3, at=BEGAN + 5, peer="10.1.0.3")
        world.pods.reachable = True
        await world.settle(seconds=5)
        assert triggers(agent, first) == triggers(agent, second) == [("pod_gone", False)]
        assert triggers(agent, third) == []
        assert agent.mapped_to(third) == "uid-p2-2"
        assert world.pods.lists == lists + 1

    @in_virtual_time
    async def test_the_api_server_was_away(self) -> None:
        """Nothing is told meanwhile, and nothing on its return if nothing happened."""
        world, agent = await started()
        agent.register(7, at=BEGAN)
        await world.settle()
        world.pods.reachable = world.cluster.reachable = False
        world.pods.cut()
        await world.settle(seconds=300)
        assert not world.flow.summary(SERVER).pods_known
        world.pods.reachable = world.cluster.reachable = True
        await world.settle(seconds=5)
        assert world.flow.summary(SERVER).pods_known
        assert agent.evidence == []

    @in_virtual_time
    async def test_an_address_is_used_again_behind_a_silent_watch(self) -> None:
        """Mapped to the pod that was known; when it shows that this one is gone, it is the other's.

        No evidence reaches the worker that lives.
        """
        world, agent = await started()
        world.pods.reachable = False
        world.pods.cut()
        world.pods.delete("default", "w")
        later = container_status("engine", running(BEGAN + 20), run="containerd://z")
        world.put_pod("w2", later)
        report = agent.register(7, at=BEGAN + 30)
        await world.settle(seconds=60)
        world.pods.expire()
        world.pods.reachable = True
        await world.settle(seconds=5)
        assert agent.mapped_to(report) == "uid-w2"
        assert agent.evidence == []


class TestSeveral:
    """More than one server, node or namespace."""

    @in_virtual_time
    async def test_each_server_has_its_own_agents(self) -> None:
        """Two servers select the same pod: each agent is told of its own registrations."""
        world, agent = await started()
        second = ServerRef("default", "kv2", "uid-kv2")
        world.edit(
            second, workers={"podSelector": {"matchLabels": {"lmcache-kube.dev/server": "kv"}}}
        )
        other = ScriptedAgent(second, "n1")
        world.agents["n1 of kv2"] = other
        other.connect(world.registry)
        mine, theirs = agent.register(7, at=BEGAN), other.register(8, at=BEGAN)
        await world.settle()
        assert world.annotation() == "7,8"
        lists = world.pods.lists
        world.put_pod("w", ENDED)
        await world.settle()
        assert triggers(agent, mine) == triggers(other, theirs) == [("container_terminated", True)]
        assert world.pods.lists == lists == 1

    @in_virtual_time
    async def test_a_namespace_that_we_may_not_read_does_not_hold_up_the_others(self) -> None:
        """What happens in it is unknown; that is reported."""
        world = FlowWorld(workers={"namespaces": ["default", "closed"]})
        world.put_pod()
        world.pods.refusal = Forbidden(403, "Forbidden", "no")
        await world.start_operator()
        agent = world.agent()
        report = agent.register(7, at=BEGAN)
        await world.settle(seconds=5)
        assert agent.mapped_to(report) == ""
        assert not world.flow.summary(SERVER).pods_known
        world.pods.refusal = None
        await world.settle(seconds=60)
        assert agent.mapped_to(report) == "uid-w"

    @in_virtual_time
    async def test_an_agent_connects_before_its_server_is_known(self) -> None:
        """It is taken in with the server."""
        world = FlowWorld()
        world.put_pod()
        await world.start_operator()
        world.remove()
        agent = world.agent()
        report = agent.register(7, at=BEGAN)
        await world.settle()
        assert agent.mapped_to(report) == ""
        world.edit()
        await world.settle()
        assert agent.mapped_to(report) == "uid-w"

    @in_virtual_time
    async def test_two_agents_of_a_node_overlap(self) -> None:
        """While one replaces the other, whoever comes back last; then the one that is left."""
        world, old = await started()
        old.register(7, at=BEGAN)
        new = ScriptedAgent(SERVER, "n1", pod="another")
        world.agents["n1, new"] = new
        new.connect(world.registry)
        report = new.register(8, at=BEGAN)
        await world.settle()
        assert new.mapped_to(report) == "uid-w"
        old.connect(world.registry)
        await world.settle()
        old.disconnect()
        world.put_pod("w", ENDED)
        await world.settle()
        assert triggers(new, report) == [("container_terminated", True)]

    @in_virtual_time
    async def test_memory_follows_what_is_there(self) -> None:
        """Pods that came and went leave nothing behind."""
        world, agent = await started()
        for n in range(50):
            world.put_pod(f"p{n}", addresses=(f"10.2.0.{n}",))
            report = agent.register(n, at=BEGAN, peer=f"10.2.0.{n}")
            await world.settle(seconds=0.3)
            world.pods.delete("default", f"p{n}")
            await world.settle(seconds=0.3)
            agent.drop(report)
        await world.settle()
        assert world.flow.gauges()["pods_tracked"] == 1
        known = world.flow._servers[SERVER]
        assert known.pods.absences == {}


class TestSummary:
    """What the status is made of."""

    @in_virtual_time
    async def test_counts_follow_what_agents_say(self) -> None:
        """Suspects, those that are being released, and those whose end is proven."""
        world, agent = await started()
        for n, state in enumerate(("active", "idle", "suspect", "closed", "releasing")):
            agent.register(n, at=BEGAN, state=state)
        await world.settle()
        summary = world.flow.summary(SERVER)
        assert (summary.registered_workers, summary.suspects) == (4, 2)
        world.put_pod("w", ENDED, phase="Failed")
        await world.settle()
        assert world.flow.summary(SERVER).registered_workers == 0

    @in_virtual_time
    async def test_changes_are_told(self) -> None:
        """So that a status pass is made; and none while nothing changes."""
        world, agent = await started()
        await world.settle()
        world.changes.clear()
        agent.register(7, at=BEGAN)
        await world.settle()
        assert set(world.changes) == {SERVER}
        world.changes.clear()
        await world.settle(seconds=200)
        assert world.changes == []

    @in_virtual_time
    async def test_an_unknown_server(self) -> None:
        """Nothing is known of it."""
        world, _ = await started()
        assert world.flow.summary(ServerRef("a", "b", "c")).registered_workers == 0
        await asyncio.sleep(0)
