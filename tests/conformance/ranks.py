"""Two workers of one model, each with a part of every prompt."""

from __future__ import annotations

from tests.conformance.stock_process import StockProcess

PROMPT, CHUNKS, TOKENS, BLOCKS = 1, 2, 128, 8
STORED, LOADED = 1, 24


def hold_a_prompt_together(
    stock: StockProcess, second_stock: StockProcess, url: str, *mode: str
) -> None:
    """Check that a prompt is found once both ranks stored, and that each loads its own part."""
    ranks = (stock, second_stock)
    for rank, worker in enumerate(ranks):
        worker.ask("open", url, *mode, world_size=2, rank=rank)
        worker.ask("register", seed=rank)
    assert stock.ask("store", "cold", PROMPT, CHUNKS, STORED) is True
    assert stock.ask("lookup", "half", PROMPT, CHUNKS) == 0
    assert second_stock.ask("store", "cold", PROMPT, CHUNKS, STORED) is True
    assert stock.ask("lookup", "warm", PROMPT, CHUNKS) == TOKENS
    for worker in ranks:  # both at once
        worker.tell("retrieve", "warm", PROMPT, CHUNKS, LOADED)
    assert [worker.result() for worker in ranks] == [[], []]
    loaded = [worker.ask("digest", LOADED, BLOCKS) for worker in ranks]
    assert loaded == [worker.ask("digest", STORED, BLOCKS) for worker in ranks]
    assert loaded[0] != loaded[1]
    for request in ("half", "warm"):
        stock.ask("end", request)
