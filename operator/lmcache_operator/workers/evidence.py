"""From a pod's state to evidence about the engine workers in it. Pure.

*Proof* is the kubelet's own word: a container's run has ended. Everything else that looks like an
end is a *hint*, which the agent needs silence to believe. Readiness, deletion marks and phase
Unknown say nothing: a process runs on through all of them. The same state gives the same evidence
each time; agents take repeats without harm.

What an agent knows better is left to it: a worker that is heard, or whose connection is open,
contradicts a proof, and the agent then treats it as a hint.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from lmcache_operator.workers.pod import Container, Pod, Termination

LATE_REGISTRATION_SECONDS = 2.0
"""A registration this much after a run's end is of another run; kubelets round times down."""


class Trigger(StrEnum):
    """What was seen, as agents, Events and metrics name it."""

    CONTAINER_TERMINATED = "container_terminated"
    POD_TERMINATED = "pod_terminated"
    ENDED_UNREPORTED = "ended_unreported"
    POD_GONE = "pod_gone"


@dataclass(frozen=True, slots=True)
class Instance:
    """A registered instance that is mapped to a pod.

    Attributes:
        instance_id: the engine's number for it.
        pod_uid: the pod it runs in.
        container: the container it runs in; `None` if that is not known.
        registered_at: seconds since 1970 by its node's clock, which is also the kubelet's.
        run: the container's run that went on when it was mapped, empty if none did.
        run_since: when that run began, as far as it was reported.
    """

    instance_id: int
    pod_uid: str
    container: str | None
    registered_at: float
    run: str = ""
    run_since: float | None = None


@dataclass(frozen=True, slots=True)
class Evidence:
    """One piece of evidence about one instance.

    Attributes:
        run: the runtime's id of the run that ended, empty if not known.
        proof: the kubelet's own word; otherwise a hint.
        observed_at: seconds since 1970 by the operator's clock.
        finished_at: when the run ended by the kubelet's clock, `None` if not known.
        contradicted: it would be proof, but the instance registered after that end.
    """

    instance_id: int
    pod_uid: str
    container: str | None
    run: str
    trigger: Trigger
    proof: bool
    observed_at: float
    finished_at: float | None = None
    contradicted: bool = False

    @property
    def identity(self) -> tuple[int, str, str, Trigger]:
        """What repeats have in common: the pod's later deletion says nothing new of its end."""
        return (self.instance_id, self.pod_uid, self.run, self.trigger)


@dataclass(frozen=True, slots=True)
class _End:
    """The end of an instance's run, as the kubelet reported it."""

    run: str
    finished_at: float


def evidence_of_state(
    pod: Pod, instances: Iterable[Instance], *, observed_at: float
) -> list[Evidence]:
    """Return what a pod's present state says about the instances in it."""
    found = (_judge(pod, instance, observed_at) for instance in instances)
    return [evidence for evidence in found if evidence is not None]


def evidence_of_absence(
    last_seen: Pod, live: Pod | None, instances: Iterable[Instance], *, observed_at: float
) -> list[Evidence] | None:
    """Return what it says that a pod is missing from a complete list, or was reported as deleted.

    Args:
        last_seen: the pod as it was last seen.
        live: what a read by its name returned after that; `None` if there is no such pod.
        instances: those mapped to the pod.
        observed_at: seconds since 1970.

    Returns:
        The evidence; `None` if the pod only left the selection, so that its mapping is dropped.
    """
    if live is not None and live.uid == last_seen.uid:
        if not live.is_terminal:
            return None
        return evidence_of_state(live, instances, observed_at=observed_at)
    return [_judge_gone(last_seen, instance, observed_at) for instance in instances]


def is_proven_ended(pod: Pod) -> bool:
    """Tell whether the kubelet has reported the end of everything in a pod."""
    return (
        pod.is_terminal
        and not pod.garbage_collected
        and all(_reported_end(pod, name) for name in pod.lasting_containers)
    )


def last_end(pod: Pod) -> float | None:
    """Return when the last container of a pod ended; None unless that is proven."""
    if not is_proven_ended(pod):
        return None
    ends = [_reported_end(pod, name) for name in pod.lasting_containers]
    return max(end.finished_at for end in ends if end and end.finished_at is not None)


