"""Moving chunks between a worker's context and L1: whole, or not at all."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from lmcache_nodeagent.errors import MalformedRequest
from lmcache_nodeagent.events import Retrieved, Stored
from lmcache_nodeagent.modules.object_keys import object_keys, transfer_hashes

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from lmcache_nodeagent.clock import Now
    from lmcache_nodeagent.events import Publish
    from lmcache_nodeagent.hashing import ChunkHasher
    from lmcache_nodeagent.ids import InstanceId
    from lmcache_nodeagent.modules.calls import Call, Cancellation
    from lmcache_nodeagent.modules.context_entry import ContextEntry
    from lmcache_nodeagent.modules.kv_events import TokenBindings
    from lmcache_nodeagent.modules.layouts import LayoutRegistry
    from lmcache_nodeagent.protocol.messages import BlockIds, CacheKey
    from lmcache_nodeagent.sessions import SessionTable
    from lmcache_nodeagent.storage.objects import L1Store, ObjectKey, Reservation


class ChunkCopies:
    """Stores and retrieves for one agent. Threads: transfer-<n>, several at a time."""

    def __init__(
        self,
        store: L1Store,
        sessions: SessionTable,
        layouts: LayoutRegistry,
        hasher: ChunkHasher,
        null_block_id: int,
        publish: Publish,
        now: Now,
        bindings: TokenBindings | None = None,
    ) -> None:
        self._bindings = bindings
        self._store = store
        self._sessions = sessions
        self._layouts = layouts
        self._hasher = hasher
        self._null_block_id = null_block_id
        self._publish = publish
        self._now = now

    def store(
        self,
        entry: ContextEntry,
        key: CacheKey,
        block_ids: BlockIds,
        cancellation: Cancellation,
    ) -> bool:
        """Admit the chunks of [start, end) that are not in L1 yet.

        Returns:
            True if each chunk with content is in L1 when this returns. A range that does not fit
            as a whole is not stored at all.

        Raises:
            MalformedRequest, LayoutError: the range or the block ids do not fit.
            TransferError: a copy failed or ran out of time; nothing of it becomes visible.
        """
        started = self._now()
        keys = self._keys(entry, key)
        entry.context.check_block_ids(block_ids, len(keys))
        filled = self._filled_chunks(entry, block_ids, len(keys))
        wanted = {keys[index]: index for index in filled}
        nbytes = entry.context.layout.object_nbytes
        reservation = self._store.reserve(list(wanted), nbytes) if wanted else None
        admitted = 0
        if reservation is not None:
            self._bind(key, [wanted[object_key] for object_key in reservation.slots])
            # If the copy hangs, others may store these chunks; the room stays its own.
            cancellation.on_cancel(partial(self._store.renounce, reservation))
            admitted = self._fill(entry, block_ids, reservation, wanted, cancellation)
        ok = all(self._store.contains(object_key) for object_key in wanted)
        self._publish(
            Stored(
                instance_id=entry.instance_id,
                model=entry.model,
                requested_chunks=len(keys),
                admitted_chunks=admitted,
                copied_bytes=admitted * nbytes,
                seconds=self._now() - started,
                ok=ok,
            )
        )
        return ok

    def _bind(self, key: CacheKey, indices: Sequence[int]) -> None:
        """Remember what tokens the new chunks stand for, before their events go out."""
        if self._bindings is not None and indices:
            hashes = self._hasher.hashes(key.token_ids, key.end)
            self._bindings.bind(key, hashes, indices)

    def _fill(
        self,
        entry: ContextEntry,
        block_ids: BlockIds,
        reservation: Reservation,
        indices: dict[ObjectKey, int],
        cancellation: Cancellation,
    ) -> int:
        """Copy into a reservation and commit it; return how many chunks became visible."""
        slots = reservation.slots
        if not slots:
            return 0
        try:
            entry.context.gather(
                block_ids,
                [indices[object_key] for object_key in slots],
                list(slots.values()),
                cancellation.check,
            )
        except BaseException:
            self._store.abort(reservation)
            raise
        return len(self._store.commit(reservation))

    def retrieve(
        self,
        entry: ContextEntry,
        key: CacheKey,
        block_ids: BlockIds,
        skip_tokens: int,
        call: Call,
    ) -> bool:
        """Copy every chunk of [start, end) into the blocks, or report failure for all of them.

        Consumes one pin per chunk of the request's own lookup, whatever the outcome.

        Raises:
            MalformedRequest, LayoutError: the range or the block ids do not fit.
            TransferError: a copy failed.
        """
        started = self._now()
        keys = self._keys(entry, key)
        peer, cancellation = call.connection.peer.identity, call.cancellation
        consumed = dict(self._sessions.consume(peer, key.request_id, keys, entry.instance_id))
        give_back = partial(self._give_back, consumed)
        cancellation.on_cancel(give_back)
        ok = False
        try:
            entry.context.check_block_ids(block_ids, len(keys))
            ok = self._copy_out(entry, keys, block_ids, skip_tokens, cancellation)
        finally:
            give_back()
        nbytes = entry.context.layout.object_nbytes
        self._publish(
            Retrieved(
                instance_id=entry.instance_id,
                model=entry.model,
                requested_chunks=len(keys),
                copied_bytes=len(keys) * nbytes if ok else 0,
                seconds=self._now() - started,
                ok=ok,
            )
        )
        return ok

    def _give_back(self, consumed: dict[Hashable, int]) -> None:
        """Unpin what a session's pins became, once: when the copy has ended or its deadline."""
        while consumed:
            with suppress(KeyError):  # the other one was faster
                object_key, count = consumed.popitem()
                self._store.unpin(object_key, count)  # type: ignore[arg-type]  # sessions keep keys opaque

    def _copy_out(
        self,
        entry: ContextEntry,
        keys: Sequence[ObjectKey],
        block_ids: BlockIds,
        skip_tokens: int,
        cancellation: Cancellation,
    ) -> bool:
        """Copy under a pin of our own, so that a lease that ends meanwhile changes nothing.

        It is held until the copy returns, however late: nobody else's bytes are to be read.
        """
        if not keys:
            return True
        if not self._store.pin(keys):
            return False
        try:
            sources = []
            for index, object_key in enumerate(keys):
                source = self._store.read(object_key)
                if source is None or source.nbytes != entry.context.layout.object_nbytes:
                    return False  # dropped by a forced clear, or another layout's bytes
                sources.append((index, source))
            entry.context.scatter(block_ids, sources, skip_tokens, cancellation.check)
            self._store.touch(keys)
        finally:
            for object_key in keys:
                self._store.unpin(object_key)
        return True

    def give_back_share(self, key: CacheKey, peer: str, reader: InstanceId) -> None:
        """Give back the pins that a retrieve would have consumed, had its instance been here.

        Raises:
            MalformedRequest: the range does not fit.
        """
        identities = self._layouts.find(key.model_name, key.world_size)
        if not identities or key.worker_id is None:
            return
        hashes = transfer_hashes(key, self._hasher)
        keys = [
            object_key
            for identity in identities
            for object_key in object_keys(key, hashes, key.worker_id, identity)
        ]
        for object_key in self._sessions.consume(peer, key.request_id, keys, reader):
            self._store.unpin(object_key)  # type: ignore[arg-type]  # sessions keep keys opaque

    def _keys(self, entry: ContextEntry, key: CacheKey) -> list[ObjectKey]:
        if key.worker_id is None:
            raise MalformedRequest("worker_id is nil; a transfer needs the worker's KV shard")
        if key.model_name != entry.model or key.world_size != entry.world_size:
            raise MalformedRequest(
                f"key is of model {key.model_name!r}, world size {key.world_size}; the instance"
                f" registered {entry.model!r}, world size {entry.world_size}"
            )
        hashes = transfer_hashes(key, self._hasher)
        return object_keys(key, hashes, key.worker_id, entry.layout_identity)

    def _filled_chunks(
        self, entry: ContextEntry, block_ids: BlockIds, chunks: int
    ) -> Sequence[int]:
        """Leave out the chunks whose blocks are all the engine's null block: nothing is there."""
        null = self._null_block_id
        if not any(null in ids for ids in block_ids):
            return range(chunks)
        per_chunk = {
            group.block_list: group.blocks_per_chunk for group in entry.context.layout.groups
        }
        return [
            chunk
            for chunk in range(chunks)
            if any(
                block_id != null
                for block_list, count in per_chunk.items()
                for block_id in block_ids[block_list][chunk * count : (chunk + 1) * count]
            )
        ]
