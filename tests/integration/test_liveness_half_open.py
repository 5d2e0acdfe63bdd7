"""Peers that vanish without a word leave nothing behind for long."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.fakes.agent_process import FAST_WINDOWS, AgentProcess
from tests.fakes.crowd import Crowd
from tests.fakes.netns import NetNamespace, needs_root
from tests.fakes.worker_process import WorkerProcess
from tests.polling import BUSY_SECONDS, poll_until

T = 30.0
CROWD = 300


def descriptors(agent: AgentProcess) -> int:
    """Count the descriptors of an agent."""
    return len(list(Path(f"/proc/{agent.pid}/fd").iterdir()))


@pytest.mark.slow
@needs_root
def test_half_open_connections_are_gone_within_twice_t_and_newcomers_register() -> None:
    """Their contexts go after T of silence: the loss of a network is no close."""
    with ExitStack() as stack:
        network = stack.enter_context(NetNamespace())
        agent = stack.enter_context(AgentProcess("--host=0.0.0.0", *FAST_WINDOWS))
        url = f"tcp://{network.host}:{agent.port}"
        assert agent.instances() == {}  # the HTTP server has opened what it needs
        baseline = descriptors(agent)
        with (
            Crowd(url, range(1, CROWD + 1), network.wrapper),
            WorkerProcess(url, CROWD + 1, network.wrapper) as asking,
        ):
            asking.ask("register")
            assert len(agent.instances()) == CROWD + 1
            assert descriptors(agent) >= baseline + CROWD + 1
            lose_a_reply(agent, network, asking)
            network.lose_everything()
            cut_at = time.monotonic()

            poll_until(lambda: not agent.instances())
            gone_after = time.monotonic() - cut_at
            assert gone_after >= T - 5  # the crowd took a moment to register
            assert gone_after < 1.25 * T + BUSY_SECONDS
            assert {reap["reason"] for reap in agent.reaps()} == {"heartbeat_timeout"}
            assert len(agent.reaps()) == CROWD + 1
            poll_until(lambda: descriptors(agent) <= baseline)
            assert time.monotonic() - cut_at < 2 * T + BUSY_SECONDS
        network.lose_nothing()
        with Crowd(url, range(1001, 1001 + CROWD), network.wrapper):
            assert len(agent.instances()) == CROWD


def lose_a_reply(agent: AgentProcess, network: NetNamespace, asking: WorkerProcess) -> None:
    """Leave data unacknowledged: TCP then sends that again, and no keepalive probes."""
    network.lose_incoming()
    asking.tell("ping")
    poll_until(lambda: agent.instances()[asking.instance_id]["has_liveness_signal"])
