"""A listener of the agent registry that writes down what it is told."""

from __future__ import annotations

from collections.abc import Sequence

from lmcache_nodeagent.operator_link.messages import InstanceReport, JournalEntry
from lmcache_operator.agents.registry import AgentSession


class WritesDown:
    """Keeps the calls in order, and what changed.

    Attributes:
        told: (what, boot id of whose stream).
        changes: (changed, gone, whether the list was complete then).
    """

    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []
        self.changes: list[tuple[Sequence[InstanceReport], Sequence[tuple[int, int]], bool]] = []

    def connected(self, session: AgentSession) -> None:
        """See `AgentListener`."""
        self.told.append(("connected", session.boot_id))

    def instances_changed(
        self,
        session: AgentSession,
        changed: Sequence[InstanceReport],
        gone: Sequence[tuple[int, int]],
    ) -> None:
        """See `AgentListener`."""
        self.told.append(("instances", session.boot_id))
        self.changes.append((changed, gone, session.complete))

    def state_changed(self, session: AgentSession) -> None:
        """See `AgentListener`."""
        self.told.append(("state", session.boot_id))

    def journal(self, session: AgentSession, entry: JournalEntry) -> None:
        """See `AgentListener`."""
        self.told.append((f"journal {entry.seq}", session.boot_id))

    def disconnected(self, session: AgentSession) -> None:
        """See `AgentListener`."""
        self.told.append(("disconnected", session.boot_id))
