"""What is wrong with a server is said on it, with the fix, and no more often than needed."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from lmcache_operator.api.crd import definition
from tests.cluster.api import APPLY
from tests.cluster.control_plane import ControlPlane
from tests.cluster.operator_process import OperatorProcess
from tests.cluster.reconcile_world import Json, World
from tests.polling import poll_until

IDLE_SECONDS = 60.0


NO_HINTS = {"hints": {"mode": "Disabled"}}
"""For tests without agents: nothing waits for them."""


def wait_event(world: World, reason: str) -> Json:
    """Wait for an Event on the server."""

    def found() -> Json | None:
        return next((e for e in world.events() if e["reason"] == reason), None)

    return poll_until(found, f"an Event {reason}")


@pytest.mark.usefixtures("operator")
def test_a_node_that_matches_makes_a_server_ready(world: World) -> None:
    """No node, then one, then its agent: each step is a reason in the column Status."""
    world.apply(reaping=NO_HINTS)
    condition = world.wait_condition("Ready", "False", "NoNodesMatch")
    assert "nodeSelector" in condition["message"]
    wait_event(world, "NoNodesMatch")
    world.add_node()
    (pod,) = world.wait_pods(1)
    world.wait_condition("Available", "False", "AgentsStarting")
    world.make_ready(pod)
    world.wait_condition("Ready", "True", "Ready")
    status = world.server()["status"]
    assert (status["desiredNodes"], status["readyNodes"], status["updatedNodes"]) == (1, 1, 1)
    assert status["observedGeneration"] == world.server()["metadata"]["generation"]
    assert status["reaping"] == {"total": 0, "suspects": 0}


@pytest.mark.usefixtures("operator")
def test_an_image_that_cannot_be_pulled(world: World) -> None:
    """Said with the image; the same whichever of its two words the kubelet has just now."""
    world.add_node()
    world.apply(image={"repository": "r.example/typo", "tag": "1"})
    (pod,) = world.wait_pods(1)
    waiting = {"reason": "ErrImagePull", "message": "not found"}
    world.report_container(pod, {"waiting": waiting})
    condition = world.wait_condition("Ready", "False", "ImagePullFailed")
    assert "r.example/typo:1" in condition["message"]
    assert "spec.image" in condition["message"]
    assert "imagePullSecrets" in wait_event(world, "ImagePullFailed")["message"]
    again = {"waiting": {"reason": "ImagePullBackOff", "message": "Back-off pulling image"}}
    world.report_container(pod, again)
    world.make_ready(pod)
    world.wait_condition("Available", "True", "AgentsReady")
    assert sum(event["reason"] == "ImagePullFailed" for event in world.events()) == 1


@pytest.mark.usefixtures("operator")
def test_pods_that_the_pod_security_level_refuses(world: World) -> None:
    """Which the DaemonSet itself does not say: only an Event on it does. Without ways, any fits."""
    label = {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}}
    path = f"/api/v1/namespaces/{world.namespace}"
    merge = "application/merge-patch+json"
    assert world.api.request("PATCH", path, label, content_type=merge).ok
    world.add_node()
    world.apply()
    condition = world.wait_condition("Ready", "False", "PodSecurityRefused")
    assert "hostPath" in condition["message"]
    assert "pod-security.kubernetes.io/enforce=privileged" in condition["message"]
    assert "devicePlugin" in wait_event(world, "PodSecurityRefused")["message"]
    world.patch_server({"spec": {"transport": {"devicePlugin": {"mode": "Disabled"}}}})
    (pod,) = world.wait_pods(1)
    world.make_ready(pod)
    world.wait_condition("Available", "True", "AgentsReady")


@pytest.mark.usefixtures("operator")
def test_a_runtime_class_that_does_not_exist(world: World) -> None:
    """Refused at the creation of pods; the API server's words are passed on."""
    world.add_node()
    world.apply(runtimeClassName="nope")
    condition = world.wait_condition("Ready", "False", "PodsRefused")
    assert '"nope" not found' in condition["message"]


@pytest.mark.usefixtures("operator")
def test_a_spec_that_no_pod_can_have(world: World) -> None:
    """What the API server takes and agents cannot be made of; nothing is applied, then all is."""
    volume = {"name": "agent-shm", "emptyDir": {}}
    world.apply(volumes=[volume])
    condition = world.wait_condition("Ready", "False", "InvalidSpec")
    assert 'spec.volumes[0].name: "agent-shm"' in condition["message"]
    wait_event(world, "InvalidSpec")
    assert world.get("DaemonSet", "kv") is None
    world.patch_server({"spec": {"volumes": None}})
    world.wait_condition("Ready", "False", "NoNodesMatch")


@pytest.mark.usefixtures("operator")
def test_what_only_the_api_server_can_judge(world: World) -> None:
    """A volume of no known type is refused when the DaemonSet is applied; its words are shown."""
    world.apply(volumes=[{"name": "odd", "noSuchSource": {}}])
    condition = world.wait_condition("Ready", "False", "ApplyRefused")
    assert "noSuchSource" in condition["message"]
    world.patch_server({"spec": {"volumes": None}})
    world.wait_condition("Ready", "False", "NoNodesMatch")


