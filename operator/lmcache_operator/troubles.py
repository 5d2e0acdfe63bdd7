"""Why agents are not ready, read off their pods and off the Events on their DaemonSet. Pure.

What the kubelet and the controllers say changes from try to try (ErrImagePull, ImagePullBackOff);
a trouble's words must not, or they would be written to the cluster again and again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lmcache_operator.cluster import KubeObject

_PULL_REASONS = frozenset(
    {
        "ErrImagePull",
        "ImagePullBackOff",
        "InvalidImageName",
        "ErrImageNeverPull",
        "ImageInspectError",
        "RegistryUnavailable",
        "SignatureValidationFailed",
    }
)
_CREATE_REASONS = frozenset(
    {"CreateContainerConfigError", "CreateContainerError", "RunContainerError"}
)
_KEPT_CHARACTERS = 400


@dataclass(frozen=True, slots=True)
class Trouble:
    """Something that is wrong.

    Attributes:
        reason: one word, as conditions and Events have it.
        message: what it is and what to do, in words.
    """

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class _Complaint:
    """What one pod suffers from; the worst of all pods' is shown."""

    severity: int
    reason: str
    words: str
    fix: str


def pod_trouble(pods: Sequence[KubeObject]) -> Trouble | None:
    """Return what keeps most severely agents' pods from being ready, None if nothing does."""
    complaints = [found for pod in pods if (found := _complaint(pod)) is not None]
    if not complaints:
        return None
    worst = min(complaints, key=lambda found: (found.severity, found.words))
    alike = sum(found.reason == worst.reason for found in complaints)
    agents = "agent" if len(pods) == 1 else "agents"
    return Trouble(worst.reason, f"{alike} of {len(pods)} {agents}: {worst.words}. {worst.fix}.")


def creation_trouble(events: Iterable[KubeObject]) -> Trouble | None:
    """Return why the latest pod of a DaemonSet could not be created, None if no Event says so."""
    refused = [event for event in events if event.get("reason") == "FailedCreate"]
    if not refused:
        return None
    latest = max(refused, key=_event_time)
    return _refusal(str(latest.get("message") or ""))


def _refusal(message: str) -> Trouble:
    words = _shortened(re.sub(r'^Error creating: (pods "[^"]*" is forbidden: )?', "", message))
    if "violates PodSecurity" in message:
        return Trouble(
            "PodSecurityRefused",
            f"The namespace's Pod Security level forbids the agents' pods: {words}. Label it "
            "pod-security.kubernetes.io/enforce=privileged; workers may be in others, of another "
            "level, named in spec.workers.namespaces. Agents fit the level restricted with "
            "spec.transport.devicePlugin.mode Disabled, memorySharing None, unixSocket Disabled "
            "and a spec.security.runAsUser other than 0.",
        )
    if "exceeded quota" in message:
        return Trouble(
            "QuotaExceeded",
            f"The namespace's quota leaves no room for the agents' pods: {words}. Raise the quota, "
            "or lower spec.cache.size or spec.resources.",
        )
    return Trouble(
        "PodsRefused",
        f"The agents' pods cannot be created: {words}. Change the spec by what this says: "
        "runtimeClassName, priorityClassName, volumes, or a webhook's demands.",
    )


def _event_time(event: KubeObject) -> str:
    series = event.get("series") or {}
    moments = (series.get("lastObservedTime"), event.get("lastTimestamp"), event.get("eventTime"))
    return max(str(moment)[:19] for moment in moments)


def _complaint(pod: KubeObject) -> _Complaint | None:
    """Return the first thing that keeps one pod from being ready."""
    status = pod.get("status") or {}
    if pod["metadata"].get("deletionTimestamp") or _is_ready(status):
        return None
    return next((found for found in _complaints(pod, status) if found is not None), None)


def _complaints(pod: KubeObject, status: dict[str, Any]) -> Iterator[_Complaint | None]:
    for container in _containers(status):
        yield _waiting(pod, container)
    for container in _containers(status):
        yield _ended(container)
    yield _unscheduled(status)
    yield _Complaint(
        9,
        "AgentsStarting",
        "not ready yet",
        "An agent is ready once it has taken its whole cache",
    )


def _containers(status: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        *(status.get("initContainerStatuses") or ()),
        *(status.get("containerStatuses") or ()),
    ]


def _is_ready(status: dict[str, Any]) -> bool:
    conditions = status.get("conditions") or ()
    return any(found["type"] == "Ready" and found["status"] == "True" for found in conditions)


def _waiting(pod: KubeObject, container: dict[str, Any]) -> _Complaint | None:
    waiting = (container.get("state") or {}).get("waiting") or {}
    reason, message = waiting.get("reason", ""), str(waiting.get("message") or "")
    if reason in _PULL_REASONS:
        image = container.get("image") or "?"
        return _Complaint(0, "ImagePullFailed", f"image {image} cannot be pulled", _pull_fix(pod))
    if reason in _CREATE_REASONS:
        return _Complaint(
            1,
            "ContainerCannotStart",
            f"the container cannot be started: {_shortened(message)}",
            "Correct what the spec adds to the pods: env, volumes, volumeMounts, resources",
        )
    return None


def _pull_fix(pod: KubeObject) -> str:
    where = f"kubectl describe pod -n {pod['metadata'].get('namespace', '')} {_name(pod)}"
    containers = (pod.get("spec") or {}).get("containers") or [{}]
    if containers[0].get("imagePullPolicy") == "Never":
        never = "With pullPolicy Never the image must be on every node already: load it there"
        return f"{never}, or set spec.image.pullPolicy to IfNotPresent"
    return (
        "Correct spec.image, or name the registry's credentials in spec.imagePullSecrets; "
        f"{where} has the registry's words"
    )


def _ended(container: dict[str, Any]) -> _Complaint | None:
    """Look at a container that has ended before and is not ready now."""
    state, last = container.get("state") or {}, container.get("lastState") or {}
    ended = state.get("terminated") or last.get("terminated")
    if ended is None or container.get("ready") or ended.get("reason") == "Completed":
        return None
    if ended.get("reason") == "OOMKilled":
        return _Complaint(
            2,
            "AgentsOutOfMemory",
            "killed for using more memory than its limit",
            "Raise spec.resources.limits.memory, to which the cache is added, or leave it out",
        )
    return _Complaint(
        3,
        "AgentsCrash",
        f"the agent ends with exit code {ended.get('exitCode')}",
        "kubectl logs --previous on its pod has the reason, in the last lines",
    )


def _unscheduled(status: dict[str, Any]) -> _Complaint | None:
    for condition in status.get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return _Complaint(
                4,
                "Unschedulable",
                f"no room on its node: {_shortened(str(condition.get('message') or ''))}",
                "Lower spec.cache.size or spec.resources, free the node, or give the agents a "
                "higher spec.priorityClassName",
            )
    return None


def _name(pod: KubeObject) -> str:
    return str(pod["metadata"].get("name", ""))


def _shortened(words: str) -> str:
    """Return one sentence without its full stop, of bounded length."""
    plain = " ".join(words.split()).rstrip(".")
    return plain if len(plain) <= _KEPT_CHARACTERS else f"{plain[:_KEPT_CHARACTERS]}…"
