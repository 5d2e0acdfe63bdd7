"""Closing a context while copies are running: the memory goes after the last user, once."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier, Event

import pytest

from lmcache_nodeagent.contexts.copying import GroupCopier
from lmcache_nodeagent.contexts.host import HostContext, open_host_context
from lmcache_nodeagent.errors import TransferError
from lmcache_nodeagent.protocol.messages import LayoutHints
from tests.fakes.paged_memory import create_segment, fill, kv_tensor
from tests.polling import PATIENCE_SECONDS, poll_until

SHAPE = [2, 64, 16, 2, 8]


def mapped(directory: Path) -> bool:
    """Whether the segment is mapped by this process."""
    return f"{directory}/kv" in Path("/proc/self/maps").read_text()


@pytest.fixture
def context(tmp_path: Path) -> Iterator[HostContext]:
    """One layer of 64 blocks; chunks of 32 tokens."""
    tensor = kv_tensor("/kv", SHAPE)
    fill(create_segment(tmp_path, "/kv", tensor.nbytes))
    context = open_host_context([tensor], LayoutHints(kv_layout="NHD"), (), 32, directory=tmp_path)
    yield context
    context.close()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    """Threads for copies and closes."""
    with ThreadPoolExecutor(8) as pool:
        yield pool


def test_close_waits_for_the_copy_in_flight(
    context: HostContext,
    pool: ThreadPoolExecutor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """New copies are refused meanwhile; every close returns when the memory is gone."""
    started, go_on = Event(), Event()
    real_gather = GroupCopier.gather

    def held_gather(copier: GroupCopier, *arguments: object) -> None:
        started.set()
        assert go_on.wait(PATIENCE_SECONDS)
        real_gather(copier, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(GroupCopier, "gather", held_gather)
    data = memoryview(bytearray(context.layout.object_nbytes))
    copy = pool.submit(context.gather, [[0, 1]], [0], [data])
    assert started.wait(PATIENCE_SECONDS)
    closes = [pool.submit(context.close) for _ in range(2)]

    def refused() -> bool:
        try:
            context.scatter([[0, 1]], [], 0)
        except TransferError:
            return True
        return False

    poll_until(refused, "the fence")
    assert not any(close.done() for close in closes)
    assert mapped(tmp_path)
    go_on.set()
    for future in (copy, *closes):
        future.result(PATIENCE_SECONDS)
    assert not mapped(tmp_path)


def test_a_failed_copy_does_not_keep_the_memory(
    context: HostContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its traceback may live for long, in a log record or a future."""

    def fail(_copier: GroupCopier, *_arguments: object) -> None:
        raise MemoryError

    monkeypatch.setattr(GroupCopier, "gather", fail)
    data = memoryview(bytearray(context.layout.object_nbytes))
    with pytest.raises(MemoryError) as kept:
        context.gather([[0, 1]], [0], [data])
    context.close()
    del kept
    assert not mapped(tmp_path)


def test_copies_run_side_by_side(context: HostContext, pool: ThreadPoolExecutor) -> None:
    """Each thread moves other blocks around; nobody's bytes change for the others."""
    threads, rounds = 4, 50
    barrier = Barrier(threads)
    size = context.layout.object_nbytes

    def move(thread: int) -> bool:
        here = [thread * 8 + i for i in (0, 3, 1, 2)]
        there = [thread * 8 + i for i in (7, 6, 5, 4)]
        first = [memoryview(bytearray(size)) for _ in range(2)]
        again = [memoryview(bytearray(size)) for _ in range(2)]
        barrier.wait(PATIENCE_SECONDS)
        for _ in range(rounds):
            context.gather([here], [0, 1], first)
            context.scatter([there], list(enumerate(first)), 0)
            context.gather([there], [0, 1], again)
            if first != again:
                return False
        return True

    assert all(pool.map(move, range(threads)))
