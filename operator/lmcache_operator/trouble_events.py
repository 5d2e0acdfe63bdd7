"""Says what is wrong with a server where people look first: Events on the object."""

from __future__ import annotations

import hashlib

import structlog

from lmcache_operator.agents.registry import ServerRef
from lmcache_operator.api.crd import GROUP, KIND, VERSION
from lmcache_operator.clock import Now, kube_time, monotonic, wall
from lmcache_operator.cluster import Cluster, KubeObject
from lmcache_operator.errors import ApiError
from lmcache_operator.names import FIELD_MANAGER, owner_labels
from lmcache_operator.troubles import Trouble

log = structlog.get_logger(__name__)

_EVENT_LIFE_SECONDS = 3600.0  # the API server forgets Events after this; what lasts is said again
_LONGEST_MESSAGE = 1024


class TroubleEvents:
    """Posts one Event for each trouble of each generation of a spec, once while it is kept.

    Events are named after what they say, so that a new operator does not say it again.
    """

    def __init__(self, cluster: Cluster, *, now: Now = monotonic, wall_now: Now = wall) -> None:
        self._cluster = cluster
        self._now = now
        self._wall_now = wall_now
        self._posted: dict[tuple[str, str], float] = {}

    async def post(self, server: ServerRef, generation: int, trouble: Trouble) -> None:
        """Post an Event, unless it is known to be there. One that is refused is given up.

        Raises:
            Unreachable: no answer.
        """
        event = trouble_event(server, generation, trouble, kube_time(self._wall_now()))
        place = (server.namespace, event["metadata"]["name"])
        now = self._now()
        if now < self._posted.get(place, float("-inf")) + _EVENT_LIFE_SECONDS:
            return
        try:
            await self._cluster.create(event)
        except ApiError as error:
            log.warning("event_not_stored", namespace=place[0], name=server.name, error=str(error))
        kept = {key: at for key, at in self._posted.items() if now < at + _EVENT_LIFE_SECONDS}
        self._posted = {**kept, place: now}


def trouble_event(server: ServerRef, generation: int, trouble: Trouble, moment: str) -> KubeObject:
    """Return the Event."""
    said = f"{server.uid} {generation} {trouble.reason}"
    digest = hashlib.sha256(said.encode()).hexdigest()[:16]
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {
            "namespace": server.namespace,
            "name": f"{server.name}.{digest}",
            "labels": owner_labels(server.namespace, server.name, server.uid),
        },
        "involvedObject": {
            "apiVersion": f"{GROUP}/{VERSION}",
            "kind": KIND,
            "namespace": server.namespace,
            "name": server.name,
            "uid": server.uid,
        },
        "type": "Warning",
        "reason": trouble.reason,
        "message": trouble.message[:_LONGEST_MESSAGE],
        "source": {"component": FIELD_MANAGER},
        "reportingComponent": FIELD_MANAGER,
        "firstTimestamp": moment,
        "lastTimestamp": moment,
        "count": 1,
    }
