"""Agents and stock processes for the conformance tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conformance.stock_process import STOCK_PYTHON, StockProcess
from tests.fakes.agent_process import FAST_WINDOWS, AgentProcess

CHUNK_TOKENS = 64


@pytest.fixture(scope="module")
def stock_process() -> Iterator[StockProcess]:
    """One stock process for all tests of a module that do not kill it: its imports take seconds."""
    if not STOCK_PYTHON.exists():
        pytest.fail("there is no stock environment; `make conformance` makes it")
    with StockProcess() as process:
        yield process


@pytest.fixture(scope="module")
def second_stock_process(stock_process: StockProcess) -> Iterator[StockProcess]:
    """Another one, for what takes two workers."""
    assert stock_process.pid
    with StockProcess() as process:
        yield process


@pytest.fixture
def agent_flags(tmp_path: Path) -> tuple[str, ...]:
    """The flags of this test's agents: both transports, small chunks, short windows."""
    return (f"--chunk-size={CHUNK_TOKENS}", f"--ipc-path={tmp_path}/agent.sock", *FAST_WINDOWS)


@pytest.fixture
def agent(agent_flags: tuple[str, ...]) -> Iterator[AgentProcess]:
    """A running agent."""
    with AgentProcess(*agent_flags) as process:
        yield process


@pytest.fixture(params=["tcp", "ipc"])
def url(request: pytest.FixtureRequest, agent: AgentProcess, tmp_path: Path) -> str:
    """Where the stock client connects; each test that asks runs once over each transport."""
    return agent.url if request.param == "tcp" else f"ipc://{tmp_path}/agent.sock"


@pytest.fixture
def stock(stock_process: StockProcess, agent: AgentProcess) -> Iterator[StockProcess]:
    """The shared stock process; its adapters are shut down before the agent stops."""
    assert agent.port
    yield stock_process
    stock_process.ask("close")


@pytest.fixture
def second_stock(second_stock_process: StockProcess, agent: AgentProcess) -> Iterator[StockProcess]:
    """The other shared process, treated the same."""
    assert agent.port
    yield second_stock_process
    second_stock_process.ask("close")
