"""Event objects, as a story's tests look at them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from tests.cluster.api import Api


@dataclass(frozen=True)
class KubeEvent:
    """One Event object."""

    reason: str
    kind: str
    name: str
    uid: str
    note: str
    level: str
    count: int
    object_name: str


def read_events(api: Api, namespace: str, reasons: Collection[str]) -> list[KubeEvent]:
    """Return the Events of a namespace with one of these reasons."""
    found = map(_event, api.request("GET", f"/api/v1/namespaces/{namespace}/events").body["items"])
    return [event for event in found if event.reason in reasons]


def on(objects: Iterable[KubeEvent], kind: str, name: str) -> list[KubeEvent]:
    """Return the Events about one object."""
    return [event for event in objects if (event.kind, event.name) == (kind, name)]


def _event(document: dict[str, Any]) -> KubeEvent:
    about = document["involvedObject"]
    return KubeEvent(
        reason=document.get("reason", ""),
        kind=about.get("kind", ""),
        name=about.get("name", ""),
        uid=about.get("uid", ""),
        note=document.get("message", ""),
        level=document.get("type", ""),
        count=document.get("count") or 1,
        object_name=document["metadata"]["name"],
    )
