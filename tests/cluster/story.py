"""The whole chain in one place: operator, agents on nodes, worker pods, and the workers in them.

Real are the API server, its controllers, the operator, the agents, and the workers: each is a
process. What a kubelet does (bind, mount, report) a story does, when the test says so.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from lmcache_operator.api.crd import GROUP, PLURAL, VERSION, definition
from lmcache_operator.names import WORKER_LABEL
from tests.cluster.api import Api
from tests.cluster.control_plane import ControlPlane
from tests.cluster.operator_process import OperatorProcess
from tests.cluster.story_events import KubeEvent, read_events
from tests.cluster.story_nodes import StoryNode
from tests.cluster.story_pods import ENGINE, MERGE, StoryPod
from tests.cluster.story_worker import PING_SECONDS, LivingWorker
from tests.fakes.agent_process import AgentProcess
from tests.polling import poll_until

SERVER = "kv"

PROOF_ONLY: Mapping[str, Any] = {
    "reapTimeoutSeconds": 600,
    "hints": {"confirmSeconds": 400, "closeConfirmSeconds": 400},
}
"""Windows longer than the patience of tests: only proof releases anything."""

SMALLEST: Mapping[str, Any] = {
    "reapTimeoutSeconds": 30,
    "registrationGraceSeconds": 600,
    "hints": {"confirmSeconds": 3, "closeConfirmSeconds": 3},
}
"""The smallest windows that are allowed; 600 s for workers that never pinged."""


def make_ready(control_plane: ControlPlane, namespace: str) -> None:
    """Have a new control plane serve our kind, with a namespace for a story."""
    given = json.dumps(definition())
    done = control_plane.kubectl("apply", "--server-side", "-f", "-", given=given)
    assert done.returncode == 0, done.stderr
    api = control_plane.api
    kind = f"/apis/{GROUP}/{VERSION}/{PLURAL}"
    poll_until(lambda: api.request("GET", kind).ok, "our kind")
    assert api.request("POST", "/api/v1/namespaces", {"metadata": {"name": namespace}}).ok
    account = f"/api/v1/namespaces/{namespace}/serviceaccounts/default"
    poll_until(lambda: api.request("GET", account).ok, "a namespace's account")


class Story:
    """Everything of one test; leaving it ends every process that it started."""

    def __init__(
        self,
        control_plane: ControlPlane,
        namespace: str,
        folder: Path,
        *,
        kubeconfig: Path | None = None,
    ) -> None:
        """Prepare.

        Args:
            control_plane: its kind is served already.
            namespace: of the server, the operator and the workers.
            folder: for what pods mount.
            kubeconfig: the operator's, if it goes through a proxy.
        """
        self.api: Api = control_plane.api
        self.namespace = namespace
        self.operator = OperatorProcess(kubeconfig or control_plane.kubeconfig, namespace)
        self.nodes: list[StoryNode] = []
        self.workers: dict[int, LivingWorker] = {}
        self._folder = folder
        self._stack = ExitStack()
        self._stack.callback(self.operator.close)
        self._servers = f"/apis/{GROUP}/{VERSION}/namespaces/{namespace}/{PLURAL}"
        self._node_labels = {f"{GROUP}/story": namespace}
        self._addresses = (f"127.0.{n // 200 + 1}.{n % 200 + 5}" for n in itertools.count())

    # The server

    def apply(self, **spec: object) -> dict[str, Any]:
        """Apply the server; returns what is stored."""
        return self.apply_named(SERVER, **spec)

    def apply_named(self, name: str, **spec: object) -> dict[str, Any]:
        """Apply a server of another name."""
        body = {
            "apiVersion": f"{GROUP}/{VERSION}",
            "kind": "LMCacheServer",
            "metadata": {"name": name},
            "spec": {
                "cache": {"size": "64Mi"},
                "nodeSelector": self._node_labels,
                "workers": {"containerName": ENGINE},
                "transport": {"devicePlugin": {"mode": "Disabled"}},  # no kubelet to register with
                **spec,
            },
        }
        answer = self.api.apply(self._servers, body)
        assert answer.ok, answer.message
        return answer.body

    def edit(self, **spec: object) -> None:
        """Merge changes into the spec."""
        path = f"{self._servers}/{SERVER}"
        answer = self.api.request("PATCH", path, {"spec": spec}, content_type=MERGE)
        assert answer.ok, answer.message

    def server(self) -> dict[str, Any]:
        """Return the server."""
        return self.api.request("GET", f"{self._servers}/{SERVER}").body

    def status(self) -> dict[str, Any]:
        """Return the server's status, empty until there is one."""
        found: dict[str, Any] = self.server().get("status") or {}
        return found

    def delete_server(self) -> None:
        """Delete it."""
        assert self.api.request("DELETE", f"{self._servers}/{SERVER}").ok

    # Nodes and agents

    def add_node(self) -> StoryNode:
        """Make one more node, ready for the agent's pod."""
        name = f"{self.namespace}-{len(self.nodes)}"
        node = StoryNode(self.api, self.namespace, SERVER, name, self._folder / name)
        self._stack.callback(node.leave)
        node.join(self._node_labels)
        self.nodes.append(node)
        return node

    def begin(self, reaping: Mapping[str, Any] = PROOF_ONLY, *, nodes: int = 1) -> Self:
        """Start the operator, apply a server, and start an agent on each node; all are linked."""
        self.operator.start()
        self.apply(reaping=reaping)
        for _ in range(nodes):
            self.add_node().start_agent()
        self.wait_linked()
        return self

    @property
    def node(self) -> StoryNode:
        """The first node."""
        return self.nodes[0]

    @property
    def agent(self) -> AgentProcess:
        """The first node's agent."""
        return self.node.agent

    def wait_linked(self) -> None:
        """Wait until the operator hears every agent, with mounts kept up to date meanwhile."""

        def linked() -> bool:
            for node in self.nodes:
                node.mount()
            effective = self.status().get("reaping", {}).get("effective", {})
            return bool(effective.get("nodes", 0) == len(self.nodes))

        def said() -> str:
            return f"agents are linked: {self.status()}: {self.operator.log_text()[-5000:]}"

        poll_until(linked, said)

    # Worker pods

    def pod(
        self,
        name: str,
        *,
        node: StoryNode | None = None,
        addresses: Sequence[str] | None = None,
        containers: Sequence[str] = (ENGINE,),
        running: bool = True,
        **rest: Any,  # noqa: ANN401  # as StoryPod takes them
    ) -> StoryPod:
        """Make a worker pod, with an address of its own unless some are given."""
        pod = StoryPod(
            self.api,
            self.namespace,
            name,
            node=(node or self.node).name,
            addresses=[next(self._addresses)] if addresses is None else addresses,
            labels={WORKER_LABEL: SERVER},
            containers=containers,
            **rest,
        )
        if running:
            pod.run()
        return pod

    def add_owner(self, name: str) -> dict[str, Any]:
        """Make a StatefulSet, whose controller does not run here; return a reference to it."""
        labels = {"story": name}
        template = {
            "metadata": {"labels": labels},
            "spec": {"containers": [{"name": ENGINE, "image": "none"}]},
        }
        spec = {"serviceName": name, "selector": {"matchLabels": labels}, "template": template}
        path = f"/apis/apps/v1/namespaces/{self.namespace}/statefulsets"
        answer = self.api.request("POST", path, {"metadata": {"name": name}, "spec": spec})
        assert answer.ok, answer.message
        return {
            "apiVersion": "apps/v1",
            "kind": "StatefulSet",
            "name": name,
            "uid": answer.body["metadata"]["uid"],
            "controller": True,
        }

    def worker(
        self,
        pod: StoryPod,
        instance_id: int,
        *,
        node: StoryNode | None = None,
        address: str = "",
        ping_seconds: float | None = PING_SECONDS,
        wrapper: Sequence[str] = (),
        url: str = "",
    ) -> LivingWorker:
        """Start a worker in a pod, without waiting for it."""
        where = url or (node or self.node).worker_url(address or pod.address)
        worker = LivingWorker(where, instance_id, ping_seconds=ping_seconds, wrapper=wrapper)
        self._stack.callback(worker.close)
        self.workers[instance_id] = worker
        return worker

    def engine(
        self,
        name: str,
        *instance_ids: int,
        node: StoryNode | None = None,
        ping_seconds: float | None = PING_SECONDS,
        **rest: Any,  # noqa: ANN401  # as `pod` takes them
    ) -> StoryPod:
        """Make a pod that runs these workers, and wait until the operator has mapped them all."""
        pod = self.pod(name, node=node, **rest)
        for instance_id in instance_ids:
            self.worker(pod, instance_id, node=node, ping_seconds=ping_seconds)
        for instance_id in instance_ids:
            self.workers[instance_id].wait_registered()
        self.wait_annotated(pod, *instance_ids)
        return pod

    def wait_annotated(self, pod: StoryPod, *instance_ids: int) -> None:
        """Wait until a pod is annotated with exactly these ids: the operator has mapped them."""
        wanted = sorted(instance_ids)
        poll_until(
            lambda: pod.annotated_ids() == wanted,
            lambda: f"{pod.name} annotated with {wanted}, not {pod.annotated_ids()}",
        )

    # What comes of it

    def wait_released(
        self, *instance_ids: int, node: StoryNode | None = None
    ) -> dict[int, dict[str, Any]]:
        """Wait until these are gone, memory and all; return their entries in the journal."""
        agent = (node or self.node).agent
        reaps = {each: agent.wait_reaped(each) for each in instance_ids}
        left = [agent.instances().get(each) for each in instance_ids]
        assert not any(left), left
        return reaps

    def wait_registered(self, *instance_ids: int, node: StoryNode | None = None) -> None:
        """Wait until the agent knows these, as after its restart."""
        agent = (node or self.node).agent
        wanted = set(instance_ids)
        poll_until(lambda: wanted <= set(agent.instances()), f"{wanted} registered")

    def wait_rhythm(self, *instance_ids: int, node: StoryNode | None = None) -> None:
        """Wait until the agent knows how often these ping: hints are confirmed by that as well."""
        agent = (node or self.node).agent

        def known() -> bool:
            shown = agent.instances()
            words = [" ".join(shown[each]["evidence"]) for each in instance_ids]
            return all("pings every" in each for each in words)

        poll_until(known, f"the rhythm of {instance_ids}")

    def assert_live(self, *instance_ids: int, node: StoryNode | None = None) -> None:
        """Check that these are registered and were never reaped."""
        agent = (node or self.node).agent
        assert set(instance_ids) <= set(agent.instances()), agent.log_text()
        reaped = {int(reap["instance_id"]) for reap in agent.reaps()}
        assert not reaped & set(instance_ids), agent.reaps()

    def assert_live_for(
        self, seconds: float, *instance_ids: int, node: StoryNode | None = None
    ) -> None:
        """Check the same over a time: the point is that nothing happens."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.assert_live(*instance_ids, node=node)
            time.sleep(0.1)

    def is_hinted(self, *instance_ids: int, node: StoryNode | None = None) -> bool:
        """Tell whether the agent has been told that the pods of all of these are gone."""
        shown = (node or self.node).agent.instances()
        words = (" ".join(shown[each]["evidence"]) for each in instance_ids)
        return all("pod_gone" in each for each in words)

    def events(self, *reasons: str) -> list[KubeEvent]:
        """Return the Events of this namespace with one of these reasons."""
        return read_events(self.api, self.namespace, reasons)

    def wait_events(self, reason: str, count: int) -> list[KubeEvent]:
        """Wait until there are at least so many Events of one reason."""

        def enough() -> list[KubeEvent] | None:
            found = self.events(reason)
            return found if len(found) >= count else None

        return poll_until(enough, lambda: f"{count} Events {reason}: {self.events(reason)}")

    def condition(self, kind: str) -> dict[str, Any]:
        """Return one condition of the server, empty if it is not there."""
        conditions: list[dict[str, Any]] = self.status().get("conditions", [])
        return next((each for each in conditions if each["type"] == kind), {})

    def wait_status(self, is_so: Callable[[dict[str, Any]], bool], what: str) -> dict[str, Any]:
        """Wait until the server's status is so; return it."""

        def found() -> dict[str, Any] | None:
            status = self.status()
            return status if status and is_so(status) else None

        return poll_until(found, lambda: f"{what}: {self.status()}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()
