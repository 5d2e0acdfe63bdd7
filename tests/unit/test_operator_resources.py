"""What a spec makes of its objects, ways and figures included."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from lmcache_operator.agents.registry import ServerRef
from lmcache_operator.api.root import Spec
from lmcache_operator.cluster import KubeObject
from lmcache_operator.errors import SpecError
from lmcache_operator.quantity import whole_units
from lmcache_operator.resources.agent_resources import agent_resources, quantity_text
from lmcache_operator.resources.daemon_set import build_daemon_set, image_reference
from lmcache_operator.resources.desired import Surroundings, desired_objects
from lmcache_operator.spec import agent_arguments, read_spec
from tests.cluster.specs.row import Row
from tests.cluster.specs.table import ROWS

IMAGE = "r.example:5000/team/agent:1.2"
SERVER = ServerRef("serving", "kv", "0b0f7c9e-6c1f-4f4e-8a55-2f8f6e9f3c11")
AROUND = Surroundings(IMAGE, "wss://operator:8443", "-----BEGIN CERTIFICATE-----")
ACCEPTED = [row for row in ROWS if row.accepted]


def spec_with(**parts: object) -> Spec:
    """Read a spec of one GiB with these parts."""
    return read_spec({"cache": {"size": "1Gi"}, **parts})


def pod_of(spec: Spec) -> dict[str, Any]:
    """Return the pod of a spec's agents."""
    daemon_set = build_daemon_set(SERVER, spec, default_image=IMAGE)
    pod: dict[str, Any] = daemon_set["spec"]["template"]["spec"]
    return pod


def without_plugin(**transport: object) -> Spec:
    """Read a spec whose agents have no device plugin."""
    return spec_with(transport={"devicePlugin": {"mode": "Disabled"}, **transport})


def mounted(spec: Spec) -> dict[str, dict[str, Any]]:
    """Return the pod's volumes by where the container has them."""
    pod = pod_of(spec)
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = pod["containers"][0]["volumeMounts"]
    return {mount["mountPath"]: volumes[mount["name"]] for mount in mounts}


def leaves(value: object) -> Iterator[object]:
    """Yield every value in a document."""
    if isinstance(value, dict):
        for part in value.values():
            yield from leaves(part)
    elif isinstance(value, list):
        for part in value:
            yield from leaves(part)
    else:
        yield value


@pytest.mark.parametrize("row", ACCEPTED, ids=lambda row: row.label)
def test_every_accepted_spec_makes_objects_of_plain_values(row: Row) -> None:
    """Plain JSON without a null: applied, a null would take a field from others."""
    objects = desired_objects(SERVER, read_spec(row.spec), AROUND)
    assert {obj["kind"] for obj in objects} == {
        "ServiceAccount",
        "ConfigMap",
        "Service",
        "DaemonSet",
    }
    assert json.loads(json.dumps(objects)) == objects
    assert all(leaf is not None for obj in objects for leaf in leaves(obj))


def test_names_and_labels_of_the_longest_server_name_are_labels() -> None:
    """63 characters at most, however the objects are called."""
    server = ServerRef("n" * 63, "k" * 40, SERVER.uid)
    for obj in desired_objects(server, spec_with(), AROUND):
        assert len(obj["metadata"]["name"]) <= 63
        assert all(len(value) <= 63 for value in obj["metadata"]["labels"].values())


def test_live_settings_touch_nothing_but_config_maps() -> None:
    """So an edit of spec.reaping restarts no pod."""

    def others(spec: Spec) -> list[KubeObject]:
        objects = desired_objects(SERVER, spec, AROUND)
        return [obj for obj in objects if obj["kind"] != "ConfigMap"]

    edited = spec_with(
        reaping={
            "reapTimeoutSeconds": 60,
            "heartbeatIntervalSeconds": 20,
            "mode": "Observe",
            "reapIdleConnected": True,
            "hints": {"mode": "Disabled", "confirmSeconds": 9, "closeConfirmSeconds": 4},
            "stuckRelease": {"action": "RestartServer"},
        }
    )
    assert others(edited) == others(spec_with())


def test_without_authorities_what_agents_were_told_is_left_alone() -> None:
    """At the start of an operator there is a moment without them."""
    objects = desired_objects(SERVER, spec_with(), Surroundings(IMAGE, "wss://o:1", ""))
    assert "kv-link" not in {obj["metadata"]["name"] for obj in objects}


