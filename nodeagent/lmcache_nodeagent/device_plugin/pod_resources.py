"""Which pod has which slot, as the kubelet lists it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import grpc

from lmcache_nodeagent.device_plugin.protocol import pod_resources_v1_pb2 as api
from lmcache_nodeagent.device_plugin.protocol import pod_resources_v1_pb2_grpc as stubs
from lmcache_nodeagent.liveness.slots import SlotOwner

if TYPE_CHECKING:
    from collections.abc import Mapping

_CALL_SECONDS = 5.0
_LARGEST_REPLY_BYTES = 64 << 20
"""The kubelet allows itself 16 MiB; a node with very many devices may need more one day."""


def list_owners(socket: Path, resource: str) -> Mapping[str, SlotOwner]:
    """Ask the kubelet who has the devices of a resource.

    Raises:
        grpc.RpcError: it does not answer.
    """
    options = [("grpc.max_receive_message_length", _LARGEST_REPLY_BYTES)]
    with grpc.insecure_channel(f"unix:{socket}", options=options) as channel:
        listed = stubs.PodResourcesListerStub(channel).List(
            api.ListPodResourcesRequest(), timeout=_CALL_SECONDS
        )
    return {
        name: SlotOwner(pod.namespace, pod.name, container.name)
        for pod in listed.pod_resources
        for container in pod.containers
        for devices in container.devices
        if devices.resource_name == resource
        for name in devices.device_ids
    }


def identity(socket: Path) -> str:
    """Name a listening socket: another one after each start of who listens; empty without one."""
    try:
        status = socket.stat()
    except OSError:
        return ""
    return f"{status.st_dev}:{status.st_ino}:{status.st_ctime_ns}"
