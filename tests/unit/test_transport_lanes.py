"""Deadlines of transfers: `give_up_overdue` is called by hand, `work` runs here."""

from __future__ import annotations

from collections.abc import Callable

from lmcache_nodeagent.transport.lanes import MAX_REPLACEMENTS, LanePool
from lmcache_nodeagent.transport.requests import Request
from tests.fakes.liveness_parts import FakeClock, connection
from tests.unit.test_transport_pools import A, B, C, Runs, request

DEADLINE = 10.0


class Bench:
    """A pool with a deadline; `late` has what was given up, `threads` what takes over."""

    def __init__(self) -> None:
        self.now = FakeClock()
        self.runs = Runs()
        self.late: list[tuple[int, float]] = []
        self.threads: list[Callable[[], None]] = []
        self.pool = LanePool(
            self.runs,
            100,
            self.now,
            deadline_seconds=DEADLINE,
            overdue=lambda late, seconds: self.late.append((int.from_bytes(late.uid), seconds)),
            replace_thread=lambda _name, work: self.threads.append(work),
        )

    def submit(self, made: Request) -> bool:
        """Submit a request that arrives now."""
        made.received_at = self.now()
        return self.pool.submit(made)

    def pass_deadline(self) -> None:
        """Let the deadline of what is here pass."""
        self.now.advance(DEADLINE)
        self.pool.give_up_overdue()

    def numbers(self) -> list[int]:
        """Which requests were given up."""
        return [number for number, _ in self.late]


def test_a_transfer_that_hangs_is_given_up_with_what_waits_behind_it() -> None:
    """Its thread is replaced; other lanes go on, and newcomers of its own are refused at once."""
    bench = Bench()

    def hang() -> None:
        bench.now.advance(1)
        for number, link in ((1, A), (2, B)):
            assert bench.submit(request(link, number))
        bench.now.advance(DEADLINE - 1)
        bench.pool.give_up_overdue()
        assert bench.late == [(0, DEADLINE), (1, DEADLINE - 1)]
        assert not bench.submit(request(A, 9))
        (thread,) = bench.threads
        thread()  # runs all there is, then ends
        assert bench.runs.numbers() == [0, 2]
        bench.now.advance(5)
        overdue = bench.pool.overdue()
        assert (overdue.running, overdue.oldest_seconds, overdue.total) == (1, DEADLINE + 5, 2)
        assert (bench.pool.oldest_seconds(), bench.pool.depth()) == (DEADLINE + 5, 0)

    bench.runs.during[0] = hang
    bench.runs.during[2] = bench.pool.stop
    bench.submit(request(A, 0))
    bench.pool.work()
    assert (bench.pool.overdue().running, bench.pool.overdue().total) == (0, 2)
    assert bench.pool.lanes() == 0


def test_a_transfer_that_waits_too_long_is_answered_and_does_not_run() -> None:
    """All threads are busy: the others of its lane keep their own deadlines."""
    bench = Bench()
    bench.submit(request(A, 0))
    bench.submit(request(B, 1))
    bench.now.advance(1)
    bench.submit(request(A, 2))
    bench.now.advance(DEADLINE - 1)
    bench.pool.give_up_overdue()
    assert (bench.numbers(), bench.threads) == ([0, 1], [])
    assert bench.pool.lanes() == 1
    bench.pool.stop()
    bench.pool.work()
    assert bench.runs.numbers() == [2]
    assert bench.pool.overdue().running == 0


def test_a_replaced_thread_ends_when_its_copy_returns() -> None:
    """There are as many threads as before; the lane serves its connection again."""
    bench = Bench()
    bench.runs.during[0] = bench.pass_deadline
    bench.submit(request(A, 0))
    bench.pool.work()  # returns although nobody stops the pool
    assert bench.submit(request(A, 1))
    (thread,) = bench.threads
    bench.runs.during[1] = bench.pool.stop
    thread()
    assert bench.runs.numbers() == [0, 1]


def test_barriers_do_not_wait_for_what_was_given_up() -> None:
    """Ends of sessions give back their pins although somebody else's copy hangs."""
    bench, passed = Bench(), list[str]()

    def hang() -> None:
        bench.pool.after_current(lambda: passed.append("waited"))
        assert passed == []
        bench.pass_deadline()
        assert passed == ["waited"]
        bench.pool.after_current(lambda: passed.append("at once"))
        assert passed == ["waited", "at once"]

    bench.runs.during[0] = hang
    bench.submit(request(C, 0))
    bench.pool.work()


def test_threads_are_replaced_up_to_a_bound() -> None:
    """Then the agent says that it is out of threads."""
    bench = Bench()
    depth = MAX_REPLACEMENTS + 1

    def hang() -> None:
        bench.pass_deadline()
        hung = bench.pool.overdue().running
        assert bench.pool.is_out_of_threads() == (hung == depth)
        assert len(bench.threads) == min(hung, MAX_REPLACEMENTS)
        if hung == depth:
            bench.pool.stop()
            return
        bench.submit(request(connection(), hung))
        bench.threads[-1]()

    for number in range(depth):
        bench.runs.during[number] = hang
    bench.submit(request(connection(), 0))
    bench.pool.work()
    assert bench.runs.numbers() == list(range(depth))
    assert not bench.pool.is_out_of_threads()


def test_no_thread_is_replaced_while_the_pool_stops() -> None:
    """The process ends anyhow."""
    bench = Bench()

    def hang() -> None:
        bench.pool.stop()
        bench.pass_deadline()

    bench.runs.during[0] = hang
    bench.submit(request(A, 0))
    bench.pool.work()
    assert (bench.numbers(), bench.threads) == ([0], [])
