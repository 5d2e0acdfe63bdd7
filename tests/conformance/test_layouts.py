"""Every layout that the stock client can register, for one rank and for several."""

from __future__ import annotations

import pytest

from tests.conformance.stock_layouts import LAYOUTS
from tests.conformance.stock_process import StockProcess
from tests.fakes.agent_process import AgentProcess
from tests.polling import poll_until

PROMPT, CHUNKS, TOKENS = 1, 2, 128
STORED, LOADED = 8, 24
"""First blocks (of 16 tokens) of two regions of a worker's memory."""


def _round_trip(agent: AgentProcess, stock: StockProcess, layout: str, ranks: int) -> None:
    """Store by every rank, look up once, load by every rank: each gets its own bytes back."""
    everyone = range(ranks)
    for rank in everyone:
        stock.ask("on", rank, "open", agent.url, world_size=ranks, rank=rank)
        stock.ask("on", rank, "register_layout", layout, seed=rank)
    for rank in everyone:
        assert stock.ask("on", 0, "lookup", f"early-{rank}", PROMPT, CHUNKS) == 0
        assert stock.ask("on", rank, "store", "cold", PROMPT, CHUNKS, STORED) is True
    assert stock.ask("on", 0, "lookup", "warm", PROMPT, CHUNKS) == TOKENS
    assert agent.status()["l1"]["pinned_objects"] == ranks * CHUNKS
    seen = []
    for rank in everyone:
        assert stock.ask("on", rank, "retrieve", "warm", PROMPT, CHUNKS, LOADED) == []
        loaded = stock.ask("on", rank, "contents", LOADED * 16, TOKENS)
        assert loaded == stock.ask("on", rank, "contents", STORED * 16, TOKENS)
        seen.append(tuple(loaded))
    assert len(set(seen)) == ranks, "every rank has bytes of its own"
    poll_until(lambda: agent.status()["l1"]["pinned_objects"] == 0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_comes_back_as_it_was_stored(
    agent: AgentProcess, stock: StockProcess, layout: str
) -> None:
    """One rank."""
    _round_trip(agent, stock, layout, 1)


@pytest.mark.parametrize("layout", ["planes_first_nhd", "planes_second_hnd", "latent_with_index"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ranks_hold_a_prompt_together(
    agent: AgentProcess, stock: StockProcess, layout: str, ranks: int
) -> None:
    """It is a hit once all have stored, and its pins go with the last one's load."""
    _round_trip(agent, stock, layout, ranks)


def test_ranks_with_one_latent_cache_read_the_same_object(
    agent: AgentProcess, stock: StockProcess
) -> None:
    """Pure MLA: one rank stores, four read; each consumes a read lock of its own."""
    everyone = range(4)
    for rank in everyone:
        stock.ask("on", rank, "open", agent.url, world_size=4, rank=rank, mla=True)
        stock.ask("on", rank, "register_layout", "latent", seed=rank)
    assert stock.ask("on", 0, "store", "cold", PROMPT, CHUNKS, STORED) is True
    assert stock.ask("on", 0, "lookup", "warm", PROMPT, CHUNKS) == TOKENS
    stored = stock.ask("on", 0, "contents", STORED * 16, TOKENS)
    for rank in everyone:
        (lease,) = [one for one in agent.get("/v1/leases")["leases"] if one["pins"]]
        assert (lease["pinned_objects"], lease["pins"]) == (CHUNKS, (4 - rank) * CHUNKS)
        assert stock.ask("on", rank, "retrieve", "warm", PROMPT, CHUNKS, LOADED) == []
        assert stock.ask("on", rank, "contents", LOADED * 16, TOKENS) == stored
    poll_until(lambda: agent.status()["l1"]["pinned_objects"] == 0)


def test_a_rank_that_never_loads_costs_its_own_share_only(
    agent: AgentProcess, stock: StockProcess
) -> None:
    """The others load theirs; the end of the request gives its pins back."""
    for rank in range(3):
        stock.ask("on", rank, "open", agent.url, world_size=3, rank=rank)
        stock.ask("on", rank, "register_layout", "fused_nhd", seed=rank)
        assert stock.ask("on", rank, "store", "cold", PROMPT, CHUNKS, STORED) is True
    for request in ("warm", "other"):
        assert stock.ask("on", 0, "lookup", request, PROMPT, CHUNKS) == TOKENS
    for rank in (0, 2):
        assert stock.ask("on", rank, "retrieve", "warm", PROMPT, CHUNKS, LOADED) == []
    assert agent.status()["l1"]["pinned_objects"] == 3 * CHUNKS
    stock.ask("on", 0, "end", "warm")
    poll_until(lambda: len([o for o in agent.get("/v1/leases")["leases"] if o["pins"]]) == 1)
    assert agent.status()["l1"]["pinned_objects"] == 3 * CHUNKS, "the other request's"
    stock.ask("on", 0, "end", "other")
    poll_until(lambda: agent.status()["l1"]["pinned_objects"] == 0)
