"""The metadata of owned objects: whose they are, for people, for us, for garbage collection."""

from __future__ import annotations

from lmcache_operator.agents.registry import ServerRef
from lmcache_operator.api.crd import GROUP, KIND, VERSION
from lmcache_operator.cluster import KubeObject
from lmcache_operator.names import owner_labels


def owned(server: ServerRef, kind: str, api_version: str, name: str) -> KubeObject:
    """Return the head of an object that goes with its server."""
    reference = {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": KIND,
        "name": server.name,
        "uid": server.uid,
        "controller": True,
    }
    found = labelled(server, kind, api_version, name, namespace=server.namespace)
    found["metadata"]["ownerReferences"] = [reference]
    return found


def labelled(
    server: ServerRef, kind: str, api_version: str, name: str, *, namespace: str
) -> KubeObject:
    """Return the head of an object that owner references cannot reach: in any namespace."""
    return {
        "apiVersion": api_version,
        "kind": kind,
        "metadata": {
            "namespace": namespace,
            "name": name,
            "labels": owner_labels(server.namespace, server.name, server.uid),
        },
    }
