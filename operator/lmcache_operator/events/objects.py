"""Event objects, each named by what it tells, so that telling it twice makes one. Pure."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

from lmcache_nodeagent.operator_link.messages import JournalEntry
from lmcache_operator.clock import kube_time
from lmcache_operator.cluster import KubeObject
from lmcache_operator.events.wording import message_of, reason_of, type_of
from lmcache_operator.names import FIELD_MANAGER

Place = Literal["server", "worker"]
"""Which of the two Events of one entry: on the server, or on the worker's pod or its owner."""


@dataclass(frozen=True, slots=True)
class Involved:
    """The object that an Event is on."""

    api_version: str
    kind: str
    namespace: str
    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class Origin:
    """Whose journal an entry is of. A boot has one journal."""

    server: Involved
    node: str
    boot_id: str


def event_object(
    origin: Origin, entry: JournalEntry, involved: Involved, place: Place
) -> KubeObject:
    """Make the Event of one entry on one object."""
    moment = kube_time(entry.happened_at)
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {
            "name": event_name(origin.boot_id, entry.seq, place),
            "namespace": involved.namespace,
        },
        "involvedObject": {
            "apiVersion": involved.api_version,
            "kind": involved.kind,
            "namespace": involved.namespace,
            "name": involved.name,
            "uid": involved.uid,
        },
        "type": type_of(entry),
        "reason": reason_of(entry.kind),
        "message": message_of(entry, origin.node),
        "source": {"component": FIELD_MANAGER, "host": origin.node},
        "reportingComponent": FIELD_MANAGER,
        "reportingInstance": origin.node,
        "firstTimestamp": moment,
        "lastTimestamp": moment,
        "count": 1,
    }


def event_name(boot_id: str, seq: int, place: Place) -> str:
    """Name an Event. Not by the pod: once that is gone, the same entry is told of its owner."""
    told = hashlib.blake2b(f"{boot_id}/{seq}".encode(), digest_size=10).hexdigest()
    return f"lmcache-{place}.{told}"
