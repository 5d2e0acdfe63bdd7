"""How many workers of each server were reaped since it was created, over all operators.

The total lives in the server's status, together with the moment of the last reap. An operator reads
both once, and adds the reaps whose Event is new. An Event that is there already is of a reap that
was counted before, unless the operator ended between the two: then it is later than the last one
in the status. So that this can be told, a reap is acknowledged only once it is in the status.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NoReturn, Protocol

import structlog

from lmcache_nodeagent.operator_link.messages import JournalEntry
from lmcache_operator.clock import Now, kube_micro_time
from lmcache_operator.cluster import KubeObject
from lmcache_operator.errors import ApiError, Unreachable
from lmcache_operator.events.objects import Involved, Origin
from lmcache_operator.workers.pacing import CONNECTION_STEPS, REFUSAL_STEPS, Backoff, Sleep

CONFIRM_SECONDS = 0.5
"""Between two looks at a status that a reap should appear in."""

PATIENCE_SECONDS = 30.0
"""After this a reap is acknowledged although no status shows it: there may be none to write."""

_log = structlog.get_logger(__name__)


class ServerReader(Protocol):
    """The part of `Cluster` that is needed here."""

    async def get(self, kind: str, namespace: str | None, name: str) -> KubeObject | None:
        """Return an object, or None if there is none."""


@dataclass(frozen=True, slots=True)
class _Unstored:
    """A reap that no status shows yet; the `number`-th that this operator counted."""

    origin: Origin
    seq: int
    number: int
    since: float


@dataclass(slots=True)
class Reaps:
    """The reaps of one server.

    Attributes:
        total: since it was created; None until the earlier ones are known.
        last_time: of the last one, as Kubernetes writes moments, to the microsecond.
        counted: those that this operator has counted.
        known_until: the last one that an earlier operator has stored, in seconds since 1970.
        undecided: entries that were posted before, as long as it is not known until when.
    """

    total: int | None = None
    last_time: str | None = None
    last_reason: str | None = None
    counted: int = 0
    known_until: float = float("-inf")
    undecided: list[tuple[Origin, JournalEntry]] = field(default_factory=list)
    unstored: deque[_Unstored] = field(default_factory=deque)


class ReapTotals:
    """The reaps of all servers. Thread: the loop.

    Args:
        reader: reads servers.
        on_change: told which server's total has changed.
        on_stored: told up to which entry of a journal everything is in the status.
        now: monotonic seconds.
    """

    def __init__(
        self,
        reader: ServerReader,
        on_change: Callable[[Involved], None],
        on_stored: Callable[[Origin, int], None],
        *,
        now: Now,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self._reader = reader
        self._on_change = on_change
        self._on_stored = on_stored
        self._now = now
        self._sleep = sleep
        self._reaps: dict[Involved, Reaps] = {}
        self._counted_to: dict[Origin, int] = {}
        self._unread: asyncio.Queue[Involved] = asyncio.Queue()
        self._has_unstored = asyncio.Event()

    def add(self, server: Involved) -> None:
        """Have the status of a server read."""
        if server not in self._reaps:
            self._reaps[server] = Reaps()
            self._unread.put_nowait(server)

    def keep(self, servers: Collection[Involved]) -> None:
        """Forget all other servers."""
        for gone in self._reaps.keys() - set(servers):
            reaps = self._reaps.pop(gone)
            for origin, entry in reaps.undecided:
                self._on_stored(origin, entry.seq)
            for each in reaps.unstored:
                self._on_stored(each.origin, each.seq)
        counted = self._counted_to.items()
        self._counted_to = {each: seq for each, seq in counted if each.server in self._reaps}

    def of(self, server: Involved) -> Reaps:
        """Return the reaps of a server."""
        return self._reaps.get(server) or Reaps()

    def count(self, origin: Origin, entry: JournalEntry, *, is_new: bool) -> bool:
        """Count a reap, if nobody has; tell whether it is yet to be stored.

        Args:
            origin: whose journal it is in.
            entry: the reap; those of one journal come in order.
            is_new: its Event was not there before.
        """
        reaps = self._reaps.get(origin.server)
        if reaps is None:
            return False
        if entry.seq <= self._counted_to.get(origin, 0):
            return any((each.origin, each.seq) == (origin, entry.seq) for each in reaps.unstored)
        if not is_new and reaps.total is None:
            reaps.undecided.append((origin, entry))
            return True
        if not is_new and _moment(kube_micro_time(entry.happened_at)) <= reaps.known_until:
            return False
        self._add_one(reaps, origin, entry)
        self._on_change(origin.server)
        return True

    async def run(self) -> NoReturn:
        """Read what has to be read until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._read_statuses())
            group.create_task(self._confirm())
        raise AssertionError("its tasks do not end")

    async def _read_statuses(self) -> NoReturn:
        unreachable, refused = Backoff(CONNECTION_STEPS), Backoff(REFUSAL_STEPS)
        while True:
            server = await self._unread.get()
            try:
                found = await self._status(server)
            except (Unreachable, ApiError) as error:
                away = isinstance(error, Unreachable)
                if not away:
                    _log.warning("reaps_not_read", server=server.name, error=str(error))
                await self._sleep((unreachable if away else refused).next_seconds())
                self._unread.put_nowait(server)
                continue
            unreachable.reset()
            refused.reset()
            if found is not None:
                self._take(server, found)

    async def _confirm(self) -> NoReturn:
        """Look at the statuses of servers with reaps that are not stored yet."""
        while True:
            await self._has_unstored.wait()
            self._has_unstored.clear()
            await self._sleep(CONFIRM_SECONDS)
            for server, reaps in list(self._reaps.items()):
                if reaps.unstored and reaps.total is not None:
                    await self._confirm_one(server, reaps)
                if reaps.unstored:
                    self._has_unstored.set()

    async def _confirm_one(self, server: Involved, reaps: Reaps) -> None:
        try:
            status = await self._status(server)
        except (Unreachable, ApiError):
            status = {}
        assert reaps.total is not None
        earlier = reaps.total - reaps.counted
        stored = int(_reaping(status or {}).get("total") or 0) - earlier
        latest = self._now() - PATIENCE_SECONDS
        while reaps.unstored:
            first = reaps.unstored[0]
            if status is not None and first.number > stored and first.since > latest:
                return
            reaps.unstored.popleft()
            self._on_stored(first.origin, first.seq)

    async def _status(self, server: Involved) -> dict[str, Any] | None:
        """Read the status of a server; None if that server is gone."""
        found = await self._reader.get(server.kind, server.namespace, server.name)
        if found is None or found["metadata"]["uid"] != server.uid:
            return None
        return found.get("status") or {}

    def _take(self, server: Involved, status: dict[str, Any]) -> None:
        if (reaps := self._reaps.get(server)) is None or reaps.total is not None:
            return
        earlier = _reaping(status)
        reaps.total = int(earlier.get("total") or 0) + reaps.counted
        last: str | None = earlier.get("lastReapTime")
        if last is not None:
            reaps.known_until = _moment(last)
            if reaps.last_time is None or _moment(reaps.last_time) < reaps.known_until:
                reaps.last_time, reaps.last_reason = last, earlier.get("lastReason")
        undecided, reaps.undecided = reaps.undecided, []
        for origin, entry in undecided:
            if not self.count(origin, entry, is_new=False):
                self._on_stored(origin, entry.seq)
        self._on_change(server)

    def _add_one(self, reaps: Reaps, origin: Origin, entry: JournalEntry) -> None:
        self._counted_to[origin] = entry.seq
        reaps.counted += 1
        if reaps.total is not None:
            reaps.total += 1
        text = kube_micro_time(entry.happened_at)
        if reaps.last_time is None or _moment(text) >= _moment(reaps.last_time):
            reaps.last_time, reaps.last_reason = text, entry.reason
        reaps.unstored.append(_Unstored(origin, entry.seq, reaps.counted, self._now()))
        self._has_unstored.set()


def _reaping(status: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = status.get("reaping") or {}
    return found


def _moment(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()
