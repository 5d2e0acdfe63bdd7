"""A worker flow on a loop of its own, with agents that do as they are told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from lmcache_nodeagent.operator_link.messages import InstanceReport
from lmcache_operator.agents.registry import AgentRegistry, ServerRef
from lmcache_operator.cluster import Cluster
from lmcache_operator.spec import read_spec
from lmcache_operator.worker_flow import WorkerFlow, WorkerSummary
from tests.cluster.watched_pods import LoopThread
from tests.fakes.scripted_agent import ScriptedAgent


class RunningFlow(LoopThread):
    """One operator's flow. Agents outlive it: hand them to the next one."""

    def __init__(
        self, kubeconfig: Path, server: ServerRef, *agents: ScriptedAgent, **spec: object
    ) -> None:
        super().__init__()
        self.server = server
        self.registry = AgentRegistry()
        self._kubeconfig = kubeconfig
        self._agents = agents
        self._spec = read_spec({"cache": {"size": "1Gi"}, **spec})
        self._flow: WorkerFlow | None = None

    @property
    def flow(self) -> WorkerFlow:
        """The flow itself; on the loop only."""
        assert self._flow is not None
        return self._flow

    def summary(self) -> WorkerSummary:
        """Return what is known of the server's workers."""
        return self.do(lambda: self.flow.summary(self.server))

    def edit(self, **spec: object) -> None:
        """Change the spec."""
        edited = read_spec({"cache": {"size": "1Gi"}, **spec})
        self.do(lambda: self.flow.servers_changed({self.server: edited}))

    def register(
        self, agent: ScriptedAgent, instance_id: int, *, at: float, peer: str
    ) -> InstanceReport:
        """Have a worker register."""
        return self.do(lambda: agent.register(instance_id, at=at, peer=peer))

    def triggers(self, agent: ScriptedAgent, report: InstanceReport) -> list[tuple[str, bool]]:
        """Return trigger and proof of all evidence about a registration, repeats once."""

        def read() -> list[tuple[str, bool]]:
            agent.read()
            found = {each.id: (each.trigger, each.proof) for each in agent.of(report)}
            return list(found.values())

        return self.do(read)

    def mapped_to(self, agent: ScriptedAgent, report: InstanceReport) -> str:
        """Return the uid of the pod of a registration, empty if none is known."""

        def read() -> str:
            agent.read()
            return agent.mapped_to(report)

        return self.do(read)

    def acknowledged(self, agent: ScriptedAgent) -> int:
        """Return up to where an agent's journal is dealt with."""

        def read() -> int:
            agent.read()
            return agent.acknowledged

        return self.do(read)

    async def main(self, begun: Callable[[], None]) -> None:
        """Run until cancelled."""
        async with await Cluster.connect(str(self._kubeconfig)) as cluster:
            self._flow = WorkerFlow(cluster, self.registry, lambda _: None)
            self._flow.servers_changed({self.server: self._spec})
            for agent in self._agents:
                agent.connect(self.registry)
            begun()
            try:
                await self._flow.run()
            finally:
                for agent in self._agents:
                    agent.disconnect()
