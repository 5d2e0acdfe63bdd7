"""What people apply agrees with what the operator does: names, ports, keys, users."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import yaml

from lmcache_operator import names
from lmcache_operator.agents.registry import ServerRef
from lmcache_operator.api.crd import GROUP, KIND, PLURAL, VERSION
from lmcache_operator.certs.trust import SECRET
from lmcache_operator.config import OperatorConfig, parse_config
from lmcache_operator.resources.config_maps import build_connections
from lmcache_operator.resources.daemon_set import build_daemon_set
from lmcache_operator.spec import read_spec

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
EXAMPLES = ROOT / "examples"
FILES = sorted([*DEPLOY.glob("*.yaml"), *EXAMPLES.glob("*.yaml")])

Manifest = dict[str, Any]


def documents(file: Path) -> list[Manifest]:
    """Read the objects of a file."""
    return [document for document in yaml.safe_load_all(file.read_text()) if document]


def deployed(kind: str, name: str = "lmcache-operator") -> Manifest:
    """Find one object of `deploy/`."""
    found = [
        document
        for file in DEPLOY.glob("*.yaml")
        for document in documents(file)
        if (document["kind"], document.get("metadata", {}).get("name")) == (kind, name)
    ]
    assert len(found) == 1, f"{len(found)} of {kind} {name}"
    return found[0]


def pinned(lock: str) -> set[str]:
    """Return `name==version` of everything in a lock."""
    lines = (ROOT / "requirements" / f"{lock}.txt").read_text().splitlines()
    return {line.split()[0] for line in lines if "==" in line and line[0].isalnum()}


def container(deployment: Manifest) -> Manifest:
    """Return the only container of a Deployment."""
    (found,) = deployment["spec"]["template"]["spec"]["containers"]
    assert isinstance(found, dict)
    return found


@pytest.fixture
def namespace() -> str:
    """The operator's own namespace."""
    (found,) = documents(DEPLOY / "namespace.yaml")
    return str(found["metadata"]["name"])


@pytest.fixture
def operator() -> Manifest:
    """The operator's Deployment."""
    return deployed("Deployment")


@pytest.fixture
def config(namespace: str, operator: Manifest) -> OperatorConfig:
    """How the operator of the Deployment understands its arguments and variables."""
    given = container(operator)
    variables = {item["name"]: str(item.get("value", namespace)) for item in given["env"]}
    return parse_config(given["args"], variables)


@pytest.fixture(params=["", "-tcp"])
def way(request: pytest.FixtureRequest) -> str:
    """By the device plugin, or over TCP."""
    return str(request.param)


@pytest.fixture
def example(way: str) -> Manifest:
    """The server that people try first."""
    (found,) = documents(EXAMPLES / f"lmcacheserver{way}.yaml")
    return found


@pytest.fixture
def worker(way: str) -> Manifest:
    """The Deployment of its workers."""
    (found,) = documents(EXAMPLES / f"worker-deployment{way}.yaml")
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_every_file_holds_objects(file: Path) -> None:
    """Each with what makes it one."""
    for document in documents(file):
        assert document["apiVersion"]
        assert document["kind"]
        assert document["kind"] == "Kustomization" or document["metadata"]["name"]


def test_the_kustomization_has_every_file() -> None:
    """A file that is not listed would not be applied."""
    (kustomization,) = documents(DEPLOY / "kustomization.yaml")
    listed = set(kustomization["resources"])
    assert listed == {file.name for file in DEPLOY.glob("*.yaml")} - {"kustomization.yaml"}


def test_operator_and_agents_are_of_one_image(operator: Manifest) -> None:
    """That of this release; both places are replaced together."""
    (kustomization,) = documents(DEPLOY / "kustomization.yaml")
    (image,) = kustomization["images"]
    default = OperatorConfig.__dataclass_fields__["agent_image"].default
    assert f"{image['newName']}:{image['newTag']}" == default
    assert container(operator)["image"] == image["name"]
    (replacement,) = kustomization["replacements"]
    assert replacement["source"]["fieldPath"].endswith("[name=operator].image")
    (target,) = replacement["targets"]
    (path,) = target["fieldPaths"]
    assert path.endswith("env.[name=LMCACHE_KUBE_AGENT_IMAGE].value")


