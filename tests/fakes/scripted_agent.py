"""An agent as the operator sees one: it says what is registered, and keeps what it is told."""

from __future__ import annotations

import itertools
import uuid

import msgspec

from lmcache_nodeagent.operator_link.messages import (
    Ack,
    Evidence,
    Hello,
    InstanceReport,
    Instances,
    JournalEntry,
    Mapping,
    SlotPod,
)
from lmcache_operator.agents.registry import (
    AgentIdentity,
    AgentRegistry,
    AgentSession,
    ServerRef,
)

Key = tuple[int, int]


class ScriptedAgent:
    """One agent; its streams go to whichever registry it connects to."""

    def __init__(self, server: ServerRef, node: str, pod: str = "agent") -> None:
        self.server = server
        self.node = node
        self.boot_id = ""
        self.reports: dict[Key, InstanceReport] = {}
        self.mappings: list[Mapping] = []
        self.evidence: list[Evidence] = []
        self.acknowledged = 0
        self.unacknowledged: list[JournalEntry] = []
        self._session: AgentSession | None = None
        self._registry: AgentRegistry | None = None
        self._numbers = itertools.count(1)
        self._pod_uid = f"{pod}-{server.uid}-{node}"
        self.restart()

    @property
    def session(self) -> AgentSession:
        """The stream."""
        assert self._session is not None, "not connected"
        return self._session

    def restart(self) -> None:
        """Start anew: nothing is registered, and nothing is known of before."""
        self.disconnect()
        self.boot_id = uuid.uuid4().hex
        self.reports = {}
        self.acknowledged = 0
        self.unacknowledged = []
        self._numbers = itertools.count(1)

    def connect(self, registry: AgentRegistry) -> None:
        """Open a stream, and say everything."""
        self.disconnect()
        identity = AgentIdentity(self.server, self.node, "agent", self._pod_uid, 2e9)
        session = AgentSession(identity, Hello(boot_id=self.boot_id, release="test"))
        registry.add(session)
        self._session, self._registry = session, registry
        self._say(*self.reports.values(), complete=True)
        for entry in self.unacknowledged:
            registry.receive(session, entry)

    def disconnect(self) -> None:
        """End the stream, if there is one."""
        if self._session is not None and self._registry is not None:
            self.read()
            self._registry.remove(self._session)
            self._session = None

    def register(
        self,
        instance_id: int,
        *,
        at: float,
        peer: str = "10.1.0.1",
        state: str = "active",
        claimed_pod_uid: str = "",
        slot: str = "",
        slot_pod: SlotPod | None = None,
    ) -> InstanceReport:
        """Take in a worker."""
        report = InstanceReport(
            instance_id=instance_id,
            registration=next(self._numbers),
            registered_at=at,
            model="demo/model",
            peer=peer,
            connected=True,
            state=state,
            bytes=2**29,
            claimed_pod_uid=claimed_pod_uid,
            slot=slot,
            slot_pod=slot_pod,
        )
        self.change(report)
        return report

    def change(self, report: InstanceReport) -> None:
        """Say something else of a registration."""
        self.reports[report.instance_id, report.registration] = report
        self._say(report)

    def drop(self, report: InstanceReport) -> None:
        """Forget a registration: it was reaped, or said goodbye."""
        key = (report.instance_id, report.registration)
        if self.reports.pop(key, None) is not None and self._session is not None:
            assert self._registry is not None
            self._registry.receive(self._session, Instances(gone=(key,)))

    def write(self, entry: JournalEntry) -> None:
        """Say what happened, and go on saying it until it is acknowledged."""
        self.unacknowledged.append(entry)
        if self._session is not None and self._registry is not None:
            self._registry.receive(self._session, entry)

    def read(self) -> None:
        """Take in what the operator has said."""
        if self._session is None:
            return
        for message in self._session.take_unsent():
            match message:
                case Mapping():
                    self.mappings.append(message)
                    key = (message.instance_id, message.registration)
                    if (report := self.reports.get(key)) is not None:
                        self.change(msgspec.structs.replace(report, mapping=message.pod))
                case Evidence():
                    self.evidence.append(message)
                case Ack():
                    assert message.boot_id == self.boot_id
                    self.acknowledged = max(self.acknowledged, message.seq)
                    self.unacknowledged = [
                        entry for entry in self.unacknowledged if entry.seq > message.seq
                    ]

    def of(self, report: InstanceReport) -> list[Evidence]:
        """Return the evidence about one registration so far."""
        key = (report.instance_id, report.registration)
        return [
            each
            for each in self.evidence
            if each.boot_id == self.boot_id and (each.instance_id, each.registration) == key
        ]

    def mapped_to(self, report: InstanceReport) -> str:
        """Return the uid of the pod that a registration is known to run in, empty if none is."""
        known = self.reports[report.instance_id, report.registration].mapping
        return known.uid if known is not None else ""

    def _say(self, *changed: InstanceReport, complete: bool = False) -> None:
        if self._session is not None and self._registry is not None:
            self._registry.receive(self._session, Instances(changed=changed, complete=complete))
