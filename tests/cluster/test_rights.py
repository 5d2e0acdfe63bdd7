"""The manifests are accepted as they are, and give exactly the rights that the operator needs."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest

from tests.cluster.api import Api
from tests.cluster.control_plane import ControlPlane
from tests.polling import poll_until

ROOT = Path(__file__).parents[2]
OWN = "lmcache-kube-system"
OPERATOR = f"system:serviceaccount:{OWN}:lmcache-operator"
LINK_SECRET = "secret/lmcache-operator-link"  # noqa: S105  # its name

READ = ("get", "list", "watch")
WRITE = ("create", "patch", "delete")
OWNED = ("daemonsets.apps", "configmaps", "services", "serviceaccounts")

# Asked in some namespace of people, and in the operator's own.
ALLOWED_EVERYWHERE = [
    *((verb, "lmcacheservers.lmcache-kube.dev") for verb in READ),
    ("patch", "lmcacheservers.lmcache-kube.dev/status"),
    *((verb, kind) for kind in OWNED for verb in (*READ, *WRITE)),
    *((verb, "pods") for verb in (*READ, "patch")),
    *((verb, "events") for verb in ("create", "list")),
]
REFUSED_EVERYWHERE = [
    *((verb, "pods") for verb in ("create", "update", "delete", "deletecollection")),
    *(("create", f"pods/{way}") for way in ("exec", "attach", "portforward", "eviction")),
    ("get", "pods/log"),
    ("patch", "pods/status"),
    ("patch", "pods/ephemeralcontainers"),
    *((verb, "secrets") for verb in (*READ, *WRITE, "update")),
    *((verb, "lmcacheservers.lmcache-kube.dev") for verb in (*WRITE, "update")),
    *((verb, "daemonsets.apps") for verb in ("update", "deletecollection")),
    *((verb, "deployments.apps") for verb in (*READ, *WRITE)),
    *((verb, "roles.rbac.authorization.k8s.io") for verb in ("create", "bind", "escalate")),
    *((verb, "rolebindings.rbac.authorization.k8s.io") for verb in ("create", "patch")),
    ("create", "serviceaccounts/token"),
    ("impersonate", "serviceaccounts"),
    ("delete", "events"),
    ("delete", "leases.coordination.k8s.io"),
]
OWN_NAMESPACE_ONLY = [
    ("create", "leases.coordination.k8s.io"),
    *((verb, "leases.coordination.k8s.io/lmcache-operator") for verb in ("get", "update")),
    *((verb, LINK_SECRET) for verb in ("get", "update")),
]
OWN_NAMESPACE_NEITHER = [
    *((verb, LINK_SECRET) for verb in ("list", "watch", "patch", "delete")),
    *((verb, "secret/another") for verb in ("get", "update")),
    ("update", "leases.coordination.k8s.io/another"),
]
# Of the cluster as a whole. With a namespace, be it the default one, a Role there would count.
CLUSTER_ALLOWED = [("create", "tokenreviews.authentication.k8s.io")]
CLUSTER_REFUSED = [
    ("create", "subjectaccessreviews.authorization.k8s.io"),
    *((verb, "nodes") for verb in (*READ, "patch")),
    *((verb, "namespaces") for verb in (*READ, *WRITE)),
    *((verb, "customresourcedefinitions.apiextensions.k8s.io") for verb in (*READ, "patch")),
    *((verb, "clusterroles.rbac.authorization.k8s.io") for verb in ("create", "bind", "escalate")),
    ("create", "clusterrolebindings.rbac.authorization.k8s.io"),
    ("impersonate", "users"),
]


@pytest.fixture(scope="module")
def deployed(control_plane: ControlPlane, api: Api, kind: str) -> Generator[ControlPlane]:
    """The manifests, applied as people do."""
    assert kind
    applied = control_plane.kubectl("apply", "-k", str(ROOT / "deploy"))
    assert applied.returncode == 0, applied.stderr
    # Neither a level of Pod Security nor a field is complained about.
    assert "Warning" not in applied.stderr, applied.stderr
    yield control_plane
    control_plane.kubectl("delete", "-k", str(ROOT / "deploy"), "--wait=false")
    namespace = f"/api/v1/namespaces/{OWN}"
    poll_until(lambda: api.request("GET", namespace).status == 404, "all is gone")


def may(cluster: ControlPlane, verb: str, what: str, *where: str, account: str = OPERATOR) -> bool:
    """Ask as `kubectl auth can-i` does for a ServiceAccount."""
    resource, _, rest = what.partition("/")
    # kubectl reads a slash as a name; a subresource has a flag of its own.
    named = rest.startswith(("lmcache-", "another"))
    words = [what] if named or not rest else [resource, f"--subresource={rest}"]
    answer = cluster.kubectl("auth", "can-i", verb, *words, *where, f"--as={account}")
    assert answer.stdout.strip() in {"yes", "no"}, f"{verb} {what}: {answer.stderr}"
    assert "Warning" not in answer.stderr, f"{verb} {what}: {answer.stderr}"
    return answer.stdout.strip() == "yes"


@pytest.mark.parametrize(("verb", "what"), ALLOWED_EVERYWHERE)
def test_it_may_in_every_namespace(deployed: ControlPlane, verb: str, what: str) -> None:
    """What it watches, owns, annotates and says, also without naming a namespace."""
    assert may(deployed, verb, what, "--namespace=default")
    assert may(deployed, verb, what, "--all-namespaces")


@pytest.mark.parametrize(("verb", "what"), REFUSED_EVERYWHERE)
def test_it_may_not_anywhere(deployed: ControlPlane, verb: str, what: str) -> None:
    """Nothing ends a pod or gets into it; no secret; no way to more rights."""
    assert not may(deployed, verb, what, "--namespace=default")
    assert not may(deployed, verb, what, f"--namespace={OWN}")


@pytest.mark.parametrize(("verb", "what"), OWN_NAMESPACE_ONLY)
def test_it_may_in_its_own_namespace_only(deployed: ControlPlane, verb: str, what: str) -> None:
    """Its Lease, and the one Secret that it fills."""
    assert may(deployed, verb, what, f"--namespace={OWN}")
    assert not may(deployed, verb, what, "--namespace=default")


@pytest.mark.parametrize(("verb", "what"), OWN_NAMESPACE_NEITHER)
def test_others_of_its_namespace_are_not_its(deployed: ControlPlane, verb: str, what: str) -> None:
    """Rights go by name, and no further than it needs."""
    assert not may(deployed, verb, what, f"--namespace={OWN}")


@pytest.mark.parametrize(("verb", "what"), CLUSTER_ALLOWED)
def test_it_may_have_tokens_reviewed(deployed: ControlPlane, verb: str, what: str) -> None:
    """Or it could not tell an agent from anybody else."""
    assert may(deployed, verb, what, "--all-namespaces")


@pytest.mark.parametrize(("verb", "what"), CLUSTER_REFUSED)
def test_nothing_else_of_the_cluster_is_its(deployed: ControlPlane, verb: str, what: str) -> None:
    """It knows neither nodes nor namespaces nor definitions."""
    assert not may(deployed, verb, what, "--all-namespaces")


def test_agents_may_nothing(deployed: ControlPlane) -> None:
    """An account without a binding: an agent's token is only good for the operator."""
    agents = "system:serviceaccount:default:kv"
    asked = [*ALLOWED_EVERYWHERE, *OWN_NAMESPACE_ONLY]
    for verb, what in asked:
        assert not may(deployed, verb, what, f"--namespace={OWN}", account=agents), (verb, what)
    assert not may(deployed, *CLUSTER_ALLOWED[0], "--all-namespaces", account=agents)


@pytest.mark.parametrize("file", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda f: f.name)
def test_the_examples_are_accepted(deployed: ControlPlane, namespace: str, file: Path) -> None:
    """By an API server that is asked and stores nothing."""
    asked = ("apply", f"--namespace={namespace}", "--dry-run=server", f"--filename={file}")
    answer = deployed.kubectl(*asked)
    assert answer.returncode == 0, answer.stderr
    assert "Warning" not in answer.stderr


def test_applying_again_keeps_the_keys(deployed: ControlPlane, api: Api) -> None:
    """The operator fills the Secret; an update of the manifests does not empty it."""
    path = f"/api/v1/namespaces/{OWN}/secrets/lmcache-operator-link"
    stored = api.request("GET", path).body
    assert api.request("PUT", path, {**stored, "data": {"ca.crt": "eA=="}}).ok
    again = deployed.kubectl("apply", "-k", str(ROOT / "deploy"))
    assert again.returncode == 0, again.stderr
    assert api.request("GET", path).body["data"] == {"ca.crt": "eA=="}
