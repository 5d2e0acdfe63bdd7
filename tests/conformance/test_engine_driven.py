"""Stock adapters that copy by themselves: through the shared pool, and inside their messages."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conformance.conftest import CHUNK_TOKENS
from tests.conformance.ranks import hold_a_prompt_together
from tests.conformance.stock_process import StockFailed, StockProcess
from tests.fakes.agent_process import FAST_WINDOWS, AgentProcess
from tests.polling import BUSY_SECONDS, poll_until

PROMPT, CHUNKS, TOKENS, BLOCKS = 1, 2, 128, 8
STORED, LOADED, SKIPPED, BLANK = 1, 24, 40, 56
MODE = "engine_driven"
POOL = f"conformance-{os.getpid()}"
REQUESTS = 80
"""More than a small L1 has room for."""


@pytest.fixture(params=["pickle", "shm"])
def way(request: pytest.FixtureRequest) -> str:
    """How the bytes travel."""
    return str(request.param)


@pytest.fixture
def agent_flags(tmp_path: Path, way: str) -> tuple[str, ...]:
    """An agent that serves both modes, and has a pool to map or not."""
    flags = (f"--chunk-size={CHUNK_TOKENS}", f"--ipc-path={tmp_path}/agent.sock", *FAST_WINDOWS)
    pool = (f"--shm-name={POOL}",) if way == "shm" else ()
    return (*flags, "--supported-transfer-mode=auto", *pool)


@pytest.fixture
def agent(agent_flags: tuple[str, ...]) -> Iterator[AgentProcess]:
    """A running agent."""
    with AgentProcess(*agent_flags) as process:
        yield process


def store(stock: StockProcess, prompt: int = PROMPT, salt: str = "") -> None:
    """Run one cold request: looked up in vain, stored, ended."""
    assert stock.ask("lookup", "cold", prompt, CHUNKS, salt) == 0
    assert stock.ask("store", "cold", prompt, CHUNKS, STORED, salt) is True
    stock.ask("end", "cold")


def load(stock: StockProcess, prompt: int = PROMPT) -> None:
    """Run one warm request: the same bytes come back."""
    stock.ask("wipe", LOADED, BLOCKS)
    assert stock.ask("lookup", "warm", prompt, CHUNKS) == TOKENS
    assert stock.ask("retrieve", "warm", prompt, CHUNKS, LOADED) == []
    assert stock.ask("digest", LOADED, BLOCKS) == stock.ask("digest", STORED, BLOCKS)
    stock.ask("end", "warm")


def l1(agent: AgentProcess) -> dict[str, int]:
    """What L1 holds."""
    figures: dict[str, int] = agent.status()["l1"]
    return figures


def assert_nothing_is_held(agent: AgentProcess) -> None:
    """No pins and no slots are left of requests that ended."""
    poll_until(lambda: l1(agent)["pinned_bytes"] == l1(agent)["staging_bytes"] == 0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_what_is_stored_is_found_and_loaded(
    agent: AgentProcess, stock: StockProcess, url: str, way: str, layout: str, dtype: str
) -> None:
    """A cold request stores, a warm one finds all of it and loads the same bytes."""
    assert stock.ask("open", url, MODE) == CHUNK_TOKENS
    instance_id = int(stock.ask("register", layout, dtype))
    store(stock)
    load(stock)
    assert agent.instances()[instance_id]["mode"] == f"engine_driven/{way}"
    assert agent.instances()[instance_id]["bytes"] == 0
    assert agent.metric("stored_chunks_total") == CHUNKS
    assert_nothing_is_held(agent)


def test_tokens_that_the_engine_has_are_not_overwritten(stock: StockProcess, url: str) -> None:
    """A load that skips its first block leaves that block alone and fills the rest."""
    stock.ask("open", url, MODE)
    stock.ask("register")
    store(stock)
    stock.ask("wipe", SKIPPED, BLOCKS)
    stock.ask("wipe", BLANK, 1)
    assert stock.ask("lookup", "warm", PROMPT, CHUNKS) == TOKENS
    assert stock.ask("retrieve", "warm", PROMPT, CHUNKS, SKIPPED, 16) == []
    assert stock.ask("digest", SKIPPED, 1) == stock.ask("digest", BLANK, 1)
    rest = BLOCKS - 1
    assert stock.ask("digest", SKIPPED + 1, rest) == stock.ask("digest", STORED + 1, rest)
    stock.ask("end", "warm")


def test_what_is_there_is_not_stored_again(
    agent: AgentProcess, stock: StockProcess, url: str
) -> None:
    """A longer prompt adds its new chunks only; storing the same again is done at once."""
    stock.ask("open", url, MODE)
    stock.ask("register")
    store(stock)
    assert stock.ask("store", "again", PROMPT, CHUNKS, STORED) is True
    assert l1(agent)["objects"] == CHUNKS
    assert stock.ask("store", "longer", PROMPT, CHUNKS + 2, STORED) is True
    assert l1(agent)["objects"] == CHUNKS + 2
    assert stock.ask("lookup", "whole", PROMPT, CHUNKS + 2) == 2 * TOKENS
    stock.ask("end", "whole")
    assert_nothing_is_held(agent)


def test_a_request_id_that_is_used_again_starts_anew(stock: StockProcess, url: str) -> None:
    """Other tokens under the same id are another entry, and load their own bytes."""
    stock.ask("open", url, MODE)
    stock.ask("register")
    store(stock)
    assert stock.ask("store", "cold", PROMPT + 1, CHUNKS, BLANK) is True
    assert stock.ask("lookup", "cold", PROMPT + 1, CHUNKS) == TOKENS
    assert stock.ask("retrieve", "cold", PROMPT + 1, CHUNKS, LOADED) == []
    assert stock.ask("digest", LOADED, BLOCKS) == stock.ask("digest", BLANK, BLOCKS)
    stock.ask("end", "cold")
    load(stock)


def test_a_full_l1_says_so(agent_flags: tuple[str, ...], stock_process: StockProcess) -> None:
    """What does not fit is not stored and not called stored; what is there stays right."""
    flags = (*agent_flags, "--eviction-policy=noop")
    with AgentProcess(*flags, l1_size_gb=0.001) as agent:  # room for 131 chunks
        stock = stock_process
        stock.ask("open", agent.url, MODE)
        stock.ask("register")
        store(stock)
        outcomes = [stock.ask("store", f"r{n}", 10 + n, CHUNKS, STORED) for n in range(REQUESTS)]
        assert outcomes[0] is True
        assert outcomes[-1] is False
        held = sum(stock.ask("lookup", f"l{n}", 10 + n, CHUNKS) == TOKENS for n in range(REQUESTS))
        assert held == outcomes.count(True)
        for number in range(REQUESTS):
            stock.ask("end", f"l{number}")
        load(stock)
        assert stock.ask("healthy") == [True, True]
        stock.ask("close")


@pytest.mark.parametrize("how", ["end", "free"])
def test_an_aborted_request_gives_its_locks_back(
    agent: AgentProcess, stock: StockProcess, url: str, how: str
) -> None:
    """Found chunks are pinned until the request ends or frees them, also without a load."""
    stock.ask("open", url, MODE)
    stock.ask("register")
    store(stock)
    assert stock.ask("lookup", "aborted", PROMPT, CHUNKS) == TOKENS
    assert l1(agent)["pinned_bytes"] > 0
    if how == "end":
        stock.ask("end", "aborted")
    else:
        stock.ask("free", "aborted", PROMPT, CHUNKS)
    assert_nothing_is_held(agent)


def test_a_load_without_its_chunks_fails_as_a_whole(
    agent: AgentProcess, stock: StockProcess, url: str
) -> None:
    """Nothing was looked up and one chunk is missing: all blocks are reported, none is wrong."""
    stock.ask("open", url, MODE)
    stock.ask("register")
    store(stock)
    wanted = list(range(LOADED, LOADED + 12))
    assert stock.ask("retrieve", "cold", PROMPT, CHUNKS + 1, LOADED) == wanted
    assert_nothing_is_held(agent)


def test_two_workers_hold_a_prompt_together(
    stock: StockProcess, second_stock: StockProcess, url: str
) -> None:
    """Under a world size of 2 a prompt is found once both ranks stored; each loads its own part."""
    hold_a_prompt_together(stock, second_stock, url, MODE)


def test_shutting_down_leaves_nothing(agent: AgentProcess, stock: StockProcess, url: str) -> None:
    """An orderly shutdown unregisters; the pool stays for the others, and what is in it."""
    stock.ask("open", url, MODE)
    instance_id = int(stock.ask("register"))
    store(stock)
    assert set(agent.instances()) == {instance_id}
    stock.ask("close")
    poll_until(lambda: not agent.instances())
    assert agent.reaps() == []
    assert l1(agent)["objects"] == CHUNKS
    assert_nothing_is_held(agent)


def test_a_killed_worker_is_released_and_the_pool_stays(
    agent: AgentProcess, stock: StockProcess, url: str, way: str
) -> None:
    """SIGKILL of one that maps the pool: reaped as any other, and L1 serves the others on."""
    stock.ask("open", url, MODE)
    survivor = int(stock.ask("register"))
    with StockProcess() as victim:
        victim.ask("open", url, MODE)
        killed = int(victim.ask("register"))
        store(victim)
        victim.kill()
        reap = agent.wait_reaped(killed)
    assert reap["reason"] == ("process_exit" if url.startswith("ipc") else "connection_closed")
    assert set(agent.instances()) == {survivor}
    if way == "shm":
        assert (Path("/dev/shm") / f"lmcache-kube.l1.{POOL}").exists()
    stock.ask("wipe", STORED, BLOCKS)
    assert stock.ask("lookup", "warm", PROMPT, CHUNKS) == TOKENS
    assert stock.ask("retrieve", "warm", PROMPT, CHUNKS, STORED) == []
    stock.ask("end", "warm")
    load(stock)


def test_a_worker_that_exits_leaves_the_pool_alone(
    agent: AgentProcess, stock: StockProcess, url: str, way: str
) -> None:
    """Python's resource tracker removes segments of processes that end: not this one."""
    stock.ask("open", url, MODE)
    stock.ask("register")
    with StockProcess() as short_lived:
        short_lived.ask("open", url, MODE)
        short_lived.ask("register")
        store(short_lived)
        short_lived.ask("close")
        short_lived.leave()
    stock.ask("wipe", STORED, BLOCKS)
    assert stock.ask("lookup", "warm", PROMPT, CHUNKS) == TOKENS
    assert stock.ask("retrieve", "warm", PROMPT, CHUNKS, STORED) == []
    stock.ask("end", "warm")
    load(stock)
    name = POOL if way == "shm" else f"port-{agent.port}"
    assert (Path("/dev/shm") / f"lmcache-kube.l1.{name}").exists()


