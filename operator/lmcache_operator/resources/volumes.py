"""What the agent's container mounts, by the ways that the spec opens to workers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from lmcache_nodeagent.operator_link.messages import TOKEN_AUDIENCE
from lmcache_operator import names
from lmcache_operator.agents.registry import ServerRef
from lmcache_operator.api.root import Spec
from lmcache_operator.errors import SpecError
from lmcache_operator.resources.agent_resources import cache_bytes, quantity_text
from lmcache_operator.spec import (
    SHARED_MEMORY,
    SOCKET_FOLDER,
    has_device_plugin,
    slot_memory_bytes,
)

# Fixed places of every kubelet, and of those whose root folder is the usual one.
_PLUGINS = "/var/lib/kubelet/device-plugins"
_POD_RESOURCES = "/var/lib/kubelet/pod-resources"

_TOKEN_SECONDS = 3600
_SHARED_MEMORY_SLACK_BYTES = 64 << 20  # beside the cache: what workers in the pod's IPC share


@dataclass(frozen=True, slots=True)
class Volume:
    """One volume of the pod and where the agent's container has it."""

    name: str
    path: str
    source: dict[str, Any]
    read_only: bool = False

    def volume(self) -> dict[str, Any]:
        """Return the pod's entry."""
        return {"name": self.name, **self.source}

    def mount(self) -> dict[str, Any]:
        """Return the container's entry."""
        read_only = {"readOnly": True} if self.read_only else {}
        return {"name": self.name, "mountPath": self.path, **read_only}


def own_volumes(server: ServerRef, spec: Spec) -> list[Volume]:
    """Return the volumes that the operator makes, after a look at those of the spec.

    Raises:
        SpecError: one of the spec has the name or the path of one of them.
    """
    own = list(_own_volumes(server, spec))
    if problems := [*_name_problems(own, spec), *_path_problems(own, spec)]:
        raise SpecError(problems)
    return own


def _own_volumes(server: ServerRef, spec: Spec) -> Iterator[Volume]:
    # Without its settings an agent would judge by defaults that nobody chose: it waits for them.
    reaping = {"configMap": {"name": names.reaping_config_map(server.name)}}
    yield Volume("agent-reaping", names.REAPING_FOLDER, reaping, read_only=True)
    link = {"configMap": {"name": names.link_config_map(server.name), "optional": True}}
    yield Volume("agent-link", names.LINK_FOLDER, link, read_only=True)
    token = {
        "path": PurePosixPath(names.TOKEN_FILE).name,
        "audience": TOKEN_AUDIENCE,
        "expirationSeconds": _TOKEN_SECONDS,
    }
    source = {"projected": {"sources": [{"serviceAccountToken": token}]}}
    yield Volume("agent-token", names.TOKEN_FOLDER, source, read_only=True)
    yield Volume("agent-shm", SHARED_MEMORY, _shared_memory(server, spec))
    if spec.transport.unix_socket == "HostPath" or has_device_plugin(spec):
        yield Volume("agent-socket", SOCKET_FOLDER, _made_folder(names.socket_folder(server.uid)))
    if has_device_plugin(spec):
        plugins = {"hostPath": {"path": _PLUGINS, "type": "Directory"}}
        yield Volume("agent-device-plugins", _PLUGINS, plugins)
        # Where the kubelet's root is elsewhere this is empty, and spec.volumes has the real one.
        yield Volume(
            "agent-pod-resources", _POD_RESOURCES, _made_folder(_POD_RESOURCES), read_only=True
        )


def _made_folder(path: str) -> dict[str, Any]:
    return {"hostPath": {"path": path, "type": "DirectoryOrCreate"}}


def _shared_memory(server: ServerRef, spec: Spec) -> dict[str, Any]:
    """Return where the cache lives: the pod's own memory, or what workers of the node share."""
    if spec.transport.memory_sharing == "None" and slot_memory_bytes(spec):
        return _made_folder(names.slot_memory_folder(server.uid))
    if spec.transport.memory_sharing == "None":
        limit = quantity_text(cache_bytes(spec) + _SHARED_MEMORY_SLACK_BYTES)
        return {"emptyDir": {"medium": "Memory", "sizeLimit": limit}}
    return {"hostPath": {"path": SHARED_MEMORY, "type": "Directory"}}


def _name_problems(own: list[Volume], spec: Spec) -> Iterator[str]:
    taken = {volume.name for volume in own}
    for index, volume in enumerate(spec.volumes):
        if volume.get("name") in taken:
            yield (
                f'spec.volumes[{index}].name: "{volume["name"]}" is a volume that the operator '
                "makes: take another name"
            )


def _path_problems(own: list[Volume], spec: Spec) -> Iterator[str]:
    taken = {volume.path for volume in own}
    for index, mount in enumerate(spec.volume_mounts):
        if str(mount.get("mountPath", "")).rstrip("/") in taken:
            yield (
                f'spec.volumeMounts[{index}].mountPath: "{mount["mountPath"]}" is where the '
                "operator mounts what the agent needs: take another path"
            )
