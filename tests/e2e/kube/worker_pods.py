"""Worker pods on the real node, and what is seen of them: by the kubelet, the agent, people."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmcache_operator.names import (
    INSTANCE_IDS_ANNOTATION,
    WORKER_LABEL,
    agent_labels,
    connection_config_map,
)
from tests.e2e.kube.agent_view import AgentView
from tests.e2e.kube.image import PRODUCT_IMAGE
from tests.e2e.kube.real_cluster import OPERATOR_NAMESPACE, RealCluster
from tests.polling import poll_until

SERVER = "kv"
ENGINE = "engine"
KUBELET_PROOFS = {"container_terminated", "pod_terminated"}
START_SECONDS = 180.0
SEEN_SECONDS = 120.0
"""How long a test waits for what should take a second or some; a busy machine needs it."""

_ENGINE_FILE = Path(__file__).with_name("engine.py")
_USER = 65532  # the agent's, which opens what workers share


@dataclass(frozen=True)
class Run:
    """One run of the engine's container."""

    container_id: str
    process_id: int
    instance_id: str
    registered_at: float


class WorkerPod:
    """One worker pod, by its name."""

    def __init__(self, cluster: RealCluster, namespace: str, name: str) -> None:
        self.name = name
        self._cluster = cluster
        self._namespace = namespace

    def get(self) -> dict[str, Any] | None:
        """Return the object, None if it is gone."""
        path = f"/api/v1/namespaces/{self._namespace}/pods/{self.name}"
        answer = self._cluster.plane.api.request("GET", path)
        return answer.body if answer.ok else None

    def started(self, after: str = "") -> Run:
        """Wait for a run, with `after` for a later one than that container's, to register."""

        def registered() -> Run | None:
            container_id = self._running_container()
            if not container_id or container_id == after:
                return None
            said = [line for line in self.said() if line["event"] == "registered"]
            pid = self._cluster.node.process_id(container_id)
            if not said or pid is None:
                return None
            return Run(container_id, pid, said[-1]["instance_id"], said[-1]["at"])

        return poll_until(registered, f"{self.name} registers", patience_seconds=START_SECONDS)

    def said(self) -> list[dict[str, Any]]:
        """Return what the engine of the present run has printed."""
        done = self._cluster.plane.kubectl("logs", self.name, "-n", self._namespace, "-c", ENGINE)
        return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]

    def registrations(self) -> int:
        """Count how often the engine of the present run has registered."""
        return sum(line["event"] == "registered" for line in self.said())

    def has_said(self, event: str) -> bool:
        """Tell whether the engine of the present run has printed such a line."""
        return any(line["event"] == event for line in self.said())

    def annotation(self) -> str:
        """Return the ids that the operator wrote on the pod."""
        annotations = ((self.get() or {}).get("metadata") or {}).get("annotations") or {}
        return str(annotations.get(INSTANCE_IDS_ANNOTATION, ""))

    def annotated(self, ids: str) -> float:
        """Wait until the annotation is `ids`; return the moment at which it was seen."""
        poll_until(lambda: self.annotation() == ids, f"{self.name} bears {ids!r}")
        return time.time()

    def delete(self, *options: str) -> None:
        """Have kubectl delete it, without waiting."""
        wait = "--wait=false"
        self._cluster.kubectl("delete", "pod", self.name, "-n", self._namespace, wait, *options)

    def describe(self) -> str:
        """Return what people see."""
        return self._cluster.kubectl("describe", "pod", self.name, "-n", self._namespace)

    def unschedulable(self) -> str:
        """Return the scheduler's words about why it is on no node, empty if it has not said any."""
        conditions = ((self.get() or {}).get("status") or {}).get("conditions") or []
        found = [c for c in conditions if c["type"] == "PodScheduled" and c["status"] == "False"]
        return str(found[0].get("message", "")) if found else ""

    def last_end(self) -> dict[str, Any]:
        """Return how the run before the present one ended, empty if there was none."""
        (status,) = ((self.get() or {}).get("status") or {}).get("containerStatuses") or [{}]
        ended: dict[str, Any] = (status.get("lastState") or {}).get("terminated") or {}
        return ended

    def _running_container(self) -> str:
        statuses = ((self.get() or {}).get("status") or {}).get("containerStatuses") or []
        running = [s for s in statuses if "running" in s["state"]]
        return str(running[0]["containerID"]) if running else ""


