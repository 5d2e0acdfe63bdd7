"""The operator does all its work with the rights of the manifests, and with no others."""

from __future__ import annotations

import json
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.cluster.api import Api
from tests.cluster.control_plane import CONTEXT, ControlPlane
from tests.cluster.operator_process import OperatorProcess
from tests.cluster.reconcile_world import World
from tests.polling import poll_until

ROOT = Path(__file__).parents[2]
OWN = "lmcache-kube-system"


@pytest.fixture
def kubeconfig(control_plane: ControlPlane, api: Api, tmp_path: Path) -> Generator[Path]:
    """Credentials of the operator's ServiceAccount, as the manifests make it."""
    applied = control_plane.kubectl("apply", "-k", str(ROOT / "deploy"))
    assert applied.returncode == 0, applied.stderr
    path = f"/api/v1/namespaces/{OWN}/serviceaccounts/lmcache-operator/token"
    request = {"spec": {"expirationSeconds": 3600}}
    answer = api.request("POST", path, request)
    assert answer.ok, answer.message
    content = json.loads(control_plane.kubeconfig.read_text())
    content["users"] = [{"name": CONTEXT, "user": {"token": answer.body["status"]["token"]}}]
    found = tmp_path / "operator.kubeconfig"
    found.write_text(json.dumps(content))
    yield found
    control_plane.kubectl("delete", "-k", str(ROOT / "deploy"), "--wait=false")
    namespace = f"/api/v1/namespaces/{OWN}"
    poll_until(lambda: api.request("GET", namespace).status == 404, "all goes")


def test_a_server_is_served_from_beginning_to_end(kubeconfig: Path, world: World) -> None:
    """Apply, pods that are refused, a worker's namespace that goes; nothing is forbidden."""
    path = f"/api/v1/namespaces/{world.namespace}"
    label = {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "baseline"}}}
    merge = "application/merge-patch+json"
    assert world.api.request("PATCH", path, label, content_type=merge).ok
    world.add_node()
    with OperatorProcess(kubeconfig, OWN, every_namespace=True) as operator:
        world.apply(
            transport={"memorySharing": "HostShm"},
            workers={"namespaces": [world.namespace, "default"]},
        )
        world.wait_condition("Ready", "False", "PodSecurityRefused")
        world.wait("ConfigMap", "kv-connection", namespace="default")
        world.wait("ConfigMap", "kv-link")
        poll_until(world.events, "an Event")
        world.patch_server(
            {
                "spec": {
                    "transport": {"memorySharing": "None", "devicePlugin": {"mode": "Disabled"}},
                    "reaping": {"hints": {"mode": "Disabled"}},
                }
            }
        )
        (pod,) = world.wait_pods(1)
        world.make_ready(pod)
        world.wait_condition("Ready", "True", "Ready")
        world.delete("Service", "kv")
        world.wait("Service", "kv")
        world.delete_server()
        world.wait_gone("ConfigMap", "kv-connection", namespace="default")
        assert operator.stop() == 0
        lines = operator.log_text().splitlines()
        # Other tests' namespaces may be on their way out, and take nothing any more.
        assert [line for line in lines if "orbidden" in line and "terminated" not in line] == []