@pytest.mark.parametrize(
    ("image", "reference"),
    [
        ({}, IMAGE),
        ({"tag": "9"}, "r.example:5000/team/agent:9"),
        ({"repository": "other/agent"}, "other/agent:1.2"),
        ({"repository": "other/agent", "tag": "9"}, "other/agent:9"),
        ({"digest": f"sha256:{'a' * 64}"}, f"r.example:5000/team/agent@sha256:{'a' * 64}"),
        (
            {"repository": "o/a", "tag": "9", "digest": f"sha256:{'b' * 64}"},
            f"o/a@sha256:{'b' * 64}",
        ),
    ],
)
def test_images(image: dict[str, str], reference: str) -> None:
    """A digest wins over a tag, the spec over the operator's own image."""
    assert image_reference(spec_with(image=image), IMAGE) == reference


def test_an_image_without_a_tag_has_one() -> None:
    """A port of the registry is not taken for it."""
    spec = spec_with(image={"repository": "o/a"})
    assert image_reference(spec, "r.example:5000/agent") == "o/a:latest"
    assert image_reference(spec, f"r.example/agent:3@sha256:{'a' * 64}") == "o/a:3"


@pytest.mark.parametrize(
    ("resources", "requests", "limits"),
    [
        (None, {"memory": "1536Mi", "cpu": "500m"}, None),
        ({}, {"memory": "1536Mi"}, None),
        ({"requests": {"cpu": "1"}}, {"memory": "1536Mi", "cpu": "1"}, None),
        ({"limits": {"memory": "1Gi"}}, {"memory": "2Gi"}, {"memory": "2Gi"}),
        (
            {"requests": {"memory": "100"}, "limits": {"cpu": 2}},
            {"memory": str((1 << 30) + 100)},
            {"cpu": 2},
        ),
    ],
)
def test_memory_is_the_cache_and_what_is_beside_it(
    resources: object, requests: dict[str, str], limits: dict[str, str] | None
) -> None:
    """Every figure for memory has the cache in it; no limit is set that nobody asked for."""
    spec = spec_with() if resources is None else spec_with(resources=resources)
    found = agent_resources(spec)
    assert found["requests"] == requests
    assert found.get("limits") == limits


@pytest.mark.parametrize(
    "resources",
    [
        {"requests": {"memory": "lots"}},
        {"limits": {"memory": [1]}},
        {"limits": {"memory": True}},
        {"requests": "1Gi"},
    ],
)
def test_memory_that_is_no_quantity(resources: object) -> None:
    """The field is named, since the API server does not look into it."""
    with pytest.raises(SpecError, match=r"^spec\.resources\.(requests|limits)"):
        agent_resources(spec_with(resources=resources))


@pytest.mark.parametrize("size", [1, 1023, 1024, 3 << 20, (5 << 30) + 1, 7 << 30])
def test_quantities_that_are_written_read_the_same(size: int) -> None:
    """Whatever unit they are written in."""
    assert whole_units(quantity_text(size)) == size


@pytest.mark.parametrize("size", ["1536Mi", 1610612736, "1610612736", "1610612736000m"])
def test_sizes_that_mean_the_same_make_the_same_pods(size: object) -> None:
    """Case 63: however the quantity is written."""
    assert pod_of(read_spec({"cache": {"size": size}})) == pod_of(
        read_spec({"cache": {"size": "1.5Gi"}})
    )


def test_without_sharing_the_cache_is_the_pods_own_memory() -> None:
    """Sized, so that it can hold the cache and no more than a little else."""
    alone = (without_plugin(), spec_with(transport={"devicePlugin": {"sharedMemory": 0}}))
    for spec in alone:
        shm = mounted(spec)["/dev/shm"]["emptyDir"]
        assert shm["medium"] == "Memory"
        assert (1 << 30) < whole_units(shm["sizeLimit"]) < (1 << 30) * 1.1
        assert "hostIPC" not in pod_of(spec)


def test_with_the_device_plugin_the_cache_is_in_a_folder_of_the_servers_own() -> None:
    """In the node's /dev/shm, where the slots have their memory, too: one file system."""
    folder = {"path": f"/dev/shm/lmcache-kube-{SERVER.uid}", "type": "DirectoryOrCreate"}
    assert mounted(spec_with())["/dev/shm"] == {"name": "agent-shm", "hostPath": folder}


