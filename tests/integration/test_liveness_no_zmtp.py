"""What is no ZMTP client cannot be a worker come back, and holds nobody's memory for long."""

from __future__ import annotations

import time
from contextlib import ExitStack

import pytest
import zmq

from tests.fakes.agent_process import FAST_WINDOWS, AgentProcess
from tests.fakes.raw_client import RawConnection
from tests.fakes.worker_process import WorkerProcess
from tests.polling import poll_until

HANDSHAKE_SECONDS = 10.0

STRAYS = {
    "http": b"GET /healthz HTTP/1.1\r\nHost: node\r\nUser-Agent: kube-probe/1.34 " + b"a" * 64,
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "oldest framing": b"\x01\x00",
    "nothing": b"",
}


@pytest.mark.slow
@pytest.mark.parametrize("data", STRAYS.values(), ids=STRAYS)
def test_a_stray_connection_delays_the_release_of_the_dead_by_its_handshake(data: bytes) -> None:
    """It stays open for good, and libzmq keeps it: the agent ends it after the handshake time."""
    with (
        AgentProcess(*FAST_WINDOWS) as agent,
        WorkerProcess(agent.url, 5) as worker,
        WorkerProcess(agent.url, 6) as other,
    ):
        for one in (worker, other):
            one.ask("register")
            one.ask("ping")
        worker.kill()
        with RawConnection(agent.port) as stray:
            stray.send(data)
            assert agent.wait_reaped(5)["reason"] == "connection_closed"
            assert stray.wait_closed()
        assert set(agent.instances()) == {6}


@pytest.mark.slow
def test_a_silent_zmtp_client_is_kept_for_as_long_as_it_likes() -> None:
    """It may be an idle worker come back, whose first message is an hour away."""
    with AgentProcess(*FAST_WINDOWS) as agent, ExitStack() as stack:
        worker = stack.enter_context(WorkerProcess(agent.url, 5))
        worker.ask("register")
        worker.kill()
        context = stack.enter_context(zmq.Context())
        silent = stack.enter_context(context.socket(zmq.DEALER))
        silent.connect(agent.url)
        poll_until(lambda: agent.instances()[5]["held_by"], "the candidate holds the entry")
        connected_at = time.monotonic()
        poll_until(lambda: time.monotonic() - connected_at > HANDSHAKE_SECONDS + 3)
        assert agent.instances()[5]["held_by"] == "1 candidate connection(s)"
        silent.close(0)
        agent.wait_reaped(5)
