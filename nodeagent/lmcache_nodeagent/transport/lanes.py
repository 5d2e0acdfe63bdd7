"""Lanes: transfers keep their connection's order, run side by side, and have a deadline each."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass
from threading import Condition, Event
from typing import TYPE_CHECKING

from lmcache_nodeagent.transport.pools import share_of_one

if TYPE_CHECKING:
    from collections.abc import Callable

    from lmcache_nodeagent.clock import Now
    from lmcache_nodeagent.ids import RoutingId
    from lmcache_nodeagent.transport.requests import Request

MAX_REPLACEMENTS = 32
"""Threads that take the place of ones whose copy hangs; beyond that, capacity shrinks."""

_CALLBACKS_KEPT = 4096

_WATCH_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Overdue:
    """Transfers that were answered at their deadline. `running` still hold a thread each."""

    running: int = 0
    oldest_seconds: float = 0.0
    total: int = 0


class LanePool:
    """One lane per connection, first in, first out; lanes run side by side. Threads: any.

    A lane exists only while it has requests, so the table shrinks by itself. A transfer that hangs
    holds up its own lane, nobody else's: at its deadline it is given up, with what waits behind
    it. Its thread is replaced, and its lane refuses newcomers until the copy returns: two copies
    for one worker at once could write to the same blocks.
    """

    def __init__(
        self,
        run: Callable[[Request], None],
        queue_size: int,
        now: Now,
        *,
        deadline_seconds: float = 0.0,
        overdue: Callable[[Request, float], None] = lambda _request, _seconds: None,
        replace_thread: Callable[[str, Callable[[], None]], None] = lambda _name, _work: None,
    ) -> None:
        """`overdue` answers a request at its deadline (0: there is none)."""
        self._run = run
        self._queue_size = queue_size
        self._now = now
        self._deadline_seconds = deadline_seconds
        self._overdue = overdue
        self._replace_thread = replace_thread
        self._stop_watch = Event()
        self._changed = Condition()  # guards: everything below
        self._lanes: dict[RoutingId, deque[tuple[int, Request]]] = {}
        self._ready: deque[RoutingId] = deque()  # lanes with requests, none of which runs
        self._running: set[int] = set()
        self._unfinished: OrderedDict[int, Request] = OrderedDict()  # in order of arrival
        self._given_up: dict[int, Request] = {}  # answered at the deadline, and still running
        self._barriers: deque[tuple[int, Callable[[], None]]] = deque(maxlen=_CALLBACKS_KEPT)
        self._last_number = 0
        self._overdue_total = 0
        self._replacements = 0
        self._surplus = 0  # threads that have a replacement and shall end
        self._stopping = False

    def submit(self, request: Request) -> bool:
        """Take a request; False if the queue, or its connection's share, is full, or at a stop.

        False as well while a transfer of this connection hangs.
        """
        lane_id = request.connection.routing_id
        with self._changed:
            if self._stopping or len(self._unfinished) >= self._queue_size:
                return False
            lane = self._lanes.get(lane_id)
            if lane is not None and len(lane) >= share_of_one(self._queue_size):
                return False
            if lane is not None and lane[0][0] in self._given_up:
                return False
            self._last_number += 1
            self._unfinished[self._last_number] = request
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
                self._running.add(number)
            try:
                self._run(request)
            finally:
                callbacks, surplus = self._finished(lane_id, number)
                for callback in callbacks:
                    callback()
            if surplus:
                return

    def _finished(self, lane_id: RoutingId, number: int) -> tuple[list[Callable[[], None]], bool]:
        """Move the lane on; return the callbacks that waited, and whether this thread shall end."""
        with self._changed:
            self._running.remove(number)
            lane = self._lanes[lane_id]
            lane.popleft()
            if lane:
                self._ready.append(lane_id)
                self._changed.notify()
            else:
                del self._lanes[lane_id]
            surplus = False
            if self._given_up.pop(number, None) is None:
                del self._unfinished[number]
            elif self._surplus:
                self._surplus -= 1
                self._replacements -= 1
                surplus = True
            return self._passed_locked(), surplus

    def _passed_locked(self) -> list[Callable[[], None]]:
        """Take out the callbacks for which everything before them has finished."""
        oldest = next(iter(self._unfinished), self._last_number + 1)
        due = []
        while self._barriers and self._barriers[0][0] < oldest:
            due.append(self._barriers.popleft()[1])
        return due

    def watch(self) -> None:
        """Give up what is overdue, until stopped. Thread: transfer-watch."""
        while not self._stop_watch.wait(min(_WATCH_SECONDS, self._deadline_seconds / 4)):
            self.give_up_overdue()

    def give_up_overdue(self) -> None:
        """Answer whatever is past its deadline, and what waits behind it in its lane."""
        with self._changed:
            late, replaced = self._give_up_locked()
            callbacks = self._passed_locked()
        for number in replaced:
            self._replace_thread(f"transfer-again-{number}", self.work)
        now = self._now()
        for request in late:
            self._overdue(request, now - request.received_at)
        for callback in callbacks:
            callback()

    def _give_up_locked(self) -> tuple[list[Request], list[int]]:
        """Return the requests to answer, and the numbers of those whose thread is replaced."""
        latest = self._now() - self._deadline_seconds
        overdue = [n for n, r in self._unfinished.items() if r.received_at <= latest]
        late, replaced = [], []
        for number in overdue:
            request = self._unfinished.pop(number, None)
            if request is None:
                continue  # it waited behind another one
            late.append(request)
            lane_id = request.connection.routing_id
            lane = self._lanes[lane_id]
            if number not in self._running:
                lane.remove((number, request))
                if not lane:
                    del self._lanes[lane_id]
                    self._ready.remove(lane_id)
                continue
            self._given_up[number] = request
            while len(lane) > 1:
                behind, follower = lane.pop()
                del self._unfinished[behind]
                late.append(follower)
            if self._replacements < MAX_REPLACEMENTS and not self._stopping:
                self._replacements += 1
                self._surplus += 1
                replaced.append(number)
        self._overdue_total += len(late)
        return late, replaced

    def after_current(self, callback: Callable[[], None]) -> None:
        """Run `callback` once everything submitted before has finished; at once if nothing is.

        While one transfer hangs, callbacks pile up behind it until its deadline. Of more than a
        bound of them the oldest are dropped: they only hasten what a time-out does as well.
        """
        with self._changed:
            if self._unfinished:
                self._barriers.append((self._last_number, callback))
                return
        callback()

    def stop(self) -> None:
        """Take no more requests."""
        self._stop_watch.set()
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def depth(self) -> int:
        """Count the requests that wait or run, and that nobody has given up."""
        with self._changed:
            return len(self._unfinished)

    def lanes(self) -> int:
        """Count the connections that have requests here."""
        with self._changed:
            return len(self._lanes)

    def oldest_seconds(self) -> float:
        """Age of the oldest transfer that waits or runs, those given up included; else 0."""
        with self._changed:
            requests = [*self._given_up.values(), *list(self._unfinished.values())[:1]]
        return max((self._now() - request.received_at for request in requests), default=0.0)

    def overdue(self) -> Overdue:
        """Count what did not meet its deadline."""
        with self._changed:
            given_up, total = list(self._given_up.values()), self._overdue_total
        now = self._now()
        oldest = max((now - request.received_at for request in given_up), default=0.0)
        return Overdue(len(given_up), oldest, total)

    def is_out_of_threads(self) -> bool:
        """Tell whether more copies hang than threads could be replaced."""
        with self._changed:
            return len(self._given_up) > MAX_REPLACEMENTS
