"""The control plane of the tests behaves like a cluster without nodes, and leaves nothing."""

from __future__ import annotations

from pathlib import Path

import psutil

from tests.cluster.api import Api
from tests.cluster.control_plane import ControlPlane
from tests.polling import poll_until


def test_what_is_owned_goes_with_its_owner(api: Api, namespace: str) -> None:
    """Garbage collection runs."""
    maps = f"/api/v1/namespaces/{namespace}/configmaps"
    owner = api.request("POST", maps, {"metadata": {"name": "owner"}}).body
    reference = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "name": "owner",
        "uid": owner["metadata"]["uid"],
    }
    metadata = {"name": "owned", "ownerReferences": [reference]}
    assert api.request("POST", maps, {"metadata": metadata}).ok
    assert api.request("DELETE", f"{maps}/owner").ok
    poll_until(lambda: api.request("GET", f"{maps}/owned").status == 404, "owned object goes")


def test_a_pod_is_an_object_whose_status_a_test_may_write(api: Api, namespace: str) -> None:
    """There is no kubelet that would write it back."""
    pods = f"/api/v1/namespaces/{namespace}/pods"
    container = {"name": "engine", "image": "none"}
    pod = {"metadata": {"name": "w"}, "spec": {"containers": [container], "nodeName": "n1"}}
    assert api.request("POST", pods, pod).ok
    status = {"status": {"phase": "Running", "podIP": "10.1.2.3", "podIPs": [{"ip": "10.1.2.3"}]}}
    patch = api.request(
        "PATCH", f"{pods}/w/status", status, content_type="application/merge-patch+json"
    )
    assert patch.body["status"]["phase"] == "Running"


def test_stopping_ends_every_process(control_plane: ControlPlane, tmp_path: Path) -> None:
    """A second one beside the first, on ports of its own."""
    with ControlPlane(tmp_path / "second", control_plane.programs) as second:
        started = second.processes()
        assert set(started) == {"etcd", "kube-apiserver", "kube-controller-manager"}
        assert second.api.request("GET", "/version").body["minor"]
    assert not any(map(psutil.pid_exists, started.values()))
