"""A server with as many slots as there are by default, whose releases may be made slow."""

from __future__ import annotations

import json
import os
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.e2e.kube.image import PAUSE_IMAGE
from tests.e2e.kube.real_cluster import RealCluster
from tests.e2e.kube.slot_pods import SlotWorld
from tests.e2e.kube.worker_pods import WorkerPod
from tests.polling import poll_until

SERVER = "limits"
_AGENTS, _WORKERS = "limits-agents", "limits-tenants"
_MODULE = Path(__file__).with_name("slow_release") / "sitecustomize.py"
_FILL_SECONDS = 240.0
_START_TICKS = 19  # starttime of proc(5), counted from what follows the name


class LimitWorld(SlotWorld):
    """The server's defaults, and a module of ours before its agent."""

    def __init__(self, cluster: RealCluster) -> None:
        super().__init__(cluster, SERVER, _AGENTS, _WORKERS)

    def make(self) -> None:
        """Make everything; the agent may not be ready yet."""
        self.create_namespaces()
        module = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "slow-release"},
            "data": {_MODULE.name: _MODULE.read_text()},
        }
        self.cluster.kubectl("apply", "-n", _AGENTS, "-f", "-", given=json.dumps(module))
        self.apply(
            env=[{"name": "PYTHONPATH", "value": "/slow-release"}],
            volumes=[
                {"name": "slow-release", "configMap": {"name": "slow-release"}},
                {"name": "release", "emptyDir": {}},
            ],
            volumeMounts=[
                {"name": "slow-release", "mountPath": "/slow-release"},
                {"name": "release", "mountPath": "/release"},
            ],
        )

    @contextmanager
    def slow_releases(self, seconds: float) -> Generator[None]:
        """Have each release take so long within the block; it lets go of all that still wait."""
        order = self._release_folder() / "seconds"
        order.write_text(str(seconds))
        try:
            yield
        finally:
            order.unlink()

    def closed_at(self) -> float:
        """Return when a context was closed last, in seconds since the machine started."""
        return float((self._release_folder() / "closed-at").read_text())

    def _release_folder(self) -> Path:
        agent = self.agents.agent_process_id(self.server)
        return Path(f"/proc/{agent}/root/release")

    @contextmanager
    def filled(self, pods: int, containers: int) -> Generator[list[WorkerPod]]:
        """Run pods whose containers do nothing but hold a slot each."""
        with ExitStack() as stack:
            made = [
                stack.enter_context(self.workers.worker_of(self._filler(f"filler-{n}", containers)))
                for n in range(pods)
            ]
            poll_until(
                lambda: all(self.running(pod) for pod in made),
                "fillers",
                patience_seconds=_FILL_SECONDS,
            )
            yield made
            for pod in made:
                pod.delete("--ignore-not-found", "--grace-period=1")  # all before the first wait

    def running(self, pod: WorkerPod) -> Sequence[str]:
        """Return the ids of a pod's containers, none unless all of them run."""
        statuses = ((pod.get() or {}).get("status") or {}).get("containerStatuses") or []
        ids = [s["containerID"] for s in statuses if "running" in s["state"]]
        return ids if len(ids) == len(statuses) else []

    def _filler(self, name: str, containers: int) -> dict[str, Any]:
        """Return a pod in which nothing runs but the pause container's program."""
        made = self.pod(name)
        (engine,) = made["spec"]["containers"]
        idle = {
            "image": PAUSE_IMAGE,
            "resources": {"limits": {self.resource: "1"}},
            "securityContext": engine["securityContext"],
        }
        made["spec"]["containers"] = [{"name": f"c{n}", **idle} for n in range(containers)]
        return made


def started_at(process_id: int) -> float:
    """Return when a process was made, in seconds since the machine started, rounded down."""
    words = Path(f"/proc/{process_id}/stat").read_text().rpartition(") ")[2].split()
    return int(words[_START_TICKS]) / os.sysconf("SC_CLK_TCK")
