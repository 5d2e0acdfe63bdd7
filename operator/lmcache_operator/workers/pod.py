"""What is kept of a pod: who it is, where, and what its kubelet said of each container.

A pod object is some kilobytes; ten thousand of them are watched. What is kept is a tenth of that.
"""

from __future__ import annotations

import datetime as dt
import ipaddress
from dataclasses import dataclass

import msgspec
from msgspec import Struct

from lmcache_operator.errors import PodError
from lmcache_operator.names import INSTANCE_IDS_ANNOTATION

_STATUS_LOST = "ContainerStatusUnknown"
_GARBAGE_COLLECTED = "DeletionByPodGC"


@dataclass(frozen=True, slots=True)
class Termination:
    """The end of one run of a container. Times are seconds since 1970, whole ones, rounded down.

    Attributes:
        container_id: the runtime's id of the run; empty if the kubelet never had one.
        reported: the kubelet saw the run end. Otherwise it only found that nothing is known of it.
    """

    container_id: str
    started_at: float | None
    finished_at: float | None
    reported: bool


@dataclass(frozen=True, slots=True)
class Container:
    """One container: its run now, and the one before it.

    `running_since` and `ended` exclude each other; neither is set while it waits to start.
    """

    name: str
    container_id: str = ""
    running_since: float | None = None
    ended: Termination | None = None
    ended_before: Termination | None = None


@dataclass(frozen=True, slots=True)
class Owner:
    """The object that controls a pod, in the pod's namespace: a ReplicaSet, a StatefulSet."""

    api_version: str
    kind: str
    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class Pod:
    """One pod.

    Attributes:
        addresses: normal form; of a hostNetwork pod they are its node's.
        main_containers: names in `spec.containers`.
        lasting_containers: names of all that may run until the pod ends: also sidecars (init
            containers that restart) and containers that were added for debugging.
        containers: what the kubelet reported, by name; not all of them need be here.
        garbage_collected: ended by the control plane, without the kubelet.
        acknowledged_at: when the kubelet took it over, by its clock, or else when it was created;
            nothing ran in it before.
        deleting: somebody has asked for its deletion.
        instance_ids: our annotation, as it is now.
    """

    uid: str
    namespace: str
    name: str
    node: str
    phase: str
    host_network: bool
    addresses: frozenset[str]
    main_containers: tuple[str, ...]
    lasting_containers: tuple[str, ...]
    containers: dict[str, Container]
    garbage_collected: bool
    acknowledged_at: float | None = None
    deleting: bool = False
    instance_ids: str | None = None
    owner: Owner | None = None

    @property
    def is_terminal(self) -> bool:
        """Whether the pod will never run again."""
        return self.phase in {"Succeeded", "Failed"}


def read_pod(document: bytes | dict[str, object]) -> Pod:
    """Read a pod as the API server gives it, as JSON or as an object of JSON values.

    Raises:
        PodError: it is no pod.
    """
    try:
        if isinstance(document, bytes):
            found = msgspec.json.decode(document, type=_Document)
        else:
            found = msgspec.convert(document, _Document)
    except msgspec.DecodeError as error:
        raise PodError(f"what the API server calls a pod is none: {error}") from None
    return _slim(found)


def normal_address(address: str) -> str:
    """Return an IP address in the form to compare: an IPv4-mapped IPv6 address is the IPv4 one.

    Raises:
        ValueError: the text is no address.
    """
    found = ipaddress.ip_address(address)
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return str(mapped or found)


class _Running(Struct, rename="camel"):
    started_at: dt.datetime | None = None


class _Terminated(Struct, rename="camel"):
    container_id: str = msgspec.field(default="", name="containerID")
    reason: str = ""
    started_at: dt.datetime | None = None
    finished_at: dt.datetime | None = None


class _State(Struct):
    running: _Running | None = None
    terminated: _Terminated | None = None


class _ContainerStatus(Struct, rename="camel"):
    name: str
    container_id: str = msgspec.field(default="", name="containerID")
    state: _State = msgspec.field(default_factory=_State)
    last_state: _State = msgspec.field(default_factory=_State)


class _Address(Struct):
    ip: str = ""


class _Condition(Struct):
    type: str = ""
    status: str = ""
    reason: str = ""


