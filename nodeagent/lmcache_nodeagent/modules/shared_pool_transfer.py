"""Engine-driven transfer through the shared pool: the worker maps L1, and is told where."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmcache_nodeagent.errors import MalformedRequest
from lmcache_nodeagent.modules import slot_marks
from lmcache_nodeagent.modules.engine_driven_facts import retrieved, stored
from lmcache_nodeagent.protocol.messages import PoolSlot, PrepareRetrieveReply, SlotContext

if TYPE_CHECKING:
    from lmcache_nodeagent.clock import Now
    from lmcache_nodeagent.events import Publish
    from lmcache_nodeagent.modules.engine_driven_entry import EngineDrivenContextEntry
    from lmcache_nodeagent.modules.pending_transfers import Transfer
    from lmcache_nodeagent.modules.slot_quarantine import SlotQuarantine
    from lmcache_nodeagent.storage.objects import L1Store, Reservation

_SEND_OR_BE_TOLD_NO = SlotContext()
"""A worker that maps the pool then gathers for itself and commits nothing, which is declined."""

_NOTHING_TO_WRITE = SlotContext(slots=[], chunk_indices=[])
"""The worker counts the store as done."""

_NOT_THERE = PrepareRetrieveReply(success=False, data=b"", context=SlotContext())


class SharedPoolTransfer:
    """A `TransferStrategy`. Threads: transfer-<n>; no bytes move here."""

    name = "shm"

    def __init__(
        self, store: L1Store, quarantine: SlotQuarantine, publish: Publish, now: Now
    ) -> None:
        self._store = store
        self._quarantine = quarantine
        self._publish = publish
        self._now = now

    def prepare_store(self, entry: EngineDrivenContextEntry, transfer: Transfer) -> SlotContext:
        """Reserve slots for the chunks that nobody has and nobody writes.

        Returns:
            The slots; or none of them, where all chunks are there. Without a word about slots the
            worker will ask for a commit, which tells it whether the chunks are there: L1 is full,
            somebody else writes them, or this worker does so already.

        Raises:
            Overloaded: too many stores of this worker were never committed.
        """
        again = entry.pending.prepared_again(transfer)
        if again or self._quarantine.prepared_again(entry.instance_id, transfer):
            return _SEND_OR_BE_TOLD_NO
        started = self._now()
        reservation = self._store.reserve(transfer.keys, entry.form.nbytes)
        if reservation is None:
            self._publish(stored(entry, transfer, 0, 0.0, ok=False))
            entry.pending.begin_write(transfer, None, started)
            return _SEND_OR_BE_TOLD_NO
        if not reservation.slots and not reservation.being_written:
            self._publish(stored(entry, transfer, 0, 0.0, ok=True))
            return _NOTHING_TO_WRITE
        slot_marks.mark(reservation.slots.values())
        try:
            first = entry.pending.begin_write(transfer, reservation, started)
        except BaseException:
            self._store.abort(reservation)
            raise
        if not first:
            self._store.abort(reservation)
            return _SEND_OR_BE_TOLD_NO
        return _slots_to_write(entry, transfer, reservation)

    def commit_store(self, entry: EngineDrivenContextEntry, transfer: Transfer) -> bool:
        """Show the chunks of a prepared store whose slots were written; False for any other.

        Raises:
            MalformedRequest: a slot was not written; nothing of the store is kept.
        """
        if self._quarantine.end_write(entry.instance_id, transfer):
            return False
        _, write = entry.pending.end_write(transfer)
        reservation = write.reservation if write else None
        if write is None or reservation is None:
            return False
        unwritten = [s for s in reservation.slots.values() if not slot_marks.is_written(s)]
        if unwritten:
            self._store.abort(reservation)
            raise MalformedRequest(
                f"{len(unwritten)} of {len(reservation.slots)} slots were committed but never"
                " written: the worker maps another pool than this agent's, or gave up"
            )
        admitted = len(self._store.commit(reservation))
        ok = all(map(self._store.contains, transfer.keys))
        self._publish(stored(entry, transfer, admitted, self._now() - write.started_at, ok=ok))
        return ok

    def withdraw(self, entry: EngineDrivenContextEntry, transfer: Transfer) -> None:
        """Drop a prepared store: the worker sends the bytes, it cannot map the pool."""
        _, write = entry.pending.end_write(transfer)
        if write is not None and write.reservation is not None:
            self._store.abort(write.reservation)

    def prepare_retrieve(
        self, entry: EngineDrivenContextEntry, transfer: Transfer
    ) -> PrepareRetrieveReply:
        """Pin the chunks until the worker's commit, and say where they are.

        Raises:
            Overloaded: too many retrieves of this worker were never committed.
        """
        if not self._store.pin(transfer.keys):
            self._publish(retrieved(entry, transfer, 0.0, ok=False))
            return _NOT_THERE
        slots = self._locate(entry, transfer)
        try:
            if slots is not None:
                entry.pending.begin_read(transfer, self._now())
        except BaseException:
            self._unpin(transfer)
            raise
        if slots is None:  # dropped by a forced clear between the two looks
            self._unpin(transfer)
            return _NOT_THERE
        self._store.touch(transfer.keys)
        return PrepareRetrieveReply(success=True, data=b"", context=SlotContext(slots=slots))

    def commit_retrieve(self, entry: EngineDrivenContextEntry, transfer: Transfer) -> None:
        """Unpin what the worker has read."""
        if self._quarantine.end_read(entry.instance_id, transfer):
            return
        started_at = entry.pending.end_read(transfer)
        if started_at is not None:
            self._unpin(transfer)
            self._publish(retrieved(entry, transfer, self._now() - started_at, ok=True))

    def _locate(self, entry: EngineDrivenContextEntry, transfer: Transfer) -> list[PoolSlot] | None:
        slots = []
        for key in transfer.keys:
            extent = self._store.locate(key)
            if extent is None:
                return None
            slots.append(_slot(entry, extent.offset))
        return slots

    def _unpin(self, transfer: Transfer) -> None:
        for key in transfer.keys:
            self._store.unpin(key)


def _slots_to_write(
    entry: EngineDrivenContextEntry, transfer: Transfer, reservation: Reservation
) -> SlotContext:
    if not reservation.slots:
        return _SEND_OR_BE_TOLD_NO
    indices = {key: index for index, key in enumerate(transfer.keys)}
    return SlotContext(
        slots=[_slot(entry, offset) for offset in reservation.offsets],
        chunk_indices=[indices[key] for key in reservation.slots],
    )


def _slot(entry: EngineDrivenContextEntry, offset: int) -> PoolSlot:
    form = entry.form
    return PoolSlot(offset, form.nbytes, list(form.shape), form.dtype)