def test_the_device_plugin_has_the_kubelets_folders_and_root_without_its_powers() -> None:
    """Both under their own paths; of capabilities only those for folders and others' files."""
    pod, found = pod_of(spec_with()), mounted(spec_with())
    plugins, listed = "/var/lib/kubelet/device-plugins", "/var/lib/kubelet/pod-resources"
    assert found[plugins]["hostPath"] == {"path": plugins, "type": "Directory"}
    assert found[listed]["hostPath"]["path"] == listed
    assert found["/run/lmcache-kube"]["hostPath"]["path"] == f"/run/lmcache-kube/{SERVER.uid}"
    assert pod["securityContext"]["runAsUser"] == 0
    assert pod["securityContext"]["runAsGroup"] == 65532
    security = pod["containers"][0]["securityContext"]
    added = ["CHOWN", "DAC_OVERRIDE", "FOWNER"]
    assert security["capabilities"] == {"drop": ["ALL"], "add": added}
    assert security["allowPrivilegeEscalation"] is False
    assert security["readOnlyRootFilesystem"] is True
    assert "initContainers" not in pod


def test_without_the_device_plugin_agents_have_nothing_of_the_node() -> None:
    """Nor any right: they fit the level restricted."""
    pod = pod_of(without_plugin())
    assert not any("hostPath" in volume for volume in pod["volumes"])
    assert pod["securityContext"]["runAsUser"] == 65532
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["containers"][0]["securityContext"]["capabilities"] == {"drop": ["ALL"]}


@pytest.mark.parametrize("way", ["HostShm", "HostIPC"])
def test_with_sharing_the_cache_is_where_workers_of_the_node_see_it(way: str) -> None:
    """And for CUDA's sake in the same IPC namespace."""
    spec = spec_with(transport={"memorySharing": way})
    assert mounted(spec)["/dev/shm"]["hostPath"]["path"] == "/dev/shm"
    assert pod_of(spec).get("hostIPC", False) is (way == "HostIPC")


