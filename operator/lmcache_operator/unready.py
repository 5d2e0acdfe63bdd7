"""Finds out why agents are not ready: their DaemonSet does not say, its pods and Events do."""

from __future__ import annotations

import structlog

from lmcache_operator import names
from lmcache_operator.agents.registry import ServerRef
from lmcache_operator.clock import Now, monotonic
from lmcache_operator.cluster import Cluster, KubeObject
from lmcache_operator.conditions import count_nodes
from lmcache_operator.errors import Forbidden
from lmcache_operator.troubles import Trouble, creation_trouble, pod_trouble

_FRESH_SECONDS = 4.0  # during a roll-out over many nodes each pod makes a pass

log = structlog.get_logger(__name__)


class UnreadyAgents:
    """Looks at the pods of servers whose agents are not all ready, each a few times a minute."""

    def __init__(self, cluster: Cluster, *, now: Now = monotonic) -> None:
        self._cluster = cluster
        self._now = now
        self._known: dict[ServerRef, tuple[float, Trouble | None]] = {}
        self._blind: set[ServerRef] = set()

    async def why(self, server: ServerRef, daemon_set: KubeObject | None) -> Trouble | None:
        """Return why agents are not ready, None if they are or if that is not known.

        Raises:
            ApiError: a question is refused, other than for lack of rights.
            Unreachable: no answer.
        """
        nodes = count_nodes(daemon_set)
        if daemon_set is None or nodes.ready >= nodes.desired:
            self._known.pop(server, None)
            return None
        looked_at, found = self._known.get(server, (float("-inf"), None))
        if self._now() >= looked_at + _FRESH_SECONDS:
            found = await self._look(server, daemon_set["metadata"]["uid"], nodes.desired)
            self._known[server] = (self._now(), found)
        return found

    async def _look(self, server: ServerRef, uid: str, desired: int) -> Trouble | None:
        try:
            pods = await self._pods(server, uid)
            if len(pods) < desired:
                about = f"involvedObject.uid={uid},reason=FailedCreate"
                events = await self._cluster.list("Event", server.namespace, field_selector=about)
                if (found := creation_trouble(events)) is not None:
                    return found
        except Forbidden as error:
            if server not in self._blind:
                self._blind.add(server)
                log.warning("agents_not_looked_at", name=server.name, error=str(error))
            return None
        return pod_trouble(pods)

    async def _pods(self, server: ServerRef, uid: str) -> list[KubeObject]:
        labels = names.agent_labels(server.name).items()
        selector = ",".join(f"{label}={value}" for label, value in labels)
        return [
            pod
            for pod in await self._cluster.list("Pod", server.namespace, selector)
            if any(owner["uid"] == uid for owner in pod["metadata"].get("ownerReferences") or ())
        ]
