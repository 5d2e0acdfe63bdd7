"""The settings of the device plugin: the kubelet's side of how a worker gets to its agent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from lmcache_nodeagent.config_flags import Bounds, Flag, Group
from lmcache_nodeagent.config_reaping import ReapingConfig

SOCKETS_FOLDER = "sockets"
"""Below the slots' folder: where the sockets are bound. Containers see other names of them."""

_PATH = "/.+"
_PATH_WORDS = "an absolute path"
_MAX_SOCKET_PATH_BYTES = 107  # sun_path of unix(7), less the closing zero


def _path(about: str, default: str = "") -> str:
    made: str = field(
        default=default,
        metadata=Flag(Group.PLUGIN, about, pattern=_PATH, pattern_words=_PATH_WORDS).metadata,
    )
    return made


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePluginConfig(ReapingConfig):
    """What the agent offers to the kubelet of its node."""

    device_plugin_resource: str = field(
        default="",
        metadata=Flag(
            Group.PLUGIN,
            "Offer the resource lmcache-kube.dev/NAME to the node's kubelet: a container that asks "
            "for one gets the agent's socket. Empty: no device plugin.",
            pattern=r"[a-z0-9]([-a-z0-9.]{0,61}[a-z0-9])?",
            pattern_words="up to 63 lower case letters, digits, dots and dashes",
        ).metadata,
    )
    device_plugin_slots: int = field(
        default=64,
        metadata=Flag(
            Group.PLUGIN,
            "Containers that may have the resource on this node at a time.",
            bounds=Bounds(1, 1024),
        ).metadata,
    )
    device_plugin_folder: str = _path(
        "Folder in which the kubelet listens for device plugins.",
        "/var/lib/kubelet/device-plugins",
    )
    pod_resources_socket: str = _path(
        "Socket at which the kubelet tells which pod has which device.",
        "/var/lib/kubelet/pod-resources/kubelet.sock",
    )
    slots_folder: str = _path(
        "Folder for the slots' sockets, which no other agent uses; needed with "
        "--device-plugin-resource."
    )
    slots_host_folder: str = _path(
        "The same folder as the host sees it; empty: it has the same path there."
    )
    prestart_wait_seconds: float = field(
        default=20.0,
        metadata=Flag(
            Group.PLUGIN,
            "How long the start of a container waits at most until the memory of what ran in its "
            "slot before is released; 0 does not wait.",
            unit="seconds",
            bounds=Bounds(0, 25),
        ).metadata,
    )
    slot_shared_memory_bytes: int = field(
        default=0,
        metadata=Flag(
            Group.PLUGIN,
            "Give each container that has the resource a /dev/shm that the agent can see, and take "
            "registrations from it up to this much memory; 0 leaves its /dev/shm alone.",
            unit="bytes",
            bounds=Bounds(1 << 20, 1 << 50, zero_is_off=True),
        ).metadata,
    )
    slot_shared_memory_folder: str = _path(
        "Folder for those, in the file system of the agent's own /dev/shm.", "/dev/shm/slots"
    )
    slot_shared_memory_host_folder: str = _path(
        "The same folder as the host sees it; empty: it has the same path there."
    )
    slot_shared_memory_group: int = field(
        default=0,
        metadata=Flag(
            Group.PLUGIN,
            "Number of the group that may write there; 0 lets every user of the container.",
            bounds=Bounds(0, (1 << 31) - 1),
        ).metadata,
    )

    @property
    def slot_names(self) -> Sequence[str]:
        """The slots: device ids, and names of folders and sockets; none without the plugin."""
        if not self.device_plugin_resource:
            return ()
        return tuple(map(str, range(self.device_plugin_slots)))


def plugin_problems(config: DevicePluginConfig) -> Iterator[str]:
    """Check what the device plugin needs."""
    if config.device_plugin_resource and not config.slots_folder:
        yield (
            f"slots-folder is empty, but device-plugin-resource ({config.device_plugin_resource}) "
            "needs it: name a folder that is on the host, such as /run/lmcache-kube/UID"
        )
    longest = f"{config.slots_folder}/{SOCKETS_FOLDER}/{config.device_plugin_slots - 1}"
    if len(longest.encode()) > _MAX_SOCKET_PATH_BYTES:
        yield (
            f"slots-folder makes socket paths of {len(longest.encode())} bytes, but they must be "
            f"{_MAX_SOCKET_PATH_BYTES} or less: choose a shorter path"
        )
