"""Which agents are connected, and who is told what they say."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from lmcache_nodeagent.operator_link.messages import (
    MAX_INSTANCES,
    Ack,
    AgentState,
    Hello,
    InstanceReport,
    Instances,
    JournalEntry,
    LinkError,
    PodOwner,
    PodRun,
    ReapingSettings,
)
from lmcache_operator.agents import registry as registry_module
from lmcache_operator.agents.registry import (
    AgentIdentity,
    AgentRegistry,
    AgentSession,
    ServerRef,
    StreamEnd,
)
from lmcache_operator.agents.sanity import MAX_REPORT_CHARACTERS
from lmcache_operator.events.objects import Involved, Origin, event_object
from tests.fakes.link_listener import WritesDown

KV = ServerRef("serving", "kv", "uid-kv")
OTHER = ServerRef("serving", "other", "uid-other")
STATE = AgentState(
    settings=ReapingSettings(
        worker_reap_timeout_seconds=120,
        worker_registration_grace_seconds=3600,
        worker_heartbeat_interval_seconds=10,
        hint_confirm_seconds=15,
        close_confirm_seconds=10,
        reap_mode="enforce",
        reap_idle_connected=False,
        hints="enforce",
        stuck_release="alert",
    )
)
JOURNAL = JournalEntry(
    seq=1,
    kind="reaped",
    instance_id=7,
    registration=1,
    model="m",
    reason="pod_hint",
    evidence=(),
    silent_seconds=1,
    happened_at=0,
)


def a_session(
    boot_id: str = "b1", *, pod_uid: str = "p1", server: ServerRef = KV, node: str = "n1"
) -> AgentSession:
    """Make a session."""
    identity = AgentIdentity(server, node, f"pod-{pod_uid}", pod_uid, expires_at=3600)
    return AgentSession(identity, Hello(boot_id=boot_id, release="1"))


def report(instance_id: int, registration: int = 1, *, model: str = "m") -> InstanceReport:
    """Make a report."""
    return InstanceReport(
        instance_id=instance_id,
        registration=registration,
        registered_at=0,
        model=model,
        peer="10.0.0.1",
        connected=True,
        state="live",
        bytes=1,
    )


@pytest.fixture
def listener() -> WritesDown:
    """Return what the registry tells."""
    return WritesDown()


@pytest.fixture
def registry(listener: WritesDown) -> AgentRegistry:
    """Return a registry without sessions."""
    found = AgentRegistry()
    found.subscribe(listener)
    return found


def test_a_session_says_who_the_api_server_says_it_is() -> None:
    """Only boot id and release are the agent's own words."""
    session = a_session("b1", pod_uid="p1", node="n7")
    assert (session.server, session.node) == (KV, "n7")
    assert (session.pod_name, session.pod_uid) == ("pod-p1", "p1")
    assert (session.boot_id, session.release) == ("b1", "1")
    assert (session.complete, session.state, dict(session.instances)) == (False, None, {})


def test_listeners_are_told_in_order(registry: AgentRegistry, listener: WritesDown) -> None:
    """A stream's life, as a listener sees it."""
    session = a_session()
    registry.add(session)
    registry.receive(session, Instances(changed=(report(7),)))
    registry.receive(session, Instances(complete=True))
    registry.receive(session, STATE)
    registry.receive(session, JOURNAL)
    registry.remove(session)
    registry.remove(session)
    assert [what for what, _ in listener.told] == [
        "connected",
        "instances",
        "instances",
        "state",
        "journal 1",
        "disconnected",
    ]
    assert [complete for _, _, complete in listener.changes] == [False, True]
    assert session.state == STATE
    assert registry.sessions() == ()


def test_instances_follow_changes(registry: AgentRegistry, listener: WritesDown) -> None:
    """A later report of a registration replaces the earlier; what is gone goes."""
    session = a_session()
    registry.add(session)
    registry.receive(session, Instances(changed=(report(7), report(8)), complete=True))
    registry.receive(session, Instances(changed=(report(7, model="n"), report(7, 2))))
    registry.receive(session, Instances(gone=((7, 1), (9, 9))))
    assert {key: each.model for key, each in session.instances.items()} == {
        (8, 1): "m",
        (7, 2): "m",
    }
    assert session.complete
    assert listener.changes[-1] == ((), ((7, 1), (9, 9)), True)


