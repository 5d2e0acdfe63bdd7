"""Pods say which instances run in them, and nothing else of a pod is touched."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_operator.agents.registry import ServerRef
from lmcache_operator.cluster import KubeObject
from lmcache_operator.errors import ApiError, Forbidden
from lmcache_operator.names import INSTANCE_IDS_ANNOTATION
from lmcache_operator.workers.annotations import LONGEST_VALUE, annotation_value
from tests.fakes.flow_world import BEGAN, FlowWorld
from tests.fakes.pods import Json, container_status, terminated
from tests.fakes.virtual_loop import in_virtual_time

ENDED = container_status("engine", terminated(BEGAN - 100, BEGAN + 50, run="containerd://a"))


class TestValue:
    """How ids are written."""

    @pytest.mark.parametrize(
        ("ids", "value"),
        [((), None), ((7,), "7"), ((40, 7, 12), "7,12,40"), ((0, 2**63 - 1), f"0,{2**63 - 1}")],
    )
    def test_sorted_decimal_numbers(self, ids: tuple[int, ...], value: str | None) -> None:
        """By number, not by digits."""
        assert annotation_value(ids) == value

    @given(st.sets(st.integers(0, 2**63 - 1), max_size=400))
    def test_what_does_not_fit_is_counted(self, ids: set[int]) -> None:
        """Never longer than the limit; every id is there, or in the count."""
        value = annotation_value(ids) or ""
        assert len(value) <= LONGEST_VALUE
        parts = value.split(",") if value else []
        left_out = int(parts.pop().removeprefix("...+")) if "..." in value else 0
        assert [int(part) for part in parts] == sorted(ids)[: len(parts)]
        assert len(parts) + left_out == len(ids)

    def test_as_many_as_fit(self) -> None:
        """Seven characters each, comma included; the last part says how many are missing."""
        value = annotation_value(range(100_000, 100_200))
        assert value is not None
        assert value.endswith(",...+55")
        assert LONGEST_VALUE - 7 < len(value) <= LONGEST_VALUE


async def started(**spec: object) -> FlowWorld:
    """Start an operator with one node and one worker pod that runs."""
    world = FlowWorld(**spec)
    world.put_pod()
    await world.start_operator()
    world.agent()
    return world


class TestUpkeep:
    """The annotation follows what the node's agent says."""

    @in_virtual_time
    async def test_it_is_kept_current(self) -> None:
        """Within two seconds, with one patch for each change, and removed with the last."""
        world = await started()
        agent = world.agent()
        first = agent.register(12, at=BEGAN)
        await world.settle()
        assert world.annotation() == "12"
        second = agent.register(7, at=BEGAN)
        await world.settle()
        assert world.annotation() == "7,12"
        agent.drop(first)
        await world.settle()
        assert world.annotation() == "7"
        agent.drop(second)
        await world.settle()
        assert world.annotation() is None
        assert len(world.cluster.patches) == 4
        await world.settle(seconds=700)
        assert len(world.cluster.patches) == 4

    @in_virtual_time
    async def test_somebody_else_edits_it(self) -> None:
        """It is what agents say again."""
        world = await started()
        world.agent().register(7, at=BEGAN)
        await world.settle()

        def edit(document: Json) -> None:
            document["metadata"]["annotations"][INSTANCE_IDS_ANNOTATION] = "1,2,3"

        world.pods.change("default", "w", edit)
        await world.settle(seconds=70)
        assert world.annotation() == "7"

    @in_virtual_time
    async def test_no_pod_is_patched_for_nothing(self) -> None:
        """Pods without instances, unrelated pods, and pods of nodes that nobody speaks for."""
        world = await started()
        world.put_pod("unrelated", labels={"app": "x"}, addresses=("10.1.0.2",))
        world.put_pod("elsewhere", node="n2", addresses=("10.2.0.1",))
        world.put_pod("unbound", node="", addresses=(), phase="Pending")
        await world.settle(seconds=130)
        assert world.cluster.patches == []

    @in_virtual_time
    async def test_a_pod_in_deletion_is_left_alone(self) -> None:
        """Whatever is registered in it meanwhile."""
        world = await started()
        agent = world.agent()
        report = agent.register(7, at=BEGAN)
        await world.settle()

        def mark(document: Json) -> None:
            document["metadata"]["deletionTimestamp"] = "2030-01-01T00:00:00Z"

        world.pods.change("default", "w", mark)
        await world.settle()
        agent.drop(report)
        agent.register(8, at=BEGAN)
        await world.settle(seconds=70)
        assert world.annotation() == "7"
        assert len(world.cluster.patches) == 1

    @in_virtual_time
    async def test_the_agent_is_away(self) -> None:
        """Its workers go on without it: their pods keep saying so until it says otherwise."""
        world = await started()
        agent = world.agent()
        agent.register(7, at=BEGAN)
        await world.settle()
        agent.disconnect()
        await world.settle(seconds=130)
        assert world.annotation() == "7"
        agent.restart()
        agent.connect(world.registry)
        await world.settle()
        assert world.annotation() is None

    @in_virtual_time
    async def test_the_operator_was_away(self) -> None:
        """A new one corrects what it finds, once the agent has spoken."""
        world = await started()
        agent = world.agent()
        report = agent.register(7, at=BEGAN)
        await world.settle()
        await world.stop_operator()
        agent.drop(report)
        del world.agents["n1"]
        await world.start_operator()
        await world.settle(seconds=70)
        assert world.annotation() == "7"
        agent.connect(world.registry)
        await world.settle()
        assert world.annotation() is None

    @in_virtual_time
    async def test_an_instance_that_is_being_released_is_gone(self) -> None:
        """Nothing is served to it any more."""
        world = await started()
        world.agent().register(7, at=BEGAN, state="releasing")
        await world.settle()
        assert world.annotation() is None


