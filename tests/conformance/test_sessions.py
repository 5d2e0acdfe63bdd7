"""The stock adapters store, find, load and drop KV cache through our agent."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conformance.ranks import hold_a_prompt_together
from tests.conformance.stock_process import StockProcess
from tests.fakes.agent_process import AgentProcess
from tests.polling import poll_until

PROMPT, CHUNKS, TOKENS, BLOCKS = 1, 2, 128, 8
STORED, LOADED, SKIPPED, BLANK = 1, 24, 40, 56
"""First blocks of four regions of the worker's memory, `BLOCKS` long."""


def store(stock: StockProcess, prompt: int = PROMPT, salt: str = "") -> None:
    """Run one cold request: looked up in vain, stored, ended."""
    assert stock.ask("lookup", "cold", prompt, CHUNKS, salt) == 0
    assert stock.ask("store", "cold", prompt, CHUNKS, STORED, salt) is True
    stock.ask("end", "cold")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_what_is_stored_is_found_and_loaded(
    agent: AgentProcess, stock: StockProcess, url: str, layout: str, dtype: str
) -> None:
    """A cold request stores, a warm one finds all of it and loads the same bytes."""
    assert stock.ask("open", url) == 64
    stock.ask("register", layout, dtype)
    store(stock)
    assert stock.ask("lookup", "warm", PROMPT, CHUNKS) == TOKENS
    assert stock.ask("retrieve", "warm", PROMPT, CHUNKS, LOADED) == []
    assert stock.ask("digest", LOADED, BLOCKS) == stock.ask("digest", STORED, BLOCKS)
    stock.ask("report", "warm")
    stock.ask("end", "warm")
    poll_until(lambda: agent.status()["l1"]["pinned_bytes"] == 0)


def test_tokens_that_the_engine_has_are_not_overwritten(stock: StockProcess, url: str) -> None:
    """A load that skips its first block leaves that block alone and fills the rest."""
    stock.ask("open", url)
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


def test_a_shared_prefix_is_a_partial_hit(stock: StockProcess, url: str) -> None:
    """A longer prompt that starts the same finds what is there and no more."""
    stock.ask("open", url)
    stock.ask("register")
    store(stock)
    assert stock.ask("lookup", "longer", PROMPT, CHUNKS + 2) == TOKENS
    assert stock.ask("lookup", "shorter", PROMPT, CHUNKS - 1) == TOKENS // 2
    for request in ("longer", "shorter"):
        stock.ask("end", request)


def test_tenants_do_not_share(stock: StockProcess, url: str) -> None:
    """The same prompt under another salt is another entry."""
    stock.ask("open", url)
    stock.ask("register")
    store(stock)
    store(stock, salt="tenant-1")
    assert stock.ask("lookup", "a", PROMPT, CHUNKS, "tenant-1") == TOKENS
    assert stock.ask("lookup", "b", PROMPT, CHUNKS, "tenant-2") == 0
    for request in ("a", "b"):
        stock.ask("end", request)


@pytest.mark.parametrize("how", ["end", "free"])
def test_an_aborted_request_gives_its_locks_back(
    agent: AgentProcess, stock: StockProcess, url: str, how: str
) -> None:
    """Found chunks are pinned until the request ends or frees them, also without a load."""
    stock.ask("open", url)
    stock.ask("register")
    store(stock)
    assert stock.ask("lookup", "aborted", PROMPT, CHUNKS) == TOKENS
    assert agent.status()["l1"]["pinned_bytes"] > 0
    if how == "end":
        stock.ask("end", "aborted")
    else:
        stock.ask("free", "aborted", PROMPT, CHUNKS)
    poll_until(lambda: agent.status()["l1"]["pinned_bytes"] == 0)


def test_clearing_drops_all_but_what_is_in_use(
    agent: AgentProcess, stock: StockProcess, url: str
) -> None:
    """A reset keeps chunks that a request has found, which still load, and drops the others."""
    stock.ask("open", url)
    stock.ask("register")
    store(stock)
    store(stock, prompt=PROMPT + 1)
    assert stock.ask("lookup", "held", PROMPT, CHUNKS) == TOKENS
    assert stock.ask("reset") is True
    assert stock.ask("lookup", "gone", PROMPT + 1, CHUNKS) == 0
    assert stock.ask("retrieve", "held", PROMPT, CHUNKS, LOADED) == []
    assert stock.ask("digest", LOADED, BLOCKS) == stock.ask("digest", STORED, BLOCKS)
    for request in ("held", "gone"):
        stock.ask("end", request)
    assert stock.ask("reset") is True
    assert agent.status()["l1"]["objects"] == 0


def test_two_workers_hold_a_prompt_together(
    stock: StockProcess, second_stock: StockProcess, url: str
) -> None:
    """Under a world size of 2 a prompt is found once both ranks stored; each loads its own part."""
    hold_a_prompt_together(stock, second_stock, url)


def test_shutting_down_leaves_nothing(agent: AgentProcess, stock: StockProcess, url: str) -> None:
    """An orderly shutdown unregisters: no instance, no worker memory mapped."""
    stock.ask("open", url)
    instance_id = int(stock.ask("register"))
    store(stock)
    assert set(agent.instances()) == {instance_id}
    stock.ask("close")
    poll_until(lambda: not agent.instances())
    assert agent.reaps() == []
    assert agent.status()["worker_liveness"]["tracked_instances"] == 0
    assert "lmcache_kv_" not in Path(f"/proc/{agent.pid}/maps").read_text()


def test_a_client_that_wants_kv_events_is_told_what_comes_and_goes(
    agent: AgentProcess, stock: StockProcess, url: str
) -> None:
    """Chunks with parent and tokens in order; a clear withdraws them."""
    stock.ask("open", url, kv_events=True)
    stock.ask("register")
    store(stock)
    first, second = stock.ask("kv_events", CHUNKS)
    kind, parent, (first_hash,), token = first
    assert (kind, parent, token) == ("CacheStoreEvent", "", 10_000)
    kind, parent, (second_hash,), token = second
    assert (kind, parent, token) == ("CacheStoreEvent", first_hash, 10_064)
    assert stock.ask("reset") is True
    ((kind, _, gone, _),) = stock.ask("kv_events", 1)
    assert (kind, sorted(gone)) == ("CacheRemoveEvent", sorted([first_hash, second_hash]))
    assert stock.ask("healthy") == [True, True]
    assert agent.metric("kv_event_streams") == 1
    stock.ask("close")
    poll_until(lambda: agent.metric("kv_event_streams") == 0)


@pytest.mark.parametrize("agent_flags", [("--chunk-size=64", "--kv-event-log-size=0")])
def test_a_client_that_wants_kv_events_works_without(
    agent: AgentProcess, stock: StockProcess
) -> None:
    """No log: the client falls back to its own stores and serves on."""
    stock.ask("open", agent.url, kv_events=True)
    stock.ask("register")
    store(stock)
    assert len(stock.ask("kv_events", 1)) >= 1
    assert stock.ask("healthy") == [True, True]
