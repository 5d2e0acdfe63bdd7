"""What the operator sees of a running agent, and what becomes of what it says.

Translates between the agent's own records and the messages of the link. Thread: operator-link.
"""

from __future__ import annotations

import importlib.metadata
from collections import Counter
from typing import TYPE_CHECKING, assert_never

from lmcache_nodeagent.config import LIVE_OPTIONS
from lmcache_nodeagent.liveness.evidence import all_closed
from lmcache_nodeagent.liveness.testimony import OperatorEvidence
from lmcache_nodeagent.liveness.testimony import PodOwner as KnownPodOwner
from lmcache_nodeagent.liveness.testimony import PodRun as KnownPodRun
from lmcache_nodeagent.operator_link.conversation import Snapshot
from lmcache_nodeagent.operator_link.messages import (
    MAX_INSTANCES,
    MAX_MODEL_CHARACTERS,
    Ack,
    AgentState,
    Evidence,
    Hello,
    InstanceReport,
    JournalEntry,
    LinkError,
    Mapping,
    PodOwner,
    PodRun,
    ReapingSettings,
    SlotPod,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from lmcache_nodeagent.device_plugin.plugin import DevicePlugin
    from lmcache_nodeagent.liveness.journal import Journal, Numbered
    from lmcache_nodeagent.liveness.live_settings import LiveSettings
    from lmcache_nodeagent.liveness.operator_word import OperatorWord
    from lmcache_nodeagent.liveness.policy import Verdict
    from lmcache_nodeagent.liveness.reaper import Reaper
    from lmcache_nodeagent.liveness.release import Releaser
    from lmcache_nodeagent.liveness.slots import SlotBook, SlotRun
    from lmcache_nodeagent.liveness.targets import ReapableEntry
    from lmcache_nodeagent.operator_link.messages import FromOperator

_IP_IDENTITY = "ip:"
_LONGEST_PROBLEM = 1_000  # characters; of the agent's own words about somebody's file


class LinkView:
    """Implements `operator_link.conversation.AgentSide`."""

    def __init__(
        self,
        boot_id: str,
        settings: LiveSettings,
        reaper: Reaper,
        releaser: Releaser,
        journal: Journal,
        word: OperatorWord,
        slots: SlotBook | None = None,
        plugin: DevicePlugin | None = None,
    ) -> None:
        self._slots = slots
        self._plugin = plugin
        self._boot_id = boot_id
        self._settings = settings
        self._reaper = reaper
        self._releaser = releaser
        self._journal = journal
        self._word = word

    def hello(self) -> Hello:
        """Who this is."""
        return Hello(boot_id=self._boot_id, release=importlib.metadata.version("lmcache-kube"))

    def snapshot(self) -> Snapshot:
        """The registered instances and the agent as a whole.

        One that is being released is not registered any more.
        """
        verdicts = self._reaper.verdicts(describe=False)
        reports = _as_many_as_are_taken(
            _report(entry, verdict, self._slot_pod(entry.slot)) for entry, verdict, _ in verdicts
        )
        config = self._settings.config
        values = {option.field_name: getattr(config, option.field_name) for option in LIVE_OPTIONS}
        return Snapshot(
            instances={(report.instance_id, report.registration): report for report in reports},
            state=AgentState(
                settings=ReapingSettings(**values),
                settings_problem=_cut(self._settings.problem, _LONGEST_PROBLEM),
                releases_stuck=len(self._releaser.stuck()),
                mismatched_heartbeats=sum(entry.mismatch_reported for entry, _, _ in verdicts),
                device_plugin="" if self._plugin is None else self._plugin.status.state.value,
                device_plugin_problem="" if self._plugin is None else self._plugin.status.problem,
            ),
        )

    def journal(self, after: int) -> Sequence[JournalEntry]:
        """The entries beyond a number that the operator has not acknowledged."""
        return [
            _journal_entry(numbered, self._slot_pod(_slot(numbered)))
            for numbered in self._journal.unacknowledged(after)
        ]

    def _slot_pod(self, run: SlotRun) -> SlotPod | None:
        """Whose slot that was, as far as the kubelet has said."""
        owner = self._slots.owner(run) if self._slots else None
        if owner is None:
            return None
        return SlotPod(namespace=owner.namespace, name=owner.pod, container=owner.container)

    def hear(self, message: FromOperator) -> None:
        """Take what the operator says.

        Raises:
            LinkError: it acknowledges what was never said.
        """
        match message:
            case Evidence():
                self._word.take_evidence(_evidence(message))
            case Mapping():
                known = None if message.pod is None else _known_pod(message.pod)
                self._word.take_mapping(message.instance_id, message.registration, known)
            case Ack():
                ours = message.boot_id == self._boot_id
                if ours and not self._journal.acknowledge(message.seq):
                    raise LinkError(f"it acknowledges entry {message.seq}, which there is not")
            case _:
                assert_never(message)


def _as_many_as_are_taken(reports: Iterable[InstanceReport]) -> Sequence[InstanceReport]:
    """Leave out what the operator would not take: of the peers that have most, the latest.

    So a client that registers without end costs nobody else the operator's word.
    """
    ordered = sorted(reports, key=lambda report: report.registration)
    if len(ordered) <= MAX_INSTANCES:
        return ordered
    ranks, ranked = Counter[str](), list[tuple[int, InstanceReport]]()
    for report in ordered:
        ranked.append((ranks[report.peer], report))
        ranks[report.peer] += 1
    ranked.sort(key=lambda each: each[0])
    return [report for _, report in ranked[:MAX_INSTANCES]]


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else text[: longest - 1] + "…"


def _report(entry: ReapableEntry, verdict: Verdict, slot_pod: SlotPod | None) -> InstanceReport:
    registered = entry.registered
    return InstanceReport(
        instance_id=int(entry.instance_id),
        registration=registered.serial,
        registered_at=registered.at,
        model=_cut(entry.model, MAX_MODEL_CHARACTERS),
        peer=_address(entry.registrant.peer.identity),
        connected=not all_closed(entry.connections),
        state=verdict.state.value,
        bytes=entry.nbytes,
        mapping=None if registered.pod is None else _pod(registered.pod),
        slot=entry.slot.slot,
        slot_pod=slot_pod,
    )


def _address(identity: str) -> str:
    """Take the IP address out of a peer's identity; nothing over a Unix socket."""
    return identity.removeprefix(_IP_IDENTITY) if identity.startswith(_IP_IDENTITY) else ""


def _slot(numbered: Numbered) -> SlotRun:
    """The slot of the container that waited, else the instance's."""
    return numbered.entry.waiting_slot or numbered.entry.subject.slot


def _journal_entry(numbered: Numbered, slot_pod: SlotPod | None) -> JournalEntry:
    entry = numbered.entry
    registered = entry.subject.registered
    return JournalEntry(
        seq=numbered.seq,
        kind=entry.kind,
        instance_id=int(entry.subject.instance_id),
        registration=registered.serial,
        model=_cut(entry.subject.model, MAX_MODEL_CHARACTERS),
        reason=entry.reason,
        evidence=entry.evidence,
        silent_seconds=entry.silent_seconds,
        happened_at=entry.happened_at,
        released_bytes=entry.released_bytes,
        release_seconds=entry.release_seconds,
        latency_seconds=entry.latency_seconds,
        trigger=entry.trigger,
        mapping=None if registered.pod is None else _pod(registered.pod),
        missed=numbered.missed,
        slot=_slot(numbered).slot,
        slot_pod=slot_pod,
    )


def _evidence(said: Evidence) -> OperatorEvidence:
    return OperatorEvidence(
        id=said.id,
        boot_id=said.boot_id,
        instance_id=said.instance_id,
        registration=said.registration,
        pod_uid=said.pod_uid,
        container=said.container,
        trigger=said.trigger,
        proof=said.proof,
        finished_at=said.finished_at,
    )


def _known_pod(pod: PodRun) -> KnownPodRun:
    owner = pod.owner
    known = None
    if owner is not None:
        known = KnownPodOwner(owner.api_version, owner.kind, owner.name, owner.uid)
    return KnownPodRun(pod.namespace, pod.name, pod.uid, pod.container, pod.run, known)


def _pod(known: KnownPodRun) -> PodRun:
    owner = None
    if (its := known.owner) is not None:
        owner = PodOwner(api_version=its.api_version, kind=its.kind, name=its.name, uid=its.uid)
    return PodRun(
        namespace=known.namespace,
        name=known.name,
        uid=known.uid,
        container=known.container,
        run=known.run,
        owner=owner,
    )
