"""From what agents and the cluster say to what agents, pods and people are told.

Level-triggered: whatever changes marks a node of a server, and everything about a marked node is
compared again. What is kept is what agents and the cluster will not say again by themselves: what
an agent was told over its present stream, and who had registered on a node whose agent is away.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from lmcache_nodeagent.operator_link.messages import Ack, InstanceReport, JournalEntry, PodRun
from lmcache_operator import clock
from lmcache_operator.agents.registry import AgentRegistry, AgentSession, ServerRef, StreamEnd
from lmcache_operator.api.crd import GROUP, KIND, VERSION
from lmcache_operator.api.root import Spec
from lmcache_operator.cluster import Cluster
from lmcache_operator.conditions import WorkersSeen
from lmcache_operator.errors import ApiError, PodError
from lmcache_operator.events.journal import Journal
from lmcache_operator.events.objects import Involved, Origin
from lmcache_operator.events.totals import ReapTotals
from lmcache_operator.workers.absences import Absence
from lmcache_operator.workers.annotations import Annotator, annotation_value
from lmcache_operator.workers.pod import Pod
from lmcache_operator.workers.pods import KubernetesPods, PodWatch
from lmcache_operator.workers.selection import Selection
from lmcache_operator.workers.selection_watch import PodSource
from lmcache_operator.workers.server_workers import ServerWorkers, Terms
from lmcache_operator.workers.worker_node import Tally

SWEEP_SECONDS = 60.0
"""Everything is compared again this often: what was refused may be possible by now."""


@dataclass(frozen=True, slots=True)
class WorkerSummary:
    """The workers of a server.

    Attributes:
        registered_workers: without those that are being released, or whose end is proven.
        reaps_total: None until the earlier ones are known: then leave the status as it is.
        last_reap_time: as Kubernetes writes moments.
        suspects: those whose death is hinted at.
        unmapped: registrations whose pod is not known, by reason.
        pods_known: all namespaces are listed, and watched as far as one can tell.
    """

    registered_workers: int = 0
    reaps_total: int | None = None
    last_reap_time: str | None = None
    last_reason: str | None = None
    suspects: int = 0
    unmapped: Mapping[str, int] = field(default_factory=dict)
    pods_known: bool = False


class WorkerFlow:
    """Implements `AgentListener`, `PodListener` and `JournalReader`. Thread: the loop.

    Args:
        cluster: the API server.
        agents: the streams; it is subscribed to.
        on_change: told when the summary of a server has changed.
        source: reads pods; the API server, if it is left out.
        now: monotonic seconds.
        wall: seconds since 1970.
    """

    def __init__(
        self,
        cluster: Cluster,
        agents: AgentRegistry,
        on_change: Callable[[ServerRef], None],
        *,
        source: PodSource | None = None,
        now: clock.Now = clock.monotonic,
        wall: clock.Now = clock.wall,
    ) -> None:
        self._source = source or KubernetesPods(cluster.client)
        self._agents = agents
        self._on_change = on_change
        self._wall = wall
        self._told: Counter[str] = Counter()
        self._watch = PodWatch(self._source, self, now=now)
        self._annotator = Annotator(cluster, now=now)
        self._journal = Journal(cluster, self, now=now)
        self._totals = ReapTotals(
            cluster,
            lambda server: on_change(_reference(server)),
            self._journal.stored,
            now=now,
        )
        self._servers: dict[ServerRef, ServerWorkers] = {}
        self._marked: dict[tuple[ServerRef, str], None] = {}  # in the order of marking
        self._wake = asyncio.Event()
        self._cleaned: set[str] = set()  # uids of pods that our annotation was taken off already
        agents.subscribe(self)

    async def run(self) -> NoReturn:
        """Follow everything until cancelled."""
        async with asyncio.TaskGroup() as group:
            for part in (self._watch, self._annotator, self._journal, self._totals):
                group.create_task(part.run(), name=type(part).__name__)
            group.create_task(self._sweep(), name="sweep")
            while True:
                await self._wake.wait()
                self.compare_next()
                await asyncio.sleep(0)  # streams and watches have their turn in between
        raise AssertionError("only cancelling ends it")

    def compare_next(self) -> bool:
        """Compare the node that was marked first; False if none is."""
        if not self._marked:
            self._wake.clear()
            return False
        server, name = next(iter(self._marked))
        del self._marked[server, name]
        if (known := self._servers.get(server)) is not None:
            has_changed = known.compare(name, observed_at=self._wall())
            self._annotate(known, name)
            if has_changed:
                self._on_change(server)
        return True

    # What others tell

    def servers_changed(self, servers: Mapping[ServerRef, Spec]) -> None:
        """Take in which servers there are, and what their specs say."""
        before = {pod.uid: pod for known in self._servers.values() for pod in known.pods}
        for gone in self._servers.keys() - servers.keys():
            del self._servers[gone]
        for server, spec in servers.items():
            terms = Terms.of(server.namespace, server.name, spec)
            if server in self._servers:
                self._servers[server].change(terms)
            else:
                self._add(server, terms)
        for pod in before.values():
            if not any(pod.uid in known.pods for known in self._servers.values()):
                self._annotator.want(pod, None)
        self._totals.keep({_involved(server) for server in servers})
        self._watch.select({each for s in self._servers.values() for each in s.terms.selections})
        for server in servers:
            self._mark_all(server)

    def connected(self, session: AgentSession) -> None:
        """Take in a new stream."""
        if (known := self._servers.get(session.server)) is not None:
            known.node(session.node).connected(session)
        self._journal.connected(
            _origin(session), lambda seq: session.send(Ack(boot_id=session.boot_id, seq=seq))
        )
        self._on_change(session.server)

    def instances_changed(
        self,
        session: AgentSession,
        changed: Sequence[InstanceReport],
        gone: Sequence[tuple[int, int]],
    ) -> None:
        """Compare what is registered."""
        del changed, gone  # the session has them all
        self._mark(session.server, session.node)

    def state_changed(self, session: AgentSession) -> None:
        """Pass on that an agent says something else of itself."""
        self._on_change(session.server)

    def journal(self, session: AgentSession, entry: JournalEntry) -> None:
        """Post an entry, with the pod that was known by the time it was said."""
        known = self._servers.get(session.server)
        where = known.where(session.node, session, entry) if known is not None else None
        self._journal.add(_origin(session), entry, where)

    def disconnected(self, session: AgentSession) -> None:
        """Take in that a stream ended; what ran on that node still does, as far as one knows."""
        if (known := self._servers.get(session.server)) is not None:
            known.node(session.node).disconnected(session)
            self._take_up_others(known, session)
        self._journal.disconnected(_origin(session))
        self._on_change(session.server)

    def pods_changed(
        self, selection: Selection, changed: Sequence[Pod], missing: Sequence[Pod]
    ) -> None:
        """Compare the nodes of pods that changed."""
        for pod in missing:
            self._annotator.forget(pod.uid)
            self._cleaned.discard(pod.uid)
        for server, known in self._selecting(selection):
            known.pods_changed(changed, missing)
            for name in {pod.node for pod in (*changed, *missing)}:
                self._mark(server, name)
            if known.settled_changed():
                self._mark_all(server)
                self._on_change(server)

    def pod_absent(self, selection: Selection, absence: Absence) -> None:
        """Compare a node, now that it is known what became of a pod."""
        for server, known in self._selecting(selection):
            known.pod_absent(absence)
            self._mark(server, absence.last_seen.node)

    # What the journal asks

    async def find_worker(self, origin: Origin, where: PodRun) -> Involved | None:
        """Return the pod, or what controls it once it is gone; None if it is no worker of ours.

        Raises:
            Unreachable: nobody can tell now.
        """
        known = self._servers.get(_reference(origin.server))
        if known is None or not known.pods.selects(where.namespace):
            return None  # an agent's word must not make us write elsewhere
        pod = Involved("v1", "Pod", where.namespace, where.name, where.uid)
        owner = where.owner
        if owner is None or where.uid in known.pods:
            return pod
        try:
            live = await self._source.read(where.namespace, where.name)
        except (ApiError, PodError):
            return pod
        if live is not None and live.uid == where.uid:
            return pod
        return Involved(owner.api_version, owner.kind, where.namespace, owner.name, owner.uid)

    def posted(self, origin: Origin, entry: JournalEntry, *, is_new: bool) -> bool:
        """Count a reap; it waits for its acknowledgement until it is in the status."""
        return entry.kind == "reaped" and self._totals.count(origin, entry, is_new=is_new)

    def overflowed(self, origin: Origin) -> None:
        """Have an agent begin again, since it said more than could be kept."""
        known = self._servers.get(_reference(origin.server))
        stream = known.node(origin.node).stream if known is not None else None
        if isinstance(stream, AgentSession):
            stream.end(StreamEnd.TOO_SLOW, "more journal entries than can be posted at once")

    # What others ask

    def summary(self, server: ServerRef) -> WorkerSummary:
        """Return what is known of the workers of a server."""
        if (known := self._servers.get(server)) is None:
            return WorkerSummary()
        tally, reaps = known.tally(), self._totals.of(_involved(server))
        return WorkerSummary(
            registered_workers=tally.registered,
            reaps_total=reaps.total,
            last_reap_time=reaps.last_time,
            last_reason=reaps.last_reason,
            suspects=tally.suspects,
            unmapped=tally.unmapped,
            pods_known=known.pods.is_current,
        )

    def seen(self, server: ServerRef) -> WorkersSeen:
        """Return the same in the form that conditions and status are made of."""
        found = self.summary(server)
        return WorkersSeen(
            registered=found.registered_workers,
            reaps=found.reaps_total,
            last_reap_time=found.last_reap_time,
            last_reason=found.last_reason,
            suspects=found.suspects,
            pods_known=found.pods_known,
        )

    def counts(self) -> Mapping[str, Mapping[str, int]]:
        """Return what was counted since the start, by subject and name."""
        return {
            "told": self._told,
            "pods": self._watch.counts,
            "annotations": self._annotator.counts,
            "events": self._journal.counts,
        }

    def unmapped(self) -> Mapping[str, int]:
        """Count the registrations whose pod is not known, by reason."""
        tallies = (known.tally() for known in self._servers.values())
        return sum(tallies, Tally()).unmapped

    def gauges(self) -> Mapping[str, int]:
        """Return what is so now."""
        return {
            "pods_tracked": self._watch.tracked(),
            "events_waiting": self._journal.waiting(),
        }

    # What follows

    def _add(self, server: ServerRef, terms: Terms) -> None:
        known = self._servers[server] = ServerWorkers(self._watch, terms, self._told)
        self._totals.add(_involved(server))
        for session in self._agents.sessions(server):
            known.node(session.node).connected(session)

    def _take_up_others(self, known: ServerWorkers, session: AgentSession) -> None:
        """Go on with another agent of the node: two overlap while a pod is being replaced."""
        for other in self._agents.sessions(session.server):
            if other.node == session.node and known.node(other.node).stream is None:
                known.node(other.node).connected(other)
                self._mark(other.server, other.node)

    def _annotate(self, server: ServerWorkers, name: str) -> None:
        """Have the pods of a node say who runs in them, or nothing if nobody wants that."""
        for pod in server.pods.on_node(name):
            wanting = [
                each
                for each in self._servers.values()
                if each.terms.annotates and pod.uid in each.pods
            ]
            if not wanting:
                self._take_off(pod)
                continue
            self._cleaned.discard(pod.uid)
            said = [ids for each in wanting if (ids := each.instance_ids(name)) is not None]
            if said:
                here = frozenset[int]().union(*(ids.get(pod.uid, ()) for ids in said))
                self._annotator.want(pod, annotation_value(here))

    def _take_off(self, pod: Pod) -> None:
        """Remove our annotation once; if somebody else writes it later, it is theirs."""
        if pod.uid not in self._cleaned:
            self._cleaned.add(pod.uid)
            self._annotator.want(pod, None)

    async def _sweep(self) -> NoReturn:
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            self._annotator.forget_expired()
            for server, known in self._servers.items():
                known.forget_idle_nodes()
                self._mark_all(server)

    def _mark(self, server: ServerRef, name: str) -> None:
        if name:
            self._marked[server, name] = None
            self._wake.set()

    def _mark_all(self, server: ServerRef) -> None:
        for name in self._servers[server].node_names():
            self._mark(server, name)

    def _selecting(self, selection: Selection) -> list[tuple[ServerRef, ServerWorkers]]:
        known = self._servers.items()
        return [(server, each) for server, each in known if selection in each.terms.selections]


def _origin(session: AgentSession) -> Origin:
    return Origin(_involved(session.server), session.node, session.boot_id)


def _involved(server: ServerRef) -> Involved:
    return Involved(f"{GROUP}/{VERSION}", KIND, server.namespace, server.name, server.uid)


def _reference(server: Involved) -> ServerRef:
    return ServerRef(server.namespace, server.name, server.uid)
