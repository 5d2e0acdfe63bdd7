"""The worker flow with a real API server: what it writes there, and what it makes of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from functools import partial
from typing import Any

import pytest

from lmcache_nodeagent.operator_link.messages import InstanceReport, JournalEntry, PodOwner, PodRun
from lmcache_operator.agents.registry import ServerRef
from lmcache_operator.names import INSTANCE_IDS_ANNOTATION, WORKER_LABEL
from tests.cluster.api import Api
from tests.cluster.control_plane import ControlPlane
from tests.cluster.running_flow import RunningFlow
from tests.cluster.story_pods import MERGE, StoryPod
from tests.fakes.scripted_agent import ScriptedAgent
from tests.polling import BUSY_SECONDS, poll_until

LABELS = {WORKER_LABEL: "kv"}

Run = Callable[..., RunningFlow]


@pytest.fixture
def server(api: Api, servers: str, namespace: str) -> ServerRef:
    """A server of this test's own."""
    body = {
        "apiVersion": "lmcache-kube.dev/v1alpha1",
        "kind": "LMCacheServer",
        "metadata": {"name": "kv"},
        "spec": {"cache": {"size": "1Gi"}},
    }
    answer = api.request("POST", servers, body)
    assert answer.ok, answer.message
    return ServerRef(namespace, "kv", answer.body["metadata"]["uid"])


@pytest.fixture
def agent(server: ServerRef) -> ScriptedAgent:
    """The agent of node n1."""
    return ScriptedAgent(server, "n1")


@pytest.fixture
def run(control_plane: ControlPlane, server: ServerRef, agent: ScriptedAgent) -> Run:
    """Make an operator's flow, to be entered."""
    return lambda **spec: RunningFlow(control_plane.kubeconfig, server, agent, **spec)


@pytest.fixture
def flow(run: Run) -> Generator[RunningFlow]:
    """A flow that runs."""
    with run() as flow:
        yield flow


def make(api: Api, namespace: str, name: str, address: str = "10.1.0.1", **more: Any) -> StoryPod:  # noqa: ANN401
    """Create a worker pod that runs."""
    more = {"node": "n1", "addresses": [address], "labels": LABELS, **more}
    pod = StoryPod(api, namespace, name, **more)
    pod.run()
    return pod


def registered(
    flow: RunningFlow, agent: ScriptedAgent, pod: StoryPod, instance_id: int
) -> InstanceReport:
    """Have a worker in a pod register, and wait until its pod is known."""
    peer = pod.addresses[-1]
    report = flow.register(agent, instance_id, at=time.time(), peer=peer)
    poll_until(lambda: flow.mapped_to(agent, report) == pod.uid, "its pod")
    return report


def managers(pod: StoryPod) -> dict[str, list[str]]:
    """Return who has written what of a pod's metadata, status writes left aside."""
    found: dict[str, list[str]] = {}
    for field in pod.read()["metadata"]["managedFields"]:
        if field.get("subresource") != "status":
            written = field["fieldsV1"].get("f:metadata", {})
            found[field["manager"]] = sorted(written)
            if field["manager"] == "lmcache-operator":
                assert list(field["fieldsV1"]) == ["f:metadata"]
                assert list(written) == ["f:annotations"]
                keys = [key for key in written["f:annotations"] if key != "."]
                assert keys == [f"f:{INSTANCE_IDS_ANNOTATION}"]
    return found


