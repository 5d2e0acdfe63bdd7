"""The agents: one pod on each selected node."""

from __future__ import annotations

from typing import Any

import msgspec

from lmcache_operator import names
from lmcache_operator.agents.registry import ServerRef
from lmcache_operator.api.root import Spec
from lmcache_operator.cluster import KubeObject
from lmcache_operator.resources.agent_resources import agent_resources
from lmcache_operator.resources.metadata import owned
from lmcache_operator.resources.volumes import own_volumes
from lmcache_operator.spec import SOCKET_FOLDER, agent_arguments, has_device_plugin

CONTAINER = "agent"

# A cache of a terabyte is zeroed page by page before the agent serves.
_START_TRIES = 300
_START_PERIOD_SECONDS = 2

_ALL_GPUS = {
    "NVIDIA_VISIBLE_DEVICES": "all",
    "NVIDIA_DRIVER_CAPABILITIES": "compute,utility",
}

_HARDENED = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}

# What root needs of root's powers: to hand folders to workers' groups, and to open and remove what
# workers of any user have made in them.
_PLUGIN_CAPABILITIES = ["CHOWN", "DAC_OVERRIDE", "FOWNER"]


def build_daemon_set(server: ServerRef, spec: Spec, *, default_image: str) -> KubeObject:
    """Return the DaemonSet.

    Raises:
        SpecError: the spec asks for pods that cannot be.
    """
    labels = names.agent_labels(server.name)
    return owned(server, "DaemonSet", "apps/v1", names.daemon_set(server.name)) | {
        "spec": {
            "selector": {"matchLabels": labels},
            "updateStrategy": _update_strategy(spec),
            "template": {
                "metadata": {
                    "labels": {**spec.pod_labels, **labels},
                    "annotations": dict(spec.pod_annotations),
                },
                "spec": _pod(server, spec, default_image),
            },
        }
    }


def image_reference(spec: Spec, default_image: str) -> str:
    """Return the image of the agents: a digest wins over a tag, the spec over the default.

    Args:
        spec: what is wanted.
        default_image: name with tag or digest; a repository of the spec takes the tag along.
    """
    image = spec.image
    if not (image.repository or image.tag or image.digest):
        return default_image
    default_name, default_tag = _split(default_image)
    name = image.repository or default_name
    if image.digest:
        return f"{name}@{image.digest}"
    return f"{name}:{image.tag or default_tag}"


def _split(image: str) -> tuple[str, str]:
    """Return name and tag; a port of the registry is no tag."""
    bare = image.partition("@")[0]
    path, colon, tag = bare.rpartition(":")
    return (path, tag) if colon and "/" not in tag else (bare, "latest")


def _update_strategy(spec: Spec) -> dict[str, Any]:
    strategy = spec.update_strategy
    if strategy.type == "OnDelete":
        return {"type": "OnDelete"}
    return {
        "type": "RollingUpdate",
        "rollingUpdate": {"maxUnavailable": strategy.max_unavailable},
    }


def _pod(server: ServerRef, spec: Spec, default_image: str) -> dict[str, Any]:
    volumes = [volume.volume() for volume in own_volumes(server, spec)]
    optional = {
        "imagePullSecrets": [{"name": secret.name} for secret in spec.image_pull_secrets],
        "nodeSelector": dict(spec.node_selector),
        "affinity": spec.affinity,
        "tolerations": [_as_given(toleration) for toleration in spec.tolerations],
        "priorityClassName": spec.priority_class_name,
        "runtimeClassName": spec.runtime_class_name,
        "hostIPC": spec.transport.memory_sharing == "HostIPC",
    }
    pod = {
        "serviceAccountName": names.service_account(server.name),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": spec.termination_grace_period_seconds,
        "securityContext": _pod_security(spec),
        "containers": [_container(server, spec, default_image)],
        "volumes": [*volumes, *spec.volumes],
        **{name: value for name, value in optional.items() if value},
    }
    if spec.transport.unix_socket == "HostPath" and not has_device_plugin(spec):
        pod["initContainers"] = [_socket_folder_maker(spec, default_image)]
    return pod


def _pod_security(spec: Spec) -> dict[str, Any]:
    user = 0 if has_device_plugin(spec) else spec.security.run_as_user
    return {
        "runAsUser": user,
        "runAsGroup": spec.security.run_as_group,
        "runAsNonRoot": user != 0,
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def _container_security(spec: Spec) -> dict[str, Any]:
    if not has_device_plugin(spec):
        return _HARDENED
    return {**_HARDENED, "capabilities": {"drop": ["ALL"], "add": _PLUGIN_CAPABILITIES}}


def _container(server: ServerRef, spec: Spec, default_image: str) -> dict[str, Any]:
    mounts = [volume.mount() for volume in own_volumes(server, spec)]
    return {
        "name": CONTAINER,
        "image": image_reference(spec, default_image),
        "imagePullPolicy": spec.image.pull_policy,
        "command": ["lmcache-nodeagent"],
        "args": agent_arguments(spec, uid=server.uid, name=server.name),
        "env": _variables(spec),
        "ports": [
            {"name": "messages", "containerPort": spec.server.port, "protocol": "TCP"},
            {"name": "http", "containerPort": spec.server.http_port, "protocol": "TCP"},
        ],
        "resources": agent_resources(spec),
        "securityContext": _container_security(spec),
        "volumeMounts": [*mounts, *spec.volume_mounts],
        "startupProbe": {
            **_get("/readyz"),
            "periodSeconds": _START_PERIOD_SECONDS,
            "failureThreshold": _START_TRIES,
        },
        "readinessProbe": {**_get("/readyz"), "periodSeconds": 5, "failureThreshold": 2},
        "livenessProbe": {**_get("/healthz"), "periodSeconds": 10, "failureThreshold": 3},
    }


def _get(path: str) -> dict[str, Any]:
    return {"httpGet": {"path": path, "port": "http"}, "timeoutSeconds": 5}


def _variables(spec: Spec) -> list[dict[str, Any]]:
    """Return the container's variables; those of the spec win.

    NVIDIA's container runtime shows every GPU for these, without a device of the pod's own.
    """
    variables: dict[str, dict[str, Any]] = {}
    if spec.gpu.vendor == "NVIDIA":
        for name, value in _ALL_GPUS.items():
            variables[name] = {"name": name, "value": value}
    variables |= {variable.name: _as_given(variable) for variable in spec.env}
    return list(variables.values())


def _as_given(part: msgspec.Struct) -> dict[str, Any]:
    """Write a part of the spec as it is in a pod."""
    members: dict[str, Any] = msgspec.to_builtins(part)
    return {name: value for name, value in members.items() if value is not None}


def _socket_folder_maker(spec: Spec, default_image: str) -> dict[str, Any]:
    """Return the container that gives the socket's folder to the agent.

    The kubelet makes the folder as root's, mode 0755, and the agent is not root.
    """
    owner = f"{spec.security.run_as_user}, {spec.security.run_as_group}"
    return {
        "name": "socket-folder",
        "image": image_reference(spec, default_image),
        "imagePullPolicy": spec.image.pull_policy,
        "command": ["python3", "-c", f"import os; os.chown({SOCKET_FOLDER!r}, {owner})"],
        "resources": {"requests": {"cpu": "10m", "memory": "32Mi"}},
        "securityContext": {
            **_HARDENED,
            "runAsUser": 0,
            "runAsGroup": 0,
            "runAsNonRoot": False,
            "capabilities": {"drop": ["ALL"], "add": ["CHOWN"]},
        },
        "volumeMounts": [{"name": "agent-socket", "mountPath": SOCKET_FOLDER}],
    }
