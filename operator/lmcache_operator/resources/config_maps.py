"""ConfigMaps: what agents follow while they run, and what workers are started with."""

from __future__ import annotations

import json
from collections.abc import Mapping

from lmcache_operator import names
from lmcache_operator.agents.registry import ServerRef
from lmcache_operator.api.root import Spec
from lmcache_operator.cluster import KubeObject
from lmcache_operator.resources.metadata import labelled, owned
from lmcache_operator.spec import (
    SOCKET_FOLDER,
    SOCKET_PATH,
    has_device_plugin,
    reaping_settings,
    slot_memory_bytes,
)

_MOST_HEARTBEATS_WAITED = 3
_LEAST_PATIENCE_SECONDS = 30
_MOST_PATIENCE_SECONDS = 60


def build_reaping(server: ServerRef, spec: Spec) -> KubeObject:
    """Return the live settings: a mounted file, so that an edit costs no pod its cache."""
    settings = reaping_settings(spec, uid=server.uid, name=server.name)
    text = json.dumps(settings, indent=2) + "\n"
    return owned(server, "ConfigMap", "v1", names.reaping_config_map(server.name)) | {
        "data": {names.REAPING_KEY: text}
    }


def build_link(server: ServerRef, *, url: str, authorities: str) -> KubeObject:
    """Return where agents find the operator, and the certificates that they believe it by."""
    return owned(server, "ConfigMap", "v1", names.link_config_map(server.name)) | {
        "data": {names.LINK_URL_KEY: url, names.LINK_AUTHORITY_KEY: authorities}
    }


def build_connections(server: ServerRef, spec: Spec) -> list[KubeObject]:
    """Return what workers need, once in each of their namespaces."""
    name = names.connection_config_map(server.name)
    data = _connection(server, spec)
    found = []
    for namespace in worker_namespaces(server, spec):
        if namespace == server.namespace:
            head = owned(server, "ConfigMap", "v1", name)
        else:
            head = labelled(server, "ConfigMap", "v1", name, namespace=namespace)
        found.append(head | {"data": data})
    return found


def worker_namespaces(server: ServerRef, spec: Spec) -> tuple[str, ...]:
    """Return where workers are."""
    return spec.workers.namespaces or (server.namespace,)


def patience_seconds(spec: Spec) -> int:
    """Return how long a worker waits for an answer.

    Stock clients wait 300 s, during which an engine whose agent is gone stands still. Shorter than
    some tens of seconds would give up agents that are only restarted.
    """
    missed = _MOST_HEARTBEATS_WAITED * spec.reaping.heartbeat_interval_seconds
    return min(max(missed, _LEAST_PATIENCE_SECONDS), _MOST_PATIENCE_SECONDS)


def _transfer_mode(*, shares_memory: bool) -> str:
    """Choose who copies: without shared memory only the worker can, by sending the bytes."""
    return "lmcache_driven" if shares_memory else "engine_driven"


def _connection(server: ServerRef, spec: Spec) -> dict[str, str]:
    """Return values that a pod takes one by one, by `configMapKeyRef`.

    The first way is that of the device plugin, where agents have one. Over TCP any worker may come.
    """
    host = f"{names.service(server.name)}.{server.namespace}.svc"
    port = spec.server.port
    tcp_url, socket_url = f"tcp://{host}:{port}", f"ipc://{SOCKET_PATH}"
    over_tcp = {"lmcache.mp.host": f"tcp://{host}", "lmcache.mp.port": port}
    over_socket = {"lmcache.mp.server_urls": [socket_url]}
    shared = spec.transport.memory_sharing != "None"
    tcp_mode = _transfer_mode(shares_memory=shared)
    has_plugin = has_device_plugin(spec)
    mode = _transfer_mode(shares_memory=slot_memory_bytes(spec) > 0 if has_plugin else shared)
    tcp_config = _transfer_config(spec, tcp_mode, over_tcp)
    socket_config = _transfer_config(spec, mode, over_socket)
    data = {
        "kv_transfer_config": tcp_config,
        "url": tcp_url,
        "kv_transfer_config_tcp": tcp_config,
        "url_tcp": tcp_url,
        "host": host,
        "port": str(port),
        "chunk_size": str(spec.server.chunk_size),
        "heartbeat_interval_seconds": str(spec.reaping.heartbeat_interval_seconds),
        "request_timeout_seconds": str(patience_seconds(spec)),
        "transfer_mode": mode,
    }
    if has_plugin:
        data["kv_transfer_config"], data["url"] = socket_config, socket_url
        data["resource"] = names.device_resource(server.name)
    if spec.transport.unix_socket == "HostPath":
        data["kv_transfer_config_unix_socket"] = socket_config
        data["unix_socket_host_folder"] = names.socket_folder(server.uid)
        data["unix_socket_mount_folder"] = SOCKET_FOLDER
    return data


def _transfer_config(spec: Spec, mode: str, where: Mapping[str, object]) -> str:
    """Return what `vllm serve --kv-transfer-config` takes."""
    transfer = {
        "kv_connector": "LMCacheMPConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            **where,
            "lmcache.mp.mp_transfer_mode": mode,
            "lmcache.mp.heartbeat_interval": spec.reaping.heartbeat_interval_seconds,
            "lmcache.mp.mq_timeout": patience_seconds(spec),
        },
    }
    return json.dumps(transfer)
