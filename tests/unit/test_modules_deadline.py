"""A transfer past its deadline: what it held is free, and nothing wrong becomes visible."""

from __future__ import annotations

import pytest

from lmcache_nodeagent.errors import TransferOverdue
from lmcache_nodeagent.modules.calls import Call, Cancellation
from tests.fakes.module_bench import SHAPE, Engine, ModuleBench, blocks

CHUNKS = 4


class Bench(ModuleBench):
    """One engine whose four chunks are stored under the prompt 0."""

    def __init__(self) -> None:
        super().__init__(objects=8)
        self.engine = Engine(self, 1)
        assert self.engine.store(end=CHUNKS)
        self.cancellation: Cancellation = Cancellation()

    def store(self) -> None:
        """Store the prompt 1."""
        key = self.engine.key(prompt=1, end=CHUNKS)
        call = Call(self.engine.worker, cancellation=self.cancellation)
        self.transfer.store(call, key, self.engine.instance_id, blocks(0, CHUNKS), b"")

    def retrieve(self) -> None:
        """Retrieve the prompt 0, which was looked up."""
        assert self.engine.lookup(end=CHUNKS) == CHUNKS
        key = self.engine.key(end=CHUNKS)
        call = Call(self.engine.worker, cancellation=self.cancellation)
        self.transfer.retrieve(call, key, self.engine.instance_id, blocks(0, CHUNKS), b"", 0)


class Expiring(Cancellation):
    """A deadline that passes once some chunks have been copied."""

    def __init__(self, chunks: int) -> None:
        super().__init__()
        self._left = chunks

    def check(self) -> None:
        """Count a chunk."""
        if not self._left:
            self.cancel()
        self._left -= 1
        super().check()


def stored_bytes(engine: Engine) -> list[bytes]:
    """The blocks of the first chunks, of both planes: what store and retrieve move."""
    planes, blocks_, *_ = SHAPE
    block_bytes = len(engine.memory) // (planes * blocks_)
    starts = [
        (plane * blocks_ + block) * block_bytes
        for plane in range(planes)
        for block in blocks(0, CHUNKS)[0]
    ]
    return [bytes(engine.memory[start : start + block_bytes]) for start in starts]


@pytest.mark.parametrize("chunks", [0, 1, 3])
def test_a_slow_copy_stops_at_the_next_chunk(chunks: int) -> None:
    """Of a store nothing becomes visible, of both nothing stays taken."""
    bench = Bench()
    for transfer in (bench.store, bench.retrieve):
        bench.cancellation = Expiring(chunks)
        with pytest.raises(TransferOverdue):
            transfer()
        stats = bench.store_.stats()
        assert (stats.objects, stats.staging_bytes, bench.pins()) == (CHUNKS, 0, 0)
    assert bench.engine.lookup(prompt=1, end=CHUNKS) == 0


def test_a_store_that_hangs_keeps_only_its_own_room() -> None:
    """Others store the same chunks meanwhile; what it writes in the end is nobody's."""
    bench = Bench()
    other = Engine(bench, 2)
    other.fill(seed=7)
    expected = stored_bytes(other)

    def hang() -> None:
        bench.hooks.before_gather = lambda: None
        bench.cancellation.cancel()
        assert other.store(prompt=1, end=CHUNKS)
        assert bench.store_.stats().staging_bytes > 0

    bench.hooks.before_gather = hang
    with pytest.raises(TransferOverdue):
        bench.store()
    assert bench.store_.stats().staging_bytes == 0
    other.fill(seed=8)
    assert other.lookup(prompt=1, end=CHUNKS) == CHUNKS
    assert other.retrieve(prompt=1, end=CHUNKS)
    assert stored_bytes(other) == expected


def test_a_retrieve_that_hangs_gives_back_what_its_lookup_pinned() -> None:
    """At the deadline; the bytes that it may still read stay what they are until it returns."""
    bench = Bench()
    pinned: list[int] = []

    def hang() -> None:
        bench.cancellation.cancel()
        pinned.append(bench.pins())
        bench.engine.end()
        bench.transfers_end()

    bench.hooks.before_scatter = hang
    with pytest.raises(TransferOverdue):
        bench.retrieve()
    assert (pinned, bench.pins()) == ([CHUNKS], 0)


def test_a_cancellation_calls_back_once_and_late_comers_at_once() -> None:
    """Whoever registers after the deadline has nothing to wait for."""
    cancellation, called = Cancellation(), list[int]()
    cancellation.on_cancel(lambda: called.append(1))
    cancellation.check()
    cancellation.cancel()
    cancellation.cancel()
    cancellation.on_cancel(lambda: called.append(2))
    assert called == [1, 2]
    with pytest.raises(TransferOverdue):
        cancellation.check()