def test_sessions_of_one_server(registry: AgentRegistry) -> None:
    """Two agents of one server and one of another."""
    ours = [a_session(pod_uid="p1"), a_session(pod_uid="p2")]
    theirs = a_session(pod_uid="p3", server=OTHER)
    for session in [*ours, theirs]:
        registry.add(session)
    assert list(registry.sessions(KV)) == ours
    assert list(registry.sessions(OTHER)) == [theirs]
    assert len(registry.sessions()) == 3


def test_a_newer_stream_of_a_pod_replaces_the_older(
    registry: AgentRegistry, listener: WritesDown
) -> None:
    """The older ends, is gone before the newer comes, and its late words count no more."""
    older, newer = a_session("old"), a_session("new")
    registry.add(older)
    registry.add(newer)
    assert older.end_cause == StreamEnd.REPLACED
    assert newer.end_cause is None
    registry.receive(older, Instances(changed=(report(7),)))
    registry.remove(older)
    assert registry.sessions() == (newer,)
    assert listener.told == [("connected", "old"), ("disconnected", "old"), ("connected", "new")]


def test_the_first_cause_of_an_end_counts() -> None:
    """What ended it is what is reported."""
    session = a_session()
    session.end(StreamEnd.GARBAGE, "no JSON")
    session.end(StreamEnd.STOPPED)
    assert (session.end_cause, session.end_detail) == (StreamEnd.GARBAGE, "no JSON")


