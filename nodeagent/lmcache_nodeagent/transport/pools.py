"""Where requests run: an ordered thread or a bounded pool; `lanes.py` has the third kind."""

from __future__ import annotations

from collections import Counter, deque
from threading import Condition
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from lmcache_nodeagent.ids import RoutingId
    from lmcache_nodeagent.transport.requests import Request


_LEAST_SHARE = 16


class Pool(Protocol):
    """Takes requests and runs them on threads that `app.py` starts with `work`."""

    def submit(self, request: Request) -> bool:
        """Take a request; False if the queue is full or the pool is stopping."""
        ...

    def work(self) -> None:
        """Run requests until stopped. Thread: one of the pool's."""
        ...

    def stop(self) -> None:
        """Take no more requests; what is queued still runs, then `work` returns."""
        ...

    def depth(self) -> int:
        """Count the requests that wait or run."""
        ...


def share_of_one(queue_size: int) -> int:
    """How much of a queue one connection may fill: a client that floods is refused, not others."""
    return min(queue_size, max(_LEAST_SHARE, queue_size // 2))


class OrderedPool:
    """First come, first served; with one thread this is the SYNC queue. Threads: any."""

    def __init__(self, run: Callable[[Request], None], queue_size: int) -> None:
        self._run = run
        self._queue_size = queue_size
        self._changed = Condition()  # guards: everything below
        self._queue: deque[Request] = deque()
        self._waiting: Counter[RoutingId] = Counter()  # by connection; never 0
        self._running = 0
        self._stopping = False

    def submit(self, request: Request) -> bool:
        """Take a request; False if the queue, or its connection's share, is full, or at a stop."""
        who = request.connection.routing_id
        with self._changed:
            if self._stopping or len(self._queue) >= self._queue_size:
                return False
            if self._waiting[who] >= share_of_one(self._queue_size):
                return False
            self._waiting[who] += 1
            self._queue.append(request)
            self._changed.notify()
        return True

    def work(self) -> None:
        """Run requests until stopped and the queue is empty."""
        while True:
            with self._changed:
                while not self._queue:
                    if self._stopping:
                        return
                    self._changed.wait()
                request = self._queue.popleft()
                self._taken_locked(request.connection.routing_id)
                self._running += 1
            try:
                self._run(request)
            finally:
                with self._changed:
                    self._running -= 1

    def _taken_locked(self, who: RoutingId) -> None:
        self._waiting[who] -= 1
        if not self._waiting[who]:
            del self._waiting[who]

    def stop(self) -> None:
        """Take no more requests."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def depth(self) -> int:
        """Count the requests that wait or run."""
        with self._changed:
            return len(self._queue) + self._running
