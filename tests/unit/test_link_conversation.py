"""What an agent says to the operator over one stream: all of it first, then what changes."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from msgspec.structs import replace

from lmcache_nodeagent.operator_link.conversation import Conversation, InstanceKey, Snapshot
from lmcache_nodeagent.operator_link.messages import (
    INSTANCES_PER_MESSAGE,
    MAX_FRAME_BYTES,
    Ack,
    AgentState,
    FromAgent,
    FromOperator,
    Hello,
    InstanceReport,
    Instances,
    JournalEntry,
    LinkError,
    ReapingSettings,
    decode_from_agent,
    encode,
)

SETTINGS = ReapingSettings(
    worker_reap_timeout_seconds=120.0,
    worker_registration_grace_seconds=3600.0,
    worker_heartbeat_interval_seconds=10.0,
    hint_confirm_seconds=15.0,
    close_confirm_seconds=10.0,
    reap_mode="enforce",
    reap_idle_connected=False,
    hints="enforce",
    stuck_release="alert",
)


def report(number: int, registration: int = 1, model: str = "demo/model") -> InstanceReport:
    """One instance."""
    return InstanceReport(
        instance_id=number,
        registration=registration,
        registered_at=5.0,
        model=model,
        peer="10.0.0.1",
        connected=True,
        state="active",
        bytes=4096,
    )


class FakeAgent:
    """An agent whose state a test changes."""

    def __init__(self, reports: Iterable[InstanceReport] = ()) -> None:
        self.reports: dict[InstanceKey, InstanceReport] = {}
        self.put(*reports)
        self.state = AgentState(settings=SETTINGS)
        self.entries: list[JournalEntry] = []
        self.acknowledged = 0
        self.told: list[FromOperator] = []

    def put(self, *reports: InstanceReport) -> None:
        """Have these, beside what there is."""
        self.reports |= {(each.instance_id, each.registration): each for each in reports}

    def happen(self) -> None:
        """Add a journal entry."""
        self.entries.append(
            JournalEntry(
                seq=len(self.entries) + 1,
                kind="reaped",
                instance_id=1,
                registration=1,
                model="demo/model",
                reason="connection_closed",
                evidence=(),
                silent_seconds=10.0,
                happened_at=5.0,
            )
        )

    def hello(self) -> Hello:
        """Always the same."""
        return Hello(boot_id="boot", release="1")

    def snapshot(self) -> Snapshot:
        """What is there now."""
        return Snapshot(dict(self.reports), self.state)

    def journal(self, after: int) -> list[JournalEntry]:
        """Beyond what is acknowledged, and what was said over the stream."""
        return [entry for entry in self.entries if entry.seq > max(after, self.acknowledged)]

    def hear(self, message: FromOperator) -> None:
        """Keep it."""
        self.told.append(message)


def decoded(frames: Iterable[str]) -> list[FromAgent]:
    """Read frames, each within the limit."""
    found = []
    for frame in frames:
        assert len(frame.encode()) <= MAX_FRAME_BYTES
        found.append(decode_from_agent(frame))
    return found


def put_together(messages: Iterable[FromAgent]) -> dict[InstanceKey, InstanceReport]:
    """What an operator knows after these messages."""
    known: dict[InstanceKey, InstanceReport] = {}
    for message in messages:
        if isinstance(message, Instances):
            for key in message.gone:
                known.pop(key, None)
            known |= {(each.instance_id, each.registration): each for each in message.changed}
    return known


def test_an_agent_without_workers_says_so() -> None:
    """An empty list is complete too."""
    talk = Conversation(FakeAgent())
    assert decoded(talk.greeting()) == [
        Hello(boot_id="boot", release="1"),
        Instances(complete=True),
        AgentState(settings=SETTINGS),
    ]


def test_the_greeting_says_everything_in_order() -> None:
    """Who, whom it has, how it is, and what has happened that nobody has acknowledged."""
    agent = FakeAgent([report(1), report(2)])
    agent.happen()
    agent.happen()
    agent.acknowledged = 1
    kinds = [type(message) for message in decoded(Conversation(agent).greeting())]
    assert kinds == [Hello, Instances, Instances, AgentState, JournalEntry]


def test_long_lists_come_in_pieces_and_the_last_one_says_so() -> None:
    """No piece has more than the limit."""
    agent = FakeAgent(report(number) for number in range(1, 2 * INSTANCES_PER_MESSAGE + 2))
    messages = decoded(Conversation(agent).greeting())
    pieces = [message for message in messages if isinstance(message, Instances)]
    assert all(len(piece.changed) <= INSTANCES_PER_MESSAGE for piece in pieces)
    assert [piece.complete for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert put_together(messages) == agent.reports


def test_long_names_make_smaller_pieces() -> None:
    """A frame beyond the limit would end the stream, again and again."""
    agent = FakeAgent(report(number, model="\n" * 4096) for number in range(1, 501))
    messages = decoded(Conversation(agent).greeting())
    assert put_together(messages) == agent.reports
    assert len(messages) > 4


def test_while_nothing_changes_nothing_is_said() -> None:
    """However often it looks."""
    agent = FakeAgent([report(1)])
    agent.happen()
    talk = Conversation(agent)
    assert decoded(talk.greeting())
    assert [list(talk.news()) for _ in range(3)] == [[], [], []]


def test_what_changes_is_said_and_nothing_else() -> None:
    """Who came, who went, who is different."""
    agent = FakeAgent([report(1), report(2), report(3)])
    talk = Conversation(agent)
    known = decoded(talk.greeting())
    del agent.reports[1, 1]
    agent.put(replace(report(2), state="suspect"), report(4), report(1, registration=5))
    news = decoded(talk.news())
    changed = [each for message in news if isinstance(message, Instances) for each in message.gone]
    assert changed == [(1, 1)]
    assert sum(len(m.changed) for m in news if isinstance(m, Instances)) == 3
    assert not any(m.complete for m in news if isinstance(m, Instances))
    assert put_together([*known, *news]) == agent.reports


def test_many_who_went_come_in_pieces() -> None:
    """A node that was emptied."""
    agent = FakeAgent(report(number) for number in range(1, INSTANCES_PER_MESSAGE + 11))
    talk = Conversation(agent)
    known = decoded(talk.greeting())
    agent.reports.clear()
    news = decoded(talk.news())
    assert len(news) == 2
    assert put_together([*known, *news]) == {}


def test_state_and_journal_follow() -> None:
    """Each entry once over a stream, acknowledged or not."""
    agent = FakeAgent()
    talk = Conversation(agent)
    list(talk.greeting())
    agent.state = AgentState(settings=SETTINGS, settings_problem="bad", releases_stuck=1)
    agent.happen()
    assert [type(message) for message in decoded(talk.news())] == [AgentState, JournalEntry]
    agent.happen()
    (entry,) = decoded(talk.news())
    assert isinstance(entry, JournalEntry)
    assert entry.seq == 2


def test_a_new_stream_repeats_what_was_not_acknowledged() -> None:
    """The one before may have been cut in the middle."""
    agent = FakeAgent([report(1)])
    agent.happen()
    agent.happen()
    assert len(decoded(Conversation(agent).greeting())) == 6
    agent.acknowledged = 1
    assert len(decoded(Conversation(agent).greeting())) == 5


def test_frames_of_the_operator_reach_the_agent() -> None:
    """What is none of its messages is a link error."""
    agent = FakeAgent()
    talk = Conversation(agent)
    talk.hear(encode(Ack(boot_id="boot", seq=1)))
    assert agent.told == [Ack(boot_id="boot", seq=1)]
    for frame in ("", "{}", "[]", '{"type": "ack"}', b"\x00\xff", encode(agent.hello())):
        with pytest.raises(LinkError):
            talk.hear(frame)
    assert len(agent.told) == 1