@contextmanager
def older_definition(control_plane: ControlPlane, world: World) -> Iterator[None]:
    """Have the API server take any reaping, as a definition without our rules does."""
    loose: dict[str, Any] = definition()
    version = loose["spec"]["versions"][0]
    reaping = version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]["reaping"]
    keep = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    reaping.clear()
    reaping.update(keep)

    def install(document: dict[str, Any]) -> None:
        answer = control_plane.kubectl(
            "apply", "--server-side", "--force-conflicts", "-f", "-", given=json.dumps(document)
        )
        assert answer.returncode == 0, answer.stderr

    def takes_anything() -> bool:
        spec = {"cache": {"size": "1Gi"}, "reaping": {"reapTimeoutSeconds": "soon"}}
        document = {
            "apiVersion": "lmcache-kube.dev/v1alpha1",
            "kind": "LMCacheServer",
            "metadata": {"name": "probe"},
            "spec": spec,
        }
        path = f"/apis/lmcache-kube.dev/v1alpha1/namespaces/{world.namespace}/lmcacheservers/probe"
        query = "fieldManager=probe&dryRun=All"
        return world.api.request("PATCH", f"{path}?{query}", document, content_type=APPLY).ok

    install(loose)
    try:
        poll_until(takes_anything, "the older definition")
        yield
    finally:
        install(definition())
        poll_until(lambda: not takes_anything(), "the definition")


def test_a_bad_spec_that_is_stored_already(
    control_plane: ControlPlane, operator: OperatorProcess, world: World
) -> None:
    """Stored under an older definition: a condition, no crash loop, and served once corrected."""
    with older_definition(control_plane, world):
        world.apply(reaping={"reapTimeoutSeconds": 40, "heartbeatIntervalSeconds": 20})
        world.apply("odd", reaping={"reapTimeoutSeconds": "soon"})
        condition = world.wait_condition("Ready", "False", "InvalidSpec")
        assert "worker-reap-timeout-seconds is 40" in condition["message"]
        assert "60" in condition["message"]
        odd = world.wait_condition("Ready", "False", "InvalidSpec", "odd")
        assert "spec.reaping.reapTimeoutSeconds" in odd["message"]
    world.patch_server({"spec": {"reaping": {"reapTimeoutSeconds": 60}}})
    world.wait_condition("Ready", "False", "NoNodesMatch")
    assert operator.process.poll() is None
    assert operator.metric("passes_total", outcome="crashed") == 0


@pytest.mark.usefixtures("operator")
def test_with_on_delete_people_are_told_what_waits_for_them(world: World) -> None:
    """An edit of the pods reaches nodes when somebody deletes theirs; the command is given."""
    world.add_node()
    world.apply(reaping=NO_HINTS)
    (pod,) = world.wait_pods(1)
    world.make_ready(pod)
    world.wait_condition("Progressing", "False", "UpToDate")
    world.patch_server({"spec": {"podAnnotations": {"a": "b"}}})
    condition = world.wait_condition("Progressing", "True", "WaitsForDeletion")
    assert f"kubectl delete pod -n {world.namespace} -l" in condition["message"]
    world.wait_condition("Ready", "True", "Ready")
    world.api.request(
        "DELETE",
        f"/api/v1/namespaces/{world.namespace}/pods/{pod['metadata']['name']}?gracePeriodSeconds=0",
    )
    world.wait_condition("Progressing", "False", "UpToDate")


@pytest.mark.slow
def test_an_idle_minute_is_a_minute_without_writes(operator: OperatorProcess, world: World) -> None:
    """Case 48: no write feeds on itself, and no transition time moves."""
    world.add_node()
    world.apply(reaping=NO_HINTS)
    (pod,) = world.wait_pods(1)
    world.make_ready(pod)
    world.wait_condition("Ready", "True", "Ready")
    poll_until(lambda: "registeredWorkers" in world.server()["status"], "the last write")
    before, conditions = world.versions(), world.server()["status"]["conditions"]
    passes = operator.metric("passes_total", outcome="done")
    until = time.monotonic() + IDLE_SECONDS
    while time.monotonic() < until:
        time.sleep(2)
        assert world.versions() == before
    assert world.server()["status"]["conditions"] == conditions
    assert operator.metric("passes_total", outcome="done") - passes <= 3  # one a minute is due


@pytest.mark.usefixtures("operator")
def test_edits_in_quick_succession(world: World) -> None:
    """Case 48: another client edits spec and labels; the last spec wins, and its labels stay."""
    world.apply()
    world.wait("DaemonSet", "kv")
    began = time.monotonic()
    port = 6000
    while time.monotonic() - began < 5:
        port += 1
        world.patch_server(
            {"metadata": {"labels": {"theirs": str(port)}}, "spec": {"server": {"port": port}}}
        )
        time.sleep(0.1)
    world.wait("Service", "kv", lambda obj: obj["spec"]["ports"][0]["port"] == port)
    server = world.server()
    assert server["metadata"]["labels"] == {"theirs": str(port)}
    assert server["spec"]["server"]["port"] == port
    generation = world.wait("DaemonSet", "kv")["metadata"]["generation"]
    assert generation <= port - 6000 + 1
