"""How workers of a node find the agent of that node, and who the agents are."""

from __future__ import annotations

from lmcache_operator.agents.registry import ServerRef
from lmcache_operator.api.root import Spec
from lmcache_operator.cluster import KubeObject
from lmcache_operator.names import agent_labels, service, service_account
from lmcache_operator.resources.metadata import owned


def build_service(server: ServerRef, spec: Spec) -> KubeObject:
    """Return the Service that leads each worker to the agent of its own node.

    Agents that are not ready stay in it: readiness must not cut connections, nor keep workers from
    finding an agent that is about to serve.
    """
    port = {
        "name": "messages",
        "port": spec.server.port,
        "targetPort": "messages",
        "protocol": "TCP",
    }
    return owned(server, "Service", "v1", service(server.name)) | {
        "spec": {
            "type": "ClusterIP",
            "internalTrafficPolicy": "Local",
            "publishNotReadyAddresses": True,
            "selector": agent_labels(server.name),
            "ports": [port],
        }
    }


def build_service_account(server: ServerRef) -> KubeObject:
    """Return the agents' identity. It has no rights; the operator recognises its tokens."""
    name = service_account(server.name)
    return owned(server, "ServiceAccount", "v1", name) | {"automountServiceAccountToken": False}