class TestSwitch:
    """`spec.workers.annotate`."""

    @in_virtual_time
    async def test_off_takes_ours_off_once(self) -> None:
        """What somebody writes there afterwards is theirs."""
        world = await started()
        world.agent().register(7, at=BEGAN)
        await world.settle()
        world.edit(workers={"annotate": False})
        await world.settle()
        assert world.annotation() is None

        def write(document: Json) -> None:
            document["metadata"]["annotations"] = {INSTANCE_IDS_ANNOTATION: "mine"}

        world.pods.change("default", "w", write)
        await world.settle(seconds=130)
        assert world.annotation() == "mine"
        world.edit()
        await world.settle()
        assert world.annotation() == "7"

    @in_virtual_time
    async def test_off_from_the_start_of_an_operator(self) -> None:
        """Also without an agent."""
        world = await started()
        world.agent().register(7, at=BEGAN)
        await world.settle()
        world.edit(workers={"annotate": False})
        await world.stop_operator()
        world.agents.clear()
        await world.start_operator()
        await world.settle()
        assert world.annotation() is None

    @in_virtual_time
    async def test_the_server_is_deleted(self) -> None:
        """Its workers are nobody's, unless another server has them too."""
        world = await started()
        world.agent().register(7, at=BEGAN)
        await world.settle()
        same = {"podSelector": {"matchLabels": {"lmcache-kube.dev/server": "kv"}}}
        second = ServerRef("default", "kv2", "uid-kv2")
        world.edit(second, workers=same)
        world.remove()
        await world.settle()
        assert world.annotation() == "7"
        world.remove(second)
        await world.settle()
        assert world.annotation() is None

    @in_virtual_time
    async def test_the_namespace_leaves_the_spec(self) -> None:
        """Its pods are no workers any more."""
        world = await started()
        world.agent().register(7, at=BEGAN)
        await world.settle()
        world.edit(workers={"namespaces": ["other"]})
        await world.settle()
        assert world.annotation() is None


class TestRefusals:
    """Nobody waits for an annotation, and no refusal is asked for again and again."""

    @pytest.mark.parametrize(
        "refusal",
        [
            ApiError(422, "Invalid", "metadata.annotations: Too long: may not be more than 262144"),
            Forbidden(403, "Forbidden", "pods is forbidden"),
        ],
        ids=["full", "forbidden"],
    )
    @in_virtual_time
    async def test_it_is_tried_again_minutes_later(self, refusal: ApiError) -> None:
        """And written once that is possible."""
        world = await started()
        world.cluster.refusal = lambda patch: refusal if "metadata" in patch else None
        agent = world.agent()
        agent.register(7, at=BEGAN)
        await world.settle(seconds=290)
        assert len(world.cluster.patches) == 1
        world.cluster.refusal = lambda _: None
        await world.settle(seconds=120)
        assert world.annotation() == "7"

    @in_virtual_time
    async def test_what_is_refused_now_may_change(self) -> None:
        """Other ids are another patch, unless the whole namespace is closed."""
        world = await started()
        full = ApiError(422, "Invalid", "too long")
        world.cluster.refusal = lambda patch: full if "metadata" in patch else None
        agent = world.agent()
        report = agent.register(7, at=BEGAN)
        await world.settle()
        agent.drop(report)
        agent.register(8, at=BEGAN)
        await world.settle()
        assert len(world.cluster.patches) == 2

    @in_virtual_time
    async def test_a_closed_namespace_costs_one_try_for_all_its_pods(self) -> None:
        """Not one for each."""
        world = FlowWorld()
        for n in range(40):
            world.put_pod(f"w{n}", addresses=(f"10.1.0.{n}",))
        await world.start_operator()
        no = Forbidden(403, "Forbidden", "no")
        world.cluster.refusal = lambda patch: no if "metadata" in patch else None
        for n in range(40):
            world.agent().register(n, at=BEGAN, peer=f"10.1.0.{n}")
        await world.settle(seconds=200)
        assert len(world.cluster.patches) <= 4  # as many as are written at once

    @in_virtual_time
    async def test_an_outage(self) -> None:
        """The latest value is written when it is over."""
        world = await started()
        world.cluster.reachable = False
        agent = world.agent()
        agent.register(7, at=BEGAN)
        await world.settle(seconds=5)
        agent.register(8, at=BEGAN)
        await world.settle(seconds=5)
        world.cluster.reachable = True
        await world.settle(seconds=5)
        assert world.annotation() == "7,8"

    @in_virtual_time
    async def test_the_pod_is_another_one_by_then(self) -> None:
        """The patch is guarded by the uid."""
        world = await started()
        world.cluster.reachable = False
        world.agent().register(7, at=BEGAN)
        await world.settle(seconds=5)
        world.pods.delete("default", "w")
        world.put_pod("w", ENDED, uid="uid-w-2", phase="Failed", addresses=("10.1.0.3",))
        world.cluster.reachable = True
        await world.settle(seconds=5)
        assert world.annotation() is None

    @in_virtual_time
    async def test_writes_of_one_pod_keep_their_order(self) -> None:
        """A change while the first patch is on its way comes after it."""
        world = await started()
        agent = world.agent()
        report = agent.register(7, at=BEGAN)

        def swap(patch: KubeObject) -> None:
            world.cluster.refusal = lambda _: None
            if "metadata" in patch:
                agent.drop(report)
                agent.register(8, at=BEGAN)

        world.cluster.refusal = swap
        await world.settle(seconds=2)
        assert world.annotation() == "8"
