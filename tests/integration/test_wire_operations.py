"""Every operation there is, and those there are not: one answer each, in a form clients know."""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial

import pytest
from msgspec import msgpack

from lmcache_nodeagent.protocol.operations import OPERATIONS
from lmcache_worker.client import WorkerClient
from lmcache_worker.wire import CacheKey, RequestRefused
from tests.fakes.agent_process import FAST_WINDOWS, AgentProcess
from tests.fakes.failing_agent import HOW
from tests.fakes.raw_client import (
    IN_BAND_NO,
    Footprint,
    RawDealer,
    SteadyPinger,
    counted,
    says_no,
)
from tests.fakes.worker_process import WorkerProcess
from tests.fixtures.wire import requests
from tests.polling import BUSY_SECONDS, PATIENCE_SECONDS, poll_until

MIB = 1 << 20
SERVED = {
    "register_kv_cache",
    "unregister_kv_cache",
    "store",
    "retrieve",
    "lookup",
    "query_prefetch_status",
    "wait_prefetch_status",
    "free_lookup_locks",
    "end_session",
    "clear",
    "get_chunk_size",
    "ping",
    "report_block_allocation",
    "noop",
    "get_experimental",
    "subscribe_kv_events",
}
STREAMS = {"subscribe_kv_events"}
"""Told batch by batch; the answer to a cancel is the end."""

KNOWN_IDS = {known.wire_id for known in OPERATIONS.values()}
NOT_OPERATIONS: list[int | str] = [
    *(number for number in range(61) if number not in KNOWN_IDS),
    -1,
    999,
    1 << 63,
    (1 << 64) - 1,
    "",
    "PING",
    "ping ",
    "cb_register_rope_v3",
    "__init__",
    "x" * 100,
    "операция",
]


@pytest.fixture(scope="module")
def agent() -> Iterator[AgentProcess]:
    """Run one agent for the whole file."""
    with AgentProcess(*FAST_WINDOWS) as process:
        yield process


def test_every_number_and_name_is_answered_once_with_an_empty_body(agent: AgentProcess) -> None:
    """0 to 60, names, the ends of the integers; nothing happens to a worker or to what it stored.

    Operations without arguments are the only ones that an empty body fits.
    """
    asked = [*range(61), *NOT_OPERATIONS, *OPERATIONS]
    with WorkerProcess(agent.url, 7) as worker, RawDealer(agent.url) as dealer:
        worker.ask("register")
        assert worker.ask("store", 1) is True
        before = agent.status()["l1"]
        for operation in asked:
            dealer.request(operation)
        replies = dealer.replies(len(asked))
        assert [reply.uid for reply in replies] == list(range(len(asked)))
        assert dealer.silent()
        names = {known.wire_id: name for name, known in OPERATIONS.items()}
        for operation, reply in zip(asked, replies, strict=True):
            name = names.get(operation, operation)
            if name in {"get_chunk_size", "noop", "get_experimental"}:
                assert reply.operation == operation
            else:
                assert says_no(str(name), reply), operation
        assert agent.status()["l1"] == before
        assert set(agent.instances()) == {7}
        assert worker.ask("lookup", 1) == 2


@pytest.mark.parametrize("operation", NOT_OPERATIONS)
def test_what_is_no_operation_is_refused_whatever_its_body(
    agent: AgentProcess, operation: int | str
) -> None:
    """At once, naming what was asked and the release that the agent speaks; counted."""
    name = "malformed_messages_total"
    before = counted(agent.http_port, name, reason="unknown_operation")
    bodies: list[list[bytes]] = [[], *(requests.frames(known) for known in OPERATIONS)]
    with RawDealer(agent.url) as dealer:
        for body in bodies:
            reply = dealer.reply_to(dealer.request(operation, *body))
            assert reply.refusal == f"refused: LMCache 0.5.6 has no operation {operation!r}"
        assert dealer.silent()
    wanted = before + len(bodies)
    poll_until(
        lambda: counted(agent.http_port, name, reason="unknown_operation") >= wanted, "counted"
    )


@pytest.mark.parametrize("operation", sorted(OPERATIONS))
def test_every_operation_is_answered_once_by_number_and_by_name(
    agent: AgentProcess, operation: str
) -> None:
    """With a good body. What no module serves here says so, and its name is in the log."""
    spellings: list[int | str] = [operation]
    if (number := OPERATIONS[operation].wire_id) is not None:
        spellings.append(number)
    with RawDealer(agent.url) as dealer:
        for spelling in spellings:
            uid = dealer.request(spelling, *requests.frames(operation))
            if operation in STREAMS:
                dealer.send(msgpack.encode(uid), b"", b"cancel")
            reply = dealer.reply_to(uid)
            if operation in STREAMS and reply.value is not None:  # the first batch was faster
                reply = dealer.reply_to(uid)
            if operation not in SERVED:
                assert says_no(operation, reply)
            elif reply.refusal is None:
                assert reply.operation == spelling  # as it was asked
        assert dealer.silent()
    if operation not in SERVED:
        poll_until(
            lambda: counted(
                agent.http_port,
                "requests_refused_total",
                operation=operation,
                reason="unsupported_operation",
            ),
            "it is counted by its name",
        )


