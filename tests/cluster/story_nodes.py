"""Nodes of a story: what a kubelet does for the agent's pod of one node.

The pod is made by the real DaemonSet controller. A node binds it, mounts what its spec says, and
runs the agent with the arguments in it, paths and ports replaced by this machine's.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from tests.cluster.api import Api
from tests.cluster.operator_process import free_port
from tests.cluster.story_pods import MERGE
from tests.cluster.story_volumes import PodVolumes
from tests.fakes.agent_process import AgentProcess
from tests.fakes.pods import Json, container_status, running
from tests.polling import poll_until

_OURS = ("port", "http-port", "l1-size-gb", "log-format", "http-host")
_NO_KUBELET = ("device-plugin-resource", "slots-folder", "slot-shared-memory-bytes", "shm-name")
"""A story tells of pods by the API server; none has a kubelet that would mount anything."""


class StoryNode:
    """One node, its agent's pod, and the agent. Ports stay the same over the agent's lives."""

    def __init__(self, api: Api, namespace: str, server: str, name: str, folder: Path) -> None:
        self._api = api
        self._namespace = namespace
        self._server = server
        self.name = name
        self._folder = folder
        self._volumes: PodVolumes | None = None
        self._pod: Json = {}
        self._agents: list[AgentProcess] = []
        self.port = free_port()

    def join(self, labels: Mapping[str, str]) -> None:
        """Make the Node object, ready for pods."""
        body = {"metadata": {"name": self.name, "labels": dict(labels)}}
        answer = self._api.request("POST", "/api/v1/nodes", body)
        assert answer.ok, answer.message
        self.report(ready="True")
        # The API server taints what joins; the controller that takes that back does not run here.
        no_taints = {"spec": {"taints": None}}
        path = f"/api/v1/nodes/{self.name}"
        assert self._api.request("PATCH", path, no_taints, content_type=MERGE).ok

    def report(self, *, ready: str) -> None:
        """Write the condition Ready: True, False or Unknown."""
        condition = {"type": "Ready", "status": ready, "reason": "Story", "message": ""}
        path = f"/api/v1/nodes/{self.name}/status"
        status = {"status": {"conditions": [condition]}}
        assert self._api.request("PATCH", path, status, content_type=MERGE).ok

    def leave(self) -> None:
        """End the agent and remove the Node object."""
        for agent in self._agents:
            agent.close()
        self._api.request("DELETE", f"/api/v1/nodes/{self.name}")

    def start_agent(self) -> AgentProcess:
        """Start the agent as its pod says; first wait for the pod if there is none yet."""
        if not self._pod:
            self._pod = poll_until(self._unbound_pod, f"a pod for {self.name}")
            self._bind()
            self._volumes = PodVolumes(self._api, self._pod, self._folder / "volumes")
        self.mount()
        agent = AgentProcess(
            *self._arguments(),
            l1_size_gb=0.0625,
            port=self.port,
            environ=self._environment(),
        )
        self._agents.append(agent)
        agent.start()
        self._report_running()
        return agent

    @property
    def agent(self) -> AgentProcess:
        """The agent, in its present life."""
        return self._agents[-1]

    @property
    def agent_pod(self) -> Json:
        """The agent's pod as it was when it was bound."""
        return self._pod

    def read_agent_pod(self) -> Json:
        """Return the agent's pod as it is, empty if it is gone."""
        metadata = self._pod["metadata"]
        path = f"/api/v1/namespaces/{self._namespace}/pods/{metadata['name']}"
        answer = self._api.request("GET", path)
        return answer.body if answer.ok else {}

    def kill_agent(self) -> None:
        """SIGKILL, and wait; the pod stays, as when a container restarts."""
        self.agent.kill()

    def mount(self) -> None:
        """Bring the mounted folders up to date, as a kubelet does about once a minute."""
        self._mounted.mount()

    @property
    def _mounted(self) -> PodVolumes:
        assert self._volumes is not None, "there is no pod yet"
        return self._volumes

    def worker_url(self, address: str) -> str:
        """Where a worker with this address connects, and where from."""
        if ":" in address:
            return f"tcp://[{address}]:0;[::1]:{self.port}"
        return f"tcp://{address}:0;127.0.0.1:{self.port}"

    def _unbound_pod(self) -> Json | None:
        selector = quote(f"app.kubernetes.io/instance={self._server}")
        path = f"/api/v1/namespaces/{self._namespace}/pods?labelSelector={selector}"
        found: list[Json] = self._api.request("GET", path).body["items"]
        return next((pod for pod in found if _meant_for(pod) == self.name), None)

    def _bind(self) -> None:
        metadata = self._pod["metadata"]
        target = {"apiVersion": "v1", "kind": "Node", "name": self.name}
        body = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {"name": metadata["name"]},
            "target": target,
        }
        path = f"/api/v1/namespaces/{self._namespace}/pods/{metadata['name']}/binding"
        answer = self._api.request("POST", path, body)
        assert answer.ok, answer.message

    def _report_running(self) -> None:
        name = self._container["name"]
        status = {
            "phase": "Running",
            "podIP": "127.0.0.1",
            "podIPs": [{"ip": "127.0.0.1"}],
            "conditions": [{"type": "Ready", "status": "True"}],
            "containerStatuses": [container_status(name, running(time.time()))],
        }
        path = f"/api/v1/namespaces/{self._namespace}/pods/{self._pod['metadata']['name']}/status"
        assert self._api.request("PATCH", path, {"status": status}, content_type=MERGE).ok

    @property
    def _container(self) -> Json:
        container: Json = self._pod["spec"]["containers"][0]
        return container

    def _arguments(self) -> list[str]:
        left_out = (*_OURS, *_NO_KUBELET)
        given = [self._mounted.here(argument) for argument in self._container.get("args", [])]
        return [one for one in given if one.partition("=")[0].lstrip("-") not in left_out]

    def _environment(self) -> dict[str, str]:
        fields = {"spec.nodeName": self.name, "metadata.name": self._pod["metadata"]["name"]}
        found = {}
        for variable in self._container.get("env", []):
            source = variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
            value = fields.get(source, "") if source else variable.get("value", "")
            found[variable["name"]] = value
        return found


def _meant_for(pod: Json) -> str | None:
    """Return the node for which the DaemonSet controller made a pod; None once it is bound."""
    if pod["spec"].get("nodeName"):
        return None
    affinity: Any = pod["spec"]["affinity"]["nodeAffinity"]
    terms = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    return str(terms[0]["matchFields"][0]["values"][0])
