"""The workers of one server: its pods, and the nodes that have an agent or had one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from lmcache_nodeagent.operator_link.messages import JournalEntry, PodRun, SlotPod
from lmcache_operator.api.root import Spec
from lmcache_operator.workers.absences import Absence
from lmcache_operator.workers.assignments import Rules, owner_of
from lmcache_operator.workers.pod import Pod
from lmcache_operator.workers.pods import PodWatch
from lmcache_operator.workers.selection import Selection, selections_of
from lmcache_operator.workers.view import PodView
from lmcache_operator.workers.worker_node import Stream, Tally, WorkerNode


@dataclass(frozen=True, slots=True)
class Terms:
    """What the spec says of workers."""

    selections: frozenset[Selection]
    rules: Rules
    annotates: bool

    @staticmethod
    def of(namespace: str, name: str, spec: Spec) -> Terms:
        """Read them off the spec of a server."""
        workers = spec.workers
        return Terms(
            selections=selections_of(namespace, name, workers),
            rules=Rules(
                container_name=workers.container_name,
                tells_evidence=spec.reaping.hints.mode == "Enforce",
            ),
            annotates=workers.annotate,
        )


class ServerWorkers:
    """What is known of them. Nothing here waits.

    Attributes:
        terms: what the spec says now.
        pods: in the selections of the terms.
        was_settled: as `settled_changed` found it last.
    """

    def __init__(self, watch: PodWatch, terms: Terms, counts: Counter[str]) -> None:
        self.terms = terms
        self.pods = PodView(watch, terms.selections, {})
        self.was_settled = False
        self._watch = watch
        self._counts = counts
        self._nodes: dict[str, WorkerNode] = {}

    def change(self, terms: Terms) -> None:
        """Take in the spec again."""
        if terms == self.terms:
            return
        self.terms = terms
        self.pods = PodView(self._watch, terms.selections, self.pods.absences)
        self.was_settled = False

    def settled_changed(self) -> bool:
        """Tell whether all pods are known now and were not before, or the other way round."""
        before, self.was_settled = self.was_settled, self.pods.is_settled
        return before != self.was_settled

    def node(self, name: str) -> WorkerNode:
        """Return a node, known or new."""
        if (node := self._nodes.get(name)) is None:
            node = self._nodes[name] = WorkerNode(name, self._counts)
        return node

    def node_names(self) -> Collection[str]:
        """Return the nodes that anything is known of."""
        return self._nodes.keys() | self.pods.nodes()

    def tally(self) -> Tally:
        """Count over all nodes."""
        return sum((node.tally for node in self._nodes.values()), Tally())

    def instance_ids(self, node: str) -> Mapping[str, frozenset[int]] | None:
        """Return who runs in the pods of a node, None if that was never said."""
        known = self._nodes.get(node)
        return known.instance_ids if known is not None else None

    def where(self, name: str, stream: Stream, entry: JournalEntry) -> PodRun | None:
        """Return the pod that an entry of a node's stream is told on.

        That a start was held is told on the pod that had to wait, not on the one it waited for.
        """
        waiting = entry.slot_pod if entry.kind == "start_held" else None
        held = self._run_of(name, waiting) if waiting is not None else None
        return held or self.node(name).where(stream, entry)

    def _run_of(self, node: str, slot_pod: SlotPod) -> PodRun | None:
        """Find the pod that has a slot now, of which the kubelet tells no uid."""
        wanted = (slot_pod.namespace, slot_pod.name)
        for pod in self.pods.on_node(node):
            if (pod.namespace, pod.name) == wanted:
                return PodRun(
                    namespace=pod.namespace,
                    name=pod.name,
                    uid=pod.uid,
                    container=slot_pod.container,
                    owner=owner_of(pod),
                )
        return None

    def compare(self, name: str, *, observed_at: float) -> bool:
        """Compare everything about one node; tell whether what is counted has changed."""
        if (node := self._nodes.get(name)) is None:
            return False
        before = node.tally
        for run in node.compare(self.pods, self.terms.rules, observed_at=observed_at):
            self.pods.check_absence(_never_seen(run, name))
        self._drop_absences(node)
        return node.tally != before

    def pods_changed(self, changed: Collection[Pod], missing: Collection[Pod]) -> None:
        """Take in changes of pods; ask for missing ones that something ran in."""
        for pod in changed:
            self.pods.absences.pop(pod.uid, None)
        for pod in missing:
            node = self._nodes.get(pod.node)
            if node is not None and node.uses(pod.uid):
                self.pods.check_absence(pod)

    def pod_absent(self, absence: Absence) -> None:
        """Take in what became of a missing pod."""
        if absence.last_seen.uid not in self.pods:
            self.pods.absences[absence.last_seen.uid] = absence

    def forget_idle_nodes(self) -> None:
        """Forget nodes without agent and pods."""
        for name, node in list(self._nodes.items()):
            if node.stream is None and not self.pods.on_node(name):
                del self._nodes[name]

    def _drop_absences(self, node: WorkerNode) -> None:
        if node.stream is None or not node.stream.complete:
            return  # what it had registered may come again, with the same pods
        for uid, absence in list(self.pods.absences.items()):
            if absence.last_seen.node == node.name and not node.uses(uid):
                del self.pods.absences[uid]


def _never_seen(run: PodRun, node: str) -> Pod:
    """Make the record of a pod that an earlier operator saw."""
    return Pod(
        uid=run.uid,
        namespace=run.namespace,
        name=run.name,
        node=node,
        phase="",
        host_network=False,
        addresses=frozenset(),
        main_containers=(),
        lasting_containers=(),
        containers={},
        garbage_collected=False,
    )
