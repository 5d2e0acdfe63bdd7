"""What one client sends without waiting, or does not read, takes up a bounded part of memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import zmq
from msgspec import msgpack

from lmcache_nodeagent.protocol.pickled_tensors import write_tensors
from lmcache_worker.client import WorkerClient
from lmcache_worker.engine_driven import EngineDrivenClient
from lmcache_worker.wire import CacheKey, ChunkDescription, encode_request
from tests.fakes.agent_process import FAST_WINDOWS, AgentProcess
from tests.fakes.raw_client import Footprint, RawDealer, SteadyPinger, counted, says_no
from tests.fakes.stub_agent import StubAgent
from tests.fakes.worker_process import Worker
from tests.polling import poll_until

MIB = 1 << 20
"""Far beyond what it takes: no ping waits for a thread."""

LARGEST = 4 * MIB
OF_ONE = 2 * LARGEST
IN_ALL = 2 * OF_ONE
BOUNDS = (f"--max-message-bytes={LARGEST}", f"--max-waiting-bytes={IN_ALL}")
PICKLE_MODE = "--supported-transfer-mode=auto"
ONE_THREAD = (PICKLE_MODE, "--max-gpu-workers=1", "--transfer-deadline-seconds=0")
CHUNK_TOKENS, LAYERS, HIDDEN = 256, 2, 1024
CHUNK_BYTES = 2 * LAYERS * CHUNK_TOKENS * HIDDEN * 2
INSTANCE = 1 << 40


@pytest.fixture
def stuck() -> Iterator[StubAgent]:
    """An agent whose only transfer thread is in a copy that does not end."""
    with (
        StubAgent(*FAST_WINDOWS, *BOUNDS, *ONE_THREAD) as agent,
        Worker(agent.url, 1) as worker,
    ):
        worker.register()
        agent.hold("gather")
        worker.begin_store(1)
        poll_until(lambda: agent.holding("gather"))
        yield agent
        agent.let_go("gather")


def _send(dealer: RawDealer, count: int, data: bytes) -> None:
    for _ in range(count):
        dealer.request("commit_store", b"\x01", msgpack.encode(5), data)


def _waiting(agent: AgentProcess, kind: str) -> float:
    return counted(agent.http_port, "waiting_bytes", kind=kind)


def _refused(agent: AgentProcess) -> float:
    return counted(agent.http_port, "requests_refused_total", reason="too_much_waiting")


def test_large_requests_that_wait_are_bounded(stuck: StubAgent) -> None:
    """200 of a megabyte: two of the largest size wait, the others are answered no meanwhile."""
    data = bytes(MIB - 100)
    with SteadyPinger(stuck.url), RawDealer(stuck.url) as dealer:
        footprint = Footprint(stuck.pid)
        _send(dealer, 200, data)
        refused = dealer.replies(200 - OF_ONE // MIB)
        assert len(refused) == 200 - OF_ONE // MIB
        assert all(says_no("commit_store", reply) for reply in refused)
        poll_until(lambda: _refused(stuck) == len(refused), "each is counted")
        assert OF_ONE - 8 * 100 < _waiting(stuck, "requests") <= OF_ONE
        footprint.growth_stays_below(OF_ONE + 30 * MIB)
        stuck.let_go("gather")
        assert len(dealer.replies(OF_ONE // MIB)) == OF_ONE // MIB
        poll_until(lambda: _waiting(stuck, "requests") == 0)
        footprint.growth_stays_below(30 * MIB)


def test_all_clients_together_are_bounded(stuck: StubAgent) -> None:
    """The third one is refused what is large, and served what is small."""
    with ExitStack() as stack:
        dealers = [stack.enter_context(RawDealer(stuck.url)) for _ in range(3)]
        for dealer in dealers[:2]:
            _send(dealer, 8, bytes(MIB - 100))
        poll_until(lambda: _waiting(stuck, "requests") > IN_ALL - MIB)
        _send(dealers[2], 1, bytes(MIB))
        assert says_no("commit_store", dealers[2].reply_to(0))
        assert dealers[2].call("end_session", "r1").refusal is None
        (record,) = poll_until(lambda: stuck.log_records("request_refused"))
        assert f"of at most {IN_ALL} for all" in record["detail"]


def _key(prompt: int) -> CacheKey:
    tokens = [prompt] * CHUNK_TOKENS
    return CacheKey("demo/model", 1, 0, tokens, 0, CHUNK_TOKENS, f"r{prompt}")


def _stored_chunk(client: WorkerClient) -> None:
    """Register a worker that sends its bytes, and let it send a chunk."""
    transfers = EngineDrivenClient(client, INSTANCE)
    transfers.register(
        ChunkDescription(
            instance_id=INSTANCE,
            model_name="demo/model",
            world_size=1,
            block_size=16,
            num_layers=LAYERS,
            hidden_dim_size=HIDDEN,
            dtype_str="float16",
            use_mla=False,
            num_physical_slots=CHUNK_TOKENS,
        )
    )
    shape = (2, LAYERS, CHUNK_TOKENS, HIDDEN)
    chunk = b"".join(write_tensors("float16", shape, [memoryview(bytes(CHUNK_BYTES))]))
    assert transfers.commit_store(_key(1), chunk)


def test_large_replies_that_are_not_read_are_bounded() -> None:
    """100 loads of two megabytes, unread: what does not fit is answered no; each has a reply."""
    options: dict[int, int | bytes] = {zmq.RCVHWM: 1, zmq.RCVBUF: 4096}
    with (
        AgentProcess(*FAST_WINDOWS, *BOUNDS, PICKLE_MODE) as agent,
        WorkerClient(agent.url) as worker,
        RawDealer(agent.url, options) as slow,
        SteadyPinger(agent.url),
    ):
        _stored_chunk(worker)
        footprint = Footprint(agent.pid)
        frames = encode_request(0, "prepare_retrieve", [_key(1), INSTANCE])[2:]
        for _ in range(100):
            slow.request("prepare_retrieve", *frames)
        name = "retrieves_total"
        poll_until(lambda: counted(agent.http_port, name, ok="true") == 100)
        assert CHUNK_BYTES < _waiting(agent, "unread_replies") <= OF_ONE
        footprint.growth_stays_below(OF_ONE + 30 * MIB)

        replies = slow.replies(100)
        assert {reply.uid for reply in replies} == set(range(100))
        refused = [reply for reply in replies if says_no("prepare_retrieve", reply)]
        whole = [reply for reply in replies if len(reply[2]) > CHUNK_BYTES]
        assert len(whole) + len(refused) == 100
        assert refused
        poll_until(lambda: _refused(agent) == len(refused), "each is counted")
        poll_until(lambda: _waiting(agent, "unread_replies") == 0)
        assert len(slow.reply_to(slow.request("prepare_retrieve", *frames))[2]) > CHUNK_BYTES
