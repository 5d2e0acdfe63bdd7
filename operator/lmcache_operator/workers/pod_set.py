"""Pods by uid and by node. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from lmcache_operator.workers.pod import Pod


class PodSet:
    """The pods of one selection, as they were last seen."""

    def __init__(self) -> None:
        self._by_uid: dict[str, Pod] = {}
        self._by_node: dict[str, dict[str, Pod]] = {}

    def __len__(self) -> int:
        return len(self._by_uid)

    def __iter__(self) -> Iterator[Pod]:
        return iter(self._by_uid.values())

    def get(self, uid: str) -> Pod | None:
        """Return the pod of a uid, None if it is not in the selection."""
        return self._by_uid.get(uid)

    def on_node(self, node: str) -> Collection[Pod]:
        """Return the pods that are bound to a node."""
        return self._by_node.get(node, {}).values()

    def nodes(self) -> Collection[str]:
        """Return the nodes that pods are bound to; the empty name stands for none."""
        return self._by_node.keys()

    def put(self, pod: Pod) -> bool:
        """Take in a pod as it is now; tell whether that is news."""
        before = self._by_uid.get(pod.uid)
        if before == pod:
            return False
        if before is not None and before.node != pod.node:
            self.remove(pod.uid)  # it was bound to a node meanwhile
        self._by_uid[pod.uid] = pod
        self._by_node.setdefault(pod.node, {})[pod.uid] = pod
        return True

    def remove(self, uid: str) -> Pod | None:
        """Forget a pod and return it, None if it was not there."""
        pod = self._by_uid.pop(uid, None)
        if pod is not None:
            here = self._by_node[pod.node]
            del here[uid]
            if not here:
                del self._by_node[pod.node]
        return pod

    def replace(self, pods: Iterable[Pod]) -> tuple[list[Pod], list[Pod]]:
        """Take in a complete list; return what is new or changed in it, and what it lacks."""
        listed = {pod.uid: pod for pod in pods}
        missing = [pod for uid, pod in self._by_uid.items() if uid not in listed]
        for pod in missing:
            self.remove(pod.uid)
        return [pod for pod in listed.values() if self.put(pod)], missing
