"""A worker flow with everything around it: an API server, agents, time that passes at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

from lmcache_operator.agents.registry import AgentRegistry, ServerRef
from lmcache_operator.api.root import Spec
from lmcache_operator.cluster import Cluster, KubeObject
from lmcache_operator.errors import ApiError, Unreachable
from lmcache_operator.names import INSTANCE_IDS_ANNOTATION, WORKER_LABEL
from lmcache_operator.spec import read_spec
from lmcache_operator.worker_flow import WorkerFlow
from tests.fakes.pod_store import PodStore
from tests.fakes.pods import Json, container_status, pod, running
from tests.fakes.scripted_agent import ScriptedAgent

SERVER = ServerRef("default", "kv", "uid-kv")
BEGAN = 1_700_000_000.0
"""When the world begins, in seconds since 1970; its loop's clock is at 1,000 then."""

STATUS_SECONDS = 0.3
"""Between two writes of the server's status."""


class FakeCluster:
    """The rest of the API server: Events, patches of pods, and servers."""

    def __init__(self, pods: PodStore) -> None:
        self.events: dict[str, KubeObject] = {}
        self.patches: list[tuple[str, KubeObject]] = []
        self.reachable = True
        self.refusal: Callable[[KubeObject], ApiError | None] = lambda _: None
        self.servers: dict[tuple[str, str], KubeObject] = {}
        self.creations = 0
        self._pods = pods

    async def create(self, obj: KubeObject) -> bool:
        """Store an Event."""
        self.creations += 1
        await self._answer(obj)
        name = obj["metadata"]["namespace"] + "/" + obj["metadata"]["name"]
        if name in self.events:
            return False
        self.events[name] = obj
        return True

    async def merge_patch(
        self, kind: str, namespace: str | None, name: str, patch: KubeObject, *, uid: str = ""
    ) -> KubeObject | None:
        """Write the annotation."""
        assert kind == "Pod"
        assert namespace is not None
        self.patches.append((name, patch))
        await self._answer(patch)
        found = self._pods.get(namespace, name)
        if found is None or found["metadata"]["uid"] != uid:
            return None
        assert list(patch) == ["metadata"]
        assert list(patch["metadata"]) == ["annotations"]
        assert list(patch["metadata"]["annotations"]) == [INSTANCE_IDS_ANNOTATION]

        def write(document: Json) -> None:
            annotations = document["metadata"].setdefault("annotations", {})
            for key, value in patch["metadata"]["annotations"].items():
                annotations[key] = value
                if value is None:
                    del annotations[key]

        self._pods.change(namespace, name, write)
        return self._pods.get(namespace, name)

    async def get(self, kind: str, namespace: str | None, name: str) -> KubeObject | None:
        """Return a server."""
        await self._answer({})
        assert kind == "LMCacheServer"
        return self.servers.get((namespace or "", name))

    def notes(self, reason: str = "") -> list[tuple[str, str, str]]:
        """Return kind and name of the object, and the reason, of each Event."""
        return [
            (event["involvedObject"]["kind"], event["involvedObject"]["name"], event["reason"])
            for event in self.events.values()
            if reason in {"", event["reason"]}
        ]

    async def _answer(self, obj: KubeObject) -> None:
        await asyncio.sleep(0)
        if not self.reachable:
            raise Unreachable("nobody answers")
        if (refusal := self.refusal(obj)) is not None:
            raise refusal


