"""One pass over one server: the cluster becomes what the spec says, and the status what is so.

Level-based: whatever happened, a pass reads what is there and writes what differs. What is kept
between passes saves requests or paces them; a new operator does without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import structlog

from lmcache_operator import names
from lmcache_operator.agents.registry import AgentRegistry, ServerRef
from lmcache_operator.api.crd import GROUP, KIND, VERSION
from lmcache_operator.api.root import Spec
from lmcache_operator.api.status import Status
from lmcache_operator.clock import Now, kube_time, monotonic, wall
from lmcache_operator.cluster import Cluster, KubeObject
from lmcache_operator.conditions import AgentSeen, Seen, WorkersSeen, all_connected, count_nodes
from lmcache_operator.config import OperatorConfig
from lmcache_operator.ensure import Ensurer
from lmcache_operator.errors import ApiError, NameTaken, SpecError
from lmcache_operator.resources.config_maps import worker_namespaces
from lmcache_operator.resources.desired import Surroundings, desired_objects
from lmcache_operator.spec import read_spec
from lmcache_operator.status import (
    build_status,
    changed_conditions,
    is_urgent,
    read_status,
    trouble_of,
    write_status,
)
from lmcache_operator.trouble_events import TroubleEvents
from lmcache_operator.troubles import Trouble
from lmcache_operator.unready import UnreadyAgents

_UNWELL_SECONDS = 5.0  # looked at again: neither pods of agents nor their Events are watched
_REFUSED_SECONDS = 15.0  # tried again: what is in the way need not be an object of ours
_RESYNC_SECONDS = 60.0
_SHORTEST_SECONDS = 1.0
_WORDS_SECONDS = 30.0  # between two writes of a status that differ in words only
_SETTLE_SECONDS = 30.0  # for agents to connect, after a start and after they became ready

# Troubles that are none: agents start, connect, and are counted.
_PASSING = frozenset(
    {
        "AgentsConnecting",
        "AgentsNotReady",
        "AgentsStarting",
        "NoAgentConnected",
        "NoAgents",
        "NoDaemonSet",
        "NotObserved",
    }
)


log = structlog.get_logger(__name__)


class WorkerView(Protocol):
    """Who knows the workers of a server."""

    def seen(self, server: ServerRef) -> WorkersSeen:
        """Return what is known of them."""


@dataclass
class Memory:
    """What passes over one server remember; none of it is needed.

    Attributes:
        server: the object; None before the first pass.
        spec: what was last readable of it; None if nothing was.
        versions: of objects as the last pass left them: their events are no news.
        written_at: when the status was.
        short_since: since when agents that are ready have not been connected.
        cleaned: namespaces beside which there is no connection ConfigMap left.
    """

    server: ServerRef | None = None
    spec: Spec | None = None
    versions: set[str] = field(default_factory=set)
    written_at: float = float("-inf")
    short_since: float | None = None
    cleaned: tuple[str, ...] | None = None


class ServerPass:
    """What is done in a pass. One for all servers; a server is never in two passes at a time."""

    def __init__(
        self,
        cluster: Cluster,
        config: OperatorConfig,
        surroundings: Callable[[], Surroundings],
        agents: AgentRegistry,
        workers: WorkerView,
        *,
        written: Callable[[str], None],
        now: Now = monotonic,
        wall_now: Now = wall,
    ) -> None:
        """Prepare.

        Args:
            cluster: the API server.
            config: which namespaces are served.
            surroundings: what owned objects are made of, as it is now.
            agents: who is connected.
            workers: what agents have said of workers.
            written: told the kind of each object that was changed.
            now: monotonic seconds.
            wall_now: seconds since 1970.
        """
        self._cluster = cluster
        self._config = config
        self._surroundings = surroundings
        self._agents = agents
        self._workers = workers
        self._written = written
        self._now = now
        self._wall_now = wall_now
        self._ensurer = Ensurer(cluster, written)
        self._unready = UnreadyAgents(cluster, now=now)
        self._events = TroubleEvents(cluster, now=now, wall_now=wall_now)

    async def run(self, namespace: str, name: str, memory: Memory) -> float | None:
        """Bring one server up to date.

        Returns:
            After how many seconds it is to be looked at again; None if it is gone.

        Raises:
            Unreachable: no answer of the API server.
            ApiError: it refuses a status, an Event or a question.
        """
        obj = await self._cluster.get(KIND, namespace, name)
        if obj is None:
            memory.server = memory.spec = None
            await self._remove_connections(namespace, name, kept=())
            self._ensurer.forget(namespace, name)
            return None
        if obj["metadata"].get("deletionTimestamp"):
            return _RESYNC_SECONDS  # what it owns is being deleted, and goes before it does
        server = reference(obj)
        spec, refusal, daemon_set = await self._make_so(server, obj, memory)
        seen = await self._look(server, obj, memory, spec, refusal, daemon_set)
        status, written = await self._report(obj, seen, memory)
        trouble = trouble_of(status)
        if trouble is not None and trouble.reason not in _PASSING:
            await self._events.post(server, seen.generation, trouble)
        return self._next_seconds(seen, memory, trouble, written=written)

    def _next_seconds(
        self, seen: Seen, memory: Memory, trouble: Trouble | None, *, written: bool
    ) -> float:
        """Return when a server is looked at again if nothing happens."""
        waits = [_RESYNC_SECONDS]
        if trouble is not None:
            waits.append(_UNWELL_SECONDS if seen.refusal is None else _REFUSED_SECONDS)
        if not seen.settled and memory.short_since is not None:
            waits.append(memory.short_since + _SETTLE_SECONDS - self._now())
        if not written:
            waits.append(memory.written_at + _WORDS_SECONDS - self._now())
        return max(min(waits), _SHORTEST_SECONDS)

    async def _make_so(
        self, server: ServerRef, obj: KubeObject, memory: Memory
    ) -> tuple[Spec | None, Trouble | None, KubeObject | None]:
        """Apply what the spec asks for.

        Returns:
            The spec if it can be served, why not, and the DaemonSet.
        """
        memory.versions = {obj["metadata"]["resourceVersion"]}
        spec, refusal, daemon_set = None, None, None
        try:
            spec, wanted = self._read(server, obj, memory)
        except SpecError as error:
            words = f"{error}. Until it is corrected, what was applied stays."
            refusal = Trouble("InvalidSpec", words)
        else:
            refusal, daemon_set = await self._apply(server, spec, wanted, memory)
        if daemon_set is None:
            place = ("DaemonSet", server.namespace, names.daemon_set(server.name))
            daemon_set = await self._cluster.get(*place)
        return spec, refusal, daemon_set

    def _read(
        self, server: ServerRef, obj: KubeObject, memory: Memory
    ) -> tuple[Spec, list[KubeObject]]:
        """Return the spec and the objects that it asks for.

        What it says of workers is taken in although pods cannot be made of the rest, and what it
        said last if it cannot be read: agents and workers are there all the same.

        Raises:
            SpecError: it cannot be served.
        """
        if memory.server != server:
            memory.server, memory.spec = server, None
        spec = read_spec(obj["spec"])
        self._check_namespaces(server, spec)
        memory.spec = spec
        return spec, desired_objects(server, spec, self._surroundings())

    async def _apply(
        self, server: ServerRef, spec: Spec, wanted: list[KubeObject], memory: Memory
    ) -> tuple[Trouble | None, KubeObject | None]:
        daemon_set = None
        try:
            for each in wanted:
                stored = await self._ensurer.ensure(server, each)
                memory.versions.add(stored["metadata"]["resourceVersion"])
                if each["kind"] == "DaemonSet":
                    daemon_set = stored
            await self._clean(server, worker_namespaces(server, spec), memory)
        except NameTaken as error:
            return Trouble("NameTaken", f"{error}."), daemon_set
        except ApiError as error:
            words = f"The API server refuses what is needed: {error}."
            return Trouble("ApplyRefused", words), daemon_set
        return None, daemon_set

    def _check_namespaces(self, server: ServerRef, spec: Spec) -> None:
        served = ", ".join(self._config.namespace)
        problems = [
            f"spec.workers.namespaces: this operator serves {served} and not {namespace}: leave it "
            f"out, or start the operator with --namespace={namespace} too"
            for namespace in worker_namespaces(server, spec)
            if not self._config.serves(namespace)
        ]
        if problems:
            raise SpecError(problems)

    async def _clean(self, server: ServerRef, wanted: tuple[str, ...], memory: Memory) -> None:
        """Remove connection ConfigMaps from namespaces that the spec has no more."""
        if memory.cleaned != wanted:
            await self._remove_connections(server.namespace, server.name, kept=wanted)
            memory.cleaned = wanted

    async def _remove_connections(self, namespace: str, name: str, *, kept: Sequence[str]) -> None:
        """Delete a server's connection ConfigMaps outside some namespaces.

        Where the server itself is, what it owns goes by itself with it.
        """
        whose = {
            names.MANAGED_BY_LABEL: names.MANAGED_BY,
            names.SERVER_NAMESPACE_LABEL: namespace,
            names.SERVER_NAME_LABEL: name,
        }
        selector = ",".join(f"{label}={value}" for label, value in whose.items())
        for served in self._config.namespace or (None,):
            for found in await self._cluster.list("ConfigMap", served, selector):
                metadata = found["metadata"]
                if metadata["name"] != names.connection_config_map(name):
                    continue
                if metadata["namespace"] not in kept:
                    place = ("ConfigMap", metadata["namespace"], metadata["name"])
                    await self._cluster.delete(*place, uid=metadata["uid"])
                    self._written("ConfigMap")

    async def _look(
        self,
        server: ServerRef,
        obj: KubeObject,
        memory: Memory,
        spec: Spec | None,
        refusal: Trouble | None,
        daemon_set: KubeObject | None,
    ) -> Seen:
        """Gather what the status is made of."""
        seen = Seen(
            name=server.name,
            namespace=server.namespace,
            uid=server.uid,
            generation=obj["metadata"]["generation"],
            spec=spec,
            daemon_set=daemon_set,
            refusal=refusal,
            agents=[
                AgentSeen(session.node, session.complete, session.state)
                for session in self._agents.sessions(server)
            ],
            workers=self._workers.seen(server),
        )
        return replace(
            seen,
            pods=await self._unready.why(server, daemon_set),
            settled=self._is_settled(seen, memory),
        )

    def _is_settled(self, seen: Seen, memory: Memory) -> bool:
        """Tell whether agents that are not connected have had the time for it."""
        if all_connected(seen, count_nodes(seen.daemon_set)):
            memory.short_since = None
            return True
        if memory.short_since is None:
            memory.short_since = self._now()
        return self._now() >= memory.short_since + _SETTLE_SECONDS

    async def _report(self, obj: KubeObject, seen: Seen, memory: Memory) -> tuple[Status, bool]:
        """Write the status if it differs; return what it should be, and whether it is so now."""
        earlier = read_status(obj.get("status") or {})
        status = build_status(seen, earlier, kube_time(self._wall_now()))
        if status == earlier:
            return status, True
        recent = self._now() < memory.written_at + _WORDS_SECONDS
        if recent and not is_urgent(status, earlier):
            return status, False
        stored = await self._cluster.apply_status(
            {
                "apiVersion": f"{GROUP}/{VERSION}",
                "kind": KIND,
                "metadata": {
                    "namespace": seen.namespace,
                    "name": seen.name,
                    "uid": seen.uid,  # not the status of one that was made anew meanwhile
                },
                "status": write_status(status),
            }
        )
        for found in changed_conditions(status, earlier):
            log.info(
                "condition_changed",
                namespace=seen.namespace,
                name=seen.name,
                type=found.type,
                status=found.status,
                reason=found.reason,
                message=found.message,
            )
        memory.written_at = self._now()
        memory.versions.add(stored["metadata"]["resourceVersion"])
        self._written(KIND)
        return status, True


def reference(obj: Mapping[str, Any]) -> ServerRef:
    """Return which server an object is."""
    metadata = obj["metadata"]
    return ServerRef(metadata["namespace"], metadata["name"], metadata["uid"])
