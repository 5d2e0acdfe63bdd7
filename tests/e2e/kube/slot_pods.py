"""A server with the device plugin, and workers in a restricted namespace that ask for it."""

from __future__ import annotations

import ctypes
import http.client
import json
import os
import select
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lmcache_operator.names import WORKER_LABEL, device_resource
from tests.e2e.kube.image import PRODUCT_IMAGE
from tests.e2e.kube.node import NAME as NODE
from tests.e2e.kube.real_cluster import RealCluster
from tests.e2e.kube.worker_pods import ENGINE, SEEN_SECONDS, ServedNamespace, WorkerPod
from tests.polling import poll_until

SERVER = "slots"
SLOTS = 2
RESOURCE = device_resource(SERVER)
URL = "ipc:///run/lmcache-kube/agent.sock"
AGENTS, WORKERS = "agents", "tenants"

_USER = 1000
_HERE = Path(__file__).parent
_HTTP_PORT = 8080
_TIMEOUT_SECONDS = 10.0
_PIDFD_GETFD = 438  # the same number on every architecture


class SlotWorld:
    """Agents in a namespace of theirs, workers in one that enforces the level `restricted`."""

    def __init__(
        self,
        cluster: RealCluster,
        server: str = SERVER,
        agents: str = AGENTS,
        workers: str = WORKERS,
    ) -> None:
        self.cluster = cluster
        self.server = server
        self.resource = device_resource(server)
        self.agents = ServedNamespace(cluster, agents)
        self.workers = ServedNamespace(cluster, workers)

    def create_namespaces(self) -> None:
        """Make both, and put the engines' programs where worker pods find them."""
        self.create_namespace(self.agents.name, "privileged")
        self.create_namespace(self.workers.name, "restricted")
        self._create_engines()

    def wait_ready(self, slots: int) -> None:
        """Wait until the agent serves and the node offers so many slots."""
        self.agents.wait_ready(self.server)
        self.wait_allocatable(slots)

    def create_namespace(self, name: str, level: str) -> None:
        """Make a namespace that enforces a Pod Security level."""
        self.cluster.kubectl("create", "namespace", name)
        label = f"pod-security.kubernetes.io/enforce={level}"
        self.cluster.kubectl("label", "namespace", name, label)

    def apply(self, namespace: str = "", **spec: object) -> None:
        """Apply the server, or another of its name."""
        where = namespace or self.agents.name
        made = {
            "apiVersion": "lmcache-kube.dev/v1alpha1",
            "kind": "LMCacheServer",
            "metadata": {"name": self.server},
            "spec": {
                "cache": {"size": "256Mi"},
                "workers": {"namespaces": [self.workers.name]},
                **spec,
            },
        }
        self.cluster.kubectl("apply", "-n", where, "-f", "-", given=json.dumps(made))

    def condition(self, namespace: str = "") -> dict[str, Any]:
        """Return the condition of the device plugin."""
        where = namespace or self.agents.name
        (server,) = self.cluster.objects("lmcs", self.server, "-n", where)
        found = server.get("status", {}).get("conditions", [])
        return next((one for one in found if one["type"] == "DevicePlugin"), {})

    def wait_allocatable(self, count: int) -> None:
        """Wait until the node offers so many."""

        def offered() -> bool:
            (node,) = self.cluster.objects("node", NODE)
            return str(node["status"]["allocatable"].get(self.resource, "0")) == str(count)

        poll_until(offered, f"{count} of {self.resource}")

    @contextmanager
    def worker(self, name: str, program: str = "engine", **env: str) -> Generator[WorkerPod]:
        """Run a worker for the block."""
        with self.workers.worker_of(self.pod(name, program, **env)) as pod:
            yield pod

    def pod(self, name: str, program: str = "engine", **env: str) -> dict[str, Any]:
        """Return a worker's pod."""
        return slot_pod(name, program, self.server, **env)

    def metric(self, start: str) -> float:
        """Add up the agent's samples whose line begins so."""
        address = self.agents.agent_pod(self.server)["status"]["podIP"]
        connection = http.client.HTTPConnection(address, _HTTP_PORT, timeout=_TIMEOUT_SECONDS)
        try:
            connection.request("GET", "/metrics")
            lines = connection.getresponse().read().decode().splitlines()
        finally:
            connection.close()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(start))

    def instances(self) -> dict[str, dict[str, Any]]:
        """Return what is registered."""
        return self.agents.agent(self.server).instances()

    def mapped(self) -> set[str]:
        """Return the workers' memory that the agent maps."""
        maps = Path(f"/proc/{self.agents.agent_process_id(self.server)}/maps").read_text()
        return {line.split()[4] for line in maps.splitlines() if "lmcache_kv_" in line}

    def _create_engines(self) -> None:
        made = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": ENGINE},
            "data": {name: (_HERE / name).read_text() for name in ("engine.py", "slot_engine.py")},
        }
        self.cluster.kubectl("apply", "-n", self.workers.name, "-f", "-", given=json.dumps(made))


