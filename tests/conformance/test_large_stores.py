"""A stock worker whose store is too large for a message."""

from __future__ import annotations

import time

from tests.conformance.stock_process import StockProcess
from tests.fakes.agent_process import AgentProcess

LARGE = 160
"""Chunks of 8 KiB, for a message of 1 MiB."""

TIME_OUT_SECONDS, FAR_LESS_SECONDS = 240.0, 200.0


def test_a_store_that_does_not_fit_a_message_is_answered(agent_flags: tuple[str, ...]) -> None:
    """Its worker learns so with its next heartbeat, long before its time-out, and goes on."""
    flags = (*agent_flags, "--supported-transfer-mode=auto", "--max-message-bytes=1048576")
    with AgentProcess(*flags) as agent, StockProcess() as stock:
        stock.ask("open", agent.url, "engine_driven", timeout=TIME_OUT_SECONDS)
        stock.ask("register")
        started = time.monotonic()
        assert stock.ask("store", "large", 1, LARGE, 0) is False
        assert time.monotonic() - started < FAR_LESS_SECONDS
        refused = {"operation": "commit_store", "reason": "too_large"}
        assert agent.metric("requests_refused_total", **refused) == 1
        stock.ask("await_healthy")
        assert stock.ask("store", "small", 2, 2, 1) is True
        assert stock.ask("lookup", "warm", 2, 2) == 2 * 64
        assert stock.ask("retrieve", "warm", 2, 2, 24) == []
        assert stock.ask("digest", 24, 8) == stock.ask("digest", 1, 8)
        assert stock.ask("lookup", "lost", 1, LARGE) == 0
