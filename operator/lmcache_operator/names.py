"""Fixed names: keys of what is written to the cluster, and what owned objects are called."""

from __future__ import annotations

from lmcache_operator.api.crd import GROUP, PLURAL, VERSION

KIND_MISSING = (
    f"the API server does not know {PLURAL}.{GROUP} ({VERSION}) with its status: install the "
    f"definition, kubectl apply --server-side -f crds/{PLURAL}.{GROUP}.yaml"
)
"""What is wrong and what to do, where there is no definition of our kind."""

FIELD_MANAGER = "lmcache-operator"
"""Of every server-side apply."""

INSTANCE_IDS_ANNOTATION = f"{GROUP}/instance-ids"
"""On worker pods: the ids of the instances registered from there."""

WORKER_LABEL = f"{GROUP}/server"
"""On worker pods, with the server's name: the default selection."""

MANAGED_BY_LABEL = "app.kubernetes.io/managed-by"
NAME_LABEL = "app.kubernetes.io/name"
INSTANCE_LABEL = "app.kubernetes.io/instance"

MANAGED_BY = "lmcache-operator"
AGENT_NAME = "lmcache-nodeagent"

SERVER_NAMESPACE_LABEL = f"{GROUP}/server-namespace"
SERVER_NAME_LABEL = f"{GROUP}/server-name"
SERVER_UID_LABEL = f"{GROUP}/server-uid"
"""On every owned object, also where owner references cannot reach: whose it is."""

REAPING_KEY = "reaping.json"
LINK_URL_KEY = "url"
LINK_AUTHORITY_KEY = "ca.crt"

REAPING_FOLDER = "/etc/lmcache-kube/reaping"
LINK_FOLDER = "/etc/lmcache-kube/link"
TOKEN_FOLDER = "/var/run/secrets/lmcache-kube"  # noqa: S105  # a path
TOKEN_FILE = f"{TOKEN_FOLDER}/token"


def daemon_set(server: str) -> str:
    """Name the agents."""
    return server


def service(server: str) -> str:
    """Name the node-local Service."""
    return server


def service_account(server: str) -> str:
    """Name the agents' identity."""
    return server


def reaping_config_map(server: str) -> str:
    """Name the settings that running agents follow."""
    return f"{server}-reaping"


def link_config_map(server: str) -> str:
    """Name what agents need to find and trust the operator."""
    return f"{server}-link"


def connection_config_map(server: str) -> str:
    """Name what workers need to find their agent."""
    return f"{server}-connection"


def socket_folder(uid: str) -> str:
    """Name the folder of a node that agent and workers of a server share for the Unix socket."""
    return f"/run/lmcache-kube/{uid}"


def slot_memory_folder(uid: str) -> str:
    """Name the folder of a node in which the agent and each slot of a server share memory."""
    return f"/dev/shm/lmcache-kube-{uid}"  # not a temporary file


def device_resource(server: str) -> str:
    """Name what a worker's container asks for to reach its agent."""
    return f"{GROUP}/{server}"


def agent_labels(server: str) -> dict[str, str]:
    """Return the labels that select the agents' pods; they never change."""
    return {NAME_LABEL: AGENT_NAME, INSTANCE_LABEL: server}


def owner_labels(namespace: str, name: str, uid: str) -> dict[str, str]:
    """Return the labels of an owned object that say whose it is."""
    return {
        MANAGED_BY_LABEL: MANAGED_BY,
        INSTANCE_LABEL: name,
        SERVER_NAMESPACE_LABEL: namespace,
        SERVER_NAME_LABEL: name,
        SERVER_UID_LABEL: uid,
    }
