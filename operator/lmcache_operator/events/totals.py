"""How many workers of each server were reaped since it was created, over all operators.

The total lives in the server's status. An operator reads it once and adds what it posts for the
first time; the name of the Event tells whether an earlier one has counted an entry already.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import structlog

from lmcache_nodeagent.operator_link.messages import JournalEntry
from lmcache_operator.clock import kube_time
from lmcache_operator.cluster import KubeObject
from lmcache_operator.errors import ApiError, Unreachable
from lmcache_operator.events.objects import Involved
from lmcache_operator.workers.pacing import CONNECTION_STEPS, REFUSAL_STEPS, Backoff, Sleep

_log = structlog.get_logger(__name__)


class ServerReader(Protocol):
    """The part of `Cluster` that is needed here."""

    async def get(self, kind: str, namespace: str | None, name: str) -> KubeObject | None:
        """Return an object, or None if there is none."""


@dataclass(slots=True)
class Reaps:
    """The reaps of one server.

    Attributes:
        total: since it was created; None until the earlier ones are known.
        counted: those of this operator.
        last_time: as Kubernetes writes moments.
    """

    total: int | None = None
    counted: int = 0
    last_time: str | None = None
    last_reason: str | None = None


class ReapTotals:
    """The reaps of all servers. Thread: the loop."""

    def __init__(
        self,
        reader: ServerReader,
        on_change: Callable[[Involved], None],
        *,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self._reader = reader
        self._on_change = on_change
        self._sleep = sleep
        self._reaps: dict[Involved, Reaps] = {}
        self._unread: asyncio.Queue[Involved] = asyncio.Queue()

    def add(self, server: Involved) -> None:
        """Have the status of a server read."""
        if server not in self._reaps:
            self._reaps[server] = Reaps()
            self._unread.put_nowait(server)

    def keep(self, servers: Collection[Involved]) -> None:
        """Forget all other servers."""
        for gone in self._reaps.keys() - set(servers):
            del self._reaps[gone]

    def of(self, server: Involved) -> Reaps:
        """Return the reaps of a server."""
        return self._reaps.get(server) or Reaps()

    def count(self, server: Involved, entry: JournalEntry) -> None:
        """Count a reap that nobody has counted before."""
        if (reaps := self._reaps.get(server)) is None:
            return
        reaps.counted += 1
        if reaps.total is not None:
            reaps.total += 1
        moment = kube_time(entry.happened_at)
        if reaps.last_time is None or moment >= reaps.last_time:
            reaps.last_time, reaps.last_reason = moment, entry.reason
        self._on_change(server)

    async def run(self) -> NoReturn:
        """Read what has to be read until cancelled."""
        unreachable, refused = Backoff(CONNECTION_STEPS), Backoff(REFUSAL_STEPS)
        while True:
            server = await self._unread.get()
            try:
                found = await self._reader.get(server.kind, server.namespace, server.name)
            except Unreachable:
                await self._sleep(unreachable.next_seconds())
                self._unread.put_nowait(server)
                continue
            except ApiError as error:
                _log.warning("reaps_not_read", server=server.name, error=str(error))
                await self._sleep(refused.next_seconds())
                self._unread.put_nowait(server)
                continue
            unreachable.reset()
            refused.reset()
            if found is not None and found["metadata"]["uid"] == server.uid:
                self._take(server, found.get("status") or {})

    def _take(self, server: Involved, status: dict[str, Any]) -> None:
        if (reaps := self._reaps.get(server)) is None or reaps.total is not None:
            return
        earlier = status.get("reaping") or {}
        reaps.total = int(earlier.get("total") or 0) + reaps.counted
        last: str | None = earlier.get("lastReapTime")
        if last is not None and (reaps.last_time is None or last > reaps.last_time):
            reaps.last_time, reaps.last_reason = last, earlier.get("lastReason")
        self._on_change(server)
