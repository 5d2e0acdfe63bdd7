"""The stream to the operator: what is said when, what ends it, and that nothing waits for it."""

from __future__ import annotations

import socket
import time
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from http import HTTPStatus
from pathlib import Path

import pytest

from lmcache_nodeagent.operator_link.messages import MAX_FRAME_BYTES, Ack
from tests.fakes.agent_process import FAST_WINDOWS, AgentProcess
from tests.fakes.link_operator import POD, LinkOperator, Stream
from tests.fakes.worker_process import Worker, WorkerProcess
from tests.polling import BUSY_SECONDS, PATIENCE_SECONDS, poll_until


@pytest.fixture
def operator(tmp_path: Path) -> Generator[LinkOperator]:
    """An operator that its agents are told of."""
    with LinkOperator(tmp_path) as operator:
        operator.announce()
        yield operator


@pytest.fixture
def agent(operator: LinkOperator) -> Generator[AgentProcess]:
    """An agent with small windows."""
    with AgentProcess(*operator.flags, *FAST_WINDOWS) as agent:
        yield agent


@pytest.fixture
def stack() -> Generator[ExitStack]:
    """The workers of a test."""
    with ExitStack() as stack:
        yield stack


def link(agent: AgentProcess) -> dict[str, object]:
    """What the agent shows of its link."""
    found: dict[str, object] = agent.status()["operator_link"]
    return found


def assert_serves(agent: AgentProcess) -> None:
    """Whatever the link does, a worker is served."""
    with Worker(agent.url, 99) as worker:
        worker.register()
        assert worker.ping()
        assert worker.store(1)
        worker.unregister()


def test_an_agent_says_who_it_is_and_all_it_has(
    agent: AgentProcess, operator: LinkOperator, stack: ExitStack
) -> None:
    """Settings included; new workers are said at once, and those that leave."""
    stream = operator.stream()
    assert stream.hello.boot_id == agent.boot_id
    assert stream.state.settings.worker_reap_timeout_seconds == 30
    assert stream.state.settings.hint_confirm_seconds == 5
    worker = stack.enter_context(WorkerProcess(agent.url, 7))
    worker.ask("register")
    report = stream.instance(7)
    assert (report.peer, report.connected, report.model) == ("127.0.0.1", True, "demo/model")
    assert abs(report.registered_at - time.time()) < BUSY_SECONDS
    assert report.bytes > 0
    worker.ask("unregister")
    poll_until(lambda: not stream.instances())
    assert link(agent)["connected"] is True
    assert agent.metric("operator_link_connected") == 1


def test_while_nothing_changes_nothing_is_said(
    agent: AgentProcess, operator: LinkOperator, stack: ExitStack
) -> None:
    """Pings are no news: a thousand workers ping all the time."""
    stream = operator.stream()
    workers = [stack.enter_context(WorkerProcess(agent.url, number)) for number in (7, 8)]
    for worker in workers:
        worker.ask("register")
        assert worker.ask("ping") is True
    poll_until(lambda: {stream.instance(number).state for number in (7, 8)} == {"active"})
    before = stream.count()
    for worker in workers:
        worker.tell("heartbeat", 0.05, 4.0)
    for worker in workers:
        assert worker.result() > 20
    assert stream.count() == before


def test_a_new_stream_says_everything_again(
    agent: AgentProcess, operator: LinkOperator, stack: ExitStack
) -> None:
    """Mappings too, which an operator that is new has never said; and reaps, until acknowledged."""
    first = operator.stream()
    dying, living = (stack.enter_context(WorkerProcess(agent.url, number)) for number in (7, 8))
    for worker in (dying, living):
        worker.ask("register")
        first.map(worker.instance_id)
    dying.kill()
    reaped = first.entry("reaped", 7)
    assert reaped.seq == 1
    first.close()
    second = operator.stream(2)
    assert second.hello == first.hello
    assert second.instances() == first.instances()
    assert [report.mapping for report in second.instances().values()] == [POD]
    assert poll_until(second.journal) == [reaped]
    second.acknowledge(1)
    poll_until(lambda: link(agent)["journal_entries_unacknowledged"] == 0)
    second.close()
    third = operator.stream(3)
    assert third.journal() == []
    living.kill()
    assert third.entry("reaped", 8).seq == 2


def test_an_operator_that_comes_back_is_found_within_seconds(
    agent: AgentProcess, operator: LinkOperator
) -> None:
    """However long it was away; meanwhile the agent says once that it is."""
    operator.stream()
    operator.stop()
    poll_until(lambda: agent.metric("operator_link_failures_total", reason="unreachable") >= 6)
    assert_serves(agent)
    assert link(agent)["connected"] is False
    operator.start()
    back_at = time.monotonic()
    operator.stream(2)
    assert time.monotonic() - back_at < BUSY_SECONDS
    (down,) = agent.log_records("operator_link_down")
    assert down["reason"] == "unreachable"


