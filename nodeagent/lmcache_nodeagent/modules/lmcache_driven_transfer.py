"""LMCache-driven transfer: the agent maps a worker's KV memory and copies chunks to and from L1."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmcache_nodeagent.contexts.segments import SHM_DIRECTORY
from lmcache_nodeagent.errors import NotRegistered
from lmcache_nodeagent.modules.context_entry import ContextEntry, Registration
from lmcache_nodeagent.modules.instance_holder import HolderParts, InstanceHolder
from lmcache_nodeagent.modules.layouts import layout_id
from lmcache_nodeagent.storage.objects import kv_rank

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from lmcache_nodeagent.contexts.base import ContextOpener
    from lmcache_nodeagent.ids import InstanceId
    from lmcache_nodeagent.liveness.slots import SlotRun
    from lmcache_nodeagent.modules.calls import Call, Pending
    from lmcache_nodeagent.modules.chunk_copies import ChunkCopies
    from lmcache_nodeagent.protocol.messages import (
        BlockIds,
        CacheKey,
        EngineGroupInfo,
        EngineType,
        LayoutHints,
        TensorDescriptor,
    )

_NOTHING_OUTSTANDING = b""
"""Completion event of a copy that finished before the reply (wire reference: reply rule)."""

Transferred = tuple[bytes, bool]


class LMCacheDrivenTransferModule(InstanceHolder[ContextEntry]):
    """Serves register_kv_cache, unregister_kv_cache, store and retrieve."""

    def __init__(
        self,
        parts: HolderParts,
        opener: ContextOpener,
        copies: ChunkCopies,
        chunk_tokens: int,
        segments_of: Callable[[SlotRun], Path] = lambda _: SHM_DIRECTORY,
    ) -> None:
        super().__init__(parts)
        self._segments_of = segments_of
        self._opener = opener
        self._copies = copies
        self._chunk_tokens = chunk_tokens

    def handlers(self) -> Mapping[str, Callable[..., object]]:
        """Return the handlers by operation name."""
        return {
            "register_kv_cache": self.register_kv_cache,
            "unregister_kv_cache": self.unregister_kv_cache,
            "store": self.store,
            "retrieve": self.retrieve,
        }

    def register_kv_cache(
        self,
        call: Call,
        instance_id: InstanceId,
        tensors: Sequence[TensorDescriptor],
        model: str,
        world_size: int,
        engine_type: EngineType,
        hints: LayoutHints,
        groups: Sequence[EngineGroupInfo],
    ) -> None:
        """Map a worker's KV memory. Thread: sync.

        The same content again only refreshes; other content replaces the old context as a whole.

        Raises:
            MalformedRequest: a world size beyond what object keys can name.
            LayoutError: tensors that cannot be mapped or moved.
            NotTheSpeaker: another peer holds the id.
            StillReleasing: the id or the memory is still being released; the client tries again.
            TooManyRegistered: the peer holds as much as one may.
        """
        kv_rank(world_size, 0)  # raises for a world that no lookup could name
        self._table.refuse_early(instance_id, call.connection, len(tensors))
        registration = Registration(
            instance_id, tensors, model, world_size, engine_type, hints, groups
        )
        folder = self._segments_of(call.connection.slot)
        context = self._opener(tensors, hints, groups, self._chunk_tokens, directory=folder)
        now = self._parts.now()
        entry = ContextEntry(
            instance_id=instance_id,
            engine_type=engine_type,
            registered_at=now,
            registered=self._registered_now(),
            last_seen=now,
            last_ping_at=self._parts.absent_pings.last_ping_at(instance_id),
            registrant=call.connection,
            registration=registration,
            context=context,
            layout_identity=layout_id(context.layout),
        )
        try:
            fresh = self._install(entry, now).fresh
        except BaseException:
            context.close()
            raise
        if not fresh:
            context.close()

    def unregister_kv_cache(self, call: Call, instance_id: InstanceId) -> Pending | None:
        """Release a worker that says goodbye; answered once its memory is unmapped, or is slow.

        An unknown id is fine.

        Raises:
            NotTheSpeaker: another connection registered the id since, and is open.
        """
        return self._goodbye(call, instance_id)

    def store(
        self,
        call: Call,
        key: CacheKey,
        instance_id: InstanceId,
        block_ids: BlockIds,
        event: bytes,
    ) -> Transferred:
        """Copy the chunks of [start, end) that L1 lacks. Thread: transfer-<n>.

        Returns:
            No event, and True only if every chunk is in L1 now or has no content (null blocks).

        Raises:
            NotRegistered: no context of this id.
            MalformedRequest, LayoutError: the range or the block ids do not fit.
        """
        del event  # on CPU the client's event is a constant
        with self._using(call, instance_id, key.worker_id) as entry:
            done = self._copies.store(entry, key, block_ids, call.cancellation)
            return _NOTHING_OUTSTANDING, done

    def retrieve(
        self,
        call: Call,
        key: CacheKey,
        instance_id: InstanceId,
        block_ids: BlockIds,
        event: bytes,
        skip_first_n_tokens: int,
    ) -> Transferred:
        """Copy all chunks of [start, end) into the worker's blocks. Thread: transfer-<n>.

        Returns:
            No event, and True only if every chunk was there and was copied.

        Raises:
            NotRegistered: no context of this id; its share of the lookup's pins is given back.
            MalformedRequest, LayoutError: the range or the block ids do not fit.
        """
        del event
        try:
            with self._using(call, instance_id, key.worker_id) as entry:
                done = self._copies.retrieve(entry, key, block_ids, skip_first_n_tokens, call)
                return _NOTHING_OUTSTANDING, done
        except NotRegistered:
            self._copies.give_back_share(key, call.connection.peer.identity, instance_id)
            raise
