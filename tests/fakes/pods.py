"""Pods as the API server gives them, with statuses as a kubelet writes them."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from typing import Any

Json = dict[str, Any]


def moment(seconds: float) -> str:
    """Write a moment as Kubernetes does: whole seconds, rounded down."""
    return dt.datetime.fromtimestamp(int(seconds), dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def running(since: float) -> Json:
    """Make the state of a container that runs."""
    return {"running": {"startedAt": moment(since)}}


def terminated(
    began: float, ended: float, *, run: str = "containerd://1", reason: str = "Error", code: int = 1
) -> Json:
    """Make the state of a container that the kubelet saw end."""
    return {
        "terminated": {
            "containerID": run,
            "exitCode": code,
            "reason": reason,
            "startedAt": moment(began),
            "finishedAt": moment(ended),
        }
    }


LOST: Json = {
    "terminated": {
        "exitCode": 137,
        "reason": "ContainerStatusUnknown",
        "message": "The container could not be located when the pod was terminated",
        "startedAt": None,
        "finishedAt": None,
    }
}
"""The state of a container that the kubelet knows nothing about any more."""

WAITING: Json = {"waiting": {"reason": "CrashLoopBackOff"}}


def container_status(
    name: str, state: Json, *, last: Json | None = None, run: str = "containerd://1"
) -> Json:
    """Make the status of one container."""
    return {
        "name": name,
        "containerID": run,
        "image": "none",
        "imageID": "",
        "ready": "running" in state,
        "restartCount": 0 if last is None else 1,
        "state": state,
        "lastState": last or {},
    }


def pod(
    *statuses: Json,
    phase: str = "Running",
    uid: str = "uid-1",
    node: str = "n1",
    addresses: tuple[str, ...] = ("10.1.0.1",),
    containers: tuple[str, ...] = ("engine",),
    init: tuple[Mapping[str, object], ...] = (),
    host_network: bool = False,
    conditions: tuple[Mapping[str, object], ...] = (),
    **status: object,
) -> Json:
    """Make a pod; `statuses` are those of its containers."""
    return {
        "metadata": {"name": f"pod-{uid}", "namespace": "default", "uid": uid},
        "spec": {
            "nodeName": node,
            "hostNetwork": host_network,
            "containers": [{"name": name, "image": "none"} for name in containers],
            "initContainers": list(init),
        },
        "status": {
            "phase": phase,
            "podIP": addresses[0] if addresses else "",
            "podIPs": [{"ip": address} for address in addresses],
            "conditions": list(conditions),
            "containerStatuses": list(statuses),
            **status,
        },
    }
