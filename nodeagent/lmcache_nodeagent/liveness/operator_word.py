"""Takes what the operator says about instances: checks whom it is about and what it is worth.

The policy judges; here it is only decided whether a piece of evidence counts, and as proof or as a
hint. Wherever two readings are possible, the one that lets the worker live is taken.
"""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from typing import TYPE_CHECKING

from lmcache_nodeagent.events import EvidenceTaken
from lmcache_nodeagent.ids import InstanceId
from lmcache_nodeagent.liveness.evidence import all_closed
from lmcache_nodeagent.liveness.kubelet_clock import KubeletClock
from lmcache_nodeagent.liveness.policy import LATE_SIGN_SECONDS, NEXT_RUN_SECONDS, PROOFS
from lmcache_nodeagent.liveness.testimony import Hint

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lmcache_nodeagent.clock import Now
    from lmcache_nodeagent.events import Publish
    from lmcache_nodeagent.liveness.stalls import Stalls
    from lmcache_nodeagent.liveness.targets import InstanceLivenessTarget, ReapableEntry
    from lmcache_nodeagent.liveness.testimony import OperatorEvidence, PodRun
    from lmcache_nodeagent.liveness.windows import LivenessSettings

_ROUNDING_SECONDS = 0.001

KNOWN_TRIGGERS = frozenset({*PROOFS, "ended_unreported", "pod_gone"})
"""What metrics name; a trigger of a later operator counts as a hint and as `other`."""


class Outcome(StrEnum):
    """What became of a piece of evidence; a metric's label."""

    APPLIED = "applied"
    CONTRADICTED = "contradicted"
    DISABLED = "disabled"
    OTHER_BOOT = "other_boot"
    NOT_REGISTERED = "not_registered"
    REGISTERED_LATER = "registered_later"
    NOT_MAPPED = "not_mapped"
    OTHER_POD = "other_pod"
    OTHER_CONTAINER = "other_container"
    REPEATED = "repeated"


class OperatorWord:
    """Puts evidence and mappings to the entries they name. Thread: operator-link."""

    def __init__(
        self,
        boot_id: str,
        targets: Sequence[InstanceLivenessTarget],
        settings: Callable[[], LivenessSettings],
        stalls: Stalls,
        wake_reaper: Callable[[], None],
        publish: Publish,
        now: Now,
        wall: Now,
    ) -> None:
        self._boot_id = boot_id
        self._targets = targets
        self._settings = settings
        self._stalls = stalls
        self._wake_reaper = wake_reaper
        self._publish = publish
        self._now = now
        self._clock = KubeletClock(now, wall)

    def take_evidence(self, evidence: OperatorEvidence) -> Outcome:
        """Take one piece of evidence; a repeat or a stale one has no effect."""
        outcome = self._taken(evidence)
        known = evidence.trigger in KNOWN_TRIGGERS
        self._publish(
            EvidenceTaken(
                InstanceId(evidence.instance_id),
                evidence.trigger if known else "other",
                "proof" if evidence.proof else "hint",
                outcome.value,
            )
        )
        if outcome in {Outcome.APPLIED, Outcome.CONTRADICTED}:
            self._wake_reaper()
        return outcome

    def _taken(self, evidence: OperatorEvidence) -> Outcome:
        if not self._settings().operator_word:
            return Outcome.DISABLED
        if evidence.boot_id != self._boot_id:
            return Outcome.OTHER_BOOT
        outcomes: list[Outcome] = []

        def visit(entry: ReapableEntry) -> None:
            refusal = _refusal(evidence, entry)
            outcomes.append(refusal or self._apply(evidence, entry))

        self._visit(evidence.instance_id, visit)
        return next(iter(outcomes), Outcome.NOT_REGISTERED)

    def _apply(self, evidence: OperatorEvidence, entry: ReapableEntry) -> Outcome:
        """Keep it as a hint or as proof. Runs under the target's lock."""
        now, finished_at = self._now(), evidence.finished_at
        if not evidence.proof or evidence.trigger not in PROOFS or finished_at is None:
            entry.take_hint(Hint(evidence.trigger, now), evidence.id)
            return Outcome.APPLIED
        ended_at = self._clock.monotonic(finished_at)
        if ended_at is None or self._came_after(entry, ended_at):
            entry.take_hint(Hint(evidence.trigger, now), evidence.id)
            return Outcome.CONTRADICTED
        refuted_after = ended_at + LATE_SIGN_SECONDS + self._stalls.delay_since(ended_at)
        entry.take_hint(Hint(evidence.trigger, now, ended_at, refuted_after), evidence.id)
        return Outcome.APPLIED if all_closed(entry.connections) else Outcome.CONTRADICTED

    def _came_after(self, entry: ReapableEntry, ended_at: float) -> bool:
        """Tell whether the instance was heard, or its registrant connected, after a run's end.

        A message that was read late, because the agent was late, may have been sent before it. A
        connection that was may have been made after it: then this is the next run's worker.
        """
        link = entry.registrant.link
        connected_at = entry.registrant.opened_at if link is None else link.accepted_at
        if connected_at >= ended_at + NEXT_RUN_SECONDS - _ROUNDING_SECONDS:
            return True
        lateness = self._stalls.delay_between(ended_at, entry.last_seen)
        return entry.last_seen > ended_at + LATE_SIGN_SECONDS + lateness

    def take_mapping(self, instance_id: int, registration: int, pod: PodRun | None) -> bool:
        """Note where a registration runs; `None` takes it back. False if there is no such one.

        Evidence about another pod than the one it runs in is void.
        """
        self._clock.look()
        found: list[bool] = []

        def visit(entry: ReapableEntry) -> None:
            known = entry.registered
            found.append(known.serial == registration)
            if known.serial != registration:
                return
            if known.pod is not None and not _same_place(known.pod, pod):
                entry.hints = []
            entry.registered = replace(known, pod=pod)

        self._visit(instance_id, visit)
        return any(found)

    def _visit(self, instance_id: int, visit: Callable[[ReapableEntry], None]) -> None:
        for target in self._targets:
            if target.visit_entry(InstanceId(instance_id), visit):
                return


def _refusal(evidence: OperatorEvidence, entry: ReapableEntry) -> Outcome | None:
    """Tell why evidence is not about this entry, or `None` if it is."""
    registered = entry.registered
    pod = registered.pod
    if evidence.registration < registered.serial:
        return Outcome.REGISTERED_LATER
    if evidence.registration > registered.serial:
        return Outcome.NOT_REGISTERED
    if pod is None:
        return Outcome.NOT_MAPPED
    if evidence.pod_uid != pod.uid:
        return Outcome.OTHER_POD
    if evidence.container and pod.container and evidence.container != pod.container:
        return Outcome.OTHER_CONTAINER
    return Outcome.REPEATED if evidence.id in entry.evidence_seen else None


def _same_place(one: PodRun, other: PodRun | None) -> bool:
    """Tell whether evidence about one is about the other; a run may become known later."""
    return other is not None and (one.uid, one.container) == (other.uid, other.container)
