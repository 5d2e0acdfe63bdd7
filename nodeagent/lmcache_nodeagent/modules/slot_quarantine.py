"""L1 slots of workers that left without confirming them: nobody's until the worker is gone.

A worker that was frozen and thaws goes on writing and reading where it was told to. So what it was
told stays as it is when the worker is reaped, replaced or says goodbye: its keys are free at once,
its memory only when the kernel has told of the process's end, or all its connections are closed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING

from lmcache_nodeagent.events import SlotsQuarantined, SlotsRecovered
from lmcache_nodeagent.liveness.evidence import CloseKind
from lmcache_nodeagent.storage.allocator import aligned_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lmcache_nodeagent.clock import Now
    from lmcache_nodeagent.events import Publish
    from lmcache_nodeagent.ids import InstanceId
    from lmcache_nodeagent.liveness.evidence import Connection
    from lmcache_nodeagent.modules.pending_transfers import PendingTransfers, Transfer
    from lmcache_nodeagent.storage.objects import L1Store


@dataclass(frozen=True, slots=True, eq=False)
class _Held:
    """What one instance left behind, and the connections it had."""

    instance_id: InstanceId
    layout_identity: int
    pending: PendingTransfers
    connections: Sequence[Connection]
    since: float


class SlotQuarantine:
    """Threads: any. `sweep` comes with the reaper's scans, which evidence wakes.

    Args:
        store: Where the slots are.
        close_confirm_seconds: How long a close must be past, for a worker that comes back.
        patience_seconds: The same for a close by us or by a time-out, which says nothing about
            the worker.
        publish: Told what is held and what is back.
        now: Monotonic seconds.
    """

    def __init__(
        self,
        store: L1Store,
        close_confirm_seconds: Callable[[], float],
        patience_seconds: float,
        publish: Publish,
        now: Now,
    ) -> None:
        self._store = store
        self._close_confirm_seconds = close_confirm_seconds
        self._patience_seconds = patience_seconds
        self._publish = publish
        self._now = now
        self._lock = Lock()  # guards: _held
        self._held: list[_Held] = []

    def take(
        self,
        instance_id: InstanceId,
        layout_identity: int,
        pending: PendingTransfers,
        connections: Sequence[Connection],
    ) -> None:
        """Take over what an instance that left has not confirmed. Nothing uses `pending` then."""
        for reservation in pending.reservations():
            self._store.renounce(reservation)
        if not len(pending):
            return
        now = self._now()
        with self._lock:
            self._held.append(_Held(instance_id, layout_identity, pending, connections, now))
        if not self.sweep(now):
            self._publish(SlotsQuarantined(instance_id, _bytes(pending), len(pending)))

    def identities(self, instance_id: InstanceId) -> Sequence[int]:
        """Return the layouts under which an instance left something here."""
        with self._lock:
            held = [one.layout_identity for one in self._held if one.instance_id == instance_id]
        return tuple(dict.fromkeys(held))

    def prepared_again(self, instance_id: InstanceId, transfer: Transfer) -> bool:
        """Count a prepare of chunks that the instance may still be writing to quarantined slots."""
        return any(pending.prepared_again(transfer) for pending in self._of(instance_id))

    def end_write(self, instance_id: InstanceId, transfer: Transfer) -> bool:
        """Free slots whose writer says that it is done with them; False if there are none.

        What it wrote is dropped: it had left before.
        """
        for pending in self._of(instance_id):
            known, write = pending.end_write(transfer)
            if write is not None and write.reservation is not None:
                self._store.abort(write.reservation)
            if known:
                return True
        return False

    def end_read(self, instance_id: InstanceId, transfer: Transfer) -> bool:
        """Unpin what its reader says that it is done with; False if there is nothing."""
        for pending in self._of(instance_id):
            if pending.end_read(transfer) is not None:
                self._unpin(transfer)
                return True
        return False

    def sweep(self, now: float) -> int:
        """Free what workers held that are gone; return how many of them."""
        with self._lock:
            gone = [held for held in self._held if self._is_over(held, now)]
            self._held = [held for held in self._held if held not in gone]
        for held in gone:
            nbytes, count = _bytes(held.pending), len(held.pending)
            reservations, reads = held.pending.take_all()
            for reservation in reservations:
                self._store.abort(reservation)
            for transfer in reads:
                self._unpin(transfer)
            self._publish(SlotsRecovered(held.instance_id, nbytes, count, now - held.since))
        return len(gone)

    @property
    def sweep_due_at(self) -> float:
        """When to sweep again, unless there is new evidence before; infinity if for nobody."""
        with self._lock:
            held = list(self._held)
        return min(map(self._gone_at, held), default=math.inf)

    def held_bytes(self) -> int:
        """Bytes of slots that their writers have left; pinned chunks are counted as pinned."""
        with self._lock:
            return sum(_bytes(held.pending) for held in self._held)

    def __len__(self) -> int:
        """Count the instances."""
        with self._lock:
            return len(self._held)

    def _of(self, instance_id: InstanceId) -> Sequence[PendingTransfers]:
        with self._lock:
            return [held.pending for held in self._held if held.instance_id == instance_id]

    def _is_over(self, held: _Held, now: float) -> bool:
        """Tell whether nobody can use the slots any more, or whoever could has confirmed all."""
        return not len(held.pending) or now >= self._gone_at(held)

    def _gone_at(self, held: _Held) -> float:
        """When the last connection counts as gone, as far as is known now."""
        return max(map(self._connection_gone_at, held.connections), default=-math.inf)

    def _connection_gone_at(self, connection: Connection) -> float:
        if connection.process_gone:
            return -math.inf
        if connection.closed_at is None:
            return math.inf
        by_peer = connection.close_kind is CloseKind.PEER
        return connection.closed_at + (
            self._close_confirm_seconds() if by_peer else self._patience_seconds
        )

    def _unpin(self, transfer: Transfer) -> None:
        for key in transfer.keys:
            self._store.unpin(key)


def _bytes(pending: PendingTransfers) -> int:
    return sum(
        aligned_bytes(reservation.nbytes) * len(reservation.slots)
        for reservation in pending.reservations()
    )
