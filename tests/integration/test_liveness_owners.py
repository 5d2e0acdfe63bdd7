"""Two owners of one instance id: never a silent mix-up of their memory."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import ExitStack

import pytest

from lmcache_worker.shared_memory import SharedKvCache
from lmcache_worker.wire import RequestRefused
from tests.fakes.agent_process import FAST_WINDOWS
from tests.fakes.stub_agent import StubAgent
from tests.fakes.worker_process import BLOCK_TOKENS, BLOCKS, LAYERS, Worker
from tests.polling import poll_until

CLOSE_SECONDS = 1.0
REAP_TIMEOUT_SECONDS = 2.0
ID = 1
OTHER_ADDRESS = "127.0.0.2"


@pytest.fixture
def agent() -> Generator[StubAgent]:
    """T = 2 s, close window 1 s, by the stub's back door."""
    windows = {
        "reap_timeout_seconds": REAP_TIMEOUT_SECONDS,
        "close_confirm_seconds": CLOSE_SECONDS,
        "hint_confirm_seconds": CLOSE_SECONDS,
    }
    with StubAgent(*FAST_WINDOWS, windows=windows) as agent:
        yield agent


@pytest.fixture
def stack() -> Generator[ExitStack]:
    """The workers of a test."""
    with ExitStack() as stack:
        yield stack


def from_here(agent: StubAgent) -> str:
    """Connect from the agent's own address."""
    return agent.url


def from_elsewhere(agent: StubAgent) -> str:
    """Connect from another address, as another pod does."""
    return f"tcp://{OTHER_ADDRESS}:0;127.0.0.1:{agent.port}"


def start(stack: ExitStack, url: str) -> Worker:
    """Start an owner of the id."""
    return stack.enter_context(Worker(url, ID))


def proven_peer(agent: StubAgent) -> str | None:
    """Return the owner's address with its port, once its connection is known; it may take 2 s."""
    peer: str = agent.instances()[ID]["peer"]
    return peer if ":" in peer else None


def handles(*workers: Worker) -> set[str]:
    """Return the segments of some workers."""
    return {name for worker in workers for name in worker.segments}


def open_handles(agent: StubAgent) -> set[str]:
    """Return the segments that the agent has mapped."""
    return set(agent.counts()["handles"])


def use_other_layout(stack: ExitStack, worker: Worker) -> None:
    """Give a worker memory of another shape: more heads."""
    caches = [
        stack.enter_context(SharedKvCache.create([2, BLOCKS, BLOCK_TOKENS, 4, 8]))
        for _ in range(LAYERS)
    ]
    worker.replace_memory(caches)


@pytest.mark.parametrize("layout", ["same", "other"])
def test_a_stranger_does_not_get_an_id_whose_owner_is_connected(
    layout: str, agent: StubAgent, stack: ExitStack
) -> None:
    """Refused with the reason that names both; nothing of the owner's is touched or refreshed."""
    owner = start(stack, from_here(agent))
    owner.register()
    stranger = start(stack, from_elsewhere(agent))
    if layout == "other":
        use_other_layout(stack, stranger)
    with pytest.raises(RequestRefused, match=r"127\.0\.0\.2.*127\.0\.0\.1"):
        stranger.register()
    assert stranger.ping() is True  # bothers nobody, and refreshes nothing
    assert agent.instances()[ID]["has_liveness_signal"] is False
    assert not moves(stranger)
    with pytest.raises(RequestRefused, match=r"does not speak|belongs to"):
        stranger.unregister()

    assert owner.ping() is True
    assert owner.store(1)
    assert open_handles(agent) == handles(owner)
    assert agent.counts()["gathered"] == 2  # the owner's two chunks
    assert agent.metric("strangers_refused_total", operation="ping") == 1


