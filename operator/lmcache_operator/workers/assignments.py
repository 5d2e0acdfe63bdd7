"""Where the registrations on one node run, and what their agent is to be told of that. Pure.

Everything follows from what the agent and the cluster say now; what is remembered is only what this
stream was told already. A new stream is told everything again, and agents take repeats without
harm.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from lmcache_nodeagent.operator_link.messages import Evidence, InstanceReport, PodOwner, PodRun
from lmcache_nodeagent.operator_link.messages import Mapping as MappingMessage
from lmcache_operator.workers import evidence as ends
from lmcache_operator.workers import mapping
from lmcache_operator.workers.absences import Absence
from lmcache_operator.workers.mapping import Unmapped
from lmcache_operator.workers.pod import Container, Pod

RELEASING = "releasing"
"""State of an instance that is being reaped or says goodbye: no word about it matters any more."""

Key = tuple[int, int]
"""Instance id and number of the registration."""


class ServerPods(Protocol):
    """The worker pods of a server, as they are known now."""

    @property
    def is_settled(self) -> bool:
        """Whether all there is to know of the server's namespaces is known."""

    def get(self, uid: str) -> Pod | None:
        """Return a pod that is in the selection."""

    def on_node(self, node: str) -> Collection[Pod]:
        """Return the pods of a node."""

    def absence(self, uid: str) -> Absence | None:
        """Return what was found out about a pod that is not in the selection."""

    def selects(self, namespace: str) -> bool:
        """Tell whether workers may be in a namespace."""

    def knows(self, namespace: str) -> bool:
        """Tell whether all pods of a namespace are known."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What the spec says of it."""

    container_name: str | None = None
    tells_evidence: bool = True


@dataclass(frozen=True, slots=True)
class Told:
    """What is new: messages for the agent, and pods of which nobody knows what became."""

    messages: list[MappingMessage | Evidence] = field(default_factory=list)
    unknown: list[PodRun] = field(default_factory=list)


@dataclass(slots=True)
class _Registration:
    """What is known of one registration.

    Attributes:
        where: its pod; the agent knows this too, or is about to be told.
        run_since: when the run in `where` began.
        ended: its end is proven.
        told: ids of the evidence that this stream was told.
    """

    where: PodRun | None
    run_since: float | None = None
    unmapped: Unmapped | None = None
    ended: bool = False
    told: set[str] = field(default_factory=set)