class TestAnnotation:
    """The one thing of a user's pod that we write."""

    def test_nothing_else_is_touched(
        self, api: Api, namespace: str, agent: ScriptedAgent, flow: RunningFlow
    ) -> None:
        """By the API server's own book-keeping: of one pod one annotation, of others nothing."""
        worker = make(api, namespace, "w")
        idle = make(api, namespace, "idle", "10.1.0.2")
        other = make(api, namespace, "other", "10.1.0.3", labels={"app": "x"})
        reports = [registered(flow, agent, worker, n) for n in (12, 7)]
        poll_until(lambda: worker.annotated_ids() == [7, 12], "the annotation")
        assert managers(worker)["lmcache-operator"] == ["f:annotations"]
        for pod in (idle, other):
            assert "lmcache-operator" not in managers(pod)
        assert "finalizers" not in worker.read()["metadata"]
        for report in reports:
            flow.do(partial(agent.drop, report))
        poll_until(lambda: worker.annotated_ids() == [], "that it is gone")
        annotations = worker.read()["metadata"].get("annotations", {})
        assert INSTANCE_IDS_ANNOTATION not in annotations

    def test_soon_after_a_registration(
        self, api: Api, namespace: str, agent: ScriptedAgent, flow: RunningFlow
    ) -> None:
        """Within 2 s, and what a busy machine adds; the median of several."""
        pod = make(api, namespace, "w")
        took: list[float] = []
        for n in range(5):
            began = time.monotonic()
            flow.register(agent, n, at=time.time(), peer="10.1.0.1")
            poll_until(lambda: len(pod.annotated_ids()) == len(took) + 1, "the annotation")
            took.append(time.monotonic() - began)
        assert sorted(took)[2] < 2 + BUSY_SECONDS

    def test_a_pod_whose_annotations_are_full(
        self, api: Api, namespace: str, agent: ScriptedAgent, flow: RunningFlow
    ) -> None:
        """It is refused once, and the others are served."""
        full = make(api, namespace, "full")
        filler = {"metadata": {"annotations": {"filler": "x" * (256 * 1024 - 10)}}}
        answer = api.request("PATCH", full.path, filler, content_type=MERGE)
        assert answer.ok, answer.message
        pod = make(api, namespace, "w", "10.1.0.2")
        registered(flow, agent, full, 1)
        registered(flow, agent, pod, 2)
        poll_until(lambda: pod.annotated_ids() == [2], "the other one's annotation")
        counts = flow.flow.counts()["annotations"]
        poll_until(lambda: counts["refused"] == 1, "the refusal")
        full.write(ready=False)  # news about it are no reason to try again
        registered(flow, agent, full, 3)
        poll_until(lambda: counts["refused"] == 2, "one for other ids")

    def test_it_can_be_switched_off(
        self, api: Api, namespace: str, agent: ScriptedAgent, flow: RunningFlow
    ) -> None:
        """Then ours is taken off."""
        pod = make(api, namespace, "w")
        registered(flow, agent, pod, 7)
        poll_until(lambda: pod.annotated_ids() == [7], "the annotation")
        flow.edit(workers={"annotate": False})
        poll_until(lambda: pod.annotated_ids() == [], "that it is gone")

    def test_a_pod_in_deletion_is_left_alone(
        self, api: Api, namespace: str, agent: ScriptedAgent, flow: RunningFlow
    ) -> None:
        """Whoever leaves meanwhile; and nothing holds it up."""
        pod = make(api, namespace, "w")
        report = registered(flow, agent, pod, 7)
        poll_until(lambda: pod.annotated_ids() == [7], "the annotation")
        pod.delete()
        other = make(api, namespace, "other", "10.1.0.2")
        registered(flow, agent, other, 8)
        flow.do(lambda: agent.drop(report))
        poll_until(lambda: other.annotated_ids() == [8], "the other one's")
        assert pod.annotated_ids() == [7]
        pod.delete(grace_seconds=0)
        assert pod.read() == {}


class TestEvidence:
    """What is told of pods that end."""

    def test_each_way_to_end(
        self, api: Api, namespace: str, agent: ScriptedAgent, flow: RunningFlow
    ) -> None:
        """Forced; marked, and then ended; succeeded; evicted; lost its label; not ready."""
        names = ("forced", "marked", "succeeded", "evicted", "relabelled", "unready")
        pods = {name: make(api, namespace, name, f"10.1.0.{n}") for n, name in enumerate(names, 1)}
        reports = {name: registered(flow, agent, pods[name], n) for n, name in enumerate(names, 1)}
        pods["forced"].delete(grace_seconds=0)
        pods["marked"].delete()
        pods["succeeded"].end(phase="Succeeded", code=0)
        pods["evicted"].write(phase="Failed", reason="Evicted", containerStatuses=[])
        pods["relabelled"].relabel(**{WORKER_LABEL: None})
        pods["unready"].write(ready=False)

        def told() -> dict[str, list[tuple[str, bool]]]:
            return {name: flow.triggers(agent, report) for name, report in reports.items()}

        first: dict[str, list[tuple[str, bool]]] = {
            "forced": [("pod_gone", False)],
            "marked": [],
            "succeeded": [("pod_terminated", True)],
            "evicted": [("ended_unreported", False)],
            "relabelled": [],
            "unready": [],
        }
        poll_until(lambda: told() == first, f"{first}")
        poll_until(lambda: flow.mapped_to(agent, reports["relabelled"]) == "", "that it left")
        pods["marked"].end(phase="Failed")
        second = {**first, "marked": [("pod_terminated", True)]}
        poll_until(lambda: told() == second, f"{second}")
        # Their deletion says nothing new; the proof about another pod comes after it.
        for name in ("marked", "succeeded", "evicted"):
            pods[name].delete(grace_seconds=0)
        pods["unready"].end_container()
        third = {**second, "unready": [("container_terminated", True)]}
        poll_until(lambda: told() == third, f"{third}")

    def test_operators_come_and_go(
        self, api: Api, namespace: str, agent: ScriptedAgent, run: Run
    ) -> None:
        """Deleted while none is there, made anew under the same name, untouched."""
        pods = {name: make(api, namespace, name, f"10.1.0.{n}") for n, name in enumerate("abc", 1)}
        with run() as flow:
            reports = {
                name: registered(flow, agent, pods[name], n) for n, name in enumerate("abc", 1)
            }
        for name in "ab":
            pods[name].delete(grace_seconds=0)
        anew = make(api, namespace, "b", "10.1.0.9")
        with run() as flow:
            newer = registered(flow, agent, anew, 9)
            for name in "ab":
                ended = reports[name]
                poll_until(partial(flow.triggers, agent, ended), f"the end of {name}")
                assert flow.triggers(agent, ended) == [("pod_gone", False)]
            assert flow.triggers(agent, newer) == flow.triggers(agent, reports["c"]) == []
            poll_until(lambda: anew.annotated_ids() == [9], "the annotation")

    def test_addresses_of_either_family(
        self, api: Api, namespace: str, agent: ScriptedAgent, flow: RunningFlow
    ) -> None:
        """A worker may connect from the second one."""
        pod = make(api, namespace, "w", addresses=["10.1.0.1", "fd00::1"])
        registered(flow, agent, pod, 7)

    def test_host_network_pods_cannot_be_told_apart(
        self, api: Api, namespace: str, agent: ScriptedAgent, flow: RunningFlow
    ) -> None:
        """So neither is mapped, and the reason is counted."""
        for n in (1, 2):
            make(api, namespace, f"h{n}", "10.0.0.1", spec={"hostNetwork": True})
        report = flow.register(agent, 7, at=time.time(), peer="10.0.0.1")
        poll_until(lambda: flow.summary().unmapped == {"nobody": 1})
        assert flow.mapped_to(agent, report) == ""


