"""What a server owns exists, is as the spec says, stays so, and touches nobody else's things."""

from __future__ import annotations

import json

import pytest

from lmcache_nodeagent.operator_link.messages import TOKEN_AUDIENCE
from tests.cluster.operator_process import OperatorProcess
from tests.cluster.reconcile_world import Json, World

OWNED = (
    ("ServiceAccount", "kv"),
    ("ConfigMap", "kv-reaping"),
    ("ConfigMap", "kv-link"),
    ("ConfigMap", "kv-connection"),
    ("Service", "kv"),
    ("DaemonSet", "kv"),
)


@pytest.fixture
def served(operator: OperatorProcess, world: World) -> World:
    """A world in which one server has everything."""
    operator.wait_for_record("operator_acts")
    world.apply()
    for kind, name in OWNED:
        world.wait(kind, name)
    world.wait_condition("Ready", "False", "NoNodesMatch")
    return world


def generation(world: World) -> int:
    """Return how often the DaemonSet's spec has changed."""
    return int(world.wait("DaemonSet", "kv")["metadata"]["generation"])


def test_everything_is_there_and_is_its_servers(served: World) -> None:
    """Each object names its owner, for garbage collection, and never blocks its deletion."""
    uid = served.server()["metadata"]["uid"]
    for kind, name in OWNED:
        metadata = served.wait(kind, name)["metadata"]
        assert [owner["uid"] for owner in metadata["ownerReferences"]] == [uid]
        assert "finalizers" not in metadata
        assert metadata["labels"]["app.kubernetes.io/managed-by"] == "lmcache-operator"