def slot_pod(
    name: str, program: str = "engine", server: str = SERVER, **env: str
) -> dict[str, Any]:
    """Return a worker pod whose only special line is the resource; the rest any level demands."""
    variables = {"URL": URL, "PING_SECONDS": "1", "ON_TERM": "ignore", **env}
    container = {
        "name": ENGINE,
        "image": PRODUCT_IMAGE,
        "command": ["python3", f"/engine/{program}.py"],
        "env": [{"name": name, "value": value} for name, value in variables.items()],
        "resources": {"limits": {"memory": "256Mi", device_resource(server): "1"}},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [{"name": "engine", "mountPath": "/engine"}],
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {WORKER_LABEL: server}},
        "spec": {
            "containers": [container],
            "terminationGracePeriodSeconds": 2,
            "securityContext": {
                "runAsUser": _USER,
                "runAsNonRoot": True,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "volumes": [{"name": "engine", "configMap": {"name": ENGINE}}],
        },
    }


class Death:
    """When a process ended, to the millisecond."""

    def __init__(self, process_id: int) -> None:
        self._descriptor = os.pidfd_open(process_id)

    def wait(self, seconds: float = SEEN_SECONDS) -> float:
        """Wait for it; return the moment."""
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        assert poll.poll(seconds * 1000), f"still alive after {seconds} s"
        ended_at = time.time()
        os.close(self._descriptor)
        return ended_at


@contextmanager
def held_sockets(process_id: int) -> Generator[int]:
    """Keep a process's Unix sockets open, as a child of it would that outlives it.

    Yields how many there are. Inside a container nothing outlives its first process; what hangs on
    its exit in a driver keeps its descriptors just so.
    """
    library = ctypes.CDLL(None, use_errno=True)
    process = os.pidfd_open(process_id)
    held: list[int] = []
    for link in Path(f"/proc/{process_id}/fd").iterdir():
        with suppress(OSError):
            if str(link.readlink()).startswith("socket:"):
                held.append(library.syscall(_PIDFD_GETFD, process, int(link.name), 0))
    os.close(process)
    assert all(descriptor >= 0 for descriptor in held), os.strerror(ctypes.get_errno())
    try:
        yield len(held)
    finally:
        for descriptor in held:
            os.close(descriptor)


def seen_in(process_id: int, folder: str) -> dict[str, int]:
    """Return names and inodes in a folder as a container sees it."""
    found = Path(f"/proc/{process_id}/root{folder}").iterdir()
    return {path.name: path.stat().st_ino for path in found}


def segments_of(process_id: int) -> set[int]:
    """Return the inodes of the KV memory in a container's /dev/shm; names repeat, these do not."""
    seen = seen_in(process_id, "/dev/shm").items()
    return {inode for name, inode in seen if name.startswith("lmcache_kv_")}
