"""Where requests run: an ordered thread, a bounded pool, lanes that keep a connection's order."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from threading import Condition
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from lmcache_nodeagent.clock import Now
    from lmcache_nodeagent.ids import RoutingId
    from lmcache_nodeagent.transport.requests import Request


_CALLBACKS_KEPT = 4096
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


class LanePool:
    """One lane per connection, first in, first out; lanes run side by side. Threads: any.

    A lane exists only while it has requests, so the table shrinks by itself. A transfer that hangs
    holds up its own lane and one thread, nobody else's lane.
    """

    def __init__(self, run: Callable[[Request], None], queue_size: int, now: Now) -> None:
        self._run = run
        self._queue_size = queue_size
        self._now = now
        self._changed = Condition()  # guards: everything below
        self._lanes: dict[RoutingId, deque[tuple[int, Request]]] = {}
        self._ready: deque[RoutingId] = deque()  # lanes with requests, none of which runs
        self._unfinished: OrderedDict[int, float] = OrderedDict()  # number -> moment received
        self._barriers: deque[tuple[int, Callable[[], None]]] = deque(maxlen=_CALLBACKS_KEPT)
        self._last_number = 0
        self._stopping = False

    def submit(self, request: Request) -> bool:
        """Take a request; False if the queue, or its connection's share, is full, or at a stop."""
        lane_id = request.connection.routing_id
        with self._changed:
            if self._stopping or len(self._unfinished) >= self._queue_size:
                return False
            lane = self._lanes.get(lane_id)
            if lane is not None and len(lane) >= share_of_one(self._queue_size):
                return False
            self._last_number += 1
            self._unfinished[self._last_number] = request.received_at
            if lane is None:
                lane = self._lanes[lane_id] = deque()
                self._ready.append(lane_id)
                self._changed.notify()
            lane.append((self._last_number, request))
        return True

    def work(self) -> None:
        """Run requests until stopped and the lanes are empty."""
        while True:
            with self._changed:
                while not self._ready:
                    if self._stopping:
                        return
                    self._changed.wait()
                lane_id = self._ready.popleft()
                number, request = self._lanes[lane_id][0]
            try:
                self._run(request)
            finally:
                for callback in self._finished(lane_id, number):
                    callback()

    def _finished(self, lane_id: RoutingId, number: int) -> list[Callable[[], None]]:
        """Move the lane on; return the callbacks that waited for this request."""
        due = []
        with self._changed:
            lane = self._lanes[lane_id]
            lane.popleft()
            if lane:
                self._ready.append(lane_id)
                self._changed.notify()
            else:
                del self._lanes[lane_id]
            del self._unfinished[number]
            oldest = next(iter(self._unfinished), self._last_number + 1)
            while self._barriers and self._barriers[0][0] < oldest:
                due.append(self._barriers.popleft()[1])
        return due

    def after_current(self, callback: Callable[[], None]) -> None:
        """Run `callback` once everything submitted before has finished; at once if nothing is.

        While one transfer hangs, callbacks pile up behind it. Of more than a bound of them the
        oldest are dropped: they only hasten what a time-out does as well.
        """
        with self._changed:
            if self._unfinished:
                self._barriers.append((self._last_number, callback))
                return
        callback()

    def stop(self) -> None:
        """Take no more requests."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def depth(self) -> int:
        """Count the requests that wait or run."""
        with self._changed:
            return len(self._unfinished)

    def lanes(self) -> int:
        """Count the connections that have requests here."""
        with self._changed:
            return len(self._lanes)

    def oldest_seconds(self) -> float:
        """Age of the oldest request that waits or runs, 0 without one."""
        with self._changed:
            received_at = next(iter(self._unfinished.values()), None)
        return 0.0 if received_at is None else self._now() - received_at
