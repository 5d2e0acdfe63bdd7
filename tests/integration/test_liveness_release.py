"""Releases: after the last user, once, and no matter to anybody else when they hang."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Generator
from contextlib import ExitStack
from typing import Any

import pytest

from lmcache_worker.wire import RequestRefused
from tests.fakes.agent_process import FAST_WINDOWS
from tests.fakes.stub_agent import StubAgent
from tests.fakes.worker_process import LAYERS, Worker
from tests.polling import BUSY_SECONDS, PATIENCE_SECONDS, poll_until

DEADLINE_SECONDS = 1
CLOSE_SECONDS = 0.2
"""By the stub's back door, so that twenty deaths do not take a minute."""

ROUNDS = 20


@pytest.fixture
def agent() -> Generator[StubAgent]:
    """Close window 0.2 s, releases overdue after 1 s."""
    flags = (*FAST_WINDOWS, f"--release-deadline-seconds={DEADLINE_SECONDS}")
    with StubAgent(*flags, windows={"close_confirm_seconds": CLOSE_SECONDS}) as agent:
        yield agent


@pytest.fixture
def stack() -> Generator[ExitStack]:
    """The workers of a test."""
    with ExitStack() as stack:
        yield stack


def start(stack: ExitStack, agent: StubAgent, number: int) -> Worker:
    """Start a registered worker."""
    worker = stack.enter_context(Worker(agent.url, number))
    worker.register()
    return worker


def releases(agent: StubAgent) -> dict[str, dict[str, Any]]:
    """Return the releases in progress as `/status` shows them, by instance id."""
    listed = agent.status()["worker_liveness"]["releases"]
    return {release["instance_id"]: release for release in listed}


def healthz(agent: StubAgent) -> int:
    """Return the status of `/healthz`."""
    url = f"http://127.0.0.1:{agent.http_port}/healthz"
    with urllib.request.urlopen(url, timeout=PATIENCE_SECONDS) as reply:
        return int(reply.status)


def test_a_release_that_never_returns_holds_up_nobody(agent: StubAgent, stack: ExitStack) -> None:
    """Others are served and released; the stuck one is visible, its id refused, health is fine."""
    stuck, dying, served = (start(stack, agent, number) for number in (1, 2, 3))
    agent.hold("close")
    stuck.close()
    poll_until(lambda: agent.holding("close"))
    poll_until(lambda: releases(agent)["1"]["stuck"])
    poll_until(lambda: agent.metric("releases_stuck_total") == 1)
    assert agent.metric("releases_stuck") == 1
    assert agent.instances()[1]["state"] == "releasing"
    (reap,) = agent.reaps()
    assert (reap["reason"], reap["release_seconds"]) == ("connection_closed", None)

    dying.close()
    assert agent.wait_reaped(2)["release_seconds"] < BUSY_SECONDS
    start(stack, agent, 4).unregister()
    assert served.ping()
    assert served.store(1)
    assert served.lookup(1) == 2
    assert served.retrieve(1)
    assert healthz(agent) == 200
    assert set(agent.instances()) == {1, 3}

    agent.let_go("close")
    poll_until(lambda: not releases(agent))
    assert agent.counts()["opened"] - agent.counts()["closed"] == 1


def test_an_unregister_whose_release_hangs_is_answered_all_the_same(
    agent: StubAgent, stack: ExitStack
) -> None:
    """At the deadline of the release at the latest."""
    leaving = start(stack, agent, 1)
    agent.hold("close")
    asked_at = time.monotonic()
    leaving.unregister()
    assert time.monotonic() - asked_at < DEADLINE_SECONDS + BUSY_SECONDS
    assert leaving.ping() is False
    agent.let_go("close")


def test_an_id_is_refused_at_once_while_its_old_context_is_being_released(
    agent: StubAgent, stack: ExitStack
) -> None:
    """With the reason; nothing is opened meanwhile, and afterwards the id registers as ever."""
    first = start(stack, agent, 1)
    agent.hold("close")
    first.close()
    poll_until(lambda: agent.holding("close"))

    again = stack.enter_context(Worker(agent.url, 1))
    for _ in range(3):
        with pytest.raises(RequestRefused, match="still being released"):
            again.register()
    assert agent.counts()["opened"] == 1
    agent.let_go("close")
    poll_until(lambda: not releases(agent))
    again.register()
    assert again.store(1)
    assert set(agent.instances()) == {1}
    assert agent.counts()["opened"] == 2
    assert agent.counts()["closed"] == 1


def test_memory_is_refused_while_another_id_that_maps_it_is_being_released(
    agent: StubAgent, stack: ExitStack
) -> None:
    """A recovery may come with a new id and the old handles."""
    worker = start(stack, agent, 1)
    agent.hold("close")
    uid = worker.client.send("unregister_kv_cache", 1)
    poll_until(lambda: agent.holding("close"))
    worker.instance_id = 2
    with pytest.raises(RequestRefused, match="still being released"):
        worker.register()
    assert agent.counts()["handles"] == dict.fromkeys(worker.segments, 1)
    agent.let_go("close")
    worker.client.receive(uid)
    worker.register()
    assert set(agent.instances()) == {2}


@pytest.mark.slow
def test_a_context_is_closed_once_and_only_after_its_last_user(
    agent: StubAgent, stack: ExitStack
) -> None:
    """Twenty workers die in the middle of a retrieve; each is closed when that one has ended."""
    storing = start(stack, agent, 1000)
    assert storing.store(1)
    for number in range(1, ROUNDS + 1):
        with Worker(agent.url, number) as dying:
            dying.register()
            assert agent.counts()["handles"].keys() >= set(dying.segments)
            agent.hold("scatter")
            dying.begin_retrieve(1)
            poll_until(lambda: agent.holding("scatter"))
        poll_until(lambda: releases(agent))
        counts = agent.counts()
        assert counts["opened"] - counts["closed"] == 2
        assert len(counts["handles"]) == 2 * LAYERS
        assert releases(agent)[str(number)]["transfers_in_flight"] == 1

        agent.let_go("scatter")
        agent.wait_reaped(number)
        counts = agent.counts()
        assert counts["opened"] == number + 1
        assert counts["closed"] == number
        assert set(counts["handles"]) == set(storing.segments)
    assert [int(reap["instance_id"]) for reap in agent.reaps()] == list(range(1, ROUNDS + 1))