def _judge_gone(last_seen: Pod, instance: Instance, observed_at: float) -> Evidence:
    found = _judge(last_seen, instance, observed_at)
    if found is None or found.contradicted:  # whatever ran after that end is gone as well
        return _hint(instance, Trigger.POD_GONE, observed_at)
    return found


def _judge(pod: Pod, instance: Instance, observed_at: float) -> Evidence | None:
    all_ended_at = last_end(pod)
    if instance.container is None:
        if all_ended_at is not None:
            end = _End("", all_ended_at)
            return _proof(instance, Trigger.POD_TERMINATED, end, observed_at)
    elif found := _end_of_run(pod.containers.get(instance.container), instance):
        over = all_ended_at is not None
        trigger = Trigger.POD_TERMINATED if over else Trigger.CONTAINER_TERMINATED
        return _proof(instance, trigger, found, observed_at)
    if pod.is_terminal or _status_lost(pod, instance.container) or _run_replaced(pod, instance):
        return _hint(instance, Trigger.ENDED_UNREPORTED, observed_at)
    return None


def _end_of_run(container: Container | None, instance: Instance) -> _End | None:
    """Find the end of the run that an instance belongs to, or of a later run.

    By the run's id, if that is known: times are whole seconds, in which one run may end and the
    next begin.
    """
    if container is None:
        return None
    registered_at, since = instance.registered_at, container.running_since
    if instance.run:
        if since is not None and container.container_id == instance.run:
            return None
        for ended in (container.ended, container.ended_before):
            if ended and ended.container_id == instance.run and ended.finished_at is not None:
                return _End(instance.run, ended.finished_at) if ended.reported else None
    if since is None:
        return _end_among((container.ended_before, container.ended), registered_at)
    if registered_at >= since:
        return None  # of the run that goes on
    # A newer run is proof by itself: the kubelet starts it only after the end of the other.
    return _end_among((container.ended_before,), registered_at) or _End("", since)


def _end_among(runs: tuple[Termination | None, ...], registered_at: float) -> _End | None:
    """Pick the last run that began by a moment, if its end is reported.

    Otherwise it ended, at the latest, when the one after it began.
    """
    known = [run for run in runs if run is not None]
    begun = [run for run in known if run.started_at is None or run.started_at <= registered_at]
    if begun and begun[-1].reported and (ended := begun[-1].finished_at) is not None:
        return _End(begun[-1].container_id, ended)
    after = known[known.index(begun[-1]) + 1 :] if begun else known
    starts = [run.started_at for run in after if run.started_at is not None]
    return _End("", min(starts)) if starts else None


def _reported_end(pod: Pod, name: str) -> Termination | None:
    container = pod.containers.get(name)
    ended = container.ended if container else None
    return ended if ended is not None and ended.reported else None


def _status_lost(pod: Pod, name: str | None) -> bool:
    """Tell whether the kubelet found a container ended without knowing how."""
    container = pod.containers.get(name) if name is not None else None
    ended = container.ended if container else None
    return ended is not None and not ended.reported


def _run_replaced(pod: Pod, instance: Instance) -> bool:
    """Tell whether another run is reported, as if it had begun when the instance's run did.

    No kubelet should say so. What it says of time is then not to be trusted, so this is no proof.
    """
    if not instance.run or instance.container is None:
        return False
    found = pod.containers.get(instance.container)
    return (
        found is not None
        and found.ended is None
        and found.container_id not in {"", instance.run}
        and found.running_since == instance.run_since
    )


def _proof(instance: Instance, trigger: Trigger, end: _End, observed_at: float) -> Evidence:
    contradicted = instance.registered_at > end.finished_at + LATE_REGISTRATION_SECONDS
    return Evidence(
        instance_id=instance.instance_id,
        pod_uid=instance.pod_uid,
        container=instance.container,
        run=end.run,
        trigger=trigger,
        proof=not contradicted,
        observed_at=observed_at,
        finished_at=end.finished_at,
        contradicted=contradicted,
    )


def _hint(instance: Instance, trigger: Trigger, observed_at: float) -> Evidence:
    return Evidence(
        instance_id=instance.instance_id,
        pod_uid=instance.pod_uid,
        container=instance.container,
        run="",
        trigger=trigger,
        proof=False,
        observed_at=observed_at,
    )
