"""Makes one owned object what it should be, and never takes one that is somebody else's."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable

import structlog

from lmcache_operator.agents.registry import ServerRef
from lmcache_operator.cluster import Cluster, KubeObject
from lmcache_operator.errors import NameTaken
from lmcache_operator.names import (
    FIELD_MANAGER,
    SERVER_NAME_LABEL,
    SERVER_NAMESPACE_LABEL,
)

log = structlog.get_logger(__name__)


class Ensurer:
    """Applies what differs. What it remembers saves requests, nothing else depends on it."""

    def __init__(self, cluster: Cluster, written: Callable[[str], None]) -> None:
        """Prepare.

        Args:
            cluster: where.
            written: told the kind of each object that was changed.
        """
        self._cluster = cluster
        self._written = written
        self._applied: dict[tuple[str, str, str], tuple[str, str]] = {}

    async def ensure(self, server: ServerRef, wanted: KubeObject) -> KubeObject:
        """Apply an object unless it is stored as we applied it last; return what is stored.

        Raises:
            NameTaken: the object there is somebody else's.
            ApiError: the API server refuses it.
            Unreachable: no answer.
        """
        kind, metadata = wanted["kind"], wanted["metadata"]
        place = (kind, metadata["namespace"], metadata["name"])
        live = await self._cluster.get(*place)
        if live is not None and not _is_ours(live, server):
            raise NameTaken(
                f"{kind} {metadata['namespace']}/{metadata['name']} exists and belongs to somebody "
                "else: delete it or rename it, or give this server another name"
            )
        digest = hashlib.sha256(json.dumps(wanted, sort_keys=True).encode()).hexdigest()
        if live is not None and self._applied.get(place) == (digest, _version(live)):
            return live
        stored = await self._cluster.apply(wanted)
        self._applied[place] = (digest, _version(stored))
        if live is None or _version(live) != _version(stored):
            self._written(kind)
            log.info("object_written", kind=kind, namespace=place[1], name=place[2])
        return stored

    def forget(self, namespace: str, name: str) -> None:
        """Drop what is remembered of the objects that are named after a server."""
        for place in [place for place in self._applied if place[1] == namespace]:
            if place[2] == name or place[2].startswith(f"{name}-"):
                del self._applied[place]


def _version(obj: KubeObject) -> str:
    return str(obj["metadata"].get("resourceVersion", ""))


def _is_ours(live: KubeObject, server: ServerRef) -> bool:
    """Tell whether an object is this server's, also after somebody has taken its labels off."""
    metadata = live["metadata"]
    labels = metadata.get("labels") or {}
    if SERVER_NAME_LABEL in labels:
        whose = (labels.get(SERVER_NAMESPACE_LABEL), labels[SERVER_NAME_LABEL])
        return whose == (server.namespace, server.name)
    if any(owner.get("uid") == server.uid for owner in metadata.get("ownerReferences") or ()):
        return True
    managers = metadata.get("managedFields") or ()
    return any(entry.get("manager") == FIELD_MANAGER for entry in managers)
