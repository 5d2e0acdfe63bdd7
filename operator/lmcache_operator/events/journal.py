"""Posts the agents' journals: each entry as Events, in order, then an acknowledgement.

An entry is acknowledged once its Events are stored, or can never be. Until then the agent repeats
it, also to the next operator; the names of Events make repeats harmless. Each agent has a queue of
its own, and the queues take turns, so that none waits for another.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import NoReturn, Protocol

import structlog

from lmcache_nodeagent.operator_link.messages import JournalEntry, PodRun
from lmcache_operator.clock import Now
from lmcache_operator.cluster import KubeObject
from lmcache_operator.errors import ApiError, Unreachable
from lmcache_operator.events.objects import Involved, Origin, Place, event_object
from lmcache_operator.workers.pacing import Backoff, Sleep

MAX_WAITING = 2048
"""Entries of one agent that wait to be posted; twice what an agent keeps."""

PATIENCE_SECONDS = 300.0
"""An Event that the API server fails to store for this long is given up: others wait behind it."""

_AT_ONCE = 8
_STEPS_SECONDS = (0.2, 0.5, 1.0, 2.0, 5.0)

_log = structlog.get_logger(__name__)


class EventStore(Protocol):
    """The part of `Cluster` that is needed here."""

    async def create(self, obj: KubeObject) -> bool:
        """Create an object; False if one of that name exists already."""


class JournalReader(Protocol):
    """Who has the journals posted."""

    async def find_worker(self, origin: Origin, where: PodRun) -> Involved | None:
        """Return what the Event about a worker is to be on, None if it is to be on nothing.

        Raises:
            Unreachable: ask again.
        """

    def posted(self, origin: Origin, entry: JournalEntry, *, is_new: bool) -> bool:
        """Tell that an entry is posted, now or (not `is_new`) by somebody before.

        Returns:
            Whether its acknowledgement is to wait for `Journal.stored`.
        """

    def overflowed(self, origin: Origin) -> None:
        """Tell that entries had to be dropped; the agent must begin again to repeat them."""


@dataclass(slots=True)
class _Queue:
    """The journal of one boot.

    Attributes:
        taken: the last entry that was queued.
        done: the last entry that is posted.
        held: entries that are posted and must not be acknowledged yet.
        acknowledge: says so to the agent; None while it is not connected.
        refuses: entries had to be dropped, so the ones after them cannot be taken either.
        scheduled: its first entry is being posted, or has its turn soon; one at a time, in order.
        failing_since: when storing its first entry began to fail.
    """

    origin: Origin
    acknowledge: Callable[[int], None] | None
    waiting: deque[tuple[JournalEntry, PodRun | None]] = field(default_factory=deque)
    taken: int = 0
    done: int = 0
    held: deque[int] = field(default_factory=deque)
    refuses: bool = False
    scheduled: bool = False
    failing_since: float | None = None
    backoff: Backoff = field(default_factory=lambda: Backoff(_STEPS_SECONDS))


class Journal:
    """The journals of all agents. Thread: the loop.

    Args:
        now: monotonic seconds.
    """

    def __init__(
        self,
        store: EventStore,
        reader: JournalReader,
        *,
        now: Now,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self.counts: Counter[str] = Counter()
        """Events since the start: `created`, `repeated`, `impossible`; `retry`, `dropped`."""
        self._store = store
        self._reader = reader
        self._now = now
        self._sleep = sleep
        self._queues: dict[Origin, _Queue] = {}
        self._ready: asyncio.Queue[_Queue] = asyncio.Queue()

    def waiting(self) -> int:
        """Count the entries that are not posted yet."""
        return sum(len(queue.waiting) for queue in self._queues.values())

    def connected(self, origin: Origin, acknowledge: Callable[[int], None]) -> None:
        """Tell of an agent's new stream, over which it repeats what is not acknowledged."""
        queue = self._queues.setdefault(origin, _Queue(origin, acknowledge))
        queue.acknowledge = acknowledge
        if queue.refuses:
            queue.refuses = False
            queue.taken = queue.waiting[-1][0].seq if queue.waiting else queue.done

    def disconnected(self, origin: Origin) -> None:
        """Tell that a stream ended. What was said is still posted."""
        queue = self._queues.get(origin)
        if queue is not None:
            queue.acknowledge = None
            self._forget_if_idle(queue)

    def add(self, origin: Origin, entry: JournalEntry, where: PodRun | None) -> None:
        """Post an entry in its turn; of a connected boot only."""
        queue = self._queues[origin]
        if entry.seq <= queue.done:
            self._acknowledge(queue)
        elif entry.seq <= queue.taken:
            return  # it waits already
        elif queue.refuses or len(queue.waiting) >= MAX_WAITING:
            queue.refuses = True
            self.counts["dropped"] += 1
        else:
            queue.taken = entry.seq
            queue.waiting.append((entry, where))
            if not queue.scheduled:
                queue.scheduled = True
                self._ready.put_nowait(queue)

    def stored(self, origin: Origin, seq: int) -> None:
        """Acknowledge an entry, and those before it, that had to wait for this."""
        queue = self._queues.get(origin)
        if queue is None or not queue.held or queue.held[0] > seq:
            return
        while queue.held and queue.held[0] <= seq:
            queue.held.popleft()
        self._acknowledge(queue)

    async def run(self) -> NoReturn:
        """Post until cancelled."""
        async with asyncio.TaskGroup() as group:
            for _ in range(_AT_ONCE):
                group.create_task(self._work())
        raise AssertionError("its tasks do not end")

    async def _work(self) -> NoReturn:
        while True:
            queue = await self._ready.get()
            entry, where = queue.waiting[0]
            try:
                await self._post(queue, entry, where)
            except Unreachable as error:
                await self._retry_later(queue, error)
                continue
            queue.waiting.popleft()
            queue.done = entry.seq
            queue.failing_since = None
            queue.backoff.reset()
            self._acknowledge(queue)
            if queue.waiting:
                self._ready.put_nowait(queue)
                continue
            queue.scheduled = False
            if queue.refuses and queue.acknowledge is not None:
                self._reader.overflowed(queue.origin)
            self._forget_if_idle(queue)

    async def _post(self, queue: _Queue, entry: JournalEntry, where: PodRun | None) -> None:
        """Store the Events of an entry.

        Raises:
            Unreachable: not now; the ones that are stored are found when it is tried again.
        """
        origin = queue.origin
        worker = await self._reader.find_worker(origin, where) if where is not None else None
        if worker is not None:
            await self._create(queue, entry, worker, "worker")
        is_new = await self._create(queue, entry, origin.server, "server")
        if is_new is not None and self._reader.posted(origin, entry, is_new=is_new):
            queue.held.append(entry.seq)

    async def _create(
        self, queue: _Queue, entry: JournalEntry, involved: Involved, place: Place
    ) -> bool | None:
        """Store an Event; None if that can never be.

        Raises:
            Unreachable: not now.
        """
        event = event_object(queue.origin, entry, involved, place)
        try:
            created = await self._store.create(event)
        except ApiError as error:
            if self._may_pass(queue, error):
                raise Unreachable(str(error)) from None
            self.counts["impossible"] += 1
            _log.warning(
                "event_not_stored",
                reason=event["reason"],
                object=f"{involved.kind} {involved.namespace}/{involved.name}",
                error=str(error),
            )
            return None
        self.counts["created" if created else "repeated"] += 1
        return created

    def _may_pass(self, queue: _Queue, error: ApiError) -> bool:
        """Tell whether a refusal may be one for the moment."""
        busy = error.status == HTTPStatus.TOO_MANY_REQUESTS
        if not busy and error.status < HTTPStatus.INTERNAL_SERVER_ERROR:
            return False
        since = queue.failing_since
        return since is None or self._now() - since < PATIENCE_SECONDS

    async def _retry_later(self, queue: _Queue, error: Unreachable) -> None:
        self.counts["retry"] += 1
        if queue.failing_since is None:
            queue.failing_since = self._now()
            _log.warning("events_wait", node=queue.origin.node, error=str(error))
        await self._sleep(queue.backoff.next_seconds())
        self._ready.put_nowait(queue)

    def _acknowledge(self, queue: _Queue) -> None:
        upto = queue.held[0] - 1 if queue.held else queue.done
        if queue.acknowledge is not None and upto > 0:
            queue.acknowledge(upto)

    def _forget_if_idle(self, queue: _Queue) -> None:
        if queue.acknowledge is None and not queue.waiting:
            self._queues.pop(queue.origin, None)