def test_the_unix_socket_is_in_a_folder_that_the_agent_may_write_to() -> None:
    """Its own by the server's uid; the kubelet makes it root's, hence the init container."""
    spec = spec_with(
        transport={"unixSocket": "HostPath", "devicePlugin": {"mode": "Disabled"}},
        security={"runAsUser": 7, "runAsGroup": 8},
    )
    folder = mounted(spec)["/run/lmcache-kube"]["hostPath"]
    assert folder == {"path": f"/run/lmcache-kube/{SERVER.uid}", "type": "DirectoryOrCreate"}
    (maker,) = pod_of(spec)["initContainers"]
    assert "chown('/run/lmcache-kube', 7, 8)" in maker["command"][-1]
    assert maker["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["CHOWN"]}
    assert "initContainers" not in pod_of(without_plugin())
    assert "initContainers" not in pod_of(spec_with(transport={"unixSocket": "HostPath"}))
    data = _connection(spec)
    assert "ipc://" in data["kv_transfer_config_unix_socket"]
    assert "tcp://" in data["kv_transfer_config"]


def test_workers_are_told_the_device_plugins_way_first() -> None:
    """The URL is the same constant everywhere; TCP stands beside it, and alone without a plugin."""
    data = _connection(spec_with())
    assert data["url"] == "ipc:///run/lmcache-kube/agent.sock"
    assert data["resource"] == "lmcache-kube.dev/kv"
    extra = json.loads(data["kv_transfer_config"])["kv_connector_extra_config"]
    assert extra["lmcache.mp.server_urls"] == [data["url"]]
    assert data["url_tcp"] == "tcp://kv.serving.svc:5555"
    alone = _connection(without_plugin())
    assert alone["url"] == alone["url_tcp"] == data["url_tcp"]
    assert alone["kv_transfer_config"] == data["kv_transfer_config_tcp"]
    assert "resource" not in alone


def _connection(spec: Spec) -> dict[str, str]:
    objects = desired_objects(SERVER, spec, AROUND)
    found = (obj for obj in objects if obj["metadata"]["name"] == "kv-connection")
    data: dict[str, str] = next(found)["data"]
    return data


@pytest.mark.parametrize(("interval", "patience"), [(1, 30), (10, 30), (15, 45), (40, 60)])
def test_workers_wait_for_answers_neither_briefly_nor_for_ever(
    interval: int, patience: int
) -> None:
    """Three heartbeats, within bounds: a restart of an agent is waited for, its absence is not."""
    reaping = {"heartbeatIntervalSeconds": interval, "reapTimeoutSeconds": 120}
    extra = json.loads(_connection(spec_with(reaping=reaping))["kv_transfer_config"])
    assert extra["kv_connector_extra_config"]["lmcache.mp.mq_timeout"] == patience


@pytest.mark.parametrize(
    ("sharing", "mode"),
    [("None", "engine_driven"), ("HostShm", "lmcache_driven"), ("HostIPC", "lmcache_driven")],
)
def test_workers_copy_themselves_where_no_memory_is_shared(sharing: str, mode: str) -> None:
    """They are told so, for each way, and agents serve both modes."""
    spec = without_plugin(memorySharing=sharing)
    data = _connection(spec)
    extra = json.loads(data["kv_transfer_config"])["kv_connector_extra_config"]
    assert data["transfer_mode"] == extra["lmcache.mp.mp_transfer_mode"] == mode
    assert "--supported-transfer-mode=auto" in agent_arguments(spec, uid="uid", name="kv")
    both = _connection(spec_with(transport={"memorySharing": sharing}))
    over_tcp = json.loads(both["kv_transfer_config_tcp"])["kv_connector_extra_config"]
    assert over_tcp["lmcache.mp.mp_transfer_mode"] == mode
    assert both["transfer_mode"] == "lmcache_driven"


def test_slots_without_shared_memory_copy_themselves() -> None:
    """As over TCP: the bytes go through the slot's socket."""
    data = _connection(spec_with(transport={"devicePlugin": {"sharedMemory": 0}}))
    assert data["transfer_mode"] == "engine_driven"


def test_connections_stand_where_workers_are() -> None:
    """Only in the server's own namespace does an owner reference reach."""
    spec = spec_with(workers={"namespaces": ["a", "serving"]})
    objects = desired_objects(SERVER, spec, AROUND)
    found = {
        obj["metadata"]["namespace"]: "ownerReferences" in obj["metadata"]
        for obj in objects
        if obj["metadata"]["name"] == "kv-connection"
    }
    assert found == {"a": False, "serving": True}


def test_variables_of_the_spec_win() -> None:
    """Each name stands once: the API server refuses it twice."""
    pod = pod_of(
        spec_with(
            gpu={"vendor": "NVIDIA"},
            env=[{"name": "NVIDIA_VISIBLE_DEVICES", "value": "0"}, {"name": "A", "value": ""}],
        )
    )
    variables = pod["containers"][0]["env"]
    assert len({variable["name"] for variable in variables}) == len(variables)
    assert {"name": "NVIDIA_VISIBLE_DEVICES", "value": "0"} in variables
    assert {"name": "NVIDIA_DRIVER_CAPABILITIES", "value": "compute,utility"} in variables
    assert {"name": "A", "value": ""} in variables


def test_labels_that_select_the_agents_cannot_be_taken_from_them() -> None:
    """Further labels are added; ours win."""
    spec = spec_with(podLabels={"app.kubernetes.io/instance": "x", "team": "a"})
    found = build_daemon_set(SERVER, spec, default_image=IMAGE)["spec"]
    labels = found["template"]["metadata"]["labels"]
    assert labels["team"] == "a"
    assert found["selector"]["matchLabels"].items() <= labels.items()


def test_root_is_root() -> None:
    """Who asks for user 0 gets pods that the kubelet starts."""
    off = {"devicePlugin": {"mode": "Disabled"}}
    security = pod_of(spec_with(transport=off, security={"runAsUser": 0}))["securityContext"]
    assert security["runAsNonRoot"] is False


def test_further_volumes_stand_beside_ours() -> None:
    """As they are given."""
    volume = {"name": "models", "hostPath": {"path": "/models"}}
    mount = {"name": "models", "mountPath": "/models", "readOnly": True}
    pod = pod_of(spec_with(volumes=[volume], volumeMounts=[mount]))
    assert volume in pod["volumes"]
    assert mount in pod["containers"][0]["volumeMounts"]


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"volumes": [{"name": "agent-token"}]}, "take another name"),
        (
            {"volumeMounts": [{"name": "x", "mountPath": "/dev/shm/"}]},
            "take another path",
        ),
    ],
)
def test_volumes_that_are_in_the_way_of_ours(parts: dict[str, Any], words: str) -> None:
    """The field is named, with what to do."""
    with pytest.raises(SpecError, match=words):
        pod_of(spec_with(**parts))


def test_tolerations_and_pull_secrets_are_passed_on() -> None:
    """What is left out of them stays out."""
    pod = pod_of(
        spec_with(
            tolerations=[{"key": "nvidia.com/gpu", "operator": "Exists"}],
            imagePullSecrets=[{"name": "registry"}],
            updateStrategy={"type": "RollingUpdate", "maxUnavailable": "10%"},
        )
    )
    assert pod["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists"}]
    assert pod["imagePullSecrets"] == [{"name": "registry"}]