def test_an_agent_that_is_killed_and_replaced_is_joined_again(
    agent: AgentProcess, agent_flags: tuple[str, ...], stock: StockProcess, url: str
) -> None:
    """The client degrades while it is away, registers again by itself and maps the new pool."""
    stock.ask("open", url, MODE)
    instance_id = int(stock.ask("register"))
    store(stock)
    agent.kill()
    stock.ask("await_unhealthy")
    assert stock.ask("store", "away", PROMPT, CHUNKS, STORED) is False
    with AgentProcess(*agent_flags, port=agent.port) as successor:
        stock.ask("await_healthy")
        assert set(successor.instances()) == {instance_id}
        store(stock)
        load(stock)
        stock.ask("close")


def test_an_agent_replaced_within_one_ping_window_is_joined_again(
    agent: AgentProcess, agent_flags: tuple[str, ...], stock: StockProcess, url: str
) -> None:
    """Transfers to the successor are declined at once until the worker has registered there."""
    heartbeat = 4.0
    stock.ask("open", url, MODE, heartbeat=heartbeat)
    instance_id = int(stock.ask("register"))
    store(stock)
    agent.kill()
    with AgentProcess(*agent_flags, port=agent.port) as successor:
        started = time.monotonic()
        assert stock.ask("store", "early", PROMPT, CHUNKS, STORED) is False
        assert len(stock.ask("retrieve", "early", PROMPT, CHUNKS, LOADED)) == BLOCKS
        assert time.monotonic() - started < BUSY_SECONDS
        poll_until(lambda: instance_id in successor.instances())
        stock.ask("await_healthy")
        store(stock)
        load(stock)
        stock.ask("close")


