"""What a test of the reconcile loop does to a cluster: servers, nodes, what kubelets write."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from lmcache_operator.api.crd import PLURAL
from tests.cluster.api import Api
from tests.polling import poll_until

Json = dict[str, Any]

MERGE = "application/merge-patch+json"

_PATHS = {
    "ConfigMap": "/api/v1/namespaces/{}/configmaps",
    "DaemonSet": "/apis/apps/v1/namespaces/{}/daemonsets",
    "Event": "/api/v1/namespaces/{}/events",
    "Pod": "/api/v1/namespaces/{}/pods",
    "Service": "/api/v1/namespaces/{}/services",
    "ServiceAccount": "/api/v1/namespaces/{}/serviceaccounts",
}


class World:
    """One namespace, with a label for nodes that only its servers select."""

    def __init__(self, api: Api, kind: str, namespace: str) -> None:
        self.api = api
        self.namespace = namespace
        self._kind = kind
        self._nodes: list[str] = []

    @property
    def node_selector(self) -> dict[str, str]:
        """What selects the nodes of this world."""
        return {"test": self.namespace}

    def close(self) -> None:
        """Remove what is not in the namespace."""
        for node in self._nodes:
            self.api.request("DELETE", f"/api/v1/nodes/{node}")

    def apply(self, name: str = "kv", **parts: object) -> Json:
        """Apply a server as a person would; it selects this world's nodes."""
        spec = {"cache": {"size": "64Mi"}, "nodeSelector": self.node_selector, **parts}
        document = {
            "apiVersion": "lmcache-kube.dev/v1alpha1",
            "kind": "LMCacheServer",
            "metadata": {"name": name},
            "spec": spec,
        }
        answer = self.api.apply(self._servers, document)
        assert answer.ok, answer.message
        return answer.body

    def server(self, name: str = "kv") -> Json:
        """Read a server."""
        return self.api.request("GET", f"{self._servers}/{name}").body

    def delete_server(self, name: str = "kv") -> None:
        """Delete a server as `kubectl delete` does."""
        assert self.api.request("DELETE", f"{self._servers}/{name}").ok

    def patch_server(self, patch: Json, name: str = "kv") -> None:
        """Merge something into a server."""
        path = f"{self._servers}/{name}"
        answer = self.api.request("PATCH", path, patch, content_type=MERGE)
        assert answer.ok, answer.message

    def condition(self, kind: str, name: str = "kv") -> Json:
        """Read a condition of a server, empty before it is there."""
        found = self.server(name).get("status", {}).get("conditions", [])
        return next((one for one in found if one["type"] == kind), {})

    def wait_condition(
        self,
        kind: str,
        status: str,
        reason: str,
        name: str = "kv",
    ) -> Json:
        """Wait for a condition; return it."""

        def right() -> Json | None:
            found = self.condition(kind, name)
            same = (found.get("status"), found.get("reason")) == (status, reason)
            return found if same else None

        return poll_until(right, lambda: f"{kind} {status} {reason}: {self.server(name)}")

    def get(self, kind: str, name: str, namespace: str = "") -> Json | None:
        """Read an object."""
        answer = self.api.request("GET", f"{self._path(kind, namespace)}/{name}")
        return answer.body if answer.ok else None

    def wait(
        self,
        kind: str,
        name: str,
        holds: Callable[[Json], bool] = bool,
        namespace: str = "",
    ) -> Json:
        """Wait for an object of which something holds."""

        def found() -> Json | None:
            obj = self.get(kind, name, namespace)
            return obj if obj is not None and holds(obj) else None

        return poll_until(found, f"{kind} {name}")

    def wait_gone(self, kind: str, name: str, namespace: str = "") -> None:
        """Wait until an object is not there."""
        poll_until(lambda: self.get(kind, name, namespace) is None, f"{kind} {name} goes")

    def delete(self, kind: str, name: str, namespace: str = "") -> None:
        """Delete an object."""
        answer = self.api.request("DELETE", f"{self._path(kind, namespace)}/{name}")
        assert answer.ok, answer.message

    def patch(self, kind: str, name: str, patch: Json, subresource: str = "") -> Json:
        """Merge something into an object."""
        path = f"{self._path(kind)}/{name}{subresource}"
        answer = self.api.request("PATCH", path, patch, content_type=MERGE)
        assert answer.ok, answer.message
        return answer.body

    def objects(self, kind: str, namespace: str = "") -> list[Json]:
        """Read all objects of a kind."""
        found: list[Json] = self.api.request("GET", self._path(kind, namespace)).body["items"]
        return found

    def add_node(self) -> str:
        """Make a node that takes pods, without a kubelet."""
        name = f"{self.namespace}-{len(self._nodes)}"
        body = {"metadata": {"name": name, "labels": self.node_selector}}
        answer = self.api.request("POST", "/api/v1/nodes", body)
        assert answer.ok, answer.message
        self._nodes.append(name)
        ready = {"status": {"conditions": [{"type": "Ready", "status": "True"}]}}
        path = f"/api/v1/nodes/{name}"
        assert self.api.request("PATCH", f"{path}/status", ready, content_type=MERGE).ok
        # The API server taints what joins; the controller that takes that back does not run here.
        untaint = {"spec": {"taints": None}}
        assert self.api.request("PATCH", path, untaint, content_type=MERGE).ok
        return name

    def agent_pods(self, server: str = "kv") -> list[Json]:
        """Return the agents' pods of a server."""
        label = "app.kubernetes.io/instance"
        pods = self.objects("Pod")
        return [pod for pod in pods if pod["metadata"].get("labels", {}).get(label) == server]

    def wait_pods(self, count: int, server: str = "kv") -> list[Json]:
        """Wait until the DaemonSet's controller has made the pods."""

        def made() -> list[Json] | None:
            pods = self.agent_pods(server)
            return pods if len(pods) == count else None

        return poll_until(made, f"{count} pods of {server}")

    def report_container(self, pod: Json, state: Json, *, ready: bool = False) -> None:
        """Write a pod's status as a kubelet would; its container is in a state."""
        container = pod["spec"]["containers"][0]
        status = {
            "phase": "Running" if ready or "running" in state else "Pending",
            "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
            "containerStatuses": [
                {
                    "name": container["name"],
                    "image": container["image"],
                    "imageID": "",
                    "ready": ready,
                    "restartCount": 0,
                    "state": state,
                }
            ],
        }
        self.patch("Pod", pod["metadata"]["name"], {"status": status}, "/status")

    def make_ready(self, pod: Json) -> None:
        """Have an agent's pod be ready."""
        self.report_container(pod, {"running": {}}, ready=True)

    def events(self, name: str = "kv") -> list[Json]:
        """Return the Events on a server."""
        found = self.objects("Event")
        return [
            e
            for e in found
            if e["involvedObject"].get("name") == name
            and e["involvedObject"].get("kind") == "LMCacheServer"
        ]

    def versions(self, server: str = "kv") -> dict[str, str]:
        """Return the version of the server and of everything that it owns here."""
        found = {f"LMCacheServer/{server}": self.server(server)["metadata"]["resourceVersion"]}
        for kind, obj in self._owned(server):
            metadata = obj["metadata"]
            found[f"{kind}/{metadata['name']}"] = metadata["resourceVersion"]
        return found

    def _owned(self, server: str) -> Iterator[tuple[str, Json]]:
        for kind in ("ConfigMap", "DaemonSet", "Service", "ServiceAccount"):
            for obj in self.objects(kind):
                owners = obj["metadata"].get("ownerReferences", [])
                if any(owner["name"] == server for owner in owners):
                    yield kind, obj

    @property
    def _servers(self) -> str:
        return f"{self._kind}/namespaces/{self.namespace}/{PLURAL}"

    def _path(self, kind: str, namespace: str = "") -> str:
        return _PATHS[kind].format(namespace or self.namespace)