class Assignments:
    """The registrations of one stream of one agent.

    Args:
        counts: `evidence_<trigger>`, `mappings` and the like by name; shared with others.
    """

    def __init__(self, node: str, boot_id: str, counts: Counter[str]) -> None:
        self._node = node
        self._boot_id = boot_id
        self._counts = counts
        self._known: dict[Key, _Registration] = {}

    def update(
        self,
        reports: Mapping[Key, InstanceReport],
        pods: ServerPods,
        rules: Rules,
        *,
        observed_at: float,
    ) -> Told:
        """Compare what the agent and the cluster say, and return what the agent does not know yet.

        Args:
            reports: everything that is registered.
            pods: the worker pods.
            rules: what the spec says.
            observed_at: seconds since 1970 by the operator's clock.
        """
        told = Told()
        for key in self._known.keys() - reports.keys():
            del self._known[key]
        for key, report in reports.items():
            if (known := self._known.get(key)) is None:
                known = self._known[key] = _Registration(report.mapping)
            self._locate(known, report, pods, rules, told)
            if report.state != RELEASING:
                self._judge(known, report, pods, rules, told, observed_at)
        return told

    def where(self, key: Key) -> PodRun | None:
        """Return the pod of a registration."""
        known = self._known.get(key)
        return known.where if known else None

    def pod_uids(self) -> set[str]:
        """Return the uids of all pods that something runs in."""
        return {known.where.uid for known in self._known.values() if known.where}

    def instance_ids(self, reports: Mapping[Key, InstanceReport]) -> dict[str, frozenset[int]]:
        """Return the ids of the instances in each pod, by its uid."""
        found: defaultdict[str, set[int]] = defaultdict(set)
        for key, report in reports.items():
            if report.state != RELEASING and (where := self.where(key)) is not None:
                found[where.uid].add(report.instance_id)
        return {uid: frozenset(ids) for uid, ids in found.items()}

    def unmapped(self) -> Counter[str]:
        """Count the registrations without a pod, by reason."""
        return Counter(known.unmapped for known in self._known.values() if known.unmapped)

    def ended(self) -> int:
        """Count the registrations whose end is proven; their agent is about to reap them."""
        return sum(known.ended for known in self._known.values())

    def _locate(
        self,
        known: _Registration,
        report: InstanceReport,
        pods: ServerPods,
        rules: Rules,
        told: Told,
    ) -> None:
        """Find the pod of a registration, or another one than before if that was wrong."""
        where = known.where
        pod = pods.get(where.uid) if where is not None else None
        if pod is not None and pod.node != self._node:
            where = pod = None  # no agent can mean a pod of another node
        if not pods.is_settled:
            return
        found = mapping.map_instance(
            _registration(self._node, report),
            pods.on_node(self._node),
            container_name=rules.container_name,
        )
        if isinstance(found, mapping.Mapping):
            self._assign(known, report, pods, found, told)
        elif where is None or found is Unmapped.SEVERAL or (pod is None and _left(where, pods)):
            self._take_back(known, report, found, told)
        elif pod is None and pods.absence(where.uid) is None and pods.knows(where.namespace):
            told.unknown.append(where)

    def _assign(
        self,
        known: _Registration,
        report: InstanceReport,
        pods: ServerPods,
        found: mapping.Mapping,
        told: Told,
    ) -> None:
        pod = pods.get(found.pod_uid)
        assert pod is not None, "it was found among them"
        known.unmapped = None
        container = pod.containers.get(found.container or "")
        run = _run(known.where, found, container, report.registered_at)
        if known.where is None or known.where.run != run:
            goes_on = container is not None and container.container_id == run
            known.run_since = container.running_since if container and goes_on else None
        where = PodRun(
            namespace=pod.namespace,
            name=pod.name,
            uid=pod.uid,
            container=found.container or "",
            run=run,
            owner=owner_of(pod),
        )
        if where != known.where:
            known.where = where
            self._tell(known, report, told)

    def _take_back(
        self, known: _Registration, report: InstanceReport, reason: Unmapped, told: Told
    ) -> None:
        known.unmapped = reason
        if known.where is not None:
            known.where = known.run_since = None
            self._tell(known, report, told)

    def _tell(self, known: _Registration, report: InstanceReport, told: Told) -> None:
        self._counts["mappings"] += 1
        told.messages.append(
            MappingMessage(
                instance_id=report.instance_id,
                registration=report.registration,
                pod=known.where,
            )
        )

    def _judge(
        self,
        known: _Registration,
        report: InstanceReport,
        pods: ServerPods,
        rules: Rules,
        told: Told,
        observed_at: float,
    ) -> None:
        """Derive what the cluster says about the end of a registration."""
        known.ended = False
        for found in _ends(known, report, pods, observed_at):
            message = self._message(report, found, known)
            is_news = message.id not in known.told
            if found.contradicted:
                # It is of a newer run, and its agent would refuse this.
                self._counts["contradicted"] += is_news
                known.told.add(message.id)
                continue
            known.ended = known.ended or found.proof
            if is_news and rules.tells_evidence:
                known.told.add(message.id)
                self._counts[f"evidence_{found.trigger}"] += 1
                told.messages.append(message)

    def _message(
        self, report: InstanceReport, found: ends.Evidence, known: _Registration
    ) -> Evidence:
        run = (known.where.run if known.where else "") or found.run
        what = (
            self._boot_id,
            report.instance_id,
            report.registration,
            found.pod_uid,
            run,
            found.trigger,
            found.contradicted,
        )
        return Evidence(
            id=hashlib.blake2b(repr(what).encode(), digest_size=12).hexdigest(),
            boot_id=self._boot_id,
            instance_id=report.instance_id,
            registration=report.registration,
            pod_uid=found.pod_uid,
            trigger=found.trigger,
            proof=found.proof,
            observed_at=found.observed_at,
            container=found.container or "",
            run=run,
            finished_at=found.finished_at,
        )


def _ends(
    known: _Registration, report: InstanceReport, pods: ServerPods, observed_at: float
) -> list[ends.Evidence]:
    where = known.where
    if where is None:
        return []
    instance = ends.Instance(
        instance_id=report.instance_id,
        pod_uid=where.uid,
        container=where.container or None,
        registered_at=report.registered_at,
        run=where.run,
        run_since=known.run_since,
    )
    if (pod := pods.get(where.uid)) is not None:
        return ends.evidence_of_state(pod, [instance], observed_at=observed_at)
    if (absence := pods.absence(where.uid)) is None:
        return []
    found = ends.evidence_of_absence(
        absence.last_seen, absence.live, [instance], observed_at=observed_at
    )
    return found or []


def _registration(node: str, report: InstanceReport) -> mapping.Registration:
    return mapping.Registration(
        node=node,
        peer=report.peer,
        registered_at=report.registered_at,
        claimed_uid=report.claimed_pod_uid,
        slot=report.slot,
        slot_pod=report.slot_pod,
    )


def owner_of(pod: Pod) -> PodOwner | None:
    """Return what controls a pod, in the words of the link."""
    owner = pod.owner
    if owner is None:
        return None
    return PodOwner(api_version=owner.api_version, kind=owner.kind, name=owner.name, uid=owner.uid)


def _left(where: PodRun, pods: ServerPods) -> bool:
    """Tell whether a pod is no longer a worker, although it may run on."""
    if not pods.selects(where.namespace):
        return True
    absence = pods.absence(where.uid)
    live = absence.live if absence is not None else None
    return live is not None and live.uid == where.uid and not live.is_terminal


def _run(
    before: PodRun | None,
    found: mapping.Mapping,
    container: Container | None,
    registered_at: float,
) -> str:
    """Name the run of a registration: the one that was seen first, unless it cannot be."""
    if before is None or (before.uid, before.container) != (found.pod_uid, found.container or ""):
        return found.run
    if not before.run or container is None:
        return before.run or found.run
    for ended in (container.ended, container.ended_before):
        if (
            ended is not None
            and ended.container_id == before.run
            and ended.finished_at is not None
            and ended.finished_at + ends.LATE_REGISTRATION_SECONDS < registered_at
        ):
            return found.run
    return before.run
