"""The operator's word about real workers: proof acts at once, hints give them time to answer."""

from __future__ import annotations

import signal
import time
from collections.abc import Generator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.fakes.agent_process import FAST_WINDOWS, AgentProcess
from tests.fakes.link_operator import POD, LinkOperator, Stream
from tests.fakes.netns import NetNamespace, needs_root
from tests.fakes.worker_process import WorkerProcess
from tests.polling import BUSY_SECONDS, poll_until

CONFIRM = 5.0

LONG_WINDOWS = (
    "--worker-reap-timeout-seconds=600",
    "--worker-registration-grace-seconds=3600",
    "--hint-confirm-seconds=600",
    "--close-confirm-seconds=600",
)
"""Only proof acts within a test."""


@pytest.fixture
def operator(tmp_path: Path) -> Generator[LinkOperator]:
    """An operator that its agents are told of."""
    with LinkOperator(tmp_path) as operator:
        operator.announce()
        yield operator


@pytest.fixture
def stack() -> Generator[ExitStack]:
    """The agent and the workers of a test."""
    with ExitStack() as stack:
        yield stack


def start_agent(
    stack: ExitStack, operator: LinkOperator, *flags: str
) -> tuple[AgentProcess, Stream]:
    """Start an agent and wait for its stream."""
    agent = stack.enter_context(AgentProcess(*operator.flags, *flags))
    return agent, operator.stream()


def start_worker(
    stack: ExitStack, agent: AgentProcess, stream: Stream, number: int
) -> WorkerProcess:
    """Start a registered worker that the operator has found the pod of."""
    worker = stack.enter_context(WorkerProcess(agent.url, number))
    worker.ask("register")
    stream.map(number)
    return worker


def evidence_count(agent: AgentProcess, outcome: str) -> float:
    """How often the agent counted an outcome of container_terminated."""
    return agent.metric(
        "operator_evidence_total",
        trigger="container_terminated",
        kind="proof",
        outcome=outcome,
    )


@pytest.mark.parametrize("pings", [True, False])
def test_a_reported_end_releases_its_worker_at_once_and_no_other(
    operator: LinkOperator, stack: ExitStack, *, pings: bool
) -> None:
    """Also one that never pinged, in the middle of its hour of grace; no window ends."""
    agent, stream = start_agent(stack, operator, *LONG_WINDOWS)
    dying, neighbour = (start_worker(stack, agent, stream, number) for number in (7, 8))
    if pings:
        assert dying.ask("ping") is True
    dying.kill()
    stream.say(stream.evidence(7, "container_terminated"))
    entry = stream.entry("reaped", 7)
    assert (entry.reason, entry.trigger) == ("container_terminated", "container_terminated")
    assert entry.mapping == POD
    assert entry.released_bytes > 0
    assert entry.latency_seconds is not None
    assert entry.latency_seconds < BUSY_SECONDS
    assert set(agent.instances()) == {8}
    assert neighbour.ask("ping") is True
    (reap,) = agent.reaps()
    assert (reap["reason"], reap["trigger"]) == ("container_terminated", "container_terminated")
    (log,) = agent.log_records("instance_reaped")
    assert log["reason"] == "container_terminated"
    assert any(line.startswith("proof: container_terminated") for line in log["evidence"])


def test_the_kubelets_word_may_overtake_the_end_of_the_connection(
    operator: LinkOperator, stack: ExitStack
) -> None:
    """An open connection contradicts it; the proof acts as soon as that closes."""
    agent, stream = start_agent(stack, operator, *LONG_WINDOWS)
    dying = start_worker(stack, agent, stream, 7)
    ended = stream.evidence(7, "pod_terminated", finished_at=time.time())
    stream.say(ended)
    poll_until(lambda: agent.instances()[7]["hints"])
    assert agent.instances()[7]["held_by"] == "open connection"
    dying.kill()
    assert agent.wait_reaped(7)["reason"] == "pod_terminated"


def test_a_living_worker_refutes_its_reported_end(operator: LinkOperator, stack: ExitStack) -> None:
    """It is heard after it: told to the operator, counted, and a later close is only a close."""
    agent, stream = start_agent(stack, operator, *FAST_WINDOWS)
    living = start_worker(stack, agent, stream, 7)
    stream.say(stream.evidence(7, "container_terminated", finished_at=time.time() - 1.9))
    poll_until(lambda: evidence_count(agent, "contradicted") == 1)
    poll_until(lambda: living.ask("ping") and agent.metric("hints_cancelled_total"))
    entry = stream.entry("cancelled", 7)
    assert (entry.reason, entry.trigger) in {
        ("proof", "container_terminated"),
        ("hint", "container_terminated"),
    }
    assert entry.mapping == POD
    assert agent.instances()[7]["hints"] == []
    living.kill()
    assert agent.wait_reaped(7)["reason"] == "connection_closed"