def test_messages_wait_in_order_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing waits for a slow agent: it loses its stream, and with it what was queued later."""
    monkeypatch.setattr(registry_module, "MAX_UNSENT", 2)
    session = a_session()
    acks = [Ack(boot_id="b1", seq=seq) for seq in range(4)]
    for ack in acks[:2]:
        session.send(ack)
    assert not session.end_detail
    for ack in acks[2:]:
        session.send(ack)
    assert session.end_cause == StreamEnd.TOO_SLOW
    assert session.take_unsent() == acks[:2]
    session.send(acks[3])
    assert session.take_unsent() == []


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (Hello(boot_id="b2", release="1"), "second hello"),
        (Instances(changed=(report(-1),)), "instance id -1 is not from 0"),
        (Instances(changed=(report(2**63),)), f"instance id {2**63}"),
        (Instances(changed=(report(1, model="m" * 5000),)), f"at most {MAX_REPORT_CHARACTERS}"),
        (
            Instances(
                changed=(
                    InstanceReport(
                        instance_id=1,
                        registration=1,
                        registered_at=0,
                        model="m",
                        peer="",
                        connected=True,
                        state="live",
                        bytes=1,
                        mapping=PodRun(namespace="n", name="w" * 5000, uid="u"),
                    ),
                )
            ),
            f"at most {MAX_REPORT_CHARACTERS}",
        ),
    ],
    ids=["hello", "negative", "too high", "long model", "long mapping"],
)
def test_what_no_agent_says(
    registry: AgentRegistry, listener: WritesDown, message: Hello | Instances, words: str
) -> None:
    """It is refused with the value and the limit, and nobody is told of it."""
    session = a_session()
    registry.add(session)
    with pytest.raises(LinkError, match=words):
        registry.receive(session, message)
    assert listener.told == [("connected", "b1")]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"happened_at": 1e300}, "happened_at 1e\\+300 is not from 0"),
        ({"happened_at": 253_402_300_800.0}, "happened_at"),
        ({"happened_at": -1.0}, "happened_at -1 "),
        ({"released_bytes": 10**400}, "released_bytes is beyond"),
        ({"seq": 2**63}, "seq is beyond"),
        ({"missed": 10**30}, "missed is beyond"),
        ({"silent_seconds": 1e300}, "silent_seconds is beyond"),
        ({"latency_seconds": 1e300}, "latency_seconds is beyond"),
        ({"instance_id": -1}, "instance id -1"),
        ({"reason": "r" * 65}, "reason has 65 characters, at most 64"),
        ({"trigger": "t" * 65}, "trigger has 65 characters"),
        ({"evidence": ("e" * 10_000, "e" * 10_000)}, "a journal entry has 20001 characters"),
        ({"mapping": PodRun(namespace="n", name="../secrets/x", uid="u")}, "'../secrets/x' is no"),
        ({"mapping": PodRun(namespace="n?watch=1", name="w", uid="u")}, "is no name"),
    ],
)
def test_what_no_journal_has(
    registry: AgentRegistry, listener: WritesDown, changes: dict[str, object], words: str
) -> None:
    """Dates beyond the calendar and the like would stop the operator, for all its agents."""
    session = a_session()
    registry.add(session)
    with pytest.raises(LinkError, match=words):
        registry.receive(session, replace(JOURNAL, **changes))
    assert listener.told == [("connected", "b1")]


@pytest.mark.parametrize("happened_at", [0.0, 2.0**33])
def test_an_event_can_be_made_of_whatever_is_let_in(
    registry: AgentRegistry, happened_at: float
) -> None:
    """Also at the limits."""
    counts = ("seq", "registration", "released_bytes", "missed")
    seconds = ("silent_seconds", "release_seconds", "latency_seconds")
    owner = PodOwner(api_version="apps/v1", kind="StatefulSet", name="w", uid="u")
    where = PodRun(namespace="n", name="w-0.a", uid="u", owner=owner)
    entry = replace(JOURNAL, happened_at=happened_at, mapping=where)
    entry = replace(entry, **dict.fromkeys(counts, 2**53), **dict.fromkeys(seconds, 2.0**53))
    session = a_session()
    registry.add(session)
    registry.receive(session, entry)
    server = Involved("v1", "LMCacheServer", KV.namespace, KV.name, KV.uid)
    assert event_object(Origin(server, "n1", "b1"), entry, server, "server")


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (replace(STATE, releases_stuck=10**30), "releases_stuck is beyond"),
        (replace(STATE, mismatched_heartbeats=-(10**30)), "mismatched_heartbeats is beyond"),
        (replace(STATE, settings_problem="p" * 20_000), "a state has 20000 characters"),
        (
            replace(STATE, settings=replace(STATE.settings, reap_mode="m" * 100)),
            "reap_mode has 100 characters",
        ),
        (
            replace(STATE, settings=replace(STATE.settings, hint_confirm_seconds=1e300)),
            "hint_confirm_seconds is 1e\\+300, not from 0",
        ),
        (
            replace(STATE, settings=replace(STATE.settings, close_confirm_seconds=-1.0)),
            "close_confirm_seconds is -1, not from 0",
        ),
    ],
)
def test_what_no_agent_says_of_itself(
    registry: AgentRegistry, listener: WritesDown, state: AgentState, words: str
) -> None:
    """The API server would not store a status with it."""
    session = a_session()
    registry.add(session)
    with pytest.raises(LinkError, match=words):
        registry.receive(session, state)
    assert listener.told == [("connected", "b1")]
    assert session.state is None


def test_as_many_instances_are_taken_as_agents_say(registry: AgentRegistry) -> None:
    """Both sides have one limit."""
    session = a_session()
    registry.add(session)
    registry.receive(session, Instances(changed=tuple(map(report, range(MAX_INSTANCES)))))
    with pytest.raises(LinkError, match=f"{MAX_INSTANCES + 1} instances at once"):
        registry.receive(session, Instances(changed=(report(MAX_INSTANCES),)))


def test_too_many_instances(registry: AgentRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one agent may have the operator remember is bounded."""
    monkeypatch.setattr(registry_module, "MAX_INSTANCES", 3)
    session = a_session()
    registry.add(session)
    registry.receive(session, Instances(changed=tuple(map(report, range(3)))))
    with pytest.raises(LinkError, match="4 instances at once, at most 3"):
        registry.receive(session, Instances(changed=(report(3),)))


def test_a_listener_that_fails_ends_the_stream(registry: AgentRegistry) -> None:
    """The other listeners are told all the same, and nobody else's stream ends."""

    class Fails(WritesDown):
        def state_changed(self, session: AgentSession) -> None:
            """Fail."""
            raise KeyError(session.boot_id)

    registry.subscribe(Fails())
    last = WritesDown()
    registry.subscribe(last)
    session, other = a_session("b1"), a_session("b2", pod_uid="p2")
    registry.add(session)
    registry.add(other)
    with capture_logs() as logs:
        registry.receive(session, STATE)
    assert [each["event"] for each in logs] == ["agent_listener_failed"]
    assert last.told[-1] == ("state", "b1")
    assert session.end_cause == StreamEnd.FAILED
    assert other.end_cause is None