def test_a_frozen_agent_comes_back_with_all_it_had(
    agent: AgentProcess, stock: StockProcess, url: str
) -> None:
    """The worker registers the same again: that only refreshes, and its chunks are there."""
    stock.ask("open", url, MODE)
    instance_id = int(stock.ask("register"))
    store(stock)
    agent.signal(signal.SIGSTOP)
    try:
        stock.ask("await_unhealthy")
    finally:
        agent.signal(signal.SIGCONT)
    stock.ask("await_healthy")
    assert set(agent.instances()) == {instance_id}
    assert agent.reaps() == []
    load(stock)
    store(stock, PROMPT + 1)


def test_a_worker_that_cannot_map_the_pool_sends_its_bytes(
    agent: AgentProcess, stock: StockProcess, url: str
) -> None:
    """Other mount namespaces: stock workers fall back to pickle, which shows at the first store."""
    stock.ask("open", url, MODE)
    stock.ask("hide_pools")
    instance_id = int(stock.ask("register"))
    store(stock)
    load(stock)
    assert agent.instances()[instance_id]["mode"] == "engine_driven/pickle"
    assert_nothing_is_held(agent)


@pytest.mark.parametrize(
    ("served", "asked"),
    [
        ("engine_driven", "lmcache_driven"),
        ("lmcache_driven", "engine_driven"),
        ("lmcache_driven", "auto"),
    ],
)
def test_a_worker_in_a_mode_that_is_not_served_is_told_so_at_once(
    agent_flags: tuple[str, ...], stock_process: StockProcess, served: str, asked: str
) -> None:
    """It fails to start within 2 s, with what to set; the agent's log has the reason."""
    with AgentProcess(*agent_flags, f"--supported-transfer-mode={served}") as agent:
        stock_process.ask("open", agent.url, asked)
        started = time.monotonic()
        with pytest.raises(StockFailed, match=rf"set lmcache\.mp\.mp_transfer_mode to {served}"):
            stock_process.ask("register")
        assert time.monotonic() - started < BUSY_SECONDS
        assert agent.instances() == {}
        (record,) = poll_until(lambda: agent.log_records("request_refused"))
        assert f"mp_transfer_mode to {served}" in record["detail"]
        stock_process.ask("close")
