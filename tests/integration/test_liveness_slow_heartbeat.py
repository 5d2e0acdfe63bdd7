"""A worker may ping more slowly than the agent's windows allow for; running pods keep theirs."""

from __future__ import annotations

import time

from tests.fakes.agent_process import FAST_WINDOWS
from tests.fakes.stub_agent import StubAgent
from tests.fakes.worker_process import Worker
from tests.polling import poll_until

REAP_TIMEOUT_SECONDS = 0.75
PING_SECONDS = 1.5
"""As 60 s are to a T of 30 s, forty times faster."""

PINGS = 8


def test_the_window_follows_a_heartbeat_that_is_slower_than_t() -> None:
    """It is reaped once, told, and from its next ping on its own interval counts, visibly."""
    windows = {"reap_timeout_seconds": REAP_TIMEOUT_SECONDS}
    with StubAgent(*FAST_WINDOWS, windows=windows) as agent, Worker(agent.url, 1) as worker:
        worker.register()
        answers = []
        for _ in range(PINGS):
            answers.append(worker.ping())
            if not answers[-1]:
                worker.register()
            time.sleep(PING_SECONDS)

        assert answers == [True, False] + [True] * (PINGS - 2)
        assert len(agent.reaps()) == 1
        seen = agent.instances()[1]
        assert seen["state"] in {"active", "suspect"}
        assert seen["window"] == "heartbeat_timeout"
        left = seen["deadline_seconds"] + seen["last_seen_seconds"]
        assert 3 * PING_SECONDS <= left <= 3 * PING_SECONDS + 2  # two seconds for a busy machine
        assert agent.status()["worker_liveness"]["mismatched_heartbeats"] == 1
        assert agent.metric("heartbeat_mismatched_instances") == 1
        poll_until(lambda: agent.metric("heartbeat_mismatches_total") == 1)
        (logged,) = agent.log_records("heartbeat_mismatch")
        assert logged["level"] == "warning"
        assert logged["instance_id"] == "1"