@pytest.mark.parametrize("how", ["raise", "unencodable"])
def test_a_handler_that_fails_is_answered_once_in_a_form_clients_read_as_failure(how: str) -> None:
    """Every served operation: an exception inside, or a result that cannot be encoded."""
    with (
        AgentProcess(module="tests.fakes.failing_agent", environ={HOW: how}) as agent,
        RawDealer(agent.url) as dealer,
    ):
        footprint = Footprint(agent.pid)
        for operation in sorted(SERVED):
            for _ in range(3):
                uid = dealer.request(operation, *requests.frames(operation))
                reply = dealer.reply_to(uid)
                assert says_no(operation, reply), (operation, reply)
        footprint.assert_threads_live()
        assert agent.get("/healthz")["healthy"] is True
        for operation in SERVED:
            failed = partial(counted, agent.http_port, "requests_failed_total", operation=operation)
            poll_until(lambda: failed() == 3, f"failures of {operation} are counted")  # noqa: B023
        assert agent.stop() == 0


def test_our_own_client_reads_every_failure_as_one() -> None:
    """False where it asks for a yes or no, an exception with the reason elsewhere."""
    key = CacheKey("m", 1, 0, list(range(256)), 0, 256, "r")
    with (
        AgentProcess(module="tests.fakes.failing_agent", environ={HOW: "raise"}) as agent,
        WorkerClient(agent.url, timeout_seconds=PATIENCE_SECONDS) as client,
    ):
        assert client.store(key, 1, [[0]]) == (b"", False)
        assert client.retrieve(key, 1, [[0]]) == (b"", False)
        assert client.query_prefetch_status("r") == 0
        assert client.ping(1) is False
        for call in (
            client.get_chunk_size,
            client.noop,
            client.clear,
            lambda: client.lookup(key),
            lambda: client.end_session("r"),
            lambda: client.unregister(1),
        ):
            with pytest.raises(RequestRefused, match="RuntimeError"):
                call()


@pytest.mark.parametrize("operation", ["store", "retrieve", "lookup", "register_kv_cache"])
def test_requests_that_wait_when_the_agent_stops_are_still_answered(operation: str) -> None:
    """Those that never end are not waited for: a no for each, and exit 0 within ten seconds."""
    with (
        AgentProcess(module="tests.fakes.failing_agent", environ={HOW: "never"}) as agent,
        RawDealer(agent.url) as dealer,
    ):
        for _ in range(20):
            dealer.request(operation, *requests.frames(operation))
        assert dealer.call("no operation").refusal  # what came before has been read
        agent.signal(signal.SIGTERM)
        started = time.monotonic()
        replies = dealer.replies(20)
        assert [reply.uid for reply in replies] == list(range(20))
        assert all(says_no(operation, reply) for reply in replies)
        assert agent.process.wait(PATIENCE_SECONDS) == 0
        assert time.monotonic() - started < 10 + BUSY_SECONDS


def test_five_thousand_retrieves_for_an_unknown_instance_leave_nothing(
    agent: AgentProcess,
) -> None:
    """Each is answered false, as many as were asked are counted, memory stays flat."""
    key = {**requests.KEY, "token_ids": list(range(4096)), "end": 4096, "worker_id": 0}
    frames = requests.frames("retrieve")
    frames[0], frames[1] = msgpack.encode(key), msgpack.encode(123)
    with SteadyPinger(agent.url), RawDealer(agent.url) as dealer:
        before = _not_registered(agent)
        for _ in range(200):  # what the first requests allocate stays
            dealer.reply_to(dealer.request("retrieve", *frames))
        footprint = Footprint(agent.pid)
        answered: Counter[object] = Counter()
        for _ in range(50):
            for _ in range(100):
                dealer.request("retrieve", *frames)
            replies = dealer.replies(100)
            assert all(says_no("retrieve", reply) for reply in replies)
            answered.update(reply.uid for reply in replies)
        assert len(answered) == 5000
        assert set(answered.values()) == {1}
        footprint.growth_stays_below(20 * MIB)
        # What earlier tests asked may be counted after `before` was read; it is not much.
        poll_until(lambda: _not_registered(agent) >= before + 5200, "all are counted")


def test_ways_of_saying_no_are_known_for_every_operation_in_the_table() -> None:
    """The list that these tests go by names no operation that is not there."""
    assert set(IN_BAND_NO) <= set(OPERATIONS)


def _not_registered(agent: AgentProcess) -> float:
    refused = {"operation": "retrieve", "reason": "not_registered"}
    return counted(agent.http_port, "requests_refused_total", **refused)
