"""Stock clients through the agent's outages, and the agent through theirs."""

from __future__ import annotations

import signal
import time

import pytest

from tests.conformance.stock_process import StockProcess
from tests.fakes.agent_process import AgentProcess
from tests.polling import BUSY_SECONDS, poll_until

PROMPT, CHUNKS, TOKENS, BLOCKS = 1, 2, 128, 8
STORED, LOADED = 1, 32


def serve(stock: StockProcess, prompt: int) -> None:
    """Store a prompt that nobody has and load it elsewhere; the bytes are the same."""
    assert stock.ask("lookup", f"cold-{prompt}", prompt, CHUNKS) == 0
    assert stock.ask("store", f"cold-{prompt}", prompt, CHUNKS, STORED) is True
    stock.ask("end", f"cold-{prompt}")
    load(stock, prompt)


def load(stock: StockProcess, prompt: int) -> None:
    """Load a prompt that is there."""
    stock.ask("wipe", LOADED, BLOCKS)
    assert stock.ask("lookup", f"warm-{prompt}", prompt, CHUNKS) == TOKENS
    assert stock.ask("retrieve", f"warm-{prompt}", prompt, CHUNKS, LOADED) == []
    assert stock.ask("digest", LOADED, BLOCKS) == stock.ask("digest", STORED, BLOCKS)
    stock.ask("end", f"warm-{prompt}")


def assert_degraded(stock: StockProcess) -> None:
    """Nothing is found, stored or loaded, nothing raises and nothing waits."""
    started = time.monotonic()
    assert stock.ask("lookup", "away", PROMPT, CHUNKS) == 0
    assert stock.ask("store", "away", PROMPT, CHUNKS, STORED) is False
    assert stock.ask("retrieve", "away", PROMPT, CHUNKS, LOADED) == list(
        range(LOADED, LOADED + BLOCKS)
    )
    stock.ask("end", "away")
    assert time.monotonic() - started < BUSY_SECONDS


def test_a_killed_agent_is_noticed_and_its_successor_used(
    agent: AgentProcess, agent_flags: tuple[str, ...], stock: StockProcess, url: str
) -> None:
    """The client degrades while the agent is gone, and registers again by itself."""
    stock.ask("open", url)
    instance_id = int(stock.ask("register"))
    serve(stock, PROMPT)
    agent.kill()
    stock.ask("await_unhealthy")
    assert_degraded(stock)
    with AgentProcess(*agent_flags, port=agent.port) as successor:
        stock.ask("await_healthy")
        assert set(successor.instances()) == {instance_id}
        serve(stock, PROMPT)
        stock.ask("close")


def test_an_agent_replaced_within_one_ping_window_is_joined_again(
    agent: AgentProcess, agent_flags: tuple[str, ...], stock: StockProcess, url: str
) -> None:
    """The client never sees the agent away, yet registers at its next pings; nothing hangs."""
    heartbeat = 4.0
    stock.ask("open", url, heartbeat=heartbeat)
    instance_id = int(stock.ask("register"))
    serve(stock, PROMPT)
    agent.kill()
    with AgentProcess(*agent_flags, port=agent.port) as successor:
        started = time.monotonic()
        assert stock.ask("store", "early", PROMPT, CHUNKS, STORED) is False
        assert time.monotonic() - started < BUSY_SECONDS
        poll_until(lambda: instance_id in successor.instances())
        stock.ask("await_healthy")
        serve(stock, PROMPT)
        stock.ask("close")


def test_a_frozen_agent_comes_back_with_all_it_had(
    agent: AgentProcess, stock: StockProcess, url: str
) -> None:
    """Pings time out while the agent is stopped; afterwards it has the worker and its chunks."""
    stock.ask("open", url)
    instance_id = int(stock.ask("register"))
    serve(stock, PROMPT)
    agent.signal(signal.SIGSTOP)
    try:
        stock.ask("await_unhealthy")
        assert_degraded(stock)
    finally:
        agent.signal(signal.SIGCONT)
    stock.ask("await_healthy")
    assert set(agent.instances()) == {instance_id}
    assert agent.reaps() == []
    load(stock, PROMPT)


def test_an_agent_that_freezes_in_the_middle_of_a_request_does_not_hang_it(
    agent: AgentProcess, stock: StockProcess, url: str
) -> None:
    """Requests in flight end with the next failed ping, declined, and later ones are served."""
    stock.ask("open", url)
    stock.ask("register")
    serve(stock, PROMPT)
    agent.signal(signal.SIGSTOP)
    try:
        assert stock.ask("store", "caught", PROMPT + 1, CHUNKS, STORED) is False
    finally:
        agent.signal(signal.SIGCONT)
    stock.ask("await_healthy")
    load(stock, PROMPT)
    serve(stock, PROMPT + 2)


def test_a_killed_worker_is_released_and_the_others_served(
    agent: AgentProcess, stock: StockProcess, url: str
) -> None:
    """SIGKILL: proven at once over ipc://, by the closed connection over TCP; others unharmed."""
    stock.ask("open", url)
    survivor = int(stock.ask("register"))
    with StockProcess() as victim:
        victim.ask("open", url)
        killed = int(victim.ask("register", seed=2))
        assert victim.ask("store", "cold", PROMPT + 5, CHUNKS, STORED) is True
        mapped = agent.instances()[killed]["bytes"]
        victim.kill()
        reap = agent.wait_reaped(killed)
    assert reap["reason"] == ("process_exit" if url.startswith("ipc") else "connection_closed")
    assert reap["bytes"] == mapped
    assert set(agent.instances()) == {survivor}
    serve(stock, PROMPT)


@pytest.mark.parametrize("mode", ["engine_driven", "auto"])
def test_a_worker_in_another_transfer_mode_is_told_so_at_once(
    agent: AgentProcess, stock: StockProcess, url: str, mode: str
) -> None:
    """A CPU worker left at its default mode fails to start at once, with what to set."""
    stock.ask("open", url, mode)
    started = time.monotonic()
    with pytest.raises(
        AssertionError, match=r"set lmcache\.mp\.mp_transfer_mode to lmcache_driven"
    ):
        stock.ask("register")
    assert time.monotonic() - started < BUSY_SECONDS
    assert agent.instances() == {}
    assert agent.log_records("request_refused")
