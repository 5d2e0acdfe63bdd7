"""Engine-driven transfer inside the messages: for workers that cannot map the shared pool."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmcache_nodeagent.contexts.plain_copies import copy_bytes, joined
from lmcache_nodeagent.errors import MalformedRequest, TooLarge
from lmcache_nodeagent.modules.engine_driven_facts import retrieved, stored
from lmcache_nodeagent.protocol.messages import EncodedReply, PrepareRetrieveReply, SlotContext
from lmcache_nodeagent.protocol.pickled_tensors import (
    FRAMING_BYTES,
    read_tensors,
    reply_with,
    write_tensors,
)

if TYPE_CHECKING:
    from lmcache_nodeagent.clock import Now
    from lmcache_nodeagent.events import Publish
    from lmcache_nodeagent.modules.engine_driven_entry import ChunkForm, EngineDrivenContextEntry
    from lmcache_nodeagent.modules.pending_transfers import Transfer
    from lmcache_nodeagent.storage.objects import L1Store

_NOT_THERE = PrepareRetrieveReply(success=False, data=b"", context=SlotContext())


class PickledTransfer:
    """A `TransferStrategy`. Threads: transfer-<n>, which copy the bytes."""

    name = "pickle"

    def __init__(self, store: L1Store, max_message_bytes: int, publish: Publish, now: Now) -> None:
        self._store = store
        self.max_message_bytes = max_message_bytes
        self._publish = publish
        self._now = now

    def chunks_per_message(self, form: ChunkForm) -> int:
        """Chunks that fit into the largest message."""
        return (self.max_message_bytes - FRAMING_BYTES) // (form.nbytes + FRAMING_BYTES)

    def prepare_store(self, entry: EngineDrivenContextEntry, transfer: Transfer) -> SlotContext:
        """Say nothing: the worker sends the bytes with its commit, whatever it is told."""
        del entry, transfer
        return SlotContext()

    def commit_store(
        self, entry: EngineDrivenContextEntry, transfer: Transfer, data: bytes | memoryview
    ) -> bool:
        """Admit the chunks that L1 lacks, from one pickled tensor for each chunk.

        Returns:
            True if each chunk is in L1 when this returns.

        Raises:
            MalformedRequest: the data are not exactly these chunks; nothing is stored.
        """
        started, keys = self._now(), transfer.keys
        chunks = dict(zip(keys, _chunks(entry.form, data, len(keys)), strict=True))
        reservation = self._store.reserve(keys, entry.form.nbytes)
        admitted = 0
        if reservation is not None:
            try:
                for key, slot in reservation.slots.items():
                    copy_bytes(slot, chunks[key])
            except BaseException:
                self._store.abort(reservation)
                raise
            admitted = len(self._store.commit(reservation))
        ok = all(map(self._store.contains, keys))
        self._publish(stored(entry, transfer, admitted, self._now() - started, ok=ok))
        return ok

    def prepare_retrieve(
        self, entry: EngineDrivenContextEntry, transfer: Transfer
    ) -> PrepareRetrieveReply | EncodedReply:
        """Give the bytes of all chunks.

        Raises:
            TooLarge: more bytes than a message may have.
        """
        started = self._now()
        most = self.chunks_per_message(entry.form)
        if len(transfer.keys) > most:
            raise TooLarge(
                f"{len(transfer.keys)} chunks of {entry.form.nbytes} bytes do not fit a message of"
                f" at most {self.max_message_bytes} bytes; raise --max-message-bytes or set"
                " --shm-name"
            )
        document = self._reply(entry, transfer)
        self._publish(retrieved(entry, transfer, self._now() - started, ok=document is not None))
        return _NOT_THERE if document is None else EncodedReply(document)

    def _reply(self, entry: EngineDrivenContextEntry, transfer: Transfer) -> memoryview | None:
        """Copy the chunks out, once, into the document that is sent."""
        keys = transfer.keys
        if not self._store.pin(keys):
            return None
        try:
            chunks = [chunk for key in keys if (chunk := self._store.read(key)) is not None]
            if len(chunks) < len(keys):
                return None  # dropped by a forced clear between the two looks
            self._store.touch(keys)
            return joined(reply_with(write_tensors(entry.form.dtype, entry.form.shape, chunks)))
        finally:
            for key in keys:
                self._store.unpin(key)


def _chunks(form: ChunkForm, data: bytes | memoryview, count: int) -> list[memoryview]:
    tensors = read_tensors(data, count)
    for tensor in tensors:
        if (tensor.dtype, tensor.shape) != (form.dtype, form.shape):
            raise MalformedRequest(
                f"a stored tensor is {tensor.dtype} {list(tensor.shape)}, the worker registered"
                f" {form.dtype} {list(form.shape)}"
            )
    return [tensor.data for tensor in tensors]
