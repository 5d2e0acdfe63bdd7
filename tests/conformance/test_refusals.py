"""What the agent cannot do, it declines at once in a form that stock client code reads."""

from __future__ import annotations

import psutil
import pytest

from tests.conformance.stock_process import StockProcess
from tests.fakes.agent_process import AgentProcess
from tests.polling import BUSY_SECONDS

FLAT_BYTES = 20 * 1024 * 1024

NOT_TRANSFERRED = "(b'', False)"
DECLINED = {
    "store": NOT_TRANSFERRED,
    "store_q": NOT_TRANSFERRED,
    "retrieve": NOT_TRANSFERRED,
    "cb_retrieve_pre_computed": NOT_TRANSFERRED,
    "query_prefetch_status": "0",
    "wait_prefetch_status": "0",
    "prepare_store": "PrepareStoreResponse(context={})",
    "commit_store": "False",
    "prepare_retrieve": "PrepareRetrieveResponse(success=False, data=b'', context={})",
    "commit_retrieve": "True",
    "ping": "False",
}
"""Operations whose failure must not raise inside vLLM's step, with the reply that says no."""

ANSWERED = {
    "unregister_kv_cache": "None",
    "lookup": "None",
    "free_lookup_locks": "None",
    "end_session": "None",
    "clear": "None",
    "report_block_allocation": "None",
    "get_chunk_size": "64",
    "get_experimental": "['kv_event_stream']",
    "noop": "'OK'",
}
"""Operations that have an answer for a stranger."""

Outcomes = dict[str, tuple[str, str, float]]


def check(outcomes: Outcomes, values: dict[str, str]) -> None:
    """Each operation has the value in `values`, or is refused in words; all soon."""
    assert set(values) <= set(outcomes)
    for name, (what, detail, seconds) in outcomes.items():
        expected = ("value", values[name]) if name in values else ("refused", detail)
        assert (what, detail) == expected, name
        assert seconds < BUSY_SECONDS, name
        if what == "refused" and name != "subscribe_kv_events":  # a stream just ends
            assert "ValueError: Response operation" in detail, name
            assert "refused: " in detail, name


@pytest.fixture
def connected(stock: StockProcess, url: str) -> StockProcess:
    """A stock client with a registered worker of its own."""
    stock.ask("open", url)
    stock.ask("register")
    return stock


def assert_unharmed(agent: AgentProcess, stock: StockProcess) -> None:
    """The stock client's loop still runs, and its worker is still served."""
    assert stock.ask("healthy") == [True, True]
    assert stock.ask("ping") is True
    assert stock.ask("store", "after", 1, 2, 1) is True
    assert len(agent.instances()) == 1


def test_a_stranger_is_declined_in_every_operation(
    agent: AgentProcess, connected: StockProcess
) -> None:
    """Valid requests for an unknown instance, or for what this agent does not serve."""
    outcomes = connected.ask("refused_calls")
    what, _, _ = outcomes.pop("subscribe_kv_events")
    assert what == "silence", "a stream has nothing to tell until something is stored"
    check(outcomes, {**DECLINED, **ANSWERED})
    assert_unharmed(agent, connected)


@pytest.mark.parametrize(
    "kind",
    [
        "a frame too few or too many",
        "other types",
        "not msgpack",
        "cut short",
        "nested too deeply",
        "empty frames",
    ],
)
def test_malformed_payloads_are_declined_in_every_operation(
    agent: AgentProcess, connected: StockProcess, kind: str
) -> None:
    """Whatever is wrong with the frames, there is one readable reply and the client lives on."""
    check(connected.ask("malformed_calls", kind), DECLINED)
    assert_unharmed(agent, connected)


def test_unknown_operations_are_refused_by_name(
    agent: AgentProcess, connected: StockProcess
) -> None:
    """A name or a number that no operation has gets its reply too."""
    outcomes: Outcomes = connected.ask("unknown_calls")
    check(outcomes, {})
    assert "no operation 'no_such_operation'" in outcomes["'no_such_operation'"][1]
    assert_unharmed(agent, connected)


def test_five_thousand_declined_loads_cost_no_memory(
    agent: AgentProcess, connected: StockProcess
) -> None:
    """A flood of loads for an unknown instance is declined load by load, and nothing is kept."""
    connected.ask("flood", 500)  # what is allocated once
    process = psutil.Process(agent.pid)
    before = process.memory_info().rss
    assert connected.ask("flood", 5000) == 5000
    assert process.memory_info().rss - before < FLAT_BYTES
    assert_unharmed(agent, connected)
