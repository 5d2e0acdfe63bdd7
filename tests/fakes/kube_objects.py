"""An API server's store of objects, in memory: versions, conflicts, and refusals on order."""

from __future__ import annotations

import copy
from typing import Any

from lmcache_operator.errors import Conflict, OperatorError

KubeObject = dict[str, Any]


class KubeObjects:
    """Keeps objects by kind, namespace and name.

    Attributes:
        failure: raised by every request while it is set.
        lost_answers: as many writes are stored, but answered by `failure`.
        writes: (verb, kind, name) of all that was stored.
    """

    def __init__(self) -> None:
        self.failure: OperatorError | None = None
        self.lost_answers = 0
        self.writes: list[tuple[str, str, str]] = []
        self._objects: dict[tuple[str, str | None, str], KubeObject] = {}
        self._version = 0

    async def get(self, kind: str, namespace: str | None, name: str) -> KubeObject | None:
        """See `Cluster`."""
        self._answer()
        return copy.deepcopy(self._objects.get((kind, namespace, name)))

    async def create(self, obj: KubeObject) -> bool:
        """See `Cluster`."""
        self._answer()
        if _key(obj) in self._objects:
            return False
        self.put(obj, "create")
        return True

    async def replace(self, obj: KubeObject) -> KubeObject:
        """See `Cluster`."""
        self._answer()
        stored = self._objects.get(_key(obj))
        if stored is None or _version(stored) != _version(obj):
            raise Conflict(409, "Conflict", "the object has been modified")
        self.put(obj, "replace")
        return copy.deepcopy(self._objects[_key(obj)])

    def put(self, obj: KubeObject, verb: str = "put") -> None:
        """Store an object, whatever was there."""
        self._version += 1
        stored = copy.deepcopy(obj)
        stored["metadata"]["resourceVersion"] = str(self._version)
        self._objects[_key(obj)] = stored
        kind, _, name = _key(obj)
        self.writes.append((verb, kind, name))
        if self.lost_answers:
            self.lost_answers -= 1
            assert self.failure is not None
            raise self.failure

    def drop(self, kind: str, namespace: str | None, name: str) -> None:
        """Delete an object."""
        del self._objects[kind, namespace, name]

    def peek(self, kind: str, namespace: str | None, name: str) -> KubeObject:
        """Return an object that is there."""
        return copy.deepcopy(self._objects[kind, namespace, name])

    def _answer(self) -> None:
        if self.failure is not None and not self.lost_answers:
            raise self.failure


def _key(obj: KubeObject) -> tuple[str, str | None, str]:
    return obj["kind"], obj["metadata"].get("namespace"), obj["metadata"]["name"]


def _version(obj: KubeObject) -> str:
    return str(obj["metadata"].get("resourceVersion", ""))