def test_what_registered_after_an_end_is_another_run(
    operator: LinkOperator, stack: ExitStack
) -> None:
    """A container restarts, its worker takes the id it had: nothing old is believed of it."""
    agent, stream = start_agent(stack, operator, *LONG_WINDOWS)
    first = start_worker(stack, agent, stream, 7)
    old = stream.evidence(7, "container_terminated")
    first.kill()
    poll_until(lambda: agent.instances()[7]["state"] == "closed")
    second = stack.enter_context(WorkerProcess(agent.url, 7))
    second.ask("register")
    poll_until(lambda: agent.instances()[7]["registration"] > old.registration)
    stream.say(old)
    poll_until(lambda: evidence_count(agent, "registered_later") == 1)
    registration = int(agent.instances()[7]["registration"])
    poll_until(lambda: (7, registration) in stream.instances())
    stream.map(7)
    ended_at = time.time() - 30
    stream.say(stream.evidence(7, "container_terminated", finished_at=ended_at))
    poll_until(lambda: evidence_count(agent, "contradicted") == 1)
    assert second.ask("ping") is True
    assert agent.instances()[7]["state"] == "active"
    assert agent.reaps() == []


def test_a_pod_deleted_by_force_while_its_workers_live(
    operator: LinkOperator, stack: ExitStack
) -> None:
    """Who pings cancels the hint; who never pinged is held by its connection; both are visible."""
    agent, stream = start_agent(stack, operator, *FAST_WINDOWS)
    pinging, idle = (start_worker(stack, agent, stream, number) for number in (7, 8))
    assert pinging.ask("ping") is True
    for number in (7, 8):
        stream.say(stream.evidence(number, "pod_gone"))
    poll_until(lambda: all(each["hints"] for each in agent.instances().values()))
    assert pinging.ask("ping") is True
    entry = stream.entry("cancelled", 7)
    assert (entry.reason, entry.trigger) == ("hint", "pod_gone")
    told_at = time.monotonic()
    while time.monotonic() < told_at + 2 * CONFIRM:
        assert pinging.ask("ping") is True
        shown = agent.instances()[8]
        assert (shown["state"], shown["held_by"]) == ("suspect", "open connection")
        assert any("pod_gone" in line for line in shown["evidence"])
        time.sleep(0.2)
    assert agent.reaps() == []
    idle.kill()
    assert agent.wait_reaped(8)["reason"] in {"pod_hint", "connection_closed"}


def test_a_frozen_worker_of_a_pod_that_is_gone_is_reaped_after_the_hints_window(
    operator: LinkOperator, stack: ExitStack
) -> None:
    """Not after T; and when it thaws, it is told, and the operator hears of it."""
    agent, stream = start_agent(
        stack,
        operator,
        "--worker-reap-timeout-seconds=600",
        "--hint-confirm-seconds=5",
        "--close-confirm-seconds=5",
    )
    frozen = start_worker(stack, agent, stream, 7)
    frozen.ask("heartbeat", 0.6, 1.5)
    frozen.signal(signal.SIGSTOP)
    told_at = time.monotonic()
    stream.say(stream.evidence(7, "pod_gone"))
    entry = stream.entry("reaped", 7)
    assert CONFIRM <= time.monotonic() - told_at < CONFIRM + BUSY_SECONDS
    assert (entry.reason, entry.trigger) == ("pod_hint", "pod_gone")
    frozen.signal(signal.SIGCONT)
    assert frozen.ask("ping") is False
    again = stream.entry("false_reap", 7)
    assert again.registration == entry.registration
    assert again.mapping == POD
    assert agent.metric("false_reaps_total", reason="pod_hint") == 1
    frozen.ask("register")
    assert frozen.ask("ping") is True