class ServedNamespace:
    """A namespace with a server and its workers."""

    def __init__(self, cluster: RealCluster, namespace: str) -> None:
        self.cluster = cluster
        self.name = namespace

    def wait_ready(self, server: str) -> None:
        """Wait until all agents of a server serve."""
        ready = "--for=condition=Ready"
        self.cluster.kubectl("wait", ready, f"lmcs/{server}", "-n", self.name, "--timeout=120s")

    def create_engine(self) -> None:
        """Put the engine's program where worker pods find it."""
        made = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": ENGINE},
            "data": {"engine.py": _ENGINE_FILE.read_text()},
        }
        self.cluster.kubectl("apply", "-n", self.name, "-f", "-", given=json.dumps(made))

    def connection(self, server: str = SERVER) -> dict[str, str]:
        """Return what the operator tells workers."""
        name = connection_config_map(server)
        (found,) = self.cluster.objects("configmap", name, "-n", self.name)
        data: dict[str, str] = found["data"]
        return data

    @contextmanager
    def worker(
        self, name: str, *, on_term: str = "ignore", grace_seconds: int = 5
    ) -> Generator[WorkerPod]:
        """Run a worker pod, connected over TCP, for the block; nothing of it is left after it."""
        made = pod_object(name, on_term=on_term, grace_seconds=grace_seconds)
        with self.worker_of(made) as pod:
            yield pod

    @contextmanager
    def worker_of(self, made: dict[str, Any]) -> Generator[WorkerPod]:
        """Run a worker pod that is given as an object."""
        name = made["metadata"]["name"]
        self.cluster.kubectl("apply", "-n", self.name, "-f", "-", given=json.dumps(made))
        pod = WorkerPod(self.cluster, self.name, name)
        try:
            yield pod
        finally:
            options = ("--ignore-not-found", "--grace-period=1")
            self.cluster.kubectl("delete", "pod", name, "-n", self.name, *options)

    def agent_pod(self, server: str = SERVER) -> dict[str, Any]:
        """Wait for the one pod of the node's agent, beside one that is being deleted; return it."""
        labels = agent_labels(server).items()
        selector = ",".join(f"{name}={value}" for name, value in labels)

        def lasting() -> dict[str, Any] | None:
            found = self.cluster.objects("pods", "-n", self.name, f"--selector={selector}")
            pods = [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]
            return pods[0] if len(pods) == 1 else None

        return poll_until(lasting, "an agent's pod")

    def agent_process_id(self, server: str = SERVER) -> int:
        """Wait for a running agent; return its process, as the node sees it."""
        return poll_until(lambda: self._process_of(self.agent_pod(server)), "an agent runs")

    def events(self, reason: str) -> list[dict[str, Any]]:
        """Return the Events of a reason."""
        return self.cluster.objects("events", "-n", self.name, f"--field-selector=reason={reason}")

    def told(self, instance_id: str, kind: str = "Pod") -> list[dict[str, Any]]:
        """Return the Events about objects of a kind that tell of an instance's reap."""
        found = (e for e in self.events("WorkerReaped") if e["involvedObject"]["kind"] == kind)
        return [event for event in found if instance_id in event["message"]]

    @contextmanager
    def without_operator(self) -> Generator[None]:
        """Have none for the block."""
        self._operator_replicas(0)
        try:
            yield
        finally:
            self._operator_replicas(1)

    def _operator_replicas(self, count: int) -> None:
        deployment = "deployment/lmcache-operator"
        where = f"--namespace={OPERATOR_NAMESPACE}"
        self.cluster.kubectl("scale", deployment, where, f"--replicas={count}")
        self.cluster.roll_out(deployment, OPERATOR_NAMESPACE)
        poll_until(lambda: len(self._operator_pods()) == count, "operators")

    def operator_process_id(self) -> int:
        """Wait for a running operator; return its process, as the node sees it."""

        def running() -> int | None:
            pods = self._operator_pods()
            return self._process_of(pods[0]) if len(pods) == 1 else None

        return poll_until(running, "an operator runs")

    def _process_of(self, pod: dict[str, Any]) -> int | None:
        (status,) = pod["status"].get("containerStatuses") or [{"state": {}}]
        if "running" not in status["state"]:
            return None
        return self.cluster.node.process_id(status["containerID"])

    def _operator_pods(self) -> list[dict[str, Any]]:
        return self.cluster.objects("pods", f"--namespace={OPERATOR_NAMESPACE}")

    def agent(self, server: str = SERVER) -> AgentView:
        """Look into the agent that runs now."""
        return AgentView(self.agent_process_id(server))

    def reaped(self, instance_id: str, server: str = SERVER) -> dict[str, Any]:
        """Wait until an instance was reaped; return what the agent says of it."""
        agent = self.agent(server)

        def entry() -> dict[str, Any] | None:
            return next(iter(agent.reaps(instance_id)), None)

        return poll_until(entry, f"instance {instance_id} is reaped")