class FlowWorld:
    """Makes operators one after the other. Use it inside `run_in_virtual_time`."""

    def __init__(self, **spec: object) -> None:
        self.pods = PodStore()
        self.cluster = FakeCluster(self.pods)
        self.cluster.servers["default", "kv"] = {"metadata": {"uid": SERVER.uid}, "status": {}}
        self.agents: dict[str, ScriptedAgent] = {}
        self.changes: list[ServerRef] = []
        self._specs: dict[ServerRef, Spec] = {SERVER: read_server(**spec)}
        self._registry = AgentRegistry()
        self._flow: WorkerFlow | None = None
        self._task: asyncio.Task[Any] | None = None

    @property
    def flow(self) -> WorkerFlow:
        """The present operator's."""
        assert self._flow is not None
        return self._flow

    @property
    def runs(self) -> bool:
        """Whether there is an operator."""
        return self._flow is not None

    @property
    def registry(self) -> AgentRegistry:
        """The present operator's."""
        return self._registry

    def wall(self) -> float:
        """Return seconds since 1970."""
        return BEGAN + asyncio.get_running_loop().time() - 1_000

    def agent(self, node: str = "n1", server: ServerRef = SERVER) -> ScriptedAgent:
        """Return the agent of a node; a new one connects, if there is an operator."""
        if node not in self.agents:
            self.agents[node] = ScriptedAgent(server, node)
            if self._flow is not None:
                self.agents[node].connect(self._registry)
        return self.agents[node]

    async def start_operator(self) -> None:
        """Start an operator; agents connect to it."""
        loop = asyncio.get_running_loop()
        self._registry = AgentRegistry()
        self._flow = WorkerFlow(
            cast("Cluster", self.cluster),
            self._registry,
            self.changes.append,
            source=self.pods,
            now=loop.time,
            wall=self.wall,
        )
        self._flow.servers_changed(self._specs)
        self._task = loop.create_task(self._run(self._flow))
        for agent in self.agents.values():
            agent.connect(self._registry)
        await self.settle()

    async def _run(self, flow: WorkerFlow) -> None:
        """Be an operator: the flow, and who writes the status of the server."""
        async with asyncio.TaskGroup() as group:
            group.create_task(flow.run())
            while True:
                await asyncio.sleep(STATUS_SECONDS)
                found = flow.summary(SERVER)
                if self.cluster.reachable and found.reaps_total is not None:
                    self.cluster.servers["default", "kv"]["status"]["reaping"] = {
                        "total": found.reaps_total,
                        "lastReapTime": found.last_reap_time,
                        "lastReason": found.last_reason,
                    }

    async def stop_operator(self) -> None:
        """Stop it, as a kill would; streams end."""
        for agent in self.agents.values():
            agent.disconnect()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        self._flow = self._task = None

    def edit(self, server: ServerRef = SERVER, **spec: object) -> None:
        """Change a spec, or add a server."""
        self._specs = {**self._specs, server: read_server(**spec)}
        self.flow.servers_changed(self._specs)

    def remove(self, server: ServerRef = SERVER) -> None:
        """Remove a server."""
        self._specs = {each: spec for each, spec in self._specs.items() if each != server}
        self.flow.servers_changed(self._specs)

    async def settle(self, seconds: float = 1.0) -> None:
        """Let some time pass, and agents read what they are told."""
        ends = asyncio.get_running_loop().time() + seconds
        while asyncio.get_running_loop().time() < ends:
            await asyncio.sleep(0.1)
            for agent in self.agents.values():
                agent.read()
            assert self._task is None or not self._task.done(), self._task

    def put_pod(
        self,
        name: str = "w",
        *statuses: Json,
        uid: str = "",
        labels: dict[str, str] | None = None,
        **fields: Any,  # noqa: ANN401  # as `pod` takes them
    ) -> str:
        """Store a worker pod that runs since long, unless told otherwise; return its uid."""
        uid = uid or f"uid-{name}"
        shown = statuses or (
            container_status("engine", running(BEGAN - 100), run="containerd://a"),
        )
        document = pod(*shown, uid=uid, **fields)
        document["metadata"] |= {
            "name": name,
            "labels": {WORKER_LABEL: "kv"} if labels is None else labels,
        }
        self.pods.put(document)
        return uid

    def annotation(self, name: str = "w") -> str | None:
        """Return our annotation of a pod."""
        found = self.pods.get("default", name)
        assert found is not None
        annotations: dict[str, str] = found["metadata"].get("annotations", {})
        return annotations.get(INSTANCE_IDS_ANNOTATION)


def read_server(**spec: object) -> Spec:
    """Read a spec that has what is required."""
    return read_spec({"cache": {"size": "1Gi"}, **spec})
