"""Ping, small questions, clear; and the reaper, which asks all holders of instance state."""

from __future__ import annotations

from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING

from lmcache_nodeagent.clock import wall
from lmcache_nodeagent.events import FalseReap, HintCancelled, UnknownInstanceTold
from lmcache_nodeagent.liveness.entry import Speaker
from lmcache_nodeagent.liveness.journal import JournalEntry, Subject
from lmcache_nodeagent.liveness.targets import UNTOUCHED, Touched

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from lmcache_nodeagent.clock import Now
    from lmcache_nodeagent.events import Publish
    from lmcache_nodeagent.ids import InstanceId
    from lmcache_nodeagent.liveness.evidence import Connection
    from lmcache_nodeagent.liveness.journal import Journal
    from lmcache_nodeagent.liveness.reaped_lately import ReapedLately
    from lmcache_nodeagent.liveness.reaper import Reaper
    from lmcache_nodeagent.liveness.targets import InstanceLivenessTarget
    from lmcache_nodeagent.modules.absent_pings import AbsentPings
    from lmcache_nodeagent.modules.calls import Call
    from lmcache_nodeagent.protocol.messages import BlockAllocationRecord
    from lmcache_nodeagent.storage.objects import L1Store


@dataclass(frozen=True, slots=True)
class ManagementFigures:
    """Counters of this module, for metrics."""

    pings: int
    block_allocation_records: int


class ManagementModule:
    """Serves ping, noop, get_chunk_size, get_experimental, clear, report_block_allocation.

    Owns the reaper and gets every holder of instance state in one list (worker-liveness design,
    sections 5.3 and 5.4). `hear` and the constant-time operations run on the router thread.
    """

    def __init__(
        self,
        targets: Sequence[InstanceLivenessTarget],
        reaper: Reaper,
        store: L1Store,
        absent_pings: AbsentPings,
        reaped_lately: ReapedLately,
        journal: Journal,
        chunk_tokens: int,
        publish: Publish,
        now: Now,
        capabilities: Sequence[str] = (),
    ) -> None:
        """`capabilities` are what `get_experimental` lists."""
        self._capabilities = list(capabilities)
        self._targets = targets
        self.reaper = reaper
        self._store = store
        self._absent_pings = absent_pings
        self._reaped_lately = reaped_lately
        self._journal = journal
        self._chunk_tokens = chunk_tokens
        self._publish = publish
        self._now = now
        self._lock = Lock()  # guards: _pings, _records
        self._pings = 0
        self._records = 0

    def handlers(self) -> Mapping[str, Callable[..., object]]:
        """Return the handlers by operation name."""
        return {
            "ping": self.ping,
            "noop": self.noop,
            "get_chunk_size": self.get_chunk_size,
            "get_experimental": self.get_experimental,
            "clear": self.clear,
            "report_block_allocation": self.report_block_allocation,
        }

    def hear(self, instance_id: InstanceId, connection: Connection, *, ping: bool) -> Touched:
        """Take a sign of life as the router reads it. Thread: zmq-router.

        Only the holders decide whether the connection may speak for the instance.
        """
        for target in self._targets:
            touched = target.touch_instance(instance_id, connection, ping=ping)
            if touched.speaker is Speaker.UNKNOWN_INSTANCE:
                continue
            if touched.cancelled.window:
                self._note_cancelled(instance_id, touched)
            return touched
        return UNTOUCHED

    def _note_cancelled(self, instance_id: InstanceId, touched: Touched) -> None:
        """Report it; what the operator had said also to the operator, by the journal."""
        cancelled = touched.cancelled
        trigger = cancelled.hints[-1].trigger if cancelled.hints else ""
        self._publish(HintCancelled(instance_id, cancelled.window, trigger))
        if not cancelled.hints or touched.entry is None:
            return
        self._journal.append(
            JournalEntry(
                kind="cancelled",
                subject=Subject.of(touched.entry),
                reason=cancelled.window,
                evidence=tuple(f"{hint.trigger}, then heard" for hint in cancelled.hints),
                silent_seconds=cancelled.silent_seconds,
                happened_at=wall(),
                trigger=trigger,
            )
        )

    def ping(self, call: Call, instance_id: InstanceId | None) -> bool:
        """Answer a heartbeat.

        A worker whose entry is gone (reaped, or lost with an earlier agent) is told so by one
        `false`: stock clients then register again at their next ping. Somebody else's id is
        answered `true` and refreshes nothing.
        """
        with self._lock:
            self._pings += 1
        if instance_id is None or call.touched.speaker is not Speaker.UNKNOWN_INSTANCE:
            return True
        if not self._absent_pings.pinged(instance_id, self._now()):
            return True
        self._note_false_reap(call, instance_id)
        self._publish(UnknownInstanceTold(instance_id, call.connection.peer.text))
        return False

    def _note_false_reap(self, call: Call, instance_id: InstanceId) -> None:
        """Report a reaped instance that pings: it was alive all the time, or has thawed."""
        now, connection = self._now(), call.connection
        reaped = self._reaped_lately.heard(instance_id, connection, now)
        if reaped is None:
            return
        seconds = now - reaped.reaped_at
        self._publish(FalseReap(instance_id, reaped.reason, seconds, connection.peer.text))
        self._journal.append(
            JournalEntry(
                kind="false_reap",
                subject=reaped.subject,
                reason=reaped.reason,
                evidence=(
                    f"reaped {seconds:.1f} s ago: {reaped.reason}",
                    f"pinged from {connection.peer.text}",
                ),
                silent_seconds=now - reaped.last_seen,
                happened_at=wall(),
            )
        )

    @staticmethod
    def noop(call: Call) -> str:
        """Answer that requests are served."""
        del call
        return "OK"

    def get_chunk_size(self, call: Call) -> int:
        """Return the chunk size in tokens."""
        del call
        return self._chunk_tokens

    def get_experimental(self, call: Call) -> list[str]:
        """Return the optional capabilities; stock clients use those that are listed."""
        del call
        return self._capabilities

    def clear(self, call: Call, force: bool) -> None:  # noqa: FBT001  # the wire's positional flag
        """Drop cached objects; without `force` those that a lookup or transfer has pinned stay."""
        del call
        self._store.clear(force=force)

    def report_block_allocation(
        self, call: Call, scheduler_pid: int, model: str, records: list[BlockAllocationRecord]
    ) -> None:
        """Count a scheduler's block allocations; only metrics depend on them."""
        del call, scheduler_pid, model
        with self._lock:
            self._records += len(records)

    def figures(self) -> ManagementFigures:
        """Return the counters of one moment."""
        with self._lock:
            return ManagementFigures(self._pings, self._records)

    def tracked_instance_count(self) -> int:
        """Count the instances of all holders."""
        return sum(target.tracked_instance_count() for target in self._targets)