def test_an_agent_that_starts_again_is_another_one(
    operator: LinkOperator, stack: ExitStack
) -> None:
    """Its registrations begin anew, and what was meant for the one before is refused."""
    first_agent = stack.enter_context(AgentProcess(*operator.flags))
    first = operator.stream()
    worker = stack.enter_context(WorkerProcess(first_agent.url, 7))
    worker.ask("register")
    first.map(7)
    old = first.evidence(7, "container_terminated")
    port = first_agent.port
    first_agent.kill()
    with AgentProcess(*operator.flags, port=port) as agent:
        second = operator.stream(2)
        assert second.hello.boot_id == agent.boot_id != first.hello.boot_id
        assert second.instances() == {}
        assert worker.ask("ping") is False
        worker.ask("register")
        assert second.instance(7).mapping is None
        second.say(old)
        labels = {"trigger": "container_terminated", "kind": "proof", "outcome": "other_boot"}
        poll_until(lambda: agent.metric("operator_evidence_total", **labels) == 1)
        second.say(Ack(boot_id=first.hello.boot_id, seq=1000))
        assert worker.ask("ping") is True
        assert len(operator.open_streams()) == 1


# What an operator may do wrong


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        ("rubbish", "bad_message"),
        (b"\x00\x01\x02", "bad_message"),
        ('{"type": "hello", "boot_id": "b", "release": "1"}', "bad_message"),
        ('{"type": "ack", "boot_id": "BOOT", "seq": 1000}', "bad_message"),
        ("[" * 100_000, "bad_message"),
        ("x" * (MAX_FRAME_BYTES + 1), "closed"),
    ],
    ids=["text", "bytes", "of-an-agent", "acks-too-much", "deep", "huge"],
)
def test_rubbish_ends_the_stream_and_nothing_else(
    agent: AgentProcess, operator: LinkOperator, frame: str | bytes, reason: str
) -> None:
    """It is counted, and tried again."""
    stream = operator.stream()
    if isinstance(frame, str):
        frame = frame.replace("BOOT", agent.boot_id)
    stream.say_raw(frame)
    assert stream.closed.wait(PATIENCE_SECONDS)
    operator.stream(2)
    assert agent.metric("operator_link_lost_total", reason=reason) == 1
    assert_serves(agent)


def test_rubbish_again_and_again_is_answered_ever_more_slowly(
    agent: AgentProcess, operator: LinkOperator
) -> None:
    """And logged once."""
    for number in range(1, 5):
        operator.stream(number).say_raw("rubbish")
    operator.stream(5)
    records = agent.log_records("operator_link_lost")
    assert [record["reason"] for record in records] == ["bad_message"]
    assert agent.metric("operator_link_lost_total", reason="bad_message") == 4


def test_an_unknown_field_is_no_rubbish(agent: AgentProcess, operator: LinkOperator) -> None:
    """A later operator says more."""
    stream = operator.stream()
    stream.say_raw(f'{{"type":"ack","boot_id":"{agent.boot_id}","seq":0,"later":[1]}}')
    stream.acknowledge(0)
    assert_serves(agent)
    assert not stream.closed.is_set()


@pytest.mark.parametrize("subprotocol", [None, "v9.link.lmcache-kube.dev"])
def test_an_operator_of_another_version_is_left_alone(
    tmp_path: Path, subprotocol: str | None
) -> None:
    """It would not understand a word."""
    operator = LinkOperator(tmp_path)
    operator.subprotocol = subprotocol
    with operator, AgentProcess(*operator.flags) as agent:
        operator.announce()
        poll_until(lambda: agent.metric("operator_link_failures_total", reason="protocol"))
        (down,) = agent.log_records("operator_link_down")
        assert down["reason"] == "protocol"
        assert all(stream.count() == 0 for stream in operator.streams)
        assert_serves(agent)


