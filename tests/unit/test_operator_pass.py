"""What one pass leaves behind, beyond what a real API server shows."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from lmcache_operator.agents.registry import AgentRegistry, ServerRef
from lmcache_operator.cluster import Cluster, KubeObject
from lmcache_operator.conditions import WorkersSeen
from lmcache_operator.config import OperatorConfig
from lmcache_operator.errors import Forbidden
from lmcache_operator.resources.desired import Surroundings
from lmcache_operator.server_pass import Memory, ServerPass
from lmcache_operator.unready import UnreadyAgents
from tests.fakes.loop_clock import LoopClock

SERVER = ServerRef("serving", "kv", "uid-1")
CONFIG = OperatorConfig(operator_namespace="ops", namespace=("serving",))


class StoringCluster:
    """One server and its objects in memory; lists are as a test says.

    Attributes:
        lists: by kind; an error is raised.
        listed: kinds that were listed.
        statuses: that were written.
    """

    def __init__(self, spec: KubeObject) -> None:
        self.server: KubeObject = {
            "metadata": {
                "namespace": "serving",
                "name": "kv",
                "uid": "uid-1",
                "generation": 1,
                "resourceVersion": "1",
            },
            "spec": spec,
        }
        self.lists: dict[str, list[KubeObject] | Exception] = {}
        self.listed: list[str] = []
        self.statuses: list[KubeObject] = []

    async def get(self, kind: str, namespace: str | None, name: str) -> KubeObject | None:
        """See `Cluster`."""
        del namespace, name
        return self.server if kind == "LMCacheServer" else None

    async def apply(self, obj: KubeObject) -> KubeObject:
        """See `Cluster`."""
        return {**obj, "metadata": {**obj["metadata"], "resourceVersion": "2", "uid": "d"}}

    async def apply_status(self, obj: KubeObject) -> KubeObject:
        """See `Cluster`."""
        self.statuses.append(obj["status"])
        self.server["status"] = obj["status"]
        return {"metadata": {"resourceVersion": str(10 + len(self.statuses))}}

    async def create(self, obj: KubeObject) -> bool:
        """See `Cluster`."""
        del obj
        return True

    async def list(
        self,
        kind: str,
        namespace: str | None = None,
        label_selector: str = "",
        field_selector: str = "",
    ) -> list[KubeObject]:
        """See `Cluster`."""
        del namespace, label_selector, field_selector
        self.listed.append(kind)
        found = self.lists.get(kind, [])
        if isinstance(found, Exception):
            raise found
        return found


class Nobody:
    """Knows no workers."""

    def seen(self, server: ServerRef) -> WorkersSeen:
        """See `WorkerView`."""
        del server
        return WorkersSeen()


def a_pass(cluster: StoringCluster, clock: LoopClock) -> ServerPass:
    """Make passes over the one server."""
    return ServerPass(
        cast("Cluster", cluster),
        CONFIG,
        lambda: Surroundings("agent:1", "wss://o:1", "pem"),
        AgentRegistry(),
        Nobody(),
        written=list[str]().append,
        now=clock.now,
        wall_now=clock.now,
    )


def test_a_spec_that_turns_bad_leaves_workers_known() -> None:
    """Agents and workers are there all the same: their mappings and annotations stay."""
    cluster, clock, memory = StoringCluster({"cache": {"size": "1Gi"}}), LoopClock(), Memory()
    passes = a_pass(cluster, clock)

    def run_with(**parts: Any) -> str:  # noqa: ANN401  # of a spec
        cluster.server["spec"] = {"cache": {"size": "1Gi"}, **parts}
        asyncio.run(passes.run("serving", "kv", memory))
        ready: str = cluster.statuses[-1]["conditions"][0]["reason"]
        return ready

    run_with(workers={"containerName": "a"})
    good = memory.spec
    assert good is not None
    assert run_with(volumes=[{"name": "agent-shm"}], workers={"containerName": "b"}) == (
        "InvalidSpec"
    )
    assert memory.spec is not None
    assert memory.spec.workers.container_name == "b"
    for bad in ({"workers": {"namespaces": ["other"]}}, {"noSuchField": 1}):
        assert run_with(**bad) == "InvalidSpec"
        assert memory.spec is not None
        assert memory.spec.workers.container_name == "b"


def test_words_of_a_status_wait_and_are_not_forgotten() -> None:
    """The pass says when to come back for them."""
    cluster, clock, memory = StoringCluster({"cache": {"size": "1Gi"}}), LoopClock(), Memory()
    passes = a_pass(cluster, clock)
    asyncio.run(passes.run("serving", "kv", memory))
    written = len(cluster.statuses)
    cluster.server["status"]["conditions"][0]["message"] = "somebody's"
    again_seconds = asyncio.run(passes.run("serving", "kv", memory))
    assert len(cluster.statuses) == written
    assert again_seconds is not None
    assert again_seconds <= 30
    clock.jump(31)
    asyncio.run(passes.run("serving", "kv", memory))
    assert len(cluster.statuses) == written + 1


def daemon_set(ready: int) -> KubeObject:
    """Make a DaemonSet with one node."""
    return {
        "metadata": {"uid": "d"},
        "status": {"desiredNumberScheduled": 1, "numberReady": ready},
    }


def test_pods_are_looked_at_a_few_times_a_minute() -> None:
    """A roll-out over a thousand nodes makes a thousand passes; ready agents need no look."""
    cluster, clock = StoringCluster({}), LoopClock()
    unready = UnreadyAgents(cast("Cluster", cluster), now=clock.now)
    for _ in range(10):
        asyncio.run(unready.why(SERVER, daemon_set(0)))
    assert cluster.listed == ["Pod", "Event"]
    clock.jump(5)
    asyncio.run(unready.why(SERVER, daemon_set(0)))
    assert cluster.listed == ["Pod", "Event"] * 2
    clock.jump(5)
    assert asyncio.run(unready.why(SERVER, daemon_set(1))) is None
    assert len(cluster.listed) == 4


def test_what_may_not_be_looked_at_is_not_known() -> None:
    """And nothing else suffers from it."""
    cluster = StoringCluster({})
    cluster.lists["Pod"] = Forbidden(403, "Forbidden", "no")
    unready = UnreadyAgents(cast("Cluster", cluster), now=LoopClock().now)
    assert asyncio.run(unready.why(SERVER, daemon_set(0))) is None