@needs_root
def test_a_half_open_connection_holds_no_memory_beyond_the_hints_window(
    operator: LinkOperator, stack: ExitStack
) -> None:
    """The process is dead, its pod deleted by force, and no packet says so."""
    network = stack.enter_context(NetNamespace())
    agent, stream = start_agent(
        stack,
        operator,
        "--host=0.0.0.0",
        "--worker-reap-timeout-seconds=600",
        "--hint-confirm-seconds=5",
        "--close-confirm-seconds=5",
    )
    url = f"tcp://{network.host}:{agent.port}"
    dying = stack.enter_context(WorkerProcess(url, 7, network.wrapper))
    dying.ask("register")
    assert stream.map(7).peer == network.address
    dying.ask("heartbeat", 0.6, 1.5)
    network.lose_everything()
    dying.kill()
    told_at = time.monotonic()
    stream.say(stream.evidence(7, "pod_gone"))
    assert agent.wait_reaped(7)["reason"] == "pod_hint"
    assert time.monotonic() - told_at >= CONFIRM
    network.lose_nothing()


def test_one_replica_goes_by_proof_and_the_others_look_ups_stay(
    operator: LinkOperator, stack: ExitStack
) -> None:
    """What they share goes with the last of them."""
    agent, stream = start_agent(stack, operator, *LONG_WINDOWS)
    first, second = (start_worker(stack, agent, stream, number) for number in (1, 2))
    assert first.ask("store", 5) is True
    for number, worker in ((1, first), (2, second)):
        if number == 2:
            assert second.ask("lookup", 5) == 2
            assert second.ask("retrieve", 5) is True
        worker.kill()
        stream.say(stream.evidence(number, "container_terminated"))
        assert stream.entry("reaped", number).reason == "container_terminated"
    assert agent.status()["models"] == 0


@pytest.mark.parametrize(
    ("changes", "outcome"),
    [
        ({"boot_id": "another"}, "other_boot"),
        ({"registration": 99}, "not_registered"),
        ({"registration": 0}, "registered_later"),
        ({"pod_uid": "another"}, "other_pod"),
        ({"container": "sidecar"}, "other_container"),
    ],
)
def test_evidence_that_is_not_about_this_worker_is_refused_and_counted(
    operator: LinkOperator, stack: ExitStack, changes: dict[str, object], outcome: str
) -> None:
    """And has no effect, though the worker is gone."""
    agent, stream = start_agent(stack, operator, *LONG_WINDOWS)
    gone = start_worker(stack, agent, stream, 7)
    said = stream.evidence(7, "container_terminated", **changes)
    gone.kill()
    poll_until(lambda: agent.instances()[7]["state"] == "closed")
    stream.say(said, said)
    poll_until(lambda: evidence_count(agent, outcome) == 2)
    assert agent.instances()[7]["hints"] == []
    assert agent.reaps() == []


def test_a_replayed_hint_has_no_second_effect(operator: LinkOperator, stack: ExitStack) -> None:
    """The sign of life after the first one stands."""
    agent, stream = start_agent(stack, operator, *FAST_WINDOWS)
    living = start_worker(stack, agent, stream, 7)
    said = stream.evidence(7, "pod_gone")
    stream.say(said)
    stream.say(said)

    def count(outcome: str) -> float:
        labels = {"trigger": "pod_gone", "kind": "hint", "outcome": outcome}
        return agent.metric("operator_evidence_total", **labels)

    poll_until(lambda: (count("applied"), count("repeated")) == (1, 1))
    assert living.ask("ping") is True
    stream.say(said)
    poll_until(lambda: count("repeated") == 2)
    assert agent.instances()[7]["hints"] == []


def test_disabled_means_that_the_agent_judges_alone(
    operator: LinkOperator, stack: ExitStack
) -> None:
    """The operator is told so, and its word, proof included, is counted and not used."""
    agent, stream = start_agent(stack, operator, *FAST_WINDOWS, "--hints=disabled")
    assert stream.state.settings.hints == "disabled"
    dying = start_worker(stack, agent, stream, 7)
    dying.kill()
    stream.say(stream.evidence(7, "container_terminated"))
    assert agent.wait_reaped(7)["reason"] == "connection_closed"
    assert evidence_count(agent, "disabled") == 1


def test_observing_reports_what_the_operators_word_would_have_done(
    operator: LinkOperator, stack: ExitStack
) -> None:
    """The memory stays."""
    agent, stream = start_agent(stack, operator, *LONG_WINDOWS, "--reap-mode=observe")
    gone = start_worker(stack, agent, stream, 7)
    gone.kill()
    stream.say(stream.evidence(7, "container_terminated"))
    entry = stream.entry("would_reap", 7)
    assert (entry.reason, entry.trigger) == ("container_terminated", "container_terminated")
    assert entry.latency_seconds is None
    assert set(agent.instances()) == {7}