class TestEvents:
    """What people see."""

    def test_on_pod_and_server_and_once(
        self, api: Api, namespace: str, servers: str, agent: ScriptedAgent, run: Run
    ) -> None:
        """Whoever repeats it; it is acknowledged once the total is in the status."""
        pod = make(api, namespace, "w")
        entry = _entry(PodRun(namespace=namespace, name="w", uid=pod.uid))
        for _ in range(2):
            with run() as flow:
                agent.acknowledged = 0
                flow.do(lambda: agent.write(entry))
                poll_until(lambda: flow.summary().reaps_total == 1, "the reap")
                stored = {"total": 1, "lastReapTime": flow.summary().last_reap_time}
                status = {"status": {"reaping": stored}}
                path = f"{servers}/kv/status"
                answer = api.request("PATCH", path, status, content_type=MERGE)
                assert answer.ok, answer.message
                poll_until(lambda: flow.acknowledged(agent) == 1, "its acknowledgement")
        found = _events(api, namespace)
        assert {event["involvedObject"]["kind"] for event in found} == {"LMCacheServer", "Pod"}
        assert len(found) == 2
        for event in found:
            assert event["reason"] == "WorkerReaped"
            assert event["message"].startswith("Reaped instance 7 of demo/model on node n1")
            assert event["source"] == {"component": "lmcache-operator", "host": "n1"}

    def test_on_the_owner_of_a_pod_that_is_gone(
        self, api: Api, namespace: str, agent: ScriptedAgent, flow: RunningFlow
    ) -> None:
        """A ReplicaSet here."""
        owner = PodOwner(api_version="apps/v1", kind="ReplicaSet", name="rs", uid="u-1")
        where = PodRun(namespace=namespace, name="gone", uid="u-2", owner=owner)
        flow.do(lambda: agent.write(_entry(where)))
        found = poll_until(
            lambda: [e for e in _events(api, namespace) if e["involvedObject"]["kind"] != "Pod"],
        )
        poll_until(lambda: len(_events(api, namespace)) == 2)
        involved = [e["involvedObject"] for e in _events(api, namespace)]
        assert {(each["kind"], each["name"]) for each in involved} == {
            ("ReplicaSet", "rs"),
            ("LMCacheServer", "kv"),
        }
        assert found

    def test_a_namespace_that_ends(
        self, api: Api, namespace: str, agent: ScriptedAgent, run: Run
    ) -> None:
        """Its Event can never be; the server's can, and the agent is let go."""
        doomed = f"{namespace}-doomed"
        assert api.request("POST", "/api/v1/namespaces", {"metadata": {"name": doomed}}).ok
        make(api, doomed, "w")
        assert api.request("DELETE", f"/api/v1/namespaces/{doomed}").ok
        with run(workers={"namespaces": [doomed]}) as flow:
            where = PodRun(namespace=doomed, name="w", uid="u")
            flow.do(lambda: agent.write(_entry(where, kind="cancelled")))
            poll_until(lambda: flow.acknowledged(agent) == 1, "its acknowledgement")
        assert [e["involvedObject"]["kind"] for e in _events(api, namespace)] == ["LMCacheServer"]
        path = f"/api/v1/namespaces/{doomed}/pods/w"
        api.request("DELETE", path, {"kind": "DeleteOptions", "gracePeriodSeconds": 0})


def _entry(where: PodRun, kind: Any = "reaped") -> JournalEntry:  # noqa: ANN401  # an EntryKind
    return JournalEntry(
        seq=1,
        kind=kind,
        instance_id=7,
        registration=1,
        model="demo/model",
        reason="container_terminated",
        evidence=(),
        silent_seconds=1.0,
        happened_at=time.time(),
        released_bytes=2**29,
        release_seconds=0.1,
        latency_seconds=0.3,
        mapping=where,
    )


def _events(api: Api, namespace: str) -> list[dict[str, Any]]:
    answer = api.request("GET", f"/api/v1/namespaces/{namespace}/events")
    return [e for e in answer.body["items"] if e["metadata"]["name"].startswith("lmcache-")]
