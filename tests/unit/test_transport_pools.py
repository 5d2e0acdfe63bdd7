"""Pools without threads: `work` runs here, to the end of what is queued."""

from __future__ import annotations

from functools import partial

import pytest

from lmcache_nodeagent.events import discard
from lmcache_nodeagent.liveness.evidence import Connection
from lmcache_nodeagent.protocol.operations import OPERATIONS
from lmcache_nodeagent.transport.lanes import LanePool
from lmcache_nodeagent.transport.pools import OrderedPool
from lmcache_nodeagent.transport.requests import Request
from tests.fakes.liveness_parts import FakeClock, connection

A, B, C = connection(), connection(), connection()


def request(link: Connection = A, number: int = 0) -> Request:
    """A request; `uid` tells which."""
    uid = number.to_bytes(2)
    return Request(link, OPERATIONS["store"], uid, b"", (), lambda _: None, discard)


class Runs:
    """Notes what ran."""

    def __init__(self) -> None:
        self.done: list[tuple[Connection, int]] = []
        self.during: dict[int, object] = {}

    def __call__(self, ran: Request) -> None:
        """Run one."""
        number = int.from_bytes(ran.uid)
        self.done.append((ran.connection, number))
        action = self.during.get(number)
        if callable(action):
            action()

    def numbers(self) -> list[int]:
        """In the order they ran."""
        return [number for _, number in self.done]


def lanes(runs: Runs, size: int = 100, now: FakeClock | None = None) -> LanePool:
    """A pool of lanes."""
    return LanePool(runs, size, now or FakeClock())


def finish(pool: OrderedPool | LanePool) -> None:
    """Run everything that is queued."""
    pool.stop()
    pool.work()
    assert pool.depth() == 0


def test_an_ordered_pool_runs_first_come_first_served() -> None:
    """Whoever sent it."""
    runs = Runs()
    pool = OrderedPool(runs, 10)
    for number, link in enumerate((A, B, A, C)):
        assert pool.submit(request(link, number))
    assert pool.depth() == 4
    finish(pool)
    assert runs.numbers() == [0, 1, 2, 3]


def test_a_request_that_runs_counts_as_depth_but_not_as_queued() -> None:
    """The bound is on what waits."""
    runs = Runs()
    pool = OrderedPool(runs, 1)
    depths = list[int]()
    runs.during[0] = lambda: depths.append(pool.depth())
    pool.submit(request())
    assert not pool.submit(request())
    finish(pool)
    assert depths == [1]


@pytest.mark.parametrize("kind", [OrderedPool, LanePool])
def test_a_full_pool_refuses_and_a_stopping_one_drains(
    kind: type[OrderedPool | LanePool],
) -> None:
    """What was accepted still runs."""
    runs = Runs()
    pool = OrderedPool(runs, 2) if kind is OrderedPool else lanes(runs, 2)
    assert [pool.submit(request(link, n)) for n, link in enumerate((A, B, C))] == [
        True,
        True,
        False,
    ]
    pool.stop()
    assert not pool.submit(request(A, 3))
    pool.work()
    assert runs.numbers() == [0, 1]


def test_lanes_take_turns_and_each_keeps_its_order() -> None:
    """A connection with a hundred requests does not hold up one with one."""
    runs = Runs()
    pool = lanes(runs)
    for number in range(4):
        pool.submit(request(A, number))
    pool.submit(request(B, 10))
    pool.submit(request(C, 20))
    assert pool.lanes() == 3
    finish(pool)
    assert runs.numbers() == [0, 10, 20, 1, 2, 3]


def test_lanes_vanish_with_their_last_request() -> None:
    """The table never grows with connections that were."""
    pool = lanes(Runs())
    for _ in range(50):
        pool.submit(request(connection()))
    assert pool.lanes() == 50
    finish(pool)
    assert pool.lanes() == 0


def test_a_request_that_comes_while_its_lane_runs_follows() -> None:
    """And is bounded with the others: running ones count."""
    runs = Runs()
    pool = lanes(runs, 2)
    answers = list[bool]()

    def submit_more() -> None:
        answers.extend(pool.submit(request(A, number)) for number in (1, 2))

    runs.during[0] = submit_more
    pool.submit(request(A, 0))
    finish(pool)
    assert answers == [False, False], "stopping"
    runs.during[3] = submit_more
    pool = lanes(runs, 2)
    pool.submit(request(A, 3))
    runs.during[1] = pool.stop
    pool.work()
    assert answers[2:] == [True, False]
    assert runs.numbers() == [0, 3, 1]


def test_a_barrier_waits_for_everything_submitted_before_it() -> None:
    """In other lanes too, and for nothing that came after."""
    runs, order = Runs(), list[str]()
    pool = lanes(runs)
    pool.submit(request(A, 0))
    pool.submit(request(B, 1))
    pool.after_current(lambda: order.append("first"))
    pool.submit(request(B, 2))
    pool.after_current(lambda: order.append("second"))
    for number in range(3):
        runs.during[number] = lambda number=number: order.append(str(number))
    finish(pool)
    assert order == ["0", "1", "first", "2", "second"]


def test_a_barrier_with_nothing_before_it_is_passed_at_once() -> None:
    """By the caller."""
    pool, passed = lanes(Runs()), list[int]()
    pool.after_current(lambda: passed.append(1))
    assert passed == [1]


def test_a_barrier_is_passed_by_a_request_that_fails() -> None:
    """A fault of the runner ends its thread, not the books."""
    runs, passed = Runs(), list[int]()
    pool = lanes(runs)

    def fail() -> None:
        raise ZeroDivisionError

    runs.during[0] = fail
    pool.submit(request(A, 0))
    pool.after_current(lambda: passed.append(1))
    with pytest.raises(ZeroDivisionError):
        pool.work()
    assert (passed, pool.depth(), pool.lanes()) == ([1], 0, 0)


def test_the_oldest_request_has_an_age() -> None:
    """A copy that hangs shows."""
    now = FakeClock()
    pool = lanes(Runs(), now=now)
    assert pool.oldest_seconds() == 0.0
    first, second = request(A, 0), request(B, 1)
    first.received_at, second.received_at = 10.0, 20.0
    pool.submit(first)
    pool.submit(second)
    now.seconds = 25.0
    assert pool.oldest_seconds() == 15.0
    finish(pool)
    assert pool.oldest_seconds() == 0.0


def test_one_connection_fills_no_more_than_its_share_of_the_lanes() -> None:
    """A worker whose copy hangs goes on sending: the others' transfers still find room."""
    pool = lanes(Runs(), 100)
    assert [pool.submit(request(A, number)) for number in range(60)].count(True) == 50
    assert all(pool.submit(request(B, number)) for number in range(50))


def test_one_connection_fills_no_more_than_its_share_of_the_queue() -> None:
    """What has begun to run makes room again."""
    pool = OrderedPool(Runs(), 100)
    assert [pool.submit(request(A, number)) for number in range(60)].count(True) == 50
    assert pool.submit(request(B, 0))
    pool.stop()
    pool.work()
    again = OrderedPool(Runs(), 100)
    assert again.submit(request(A, 0))


def test_callbacks_behind_a_transfer_that_hangs_are_bounded() -> None:
    """They only hasten what a time-out does as well; the oldest give way."""
    pool, run = lanes(Runs()), list[int]()
    pool.submit(request(A, 0))
    for number in range(5000):
        pool.after_current(partial(run.append, number))
    finish(pool)
    assert run == list(range(5000 - 4096, 5000))