def moves(worker: Worker) -> bool:
    """Tell whether a store or a retrieve of a worker does anything."""
    succeeded = []
    for transfer in (worker.store, worker.retrieve):
        try:
            succeeded.append(transfer(7))
        except RequestRefused:
            succeeded.append(False)
    return any(succeeded)


def test_a_stranger_with_identical_content_is_refused_too(
    agent: StubAgent, stack: ExitStack
) -> None:
    """Its messages would otherwise keep somebody else's entry alive."""
    owner = start(stack, from_here(agent))
    owner.register()
    stranger = start(stack, from_elsewhere(agent))
    stranger.borrow_memory(owner)
    with pytest.raises(RequestRefused):
        stranger.register()
    assert agent.instances()[ID]["peer"].startswith("127.0.0.1")
    assert open_handles(agent) == handles(owner)


@pytest.mark.parametrize("layout", ["same", "other"])
def test_the_same_peer_replaces_the_context_as_a_whole(
    layout: str, agent: StubAgent, stack: ExitStack
) -> None:
    """The old memory is closed and never used again; the first one's late goodbye is refused."""
    first = start(stack, from_here(agent))
    first.register()
    peer = poll_until(lambda: proven_peer(agent), "its connection is proven")
    second = start(stack, from_here(agent))
    if layout == "other":
        use_other_layout(stack, second)
    second.register()
    poll_until(lambda: open_handles(agent) == handles(second))
    assert agent.counts()["opened"] == 2
    assert agent.counts()["closed"] == 1
    (replaced,) = poll_until(lambda: agent.log_records("context_replaced"))
    assert replaced["level"] == "warning"
    assert replaced["earlier_peer"] == peer
    assert replaced["peer"].startswith("127.0.0.1")  # its port comes with its first reply

    with pytest.raises(RequestRefused, match="belongs to"):
        first.unregister()
    assert second.ping() is True
    assert second.store(1)
    assert open_handles(agent) == handles(second)


def test_the_same_content_again_is_no_new_registration(agent: StubAgent, stack: ExitStack) -> None:
    """It refreshes, and what it opened on the way is closed."""
    first = start(stack, from_here(agent))
    first.register()
    second = start(stack, from_here(agent))
    second.borrow_memory(first)
    poll_until(lambda: agent.instances()[ID]["last_seen_seconds"] > 1)
    second.register()
    assert agent.instances()[ID]["last_seen_seconds"] < 1
    assert agent.counts()["handles"] == dict.fromkeys(first.segments, 1)
    assert agent.status()["worker_liveness"]["releases"] == []


def test_the_end_of_the_first_owner_does_not_end_the_second(
    agent: StubAgent, stack: ExitStack
) -> None:
    """The first dies without a goodbye, and T passes while the second one pings."""
    first = start(stack, from_here(agent))
    first.register()
    assert first.ping() is True
    second = start(stack, from_here(agent))
    second.register()
    first.close()
    ping_through(agent, second, REAP_TIMEOUT_SECONDS + CLOSE_SECONDS)
    assert open_handles(agent) == handles(second)
    assert agent.counts()["opened"] - agent.counts()["closed"] == 1


@pytest.mark.parametrize("url", [from_here, from_elsewhere])
def test_once_the_owner_is_gone_its_id_is_free_for_anybody(
    url: object, agent: StubAgent, stack: ExitStack
) -> None:
    """Even before it is reaped: every connection of the id is closed."""
    assert callable(url)
    owner = start(stack, from_here(agent))
    owner.register()
    owner.close()
    poll_until(lambda: agent.instances()[ID]["state"] == "closed")
    heir = start(stack, url(agent))
    heir.register()
    ping_through(agent, heir, 2 * CLOSE_SECONDS)
    assert open_handles(agent) == handles(heir)
    assert heir.store(1)


def ping_through(agent: StubAgent, worker: Worker, seconds: float) -> None:
    """Ping for a while; the instance stays."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert worker.ping() is True
        assert ID in agent.instances()
        time.sleep(0.1)
    assert agent.reaps() == []
