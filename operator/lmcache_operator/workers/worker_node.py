"""One node of one server: the agent there, and who is registered with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from lmcache_nodeagent.operator_link.messages import (
    FromOperator,
    InstanceReport,
    JournalEntry,
    PodRun,
)
from lmcache_operator.workers.assignments import RELEASING, Assignments, Key, Rules, ServerPods

_SUSPECT = {"suspect", "closed"}


class Stream(Protocol):
    """An agent's stream; see `AgentSession`."""

    @property
    def boot_id(self) -> str:
        """New at each start of the agent's process."""

    @property
    def instances(self) -> Mapping[Key, InstanceReport]:
        """What is registered."""

    @property
    def complete(self) -> bool:
        """Whether the agent has said all it has."""

    def send(self, message: FromOperator) -> None:
        """Queue a message; never waits."""


@dataclass(frozen=True, slots=True)
class Tally:
    """What is counted of the registrations of a node.

    Attributes:
        registered: without those that are being released, or whose end is proven.
        suspects: those whose death is hinted at.
        unmapped: those whose pod is not known, by reason.
    """

    registered: int = 0
    suspects: int = 0
    unmapped: Counter[str] = field(default_factory=Counter)

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            self.registered + other.registered,
            self.suspects + other.suspects,
            self.unmapped + other.unmapped,
        )


class WorkerNode:
    """What is known of it. Nothing here waits.

    Attributes:
        instance_ids: by the pod's uid, as the agent said last, also while it is away: its workers
            go on without it. None if this operator has never heard it.
        tally: of a connected agent.
    """

    def __init__(self, name: str, counts: Counter[str]) -> None:
        self.name = name
        self.instance_ids: Mapping[str, frozenset[int]] | None = None
        self.tally = Tally()
        self._counts = counts
        self._stream: Stream | None = None
        self._assignments: Assignments | None = None

    @property
    def stream(self) -> Stream | None:
        """The agent's stream, None while it is away."""
        return self._stream

    def connected(self, stream: Stream) -> None:
        """Take in a new stream, over which everything is said again."""
        self._stream = stream
        self._assignments = Assignments(self.name, stream.boot_id, self._counts)

    def disconnected(self, stream: Stream) -> None:
        """Take in that a stream ended."""
        if self._stream is stream:
            self._stream = self._assignments = None
            self.tally = Tally()

    def compare(self, pods: ServerPods, rules: Rules, *, observed_at: float) -> list[PodRun]:
        """Tell the agent what it does not know yet; return pods of which nobody knows the end."""
        stream, assignments = self._stream, self._assignments
        if stream is None or assignments is None or not stream.complete:
            return []
        told = assignments.update(stream.instances, pods, rules, observed_at=observed_at)
        for message in told.messages:
            stream.send(message)
        self.instance_ids = assignments.instance_ids(stream.instances)
        states = [report.state for report in stream.instances.values()]
        self.tally = Tally(
            registered=sum(state != RELEASING for state in states) - assignments.ended(),
            suspects=sum(state in _SUSPECT for state in states),
            unmapped=assignments.unmapped(),
        )
        return told.unknown

    def where(self, stream: Stream, entry: JournalEntry) -> PodRun | None:
        """Return the pod that an entry of a stream is about, as we know it, or else its agent."""
        if self._stream is not stream or self._assignments is None:
            return entry.mapping  # registrations are numbered anew by each agent
        known = self._assignments.where((entry.instance_id, entry.registration))
        return known or entry.mapping

    def uses(self, uid: str) -> bool:
        """Tell whether something that is registered runs in a pod."""
        return self._assignments is not None and uid in self._assignments.pod_uids()