class _Status(Struct, rename="camel"):
    phase: str = ""
    start_time: dt.datetime | None = None
    pod_ip: str = msgspec.field(default="", name="podIP")
    pod_ips: list[_Address] = msgspec.field(default_factory=list, name="podIPs")
    conditions: list[_Condition] = msgspec.field(default_factory=list)
    container_statuses: list[_ContainerStatus] = msgspec.field(default_factory=list)
    init_container_statuses: list[_ContainerStatus] = msgspec.field(default_factory=list)
    ephemeral_container_statuses: list[_ContainerStatus] = msgspec.field(default_factory=list)


class _ContainerSpec(Struct, rename="camel"):
    name: str
    restart_policy: str = ""


class _Spec(Struct, rename="camel"):
    containers: list[_ContainerSpec]
    init_containers: list[_ContainerSpec] = msgspec.field(default_factory=list)
    ephemeral_containers: list[_ContainerSpec] = msgspec.field(default_factory=list)
    node_name: str = ""
    host_network: bool = False


class _Annotations(Struct):
    """Ours alone; a pod may carry 256 KiB of others."""

    instance_ids: str | None = msgspec.field(default=None, name=INSTANCE_IDS_ANNOTATION)


class _OwnerReference(Struct, rename="camel"):
    api_version: str
    kind: str
    name: str
    uid: str
    controller: bool | None = None


class _Metadata(Struct, rename="camel"):
    name: str
    namespace: str
    uid: str
    creation_timestamp: dt.datetime | None = None
    deletion_timestamp: str | None = None
    annotations: _Annotations = msgspec.field(default_factory=_Annotations)
    owner_references: list[_OwnerReference] = msgspec.field(default_factory=list)


class _Document(Struct):
    metadata: _Metadata
    spec: _Spec
    status: _Status = msgspec.field(default_factory=_Status)


def _slim(found: _Document) -> Pod:
    spec, status = found.spec, found.status
    main = tuple(container.name for container in spec.containers)
    sidecars = [c.name for c in spec.init_containers if c.restart_policy == "Always"]
    reported = [
        *status.container_statuses,
        *status.init_container_statuses,
        *status.ephemeral_container_statuses,
    ]
    given = (status.pod_ip, *(address.ip for address in status.pod_ips))
    return Pod(
        uid=found.metadata.uid,
        namespace=found.metadata.namespace,
        name=found.metadata.name,
        node=spec.node_name,
        phase=status.phase,
        host_network=spec.host_network,
        addresses=frozenset(filter(None, map(_address, given))),
        main_containers=main,
        lasting_containers=(*main, *sidecars, *(c.name for c in spec.ephemeral_containers)),
        containers={each.name: _container(each) for each in reported},
        garbage_collected=any(
            condition.type == "DisruptionTarget"
            and condition.status == "True"
            and condition.reason == _GARBAGE_COLLECTED
            for condition in status.conditions
        ),
        acknowledged_at=_seconds(status.start_time or found.metadata.creation_timestamp),
        deleting=found.metadata.deletion_timestamp is not None,
        instance_ids=found.metadata.annotations.instance_ids,
        owner=_owner(found.metadata.owner_references),
    )


def _address(given: str) -> str:
    """Return an address in normal form; empty for what is none, which nobody connects from."""
    try:
        return normal_address(given)
    except ValueError:
        return ""


def _owner(references: list[_OwnerReference]) -> Owner | None:
    for found in references:
        if found.controller:
            return Owner(found.api_version, found.kind, found.name, found.uid)
    return None


def _container(status: _ContainerStatus) -> Container:
    running, ended = status.state.running, status.state.terminated
    return Container(
        name=status.name,
        container_id=status.container_id,
        running_since=_seconds(running.started_at) if running else None,
        ended=_termination(ended),
        ended_before=_termination(status.last_state.terminated),
    )


def _termination(found: _Terminated | None) -> Termination | None:
    if found is None:
        return None
    finished_at = _seconds(found.finished_at)
    return Termination(
        container_id=found.container_id,
        started_at=_seconds(found.started_at),
        finished_at=finished_at,
        reported=(
            bool(found.container_id) and found.reason != _STATUS_LOST and finished_at is not None
        ),
    )


def _seconds(moment: dt.datetime | None) -> float | None:
    """Return seconds since 1970; nothing for Go's zero time, which stands for none."""
    if moment is None or moment.year == 1:
        return None
    return moment.timestamp()