def test_the_variables_are_flags(operator: Manifest) -> None:
    """A variable of no flag would be ignored."""
    flags = {field.name.upper() for field in dataclasses.fields(OperatorConfig)}
    used = {"POD_NAME", "POD_UID"}  # by the value of another
    names_given = {item["name"] for item in container(operator)["env"]} - used
    assert {name.removeprefix("LMCACHE_KUBE_") for name in names_given} <= flags


def test_agents_find_the_link(namespace: str, operator: Manifest, config: OperatorConfig) -> None:
    """The URL they are told names the Service, its port, and leads to where it listens."""
    service = deployed("Service")
    assert config.operator_namespace == namespace
    ports = {port["name"]: port for port in service["spec"]["ports"]}
    host = f"{service['metadata']['name']}.{namespace}.svc"
    assert config.told_link_url == f"wss://{host}:{ports['link']['port']}"
    listening = {port["name"]: port["containerPort"] for port in container(operator)["ports"]}
    assert listening == {"link": config.link_port, "http": config.http_port}
    assert {port["targetPort"] for port in ports.values()} <= set(listening)
    labels = operator["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    assert operator["spec"]["selector"]["matchLabels"].items() <= labels.items()


def test_the_roll_out_fits_the_lease(operator: Manifest) -> None:
    """A surge would wait for readiness that it cannot have while the old one holds the Lease."""
    assert operator["spec"]["replicas"] == 1
    assert operator["spec"]["strategy"] == {"type": "Recreate"}


def test_the_operator_is_hardened(operator: Manifest) -> None:
    """As the level `restricted`, which its namespace enforces, wants it; and nothing to write."""
    pod, it = operator["spec"]["template"]["spec"], container(operator)
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert it["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    (namespace,) = documents(DEPLOY / "namespace.yaml")
    labels = namespace["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"


def test_everything_is_bound_to_its_account(namespace: str, operator: Manifest) -> None:
    """And to nobody else; each binding names a role that is there."""
    account = deployed("ServiceAccount")["metadata"]
    assert operator["spec"]["template"]["spec"]["serviceAccountName"] == account["name"]
    subject = {"kind": "ServiceAccount", "name": account["name"], "namespace": namespace}
    bindings = [d for d in documents(DEPLOY / "rbac.yaml") if d["kind"].endswith("Binding")]
    assert len(bindings) == 3
    for binding in bindings:
        assert binding["subjects"] == [subject]
        assert deployed(binding["roleRef"]["kind"], binding["roleRef"]["name"])["rules"]


def test_its_own_objects_have_the_names_it_looks_for(config: OperatorConfig) -> None:
    """Rights to one Secret and one Lease, by name; the Secret is made with the manifests."""
    named = {
        resource: rule["resourceNames"]
        for rule in deployed("Role")["rules"]
        for resource in rule["resources"]
        if "resourceNames" in rule
    }
    assert named == {"leases": [config.lease_name], "secrets": [SECRET]}
    assert "data" not in deployed("Secret", SECRET), "applying again would empty it"


def test_the_kind_is_ours() -> None:
    """In the operator's rights as in the definition."""
    rules = [rule for rule in deployed("ClusterRole")["rules"] if rule["apiGroups"] == [GROUP]]
    assert [rule["resources"] for rule in rules] == [[PLURAL], [f"{PLURAL}/status"]]


def test_the_example_makes_agents(example: Manifest) -> None:
    """Its spec is one that agents accept."""
    assert example["apiVersion"] == f"{GROUP}/{VERSION}"
    assert example["kind"] == KIND
    made = build_daemon_set(reference(example), read_spec(example["spec"]), default_image="a:1")
    assert made["spec"]["template"]["spec"]["containers"]


def test_the_example_worker_belongs_to_the_example_server(
    example: Manifest, worker: Manifest
) -> None:
    """By its label; and it takes what the operator writes for it, under the key it writes."""
    server, spec = reference(example), read_spec(example["spec"])
    template = worker["spec"]["template"]
    assert template["metadata"]["labels"][names.WORKER_LABEL] == server.name
    (connection,) = build_connections(server, spec)
    taken = [
        item["valueFrom"]["configMapKeyRef"]
        for item in container(worker)["env"]
        if "valueFrom" in item
    ]
    assert taken
    for reference_ in taken:
        assert reference_["name"] == connection["metadata"]["name"]
        assert reference_["key"] in connection["data"]
    names_taken = [item["name"] for item in container(worker)["env"] if "valueFrom" in item]
    arguments = " ".join(container(worker)["args"])
    assert all(f"$({name})" in arguments for name in names_taken)


def test_the_example_worker_over_tcp_shares_its_memory() -> None:
    """It mounts what the agent mounts, as the same user, and takes the key for TCP."""
    (server,) = documents(EXAMPLES / "lmcacheserver-tcp.yaml")
    (worker,) = documents(EXAMPLES / "worker-deployment-tcp.yaml")
    agent = build_daemon_set(reference(server), read_spec(server["spec"]), default_image="a:1")
    theirs, its = agent["spec"]["template"]["spec"], worker["spec"]["template"]["spec"]
    for name in ("runAsUser", "runAsGroup"):
        assert its["securityContext"][name] == theirs["securityContext"][name]
    shared = {"path": "/dev/shm", "type": "Directory"}
    for pod in (theirs, its):
        assert shared in [volume.get("hostPath") for volume in pod["volumes"]]
    keys = [item["valueFrom"]["configMapKeyRef"]["key"] for item in _taken(worker)]
    assert keys == ["kv_transfer_config_tcp"]


def test_the_example_worker_asks_for_its_agent_and_for_nothing_else() -> None:
    """One line; no host path, no IPC of the node, and all that the level `restricted` demands."""
    (server,) = documents(EXAMPLES / "lmcacheserver.yaml")
    (worker,) = documents(EXAMPLES / "worker-deployment.yaml")
    (connection,) = build_connections(reference(server), read_spec(server["spec"]))
    it, pod = container(worker), worker["spec"]["template"]["spec"]
    assert it["resources"]["limits"][connection["data"]["resource"]] == 1
    assert not any("hostPath" in volume for volume in pod["volumes"])
    assert not pod.keys() & {"hostIPC", "hostPID", "hostNetwork"}
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert it["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }


def _taken(deployment: Manifest) -> list[Manifest]:
    return [item for item in container(deployment)["env"] if "valueFrom" in item]


def test_the_image_holds_what_the_tests_ran_with() -> None:
    """Its locks name no release that the developers' lock does not."""
    tested = pinned("dev")
    for lock in ("runtime", "build"):
        assert pinned(lock) <= tested


def reference(server: Manifest) -> ServerRef:
    """Return how the operator refers to a server that is stored in some namespace."""
    return ServerRef(namespace="serving", name=server["metadata"]["name"], uid="some-uid")


def test_a_restarted_container_goes_on_with_its_lease(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its name in the Lease is the pod's: unlike a process's it is the same after a crash."""
    variables = {each["name"]: each for each in container(deployed("Deployment"))["env"]}
    pod = {"POD_NAME": "metadata.name", "POD_UID": "metadata.uid"}
    for name, path in pod.items():
        assert variables[name]["valueFrom"]["fieldRef"]["fieldPath"] == path
    identity = variables["LMCACHE_KUBE_IDENTITY"]["value"]
    assert identity == "$(POD_NAME)_$(POD_UID)"
    assert list(variables).index("LMCACHE_KUBE_IDENTITY") > list(variables).index("POD_UID")
    monkeypatch.setenv("LMCACHE_KUBE_IDENTITY", "operator-0_11-22")
    monkeypatch.setenv("LMCACHE_KUBE_OPERATOR_NAMESPACE", "lmcache-kube-system")
    assert parse_config([]).identity == "operator-0_11-22"
