"""A connection that is cut and made again is no death."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.fakes.agent_process import FAST_WINDOWS, AgentProcess
from tests.fakes.netns import NetNamespace, needs_root
from tests.fakes.tcp_proxy import TcpProxy
from tests.fakes.worker_process import WorkerProcess
from tests.polling import BUSY_SECONDS, poll_until

CLOSE_SECONDS = 3
PINGING, IDLE = 1, 2
SYN_LOSS_SECONDS = 6
DEFAULT_CLOSE_SECONDS = 10

Cut = Callable[[TcpProxy], None]


def once(proxy: TcpProxy) -> None:
    """One short interruption."""
    proxy.cut()


def twice_within_a_second(proxy: TcpProxy) -> None:
    """The second one hits the connections that were just made again."""
    proxy.cut()
    poll_until(lambda: proxy.connections() == 2, "both are back")
    time.sleep(0.3)
    proxy.cut()


@pytest.fixture
def agent() -> Generator[AgentProcess]:
    """Close window 3 s, T = 30 s."""
    with AgentProcess(*FAST_WINDOWS) as agent:
        yield agent


def start_pinging_and_idle(
    stack: ExitStack, url: str, seconds: float, wrapper: tuple[str, ...] = ()
) -> tuple[WorkerProcess, WorkerProcess]:
    """Start one worker that pings each second for a while, and one that only registered."""
    pinging, idle = (
        stack.enter_context(WorkerProcess(url, number, wrapper)) for number in (PINGING, IDLE)
    )
    for worker in (pinging, idle):
        worker.ask("register")
    assert pinging.ask("ping") is True
    pinging.tell("heartbeat", 1.0, seconds)
    return pinging, idle


def watch(agent: AgentProcess, seconds: float) -> dict[str, Any]:
    """Check that nobody is reaped for a while; return the last sight of the idle one."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert agent.reaps() == []
        assert set(agent.instances()) == {PINGING, IDLE}
        time.sleep(0.05)
    return agent.instances()[IDLE]


@pytest.mark.slow
@pytest.mark.parametrize("cut", [once, twice_within_a_second])
def test_a_worker_that_reconnects_is_not_reaped(cut: Cut, agent: AgentProcess) -> None:
    """A ping clears the close; an idle one is held for as long as its new connection is open."""
    seconds = 4 * CLOSE_SECONDS
    with ExitStack() as stack:
        proxy = stack.enter_context(TcpProxy(agent.port))
        pinging, idle = start_pinging_and_idle(stack, proxy.url, seconds)
        cut(proxy)
        idle_seen = watch(agent, seconds)

        assert idle_seen["state"] == "closed"
        assert idle_seen["held_by"] == "1 candidate connection(s)"
        assert pinging.result() > 0.8 * seconds
        assert agent.instances()[PINGING]["state"] == "active"
        assert agent.metric("hints_cancelled_total", window="close") >= 1

        # The candidate was what held it: with it gone, the window runs from there.
        closed_at = time.monotonic()
        idle.kill()
        assert agent.wait_reaped(IDLE)["reason"] == "connection_closed"
        assert CLOSE_SECONDS <= time.monotonic() - closed_at <= CLOSE_SECONDS + BUSY_SECONDS
        assert set(agent.instances()) == {PINGING}


@pytest.mark.slow
@needs_root
def test_no_worker_is_reaped_while_its_syns_are_lost_for_six_seconds() -> None:
    """With the default close window of 10 s: a lost SYN is repeated after 1, 3 and 7 s."""
    with ExitStack() as stack:
        network = stack.enter_context(NetNamespace())
        agent = stack.enter_context(AgentProcess())
        proxy = stack.enter_context(TcpProxy(agent.port, network.host))
        seconds = 2 * DEFAULT_CLOSE_SECONDS
        pinging, _ = start_pinging_and_idle(
            stack, proxy.url, seconds, wrapper=tuple(network.wrapper)
        )
        network.lose_outgoing()
        proxy.cut()
        watch(agent, SYN_LOSS_SECONDS)
        assert proxy.connections() == 0
        network.lose_nothing()
        idle_seen = watch(agent, seconds - SYN_LOSS_SECONDS + 1)

        assert idle_seen["held_by"] == "1 candidate connection(s)"
        assert pinging.result() > 0
        assert agent.instances()[PINGING]["state"] == "active"
