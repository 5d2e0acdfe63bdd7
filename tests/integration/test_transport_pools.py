"""Pools and requests with real threads: order, side by side, and one answer under races."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Barrier, Event, Thread, Timer

import pytest

from lmcache_nodeagent.clock import monotonic
from lmcache_nodeagent.errors import MalformedRequest
from lmcache_nodeagent.events import discard
from lmcache_nodeagent.liveness.evidence import Connection
from lmcache_nodeagent.modules.calls import Pending
from lmcache_nodeagent.protocol.operations import OPERATIONS
from lmcache_nodeagent.transport.lanes import LanePool
from lmcache_nodeagent.transport.pools import OrderedPool
from lmcache_nodeagent.transport.requests import Reply, Request
from tests.fakes.liveness_parts import connection
from tests.polling import PATIENCE_SECONDS, poll_until


def request(
    link: Connection, number: int = 0, send: Callable[[Reply], None] = lambda _: None
) -> Request:
    """A store whose uid tells which."""
    return Request(link, OPERATIONS["store"], number.to_bytes(4), b"", (), send, discard)


@contextmanager
def working(pool: OrderedPool | LanePool, threads: int) -> Iterator[None]:
    """Run a pool, then stop it and let it drain."""
    started = [Thread(target=pool.work, daemon=True) for _ in range(threads)]
    for thread in started:
        thread.start()
    try:
        yield
    finally:
        pool.stop()
        for thread in started:
            thread.join(PATIENCE_SECONDS)
    assert not any(thread.is_alive() for thread in started)


def test_lanes_run_side_by_side() -> None:
    """As many as there are threads: they meet at a barrier."""
    meeting = Barrier(3, timeout=PATIENCE_SECONDS)

    def meet(_: Request) -> None:
        meeting.wait()

    pool = LanePool(meet, 10, monotonic)
    with working(pool, 3):
        for _ in range(3):
            pool.submit(request(connection()))
        poll_until(lambda: pool.depth() == 0)
    assert not meeting.broken


def test_a_lane_that_hangs_holds_up_nobody_else() -> None:
    """Its own requests wait, other connections' go on; a barrier waits for it."""
    hanging, held = Event(), connection()
    done = Counter[bytes]()
    passed = Event()

    def run(ran: Request) -> None:
        if ran.connection is held:
            hanging.wait(PATIENCE_SECONDS)
        done[ran.connection.routing_id] += 1

    pool = LanePool(run, 1000, monotonic)
    others = [connection() for _ in range(3)]
    with working(pool, 2):
        pool.submit(request(held))
        pool.submit(request(held))
        for number in range(50):
            for other in others:
                pool.submit(request(other, number))
        pool.after_current(passed.set)
        poll_until(lambda: sum(done.values()) == 150)
        assert (pool.lanes(), pool.depth(), passed.is_set()) == (1, 2, False)
        hanging.set()
        assert passed.wait(PATIENCE_SECONDS)
    assert done[held.routing_id] == 2


def test_each_lane_keeps_its_order_under_load() -> None:
    """Four threads, eight connections, two submitters each."""
    seen: dict[bytes, list[int]] = {}

    def run(ran: Request) -> None:
        seen.setdefault(ran.connection.routing_id, []).append(int.from_bytes(ran.uid))

    pool = LanePool(run, 100_000, monotonic)
    links = [connection() for _ in range(8)]

    def submit(link: Connection) -> None:
        for number in range(300):
            assert pool.submit(request(link, number))

    with working(pool, 4):
        submitters = [Thread(target=submit, args=(link,)) for link in links]
        for thread in submitters:
            thread.start()
        for thread in submitters:
            thread.join(PATIENCE_SECONDS)
    assert [seen[link.routing_id] for link in links] == [list(range(300))] * 8
    assert pool.lanes() == 0


def test_a_stop_drains_what_was_accepted() -> None:
    """Nothing that got a yes is lost, whenever the stop comes."""
    ran = Counter[str]()

    def run(_: Request) -> None:
        ran["done"] += 1

    pool = OrderedPool(run, 100_000)
    stop = Timer(0.02, pool.stop)
    with working(pool, 1):
        stop.start()
        link, accepted = connection(), 0
        while pool.submit(request(link)):
            accepted += 1
        stop.join(PATIENCE_SECONDS)
    assert ran["done"] == accepted
    assert pool.depth() == 0


@pytest.mark.parametrize("late", [False, True])
def test_a_request_has_one_reply_whoever_answers_first(*, late: bool) -> None:
    """The module, a refusal, a failure and the stop, all at once, a hundred times."""
    for _ in range(100):
        replies: list[Reply] = []
        asked = request(connection(), 1, replies.append)
        start = Barrier(4, timeout=PATIENCE_SECONDS)
        pending = Pending()
        if late:
            pending.when_settled(asked.answer)
        answers: list[Callable[[], None]] = [
            lambda p=pending, a=asked: p.settle((b"", True)) if late else a.answer((b"", True)),  # type: ignore[misc]
            lambda a=asked: a.answer((b"", False)),  # type: ignore[misc]
            lambda a=asked: a.refuse(MalformedRequest("no")),  # type: ignore[misc]
            lambda a=asked: a.fail(KeyError(), "no"),  # type: ignore[misc]
        ]

        def at_once(answer: Callable[[], None], gate: Barrier = start) -> None:
            gate.wait()
            answer()

        threads = [Thread(target=at_once, args=(answer,)) for answer in answers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_SECONDS)
        assert len(replies) == 1


def test_a_late_answer_meets_its_listener_whichever_comes_first() -> None:
    """Settled and listened to at the same instant."""
    for _ in range(300):
        pending, got = Pending(), list[object]()
        start = Barrier(2, timeout=PATIENCE_SECONDS)

        def settle(late: Pending = pending, gate: Barrier = start) -> None:
            gate.wait()
            late.settle(7)

        thread = Thread(target=settle)
        thread.start()
        start.wait()
        pending.when_settled(got.append)
        thread.join(PATIENCE_SECONDS)
        assert got == [7]
