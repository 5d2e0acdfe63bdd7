"""Messages too large to be copied between libzmq and Python: right bytes, both ways, and faults."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from lmcache_nodeagent.protocol.pickled_tensors import read_tensors, write_tensors
from lmcache_worker.client import WorkerClient
from lmcache_worker.engine_driven import EngineDrivenClient
from lmcache_worker.wire import CacheKey, ChunkDescription
from tests.fakes.agent_process import FAST_WINDOWS, AgentProcess
from tests.fakes.raw_client import RawDealer
from tests.polling import PATIENCE_SECONDS

MODEL, INSTANCE_ID = "large", 1 << 40
TOKENS, CHUNKS, LAYERS, HIDDEN = 256, 4, 8, 128
CHUNK_BYTES = 2 * LAYERS * TOKENS * HIDDEN * 2


@pytest.fixture
def agent() -> Iterator[AgentProcess]:
    """An agent without a pool for workers to map."""
    with AgentProcess(*FAST_WINDOWS, "--supported-transfer-mode=auto") as process:
        yield process


def key(prompt: int, request_id: str) -> CacheKey:
    """Name the chunks of a prompt."""
    tokens = [prompt * 1000 + n for n in range(CHUNKS * TOKENS)]
    return CacheKey(MODEL, 1, 0, tokens, 0, len(tokens), request_id)


def pickled(contents: list[bytes]) -> bytes:
    """A payload as a worker sends it."""
    shape = (2, LAYERS, TOKENS, HIDDEN)
    return b"".join(write_tensors("float16", shape, [memoryview(content) for content in contents]))


def registered(client: WorkerClient) -> EngineDrivenClient:
    """Register a worker that sends its bytes."""
    worker = EngineDrivenClient(client, INSTANCE_ID)
    name, _ = worker.register(
        ChunkDescription(
            INSTANCE_ID,
            MODEL,
            1,
            16,
            LAYERS,
            HIDDEN,
            "float16",
            use_mla=False,
            num_physical_slots=TOKENS,
        )
    )
    assert not name
    return worker


def test_large_chunks_come_back_as_they_were_sent(agent: AgentProcess) -> None:
    """Several prompts in turn, each with bytes of its own, read after the others were stored."""
    prompts = {number: [os.urandom(CHUNK_BYTES) for _ in range(CHUNKS)] for number in range(3)}
    with WorkerClient(agent.url) as client:
        worker = registered(client)
        for number, contents in prompts.items():
            assert worker.commit_store(key(number, f"store-{number}"), pickled(contents))
        for number, contents in prompts.items():
            data = worker.prepare_retrieve(key(number, f"load-{number}"))
            assert isinstance(data, bytes)
            assert [bytes(tensor.data) for tensor in read_tensors(data, CHUNKS)] == contents


def test_large_data_that_are_no_tensors_are_refused(agent: AgentProcess) -> None:
    """Nothing of them is kept, and the worker goes on."""
    good = pickled([os.urandom(CHUNK_BYTES) for _ in range(CHUNKS)])
    with WorkerClient(agent.url) as client:
        worker = registered(client)
        assert not worker.commit_store(key(1, "cut"), good[:-1000])
        assert not worker.commit_store(key(1, "noise"), os.urandom(len(good)))
        assert agent.status()["l1"]["used_bytes"] == 0
        assert worker.commit_store(key(1, "whole"), good)


LARGE = bytes(range(256)) * 4096
PING = b"\x16"

MISPLACED = {
    "uid": [LARGE, PING],
    "operation": [b"\x01", LARGE],
    "word of a stream": [b"\x01", b"", LARGE],
    "instance id": [b"\x01", PING, LARGE],
    "twenty frames": [b"\x01", PING, *[LARGE] * 20],
}


@pytest.mark.parametrize("frames", MISPLACED.values(), ids=MISPLACED)
def test_a_large_frame_in_the_place_of_a_small_one_is_refused(
    agent: AgentProcess, frames: list[bytes]
) -> None:
    """Whichever it is: the same connection is served on."""
    with RawDealer(agent.url) as dealer:
        dealer.send(*frames)
        dealer.skip_uids(2)
        uid = dealer.request("noop")
        # The refusal, where there is one, comes first.
        replies = iter(lambda: dealer.receive(PATIENCE_SECONDS), None)
        assert next(reply.value for reply in replies if reply.uid == uid) == "OK"
