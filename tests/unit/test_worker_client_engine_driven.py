"""The worker's engine-driven calls: what is sent, how replies are read; and the mapped pool."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec.msgpack import decode, encode

from lmcache_worker.client import WorkerClient
from lmcache_worker.engine_driven import EngineDrivenClient, MappedPool
from lmcache_worker.wire import BadReply, CacheKey, ChunkDescription, PoolSlot, StorePlan

KEY = CacheKey("demo/model", 1, 0, range(600), 0, 512, "r1")
WIRE_SLOT = {"offset": 8, "length": 4, "shape": [2, 2], "dtype": "uint8"}
SLOT = PoolSlot(8, 4, [2, 2], "uint8")


class Answering:
    """A connection that answers every request with one value."""

    def __init__(self, value: object) -> None:
        self.value = value
        self.requests: list[list[object]] = []
        self._uid = b""
        self._operation = b""

    def send(self, frames: Sequence[bytes]) -> None:
        """Keep the request."""
        self._uid, self._operation = frames[:2]
        self.requests.append([decode(frame) for frame in frames[1:]])

    def receive(self, timeout_seconds: float) -> list[bytes] | None:
        """Answer it."""
        del timeout_seconds
        return [self._uid, self._operation, encode(self.value)]

    def close(self) -> None:
        """Nothing is open."""


def calls(value: object) -> tuple[EngineDrivenClient, Answering]:
    """The calls of worker 7, all answered with `value`."""
    connection = Answering(value)
    client = WorkerClient("tcp://nowhere", connection=connection)
    return EngineDrivenClient(client, 7), connection


def test_a_registration_tells_the_pool() -> None:
    """One map goes out, name and size come back."""
    worker, server = calls({"shm_name": "pool", "pool_size": 4096})
    description = ChunkDescription(
        7, "m", 1, 16, 2, 8, "float16", use_mla=False, num_physical_slots=32
    )
    assert worker.register(description) == ("pool", 4096)
    ((operation, sent),) = server.requests
    assert operation == 14
    assert sent == {
        "instance_id": 7,
        "model_name": "m",
        "world_size": 1,
        "block_size": 16,
        "num_layers": 2,
        "hidden_dim_size": 8,
        "dtype_str": "float16",
        "use_mla": False,
        "num_physical_slots": 32,
    }
    with pytest.raises(BadReply):
        calls({"shm_name": 1, "pool_size": "x"})[0].register(description)


def test_a_goodbye_names_the_worker() -> None:
    """Operation 15."""
    worker, server = calls(None)
    worker.unregister()
    assert server.requests == [[15, 7]]


def test_a_store_is_planned_or_not() -> None:
    """Slots and their chunks; nothing to write; nothing said; nonsense."""
    context = {"slots": [WIRE_SLOT], "chunk_indices": [1]}
    worker, server = calls({"context": context})
    assert worker.prepare_store(KEY) == StorePlan([SLOT], [1])
    assert server.requests[0][0] == 16
    assert calls({"context": {"slots": [], "chunk_indices": []}})[0].prepare_store(KEY) == (
        StorePlan([], [])
    )
    assert calls({"context": {}})[0].prepare_store(KEY) is None
    for slot in ({"offset": 1}, {**WIRE_SLOT, "shape": 1}):
        with pytest.raises(BadReply):
            calls({"context": {"slots": [slot], "chunk_indices": [0]}})[0].prepare_store(KEY)
    with pytest.raises(BadReply):
        calls([])[0].prepare_store(KEY)


def test_a_commit_sends_what_it_has() -> None:
    """Empty where the slots are written."""
    worker, server = calls(value=True)
    assert worker.commit_store(KEY)
    assert worker.commit_store(KEY, b"tensors")
    assert [(request[0], request[-1]) for request in server.requests] == [
        (17, b""),
        (17, b"tensors"),
    ]
    assert not calls(value=False)[0].commit_store(KEY)


def test_chunks_are_told_of_or_given_or_not_there() -> None:
    """Slots, bytes, a miss; nonsense."""
    found = {"success": True, "data": b"", "context": {"slots": [WIRE_SLOT]}}
    worker, server = calls(found)
    assert worker.prepare_retrieve(KEY) == [SLOT]
    assert server.requests[0][0] == 18
    assert calls({"success": True, "data": b"t", "context": {}})[0].prepare_retrieve(KEY) == b"t"
    missing = {"success": False, "data": b"", "context": {}}
    assert calls(missing)[0].prepare_retrieve(KEY) is None
    with pytest.raises(BadReply):
        calls([])[0].prepare_retrieve(KEY)
    worker, server = calls(value=True)
    worker.commit_retrieve(KEY)
    assert server.requests[0][0] == 19


def test_the_pool_is_mapped_and_written_through(tmp_path: Path) -> None:
    """A slot is the file's own bytes; the file stays when it is unmapped."""
    (tmp_path / "pool").write_bytes(bytes(range(64)))
    with MappedPool.open("/pool", 64, tmp_path) as pool:
        slot = pool.slot(SLOT)
        assert bytes(slot) == bytes(range(8, 12))
        slot[:] = b"abcd"
        slot.release()
    assert (tmp_path / "pool").read_bytes()[8:12] == b"abcd"
    with pytest.raises(FileNotFoundError):
        MappedPool.open("other", 64, tmp_path)