def test_the_pods_are_what_the_facts_demand(served: World) -> None:
    """Pinned, hardened, sized by the cache, with a token for the operator and for nobody else."""
    daemon_set = served.wait("DaemonSet", "kv")
    assert daemon_set["spec"]["updateStrategy"]["type"] == "OnDelete"
    pod = daemon_set["spec"]["template"]["spec"]
    container = pod["containers"][0]
    assert pod["automountServiceAccountToken"] is False
    assert pod["serviceAccountName"] == "kv"
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["securityContext"]["runAsUser"] == 0  # for the kubelet's folders
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]
    assert container["resources"]["requests"]["memory"] == "576Mi"
    assert "--l1-size-gb=0.0625" in container["args"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    token = volumes["agent-token"]["projected"]["sources"][0]["serviceAccountToken"]
    assert token["audience"] == TOKEN_AUDIENCE
    uid = served.server()["metadata"]["uid"]
    assert volumes["agent-shm"]["hostPath"]["path"] == f"/dev/shm/lmcache-kube-{uid}"
    assert volumes["agent-socket"]["hostPath"]["path"] == f"/run/lmcache-kube/{uid}"
    service = served.wait("Service", "kv")["spec"]
    assert service["internalTrafficPolicy"] == "Local"
    assert service["publishNotReadyAddresses"] is True


def test_workers_are_told_how_to_connect(served: World) -> None:
    """The values of the connection ConfigMap are what stock vLLM takes."""
    data = served.wait("ConfigMap", "kv-connection")["data"]
    transfer = json.loads(data["kv_transfer_config"])
    extra = transfer["kv_connector_extra_config"]
    assert transfer["kv_connector"] == "LMCacheMPConnector"
    assert extra["lmcache.mp.server_urls"] == ["ipc:///run/lmcache-kube/agent.sock"]
    assert data["resource"] == "lmcache-kube.dev/kv"
    over_tcp = json.loads(data["kv_transfer_config_tcp"])["kv_connector_extra_config"]
    assert over_tcp["lmcache.mp.host"] == f"tcp://kv.{served.namespace}.svc"
    assert over_tcp["lmcache.mp.port"] == 5555
    assert extra["lmcache.mp.mq_timeout"] < 300
    assert extra["lmcache.mp.heartbeat_interval"] == 10


def test_agents_are_told_where_the_operator_is(served: World, operator: OperatorProcess) -> None:
    """With the authority by which they believe it."""
    data = served.wait("ConfigMap", "kv-link")["data"]
    assert data["url"] == operator.link_url
    assert data["ca.crt"].startswith("-----BEGIN CERTIFICATE-----")


@pytest.mark.parametrize("owned", OWNED, ids="-".join)
def test_what_is_deleted_is_back(served: World, owned: tuple[str, str]) -> None:
    """Within ten seconds, as a new object."""
    kind, name = owned
    uid = served.wait(kind, name)["metadata"]["uid"]
    served.delete(kind, name)
    served.wait(kind, name, lambda obj: obj["metadata"]["uid"] != uid)


def test_what_is_edited_is_as_it_was(served: World) -> None:
    """Within ten seconds, with the labels by which the operator finds it again."""
    served.patch("Service", "kv", {"spec": {"internalTrafficPolicy": "Cluster"}})
    served.patch("ConfigMap", "kv-reaping", {"data": {"reaping.json": "{}"}})
    served.patch("ServiceAccount", "kv", {"metadata": {"labels": None}})
    containers = served.wait("DaemonSet", "kv")["spec"]["template"]["spec"]["containers"]
    containers[0]["args"] = ["--chunk-size=1"]
    edit = {"spec": {"template": {"spec": {"containers": containers}}}}
    served.patch("DaemonSet", "kv", edit)

    def again(obj: Json) -> bool:
        args: list[str] = obj["spec"]["template"]["spec"]["containers"][0]["args"]
        return "--host=*" in args

    served.wait("Service", "kv", lambda obj: obj["spec"]["internalTrafficPolicy"] == "Local")
    served.wait("ConfigMap", "kv-reaping", lambda obj: obj["data"]["reaping.json"] != "{}")
    served.wait("ServiceAccount", "kv", lambda obj: "labels" in obj["metadata"])
    served.wait("DaemonSet", "kv", again)


def test_an_edit_of_the_reaping_touches_no_pod(served: World) -> None:
    """The settings reach the ConfigMaps, and the DaemonSet stays at its generation."""
    before = served.wait("DaemonSet", "kv")
    served.patch_server(
        {"spec": {"reaping": {"reapTimeoutSeconds": 60, "heartbeatIntervalSeconds": 20}}}
    )

    def settings(obj: Json) -> bool:
        found = json.loads(obj["data"]["reaping.json"])
        return bool(found["worker-reap-timeout-seconds"] == 60)

    served.wait("ConfigMap", "kv-reaping", settings)
    served.wait(
        "ConfigMap",
        "kv-connection",
        lambda obj: obj["data"]["heartbeat_interval_seconds"] == "20",
    )
    served.wait_condition("Ready", "False", "NoNodesMatch")
    after = served.wait("DaemonSet", "kv")
    assert after["metadata"]["generation"] == before["metadata"]["generation"]
    assert after["spec"] == before["spec"]


def test_an_edit_of_the_image_changes_the_pods_once(served: World) -> None:
    """One edit, one generation; a digest wins over a tag."""
    digest = f"sha256:{'a' * 64}"
    first = generation(served)
    served.patch_server({"spec": {"image": {"repository": "r.example/agent", "tag": "1"}}})
    image = "r.example/agent:1"
    served.wait("DaemonSet", "kv", lambda obj: _image(obj) == image)
    served.patch_server({"spec": {"image": {"digest": digest}}})
    image = f"r.example/agent@{digest}"
    served.wait("DaemonSet", "kv", lambda obj: _image(obj) == image)
    assert generation(served) == first + 2


def _image(daemon_set: Json) -> str:
    return str(daemon_set["spec"]["template"]["spec"]["containers"][0]["image"])


def test_what_others_add_stays(served: World) -> None:
    """Labels, annotations and fields of other managers survive passes and edits of the spec."""
    served.patch("Service", "kv", {"metadata": {"annotations": {"theirs": "a"}}})
    served.patch("DaemonSet", "kv", {"metadata": {"labels": {"theirs": "b"}}})
    served.patch("Service", "kv", {"spec": {"sessionAffinity": "ClientIP"}})
    served.patch_server({"metadata": {"labels": {"theirs": "c"}}})
    served.patch_server({"spec": {"server": {"port": 6000}}})
    service = served.wait("Service", "kv", lambda obj: obj["spec"]["ports"][0]["port"] == 6000)
    assert service["metadata"]["annotations"] == {"theirs": "a"}
    assert service["spec"]["sessionAffinity"] == "ClientIP"
    assert served.wait("DaemonSet", "kv")["metadata"]["labels"]["theirs"] == "b"
    assert served.server()["metadata"]["labels"] == {"theirs": "c"}


def test_fields_that_leave_the_spec_leave_the_pods(served: World) -> None:
    """What was ours and is wanted no more is taken back."""
    served.patch_server({"spec": {"priorityClassName": "system-node-critical"}})

    def has_priority(obj: Json) -> bool:
        return "priorityClassName" in obj["spec"]["template"]["spec"]

    served.wait("DaemonSet", "kv", has_priority)
    served.patch_server({"spec": {"priorityClassName": None}})
    served.wait("DaemonSet", "kv", lambda obj: not has_priority(obj))


def test_nothing_is_written_by_the_framework(served: World) -> None:
    """The server has no finalizer and no annotation, and of it we manage the status alone."""
    metadata = served.server()["metadata"]
    assert "finalizers" not in metadata
    assert "annotations" not in metadata
    managers = {(e["manager"], e.get("subresource")) for e in metadata["managedFields"]}
    assert managers == {("test", None), ("lmcache-operator", "status")}


@pytest.mark.usefixtures("operator")
def test_pods_are_not_written_to_without_need(world: World) -> None:
    """Case 45: neither those of others nor workers that have not registered; they go at once."""
    path = f"/api/v1/namespaces/{world.namespace}/pods"
    spec = {"containers": [{"name": "engine", "image": "none"}]}
    for name, labels in (("worker", {"lmcache-kube.dev/server": "kv"}), ("other", {"a": "b"})):
        big = {"note": "x" * 250_000}
        pod = {"metadata": {"name": name, "labels": labels, "annotations": big}, "spec": spec}
        assert world.api.request("POST", path, pod).ok
    # 200 KiB of environment: no copy of the spec is kept anywhere.
    env = [{"name": f"V{number}", "value": "y" * 4000} for number in range(50)]
    world.apply(env=env)
    world.wait("DaemonSet", "kv")
    world.wait_condition("Ready", "False", "NoNodesMatch")
    for name in ("worker", "other"):
        metadata = world.wait("Pod", name)["metadata"]
        assert "finalizers" not in metadata
        assert set(metadata["annotations"]) == {"note"}
        managers = {entry["manager"] for entry in metadata["managedFields"]}
        assert not any("lmcache" in manager or "kopf" in manager for manager in managers)
        assert world.api.request("DELETE", f"{path}/{name}?gracePeriodSeconds=0").ok
        world.wait_gone("Pod", name)


@pytest.mark.usefixtures("operator")
def test_somebody_elses_object_is_left_alone(world: World) -> None:
    """A Service of the name that we would use is not taken over; the condition says what to do."""
    theirs = {"metadata": {"name": "kv"}, "spec": {"ports": [{"port": 80}], "selector": {"a": "b"}}}
    path = f"/api/v1/namespaces/{world.namespace}/services"
    assert world.api.request("POST", path, theirs).ok
    world.apply()
    condition = world.wait_condition("Ready", "False", "NameTaken")
    assert "Service" in condition["message"]
    service = world.wait("Service", "kv")
    assert service["spec"]["selector"] == {"a": "b"}
    assert "ownerReferences" not in service["metadata"]
    world.delete("Service", "kv")
    world.wait("Service", "kv", lambda obj: "ownerReferences" in obj["metadata"])
    world.wait_condition("Ready", "False", "NoNodesMatch")


PATIENCE = 30.0
