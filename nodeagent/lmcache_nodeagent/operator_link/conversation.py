"""What is said over one stream to the operator, as frames. No sockets, no clock.

After a connect everything is said, from then on whatever changed. Saying things twice is harmless,
so nothing is kept from one stream to the next.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from lmcache_nodeagent.operator_link.messages import (
    INSTANCES_PER_MESSAGE,
    MAX_FRAME_BYTES,
    AgentState,
    FromOperator,
    Hello,
    InstanceReport,
    Instances,
    JournalEntry,
    decode_from_operator,
    encode,
)

InstanceKey = tuple[int, int]
"""Instance id and registration."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The registered instances and the agent as a whole, at one moment."""

    instances: Mapping[InstanceKey, InstanceReport]
    state: AgentState


class AgentSide(Protocol):
    """What the link needs of the agent. Thread: operator-link; every method returns at once."""

    def hello(self) -> Hello:
        """Who this is."""
        ...

    def snapshot(self) -> Snapshot:
        """What is so now."""
        ...

    def journal(self, after: int) -> Sequence[JournalEntry]:
        """The entries beyond a number that the operator has not acknowledged."""
        ...

    def hear(self, message: FromOperator) -> None:
        """Take what the operator says.

        Raises:
            LinkError: it makes no sense.
        """
        ...


class Conversation:
    """One stream's talk. Thread: operator-link."""

    def __init__(self, agent: AgentSide) -> None:
        self._agent = agent
        self._said: dict[InstanceKey, InstanceReport] = {}
        self._said_state: AgentState | None = None
        self._said_seq = 0

    def greeting(self) -> Iterator[str]:
        """Say who this is, and everything there is to say."""
        yield encode(self._agent.hello())
        now = self._agent.snapshot()
        self._said = dict(now.instances)
        yield from _instance_frames(list(self._said.values()), [], complete=True)
        yield from self._rest(now.state)

    def news(self) -> Iterator[str]:
        """Say what has changed since the last call; nothing if nothing has."""
        now = self._agent.snapshot()
        found = now.instances
        changed = [report for key, report in found.items() if self._said.get(key) != report]
        gone = [key for key in self._said if key not in found]
        self._said = dict(found)
        if changed or gone:
            yield from _instance_frames(changed, gone, complete=False)
        yield from self._rest(now.state)

    def _rest(self, state: AgentState) -> Iterator[str]:
        if state != self._said_state:
            self._said_state = state
            yield encode(state)
        for entry in self._agent.journal(self._said_seq):
            self._said_seq = entry.seq
            yield encode(entry)

    def hear(self, frame: str | bytes) -> None:
        """Take one frame of the operator.

        Raises:
            LinkError: it is none of its messages, or makes no sense.
        """
        self._agent.hear(decode_from_operator(frame))


def _instance_frames(
    changed: Sequence[InstanceReport], gone: Sequence[InstanceKey], *, complete: bool
) -> Iterator[str]:
    """Write reports in as many frames as they need; the last one says that it is the last."""
    size = INSTANCES_PER_MESSAGE
    for start in range(0, len(gone), size):
        yield encode(Instances(gone=tuple(gone[start : start + size])))
    for start in range(0, len(changed), size):
        yield from _fitting(changed[start : start + size])
    if complete:
        yield encode(Instances(complete=True))


def _fitting(reports: Sequence[InstanceReport]) -> Iterator[str]:
    """Write reports, halved until each frame is within the limit: names may be long."""
    frame = encode(Instances(changed=tuple(reports)))
    if len(frame.encode()) <= MAX_FRAME_BYTES:
        yield frame
        return
    half = len(reports) // 2
    yield from _fitting(reports[:half])
    yield from _fitting(reports[half:])
