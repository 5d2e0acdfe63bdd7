"""Heartbeats of workers that have no context here: they are told once, and their rhythm is kept."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING

from lmcache_nodeagent.liveness.entry import PING_INTERVALS_KEPT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lmcache_nodeagent.ids import InstanceId

IDS_KEPT = 4096


@dataclass(slots=True)
class _Absent:
    last_ping_at: float
    intervals: list[float] = field(default_factory=list)


class AbsentPings:
    """Ids that pinged without being registered. Threads: any. Bounded: the oldest are forgotten."""

    def __init__(self, ids_kept: int = IDS_KEPT) -> None:
        self._ids_kept = ids_kept
        self._lock = Lock()  # guards: _absent
        self._absent: OrderedDict[InstanceId, _Absent] = OrderedDict()

    def pinged(self, instance_id: InstanceId, now: float) -> bool:
        """Note a ping of an id without a context; True the first time: then it is told."""
        with self._lock:
            absent = self._absent.get(instance_id)
            if absent is None:
                self._absent[instance_id] = _Absent(now)
                if len(self._absent) > self._ids_kept:
                    self._absent.popitem(last=False)
                return True
            absent.intervals = [*absent.intervals, now - absent.last_ping_at][-PING_INTERVALS_KEPT:]
            absent.last_ping_at = now
            self._absent.move_to_end(instance_id)
            return False

    def last_ping_at(self, instance_id: InstanceId) -> float | None:
        """Return the last ping of an id that is absent: the next interval begins there.

        Without it a worker that pings every 60 s would never be seen to do so with a T of 30 s:
        each second ping would find it reaped.
        """
        with self._lock:
            absent = self._absent.get(instance_id)
        return absent.last_ping_at if absent else None

    def registered(self, instance_id: InstanceId) -> Sequence[float]:
        """Forget an id that has registered; return the ping intervals seen while it was absent."""
        with self._lock:
            absent = self._absent.pop(instance_id, None)
        return absent.intervals if absent else ()