@pytest.fixture
def deaf() -> Iterator[socket.socket]:
    """Somebody who accepts connections, and says and reads nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


@pytest.mark.parametrize("scheme", ["ws", "wss"])
def test_an_operator_that_never_answers_holds_up_nothing(
    tmp_path: Path, deaf: socket.socket, scheme: str
) -> None:
    """Not even a stop in the middle of it."""
    operator = LinkOperator(tmp_path)
    operator.announce(f"{scheme}://127.0.0.1:{deaf.getsockname()[1]}")
    with AgentProcess(*operator.flags) as agent:
        accepted, _ = deaf.accept()
        assert_serves(agent)
        poll_until(lambda: agent.metric("operator_link_failures_total"))
        again, _ = deaf.accept()
        asked_at = time.monotonic()
        assert agent.stop() == 0
        assert time.monotonic() - asked_at < 10 + BUSY_SECONDS
        accepted.close()
        again.close()


def test_a_stop_with_an_open_stream_is_quick(agent: AgentProcess, operator: LinkOperator) -> None:
    """And orderly at the other end."""
    stream = operator.stream()
    asked_at = time.monotonic()
    assert agent.stop() == 0
    assert time.monotonic() - asked_at < 10 + BUSY_SECONDS
    assert stream.closed.wait(PATIENCE_SECONDS)


# Who may talk to whom


def test_an_agent_waits_for_an_operator_to_be_named(tmp_path: Path) -> None:
    """The folder is empty, then wrong, then right; each is looked at again."""
    with LinkOperator(tmp_path) as operator, AgentProcess(*operator.flags) as agent:
        poll_until(lambda: link(agent)["problem"] == "no operator is named")
        operator.announce("ws://10.0.0.1:8443")
        poll_until(lambda: "not encrypted" in str(link(agent)["problem"]))
        (down,) = agent.log_records("operator_link_down")
        assert down["reason"] == "address"
        operator.announce()
        operator.stream()
        assert link(agent)["problem"] == ""
        operator.folder.put({})
        poll_until(lambda: not operator.open_streams())
        assert_serves(agent)


def test_an_agent_without_a_token_waits_for_one(tmp_path: Path) -> None:
    """The kubelet may be late."""
    with LinkOperator(tmp_path) as operator:
        operator.announce()
        token = operator.token_file.read_text()
        operator.token_file.unlink()
        with AgentProcess(*operator.flags) as agent:
            poll_until(lambda: agent.metric("operator_link_failures_total", reason="token"))
            assert operator.refused == 0
            operator.token_file.write_text(token)
            operator.stream()


def test_a_token_is_read_anew_for_each_stream(agent: AgentProcess, operator: LinkOperator) -> None:
    """The operator ends the stream of one that has expired."""
    first = operator.stream()
    operator.tokens = {"another"}
    operator.token_file.write_text("another")
    first.close()
    operator.stream(2)
    assert operator.refused == 0
    assert_serves(agent)


def test_an_agent_that_is_refused_goes_on_alone_and_asks_again(
    operator: LinkOperator,
) -> None:
    """Less and less often; the operator's reason is in its log."""
    tokens, operator.tokens = operator.tokens, set()
    with AgentProcess(*operator.flags, *FAST_WINDOWS) as agent, Worker(agent.url, 7) as worker:
        poll_until(lambda: operator.refused >= 3)
        worker.register()
        worker.close()
        assert agent.wait_reaped(7)["reason"] == "connection_closed"
        (down,) = agent.log_records("operator_link_down")
        assert down["reason"] == "unauthorized"
        assert "no such agent" in down["detail"]
        operator.tokens = tokens
        stream = operator.stream()
        assert stream.entry("reaped", 7).reason == "connection_closed"


def test_an_operator_in_trouble_is_asked_again_soon(operator: LinkOperator) -> None:
    """503 is not a no."""
    tokens, operator.tokens = operator.tokens, set()
    operator.status_when_refused = HTTPStatus.SERVICE_UNAVAILABLE
    with AgentProcess(*operator.flags) as agent:
        poll_until(lambda: operator.refused >= 8)
        operator.tokens = tokens
        back_at = time.monotonic()
        operator.stream()
        assert time.monotonic() - back_at < BUSY_SECONDS
        assert agent.metric("operator_link_failures_total", reason="unavailable") >= 8


def test_a_new_authority_takes_over_without_a_gap(
    agent: AgentProcess, operator: LinkOperator
) -> None:
    """Both are trusted for a while; then the operator has a certificate of the new one."""
    first = operator.stream()
    old, new = operator.authority, operator.renew_authority()
    operator.announce(authorities=(old, new))
    second = operator.stream(2)
    assert first.closed.is_set()
    operator.stop()
    operator.start()
    operator.stream(3)
    assert second.closed.is_set()
    assert agent.metric("operator_link_failures_total", reason="certificate") == 0


def test_an_operator_with_a_strange_certificate_is_told_nothing(
    agent: AgentProcess, operator: LinkOperator
) -> None:
    """Not even the token; once its authority is announced it is the operator."""
    operator.stream()
    operator.stop()
    operator.renew_authority()
    operator.start()
    poll_until(lambda: agent.metric("operator_link_failures_total", reason="certificate"))
    assert len(operator.streams) == 1
    assert operator.refused == 0
    operator.announce()
    back_at = time.monotonic()
    operator.stream(2)
    # One that says no is left in peace for up to 15 s.
    assert time.monotonic() - back_at < 15 + BUSY_SECONDS


def test_an_agent_follows_its_operator_to_another_address(
    agent: AgentProcess, operator: LinkOperator, tmp_path: Path
) -> None:
    """The old stream ends."""
    first = operator.stream()
    with LinkOperator(tmp_path / "other") as other:
        operator.announce(other.url, [other.authority])
        stream: Stream = other.stream()
        assert stream.hello.boot_id == agent.boot_id
        assert first.closed.wait(PATIENCE_SECONDS)
        assert link(agent)["url"] == other.url
