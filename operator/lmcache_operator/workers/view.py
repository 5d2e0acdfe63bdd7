"""The worker pods of one server, over all its namespaces."""

from __future__ import annotations

from collections.abc import Collection, Iterator, MutableMapping

from lmcache_operator.workers.absences import Absence
from lmcache_operator.workers.pod import Pod
from lmcache_operator.workers.pods import PodWatch
from lmcache_operator.workers.selection import Selection


class PodView:
    """Implements `ServerPods`. A server's selections have no pod in common.

    Args:
        watch: knows the pods.
        selections: those of the server.
        absences: what became of pods that are in no list, by uid.
    """

    def __init__(
        self,
        watch: PodWatch,
        selections: Collection[Selection],
        absences: MutableMapping[str, Absence],
    ) -> None:
        self.absences = absences
        self._watch = watch
        self._selections = {selection.namespace: selection for selection in selections}

    def __iter__(self) -> Iterator[Pod]:
        for selection in self._selections.values():
            yield from self._watch.pods(selection) or ()

    def __contains__(self, uid: str) -> bool:
        return self.get(uid) is not None

    @property
    def is_settled(self) -> bool:
        """Whether all there is to know of the server's namespaces is known."""
        return self._watch.is_settled(self._selections.values())

    @property
    def is_current(self) -> bool:
        """Whether all pods are known, and watched as far as one can tell."""
        return all(map(self._watch.is_current, self._selections.values()))

    def get(self, uid: str) -> Pod | None:
        """Return a pod that is in the selection."""
        for selection in self._selections.values():
            pods = self._watch.pods(selection)
            if pods is not None and (pod := pods.get(uid)) is not None:
                return pod
        return None

    def on_node(self, node: str) -> Collection[Pod]:
        """Return the pods of a node."""
        known = map(self._watch.pods, self._selections.values())
        return [pod for pods in known if pods is not None for pod in pods.on_node(node)]

    def nodes(self) -> set[str]:
        """Return the nodes that pods are bound to; the empty name stands for none."""
        known = map(self._watch.pods, self._selections.values())
        return {node for pods in known if pods is not None for node in pods.nodes()}

    def absence(self, uid: str) -> Absence | None:
        """Return what was found out about a pod that is not in the selection."""
        return self.absences.get(uid)

    def selects(self, namespace: str) -> bool:
        """Tell whether workers may be in a namespace."""
        return namespace in self._selections

    def knows(self, namespace: str) -> bool:
        """Tell whether all pods of a namespace are known."""
        return self.selects(namespace) and self._watch.is_current(self._selections[namespace])

    def check_absence(self, last_seen: Pod) -> None:
        """Ask what became of a pod, in a namespace that is known."""
        self._watch.check_absence(self._selections[last_seen.namespace], last_seen)
