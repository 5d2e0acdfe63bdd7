"""Which pod an instance runs in. Pure.

The slot of the device plugin comes first, since the kubelet itself says whose it is; then the uid
that the worker sent; then the connection's address.

An address alone does not identify a pod: finished pods keep showing theirs while a new pod uses it,
and all hostNetwork pods of a node share one. Wherever more than one answer is possible there is
none, and the instance is judged by its silence.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from lmcache_nodeagent.operator_link.messages import SlotPod
from lmcache_operator.workers.evidence import LATE_REGISTRATION_SECONDS, last_end
from lmcache_operator.workers.pod import Pod, normal_address


class Unmapped(StrEnum):
    """Why an instance has no pod; a metric's label."""

    SLOT_UNLISTED = "slot_unlisted"
    SLOT_POD_UNKNOWN = "slot_pod_unknown"
    NO_ADDRESS = "no_address"
    NOBODY = "nobody"
    SEVERAL = "several"
    REGISTERED_EARLIER = "registered_earlier"
    CLAIM_UNKNOWN = "claim_unknown"
    CLAIM_DISPUTED = "claim_disputed"


@dataclass(frozen=True, slots=True)
class Registration:
    """What an agent knows of an instance's origin.

    Attributes:
        node: where the agent runs.
        peer: IP address of the connection, empty over a Unix socket.
        registered_at: seconds since 1970 by the node's clock.
        claimed_uid: pod uid that the worker sent, empty if it sent none.
        slot: of the device plugin, empty if it came another way.
        slot_pod: whose the slot was by the kubelet's word, None while that is not known.
    """

    node: str
    peer: str
    registered_at: float
    claimed_uid: str = ""
    slot: str = ""
    slot_pod: SlotPod | None = None


@dataclass(frozen=True, slots=True)
class Mapping:
    """Where an instance runs. `container` is `None` if the pod has several and none is named.

    `run` is the runtime's id of the container's run, empty if it is not the present one.
    """

    pod_uid: str
    container: str | None
    run: str


def map_instance(
    registration: Registration, pods: Iterable[Pod], *, container_name: str | None = None
) -> Mapping | Unmapped:
    """Find the pod of an instance among the pods of its node.

    Args:
        registration: the instance's origin.
        pods: worker pods; those of other nodes are left aside.
        container_name: the engine's container by `spec.workers.containerName`.
    """
    here = [pod for pod in pods if pod.node == registration.node]
    if registration.slot:
        found = _by_slot(registration, here)
        container_name = registration.slot_pod.container if registration.slot_pod else None
    elif registration.claimed_uid:
        found = _claimed(registration, here)
    else:
        found = _by_address(registration, here)
    if isinstance(found, Unmapped):
        return found
    container = _container_of(found, container_name)
    return Mapping(found.uid, container, _present_run(found, container, registration.registered_at))


def _by_slot(registration: Registration, pods: list[Pod]) -> Pod | Unmapped:
    """Take the pod that had the slot, unless it has only the name of one that is gone."""
    owner = registration.slot_pod
    if owner is None:
        return Unmapped.SLOT_UNLISTED
    name = (owner.namespace, owner.name)
    found = next((pod for pod in pods if (pod.namespace, pod.name) == name), None)
    if found is None:
        return Unmapped.SLOT_POD_UNKNOWN
    if not _may_have_run_at(registration.registered_at, found):
        return Unmapped.REGISTERED_EARLIER
    return found if found.phase == "Running" or found.is_terminal else Unmapped.SLOT_POD_UNKNOWN


def _claimed(registration: Registration, pods: list[Pod]) -> Pod | Unmapped:
    """Take a worker's word for its pod if the address confirms it."""
    claimed = next((pod for pod in pods if pod.uid == registration.claimed_uid), None)
    if claimed is None:
        return Unmapped.CLAIM_UNKNOWN
    if _peer(registration) not in claimed.addresses:
        return Unmapped.CLAIM_DISPUTED
    return claimed


def _peer(registration: Registration) -> str:
    """Return the address in normal form; empty if there is none, or what the agent says is none."""
    try:
        return normal_address(registration.peer)
    except ValueError:
        return ""


def _by_address(registration: Registration, pods: list[Pod]) -> Pod | Unmapped:
    """Take the one pod that can have owned the address when the instance registered."""
    if not (peer := _peer(registration)):
        return Unmapped.NO_ADDRESS
    holders = [pod for pod in pods if not pod.host_network and peer in pod.addresses]
    possible = [pod for pod in holders if _may_have_run_at(registration.registered_at, pod)]
    if len(possible) > 1:
        return Unmapped.SEVERAL
    if possible and (possible[0].phase == "Running" or possible[0].is_terminal):
        return possible[0]
    earlier = not possible and any(pod.phase == "Running" for pod in holders)
    return Unmapped.REGISTERED_EARLIER if earlier else Unmapped.NOBODY


def _may_have_run_at(moment: float, pod: Pod) -> bool:
    """Tell whether a process of a pod can have registered at a moment.

    Of a pod that is over, only if its kubelet reported its whole life; otherwise an evicted pod,
    which keeps its address for days, would be in the way of whoever gets that address next.
    """
    began = _began_at(pod)
    if not pod.is_terminal:
        return began is None or began <= moment
    ended = last_end(pod)
    if began is None or ended is None:
        return False
    return began <= moment <= ended + LATE_REGISTRATION_SECONDS


def _began_at(pod: Pod) -> float | None:
    """Return a moment before which nothing ran in a pod: the latest one that is known."""
    starts: list[float] = []
    for container in pod.containers.values():
        if container.ended_before is not None and pod.acknowledged_at is not None:
            return pod.acknowledged_at  # restarted: the first runs may be forgotten by now
        ends = (container.ended, container.ended_before)
        known = [container.running_since, *(end.started_at for end in ends if end is not None)]
        starts += [start for start in known if start is not None]
    return min(starts, default=pod.acknowledged_at)


def _container_of(pod: Pod, container_name: str | None) -> str | None:
    if container_name is not None:
        return container_name if container_name in pod.lasting_containers else None
    return pod.main_containers[0] if len(pod.main_containers) == 1 else None


def _present_run(pod: Pod, container: str | None, registered_at: float) -> str:
    found = pod.containers.get(container) if container is not None else None
    if found is None or found.running_since is None or registered_at < found.running_since:
        return ""
    return found.container_id