def kill(process_id: int) -> float:
    """SIGKILL a container's first process from outside, as a crash; return the moment."""
    killed_at = time.time()
    os.kill(process_id, signal.SIGKILL)
    return killed_at


def is_alive(process_id: int) -> bool:
    """Tell whether a process of the node is still there."""
    return Path(f"/proc/{process_id}").exists()


def mapped_segments(process_id: int) -> list[str]:
    """Return the workers' memory that a process maps."""
    lines = Path(f"/proc/{process_id}/maps").read_text().splitlines()
    return sorted({line.split()[5] for line in lines if "/dev/shm/lmcache_kv_" in line})


def seconds_until(moment: float, happened: Callable[[], object], what: str) -> float:
    """Wait for something; return how long after `moment` it was so."""
    poll_until(happened, what)
    return time.time() - moment


def pod_object(
    name: str, *, server: str = SERVER, on_term: str = "ignore", grace_seconds: int = 5
) -> dict[str, Any]:
    """Return a worker pod that connects over TCP and shares its memory through `/dev/shm`."""
    url = {"configMapKeyRef": {"name": connection_config_map(server), "key": "url_tcp"}}
    container = {
        "name": ENGINE,
        "image": PRODUCT_IMAGE,
        "command": ["python3", "/engine/engine.py"],
        "env": [
            {"name": "URL", "valueFrom": url},
            {"name": "PING_SECONDS", "value": "1"},
            {"name": "ON_TERM", "value": on_term},
        ],
        "resources": {"limits": {"memory": "256Mi"}},
        "volumeMounts": [
            {"name": "engine", "mountPath": "/engine"},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {WORKER_LABEL: server}},
        "spec": {
            "containers": [container],
            "terminationGracePeriodSeconds": grace_seconds,
            "securityContext": {"runAsUser": _USER, "runAsGroup": _USER, "runAsNonRoot": True},
            "volumes": [
                {"name": "engine", "configMap": {"name": ENGINE}},
                {"name": "shm", "hostPath": {"path": "/dev/shm", "type": "Directory"}},
            ],
        },
    }


def over_socket(made: dict[str, Any], connection: Mapping[str, str]) -> dict[str, Any]:
    """Have a worker pod connect over the Unix socket of its server instead."""
    mount = connection["unix_socket_mount_folder"]
    (container,) = made["spec"]["containers"]
    path = f"ipc://{mount}/agent.sock"
    assert path in connection["kv_transfer_config_unix_socket"]
    container["env"] = [
        {"name": "URL", "value": path},
        *(variable for variable in container["env"] if variable["name"] != "URL"),
    ]
    container["volumeMounts"].append({"name": "socket", "mountPath": mount})
    folder = {"path": connection["unix_socket_host_folder"], "type": "Directory"}
    made["spec"]["volumes"].append({"name": "socket", "hostPath": folder})
    return made
