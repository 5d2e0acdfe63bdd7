"""Who was reaped a short while ago: one that is heard again was alive, or came back to life."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING

from lmcache_nodeagent.liveness.journal import Subject

if TYPE_CHECKING:
    from lmcache_nodeagent.ids import InstanceId
    from lmcache_nodeagent.liveness.evidence import Connection
    from lmcache_nodeagent.liveness.targets import ReapableEntry

HEARD_WITHIN_SECONDS = 600.0
"""Later than this an id that is heard says nothing about the one that had it."""

_IDS_KEPT = 4096


@dataclass(frozen=True, slots=True)
class Reaped:
    """An instance that was reaped. Moments are monotonic."""

    subject: Subject
    reason: str
    last_seen: float
    reaped_at: float
    connection: Connection


class ReapedLately:
    """The last reaps by id. Threads: any. Bounded: the oldest are forgotten."""

    def __init__(self, ids_kept: int = _IDS_KEPT) -> None:
        self._ids_kept = ids_kept
        self._lock = Lock()  # guards: _reaped
        self._reaped: OrderedDict[InstanceId, Reaped] = OrderedDict()

    def add(self, entry: ReapableEntry, reason: str, now: float) -> None:
        """Note a reap."""
        made = Reaped(Subject.of(entry), reason, entry.last_seen, now, entry.last_connection)
        with self._lock:
            self._reaped[entry.instance_id] = made
            self._reaped.move_to_end(entry.instance_id)
            if len(self._reaped) > self._ids_kept:
                self._reaped.popitem(last=False)

    def registered(self, instance_id: InstanceId) -> None:
        """Forget an id that has registered anew: what is heard from now on is the new one."""
        with self._lock:
            self._reaped.pop(instance_id, None)

    def heard(self, instance_id: InstanceId, connection: Connection, now: float) -> Reaped | None:
        """Take a ping of an id that is not registered; return the reap that it refutes, once.

        A ping of another peer is another worker that has the same id.
        """
        with self._lock:
            reaped = self._reaped.get(instance_id)
            if reaped is None or not _is_it(reaped, connection):
                return None
            del self._reaped[instance_id]
        return reaped if now - reaped.reaped_at <= HEARD_WITHIN_SECONDS else None


def _is_it(reaped: Reaped, connection: Connection) -> bool:
    return connection is reaped.connection or connection.same_peer(reaped.connection)
