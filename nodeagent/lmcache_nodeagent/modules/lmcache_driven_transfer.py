"""LMCache-driven transfer: the agent maps a worker's KV memory and copies chunks to and from L1."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from lmcache_nodeagent.errors import NotRegistered
from lmcache_nodeagent.events import ContextReplaced, InstanceRegistered, InstanceUnregistered
from lmcache_nodeagent.ids import render_instance_id
from lmcache_nodeagent.liveness.targets import InstanceLivenessTarget
from lmcache_nodeagent.liveness.testimony import Registered
from lmcache_nodeagent.modules.calls import Pending
from lmcache_nodeagent.modules.context_entry import ContextEntry, Registration
from lmcache_nodeagent.modules.context_table import ContextTable, Installed
from lmcache_nodeagent.modules.layouts import layout_id
from lmcache_nodeagent.storage.objects import kv_rank

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from lmcache_nodeagent.clock import Now
    from lmcache_nodeagent.contexts.base import ContextOpener, WorkerContext
    from lmcache_nodeagent.events import Publish
    from lmcache_nodeagent.ids import InstanceId
    from lmcache_nodeagent.liveness.evidence import Connection
    from lmcache_nodeagent.liveness.reaped_lately import ReapedLately
    from lmcache_nodeagent.liveness.release import Releaser
    from lmcache_nodeagent.liveness.targets import Decide, ReapableEntry, Touched
    from lmcache_nodeagent.modules.absent_pings import AbsentPings
    from lmcache_nodeagent.modules.calls import Call
    from lmcache_nodeagent.modules.chunk_copies import ChunkCopies
    from lmcache_nodeagent.modules.layouts import LayoutRegistry
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


class LMCacheDrivenTransferModule(InstanceLivenessTarget):
    """Serves register_kv_cache, unregister_kv_cache, store and retrieve.

    Registrations run on `sync`, transfers on `transfer-<n>`; liveness is asked from the router and
    the reaper. All of them meet in the table, whose lock is a leaf and is never held over a copy.
    """

    def __init__(
        self,
        opener: ContextOpener,
        copies: ChunkCopies,
        layouts: LayoutRegistry,
        releaser: Releaser,
        absent_pings: AbsentPings,
        chunk_tokens: int,
        reaped_lately: ReapedLately,
        numbers: Iterator[int],
        publish: Publish,
        now: Now,
        wall: Now,
    ) -> None:
        self._opener = opener
        self._copies = copies
        self._layouts = layouts
        self._releaser = releaser
        self._absent_pings = absent_pings
        self._chunk_tokens = chunk_tokens
        self._publish = publish
        self._reaped_lately = reaped_lately
        self._now = now
        self._wall = wall
        self._table = ContextTable(numbers)

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
        """
        kv_rank(world_size, 0)  # raises for a world that no lookup could name
        self._table.refuse_leaving(instance_id)
        registration = Registration(
            instance_id, tensors, model, world_size, engine_type, hints, groups
        )
        context = self._opener(tensors, hints, groups, self._chunk_tokens)
        installed = self._install(call.connection, registration, context)
        if installed is None:
            return
        entry = installed.entry
        entry.ping_intervals.extend(self._absent_pings.registered(instance_id))
        if installed.replaced is not None:
            self._give_way(installed.replaced, call.connection.peer.text)
        self._publish(
            InstanceRegistered(
                instance_id=instance_id,
                model=model,
                peer=call.connection.peer.text,
                mapped_bytes=entry.nbytes,
                replaced=installed.replaced is not None,
            )
        )

    def _install(
        self, connection: Connection, registration: Registration, context: WorkerContext
    ) -> Installed | None:
        """Put a context into force; None, and closed, if the one in force is the same.

        The layout is counted in first: as soon as the entry can be seen, it can be reaped.
        """
        now = self._now()
        entry = ContextEntry(
            instance_id=registration.instance_id,
            engine_type=registration.engine_type,
            registered_at=now,
            registered=Registered(at=self._wall()),
            last_seen=now,
            last_ping_at=self._absent_pings.last_ping_at(registration.instance_id),
            registrant=connection,
            registration=registration,
            context=context,
            layout_identity=layout_id(context.layout),
        )
        self._layouts.add(entry.model, entry.world_size, entry.layout_identity)
        try:
            installed = self._table.install(entry, now)
        except BaseException:
            self._let_go(entry)
            context.close()
            raise
        self._reaped_lately.registered(entry.instance_id)
        if installed.fresh:
            return installed
        self._let_go(entry)
        context.close()
        self._absent_pings.registered(entry.instance_id)
        return None

    def _give_way(self, replaced: ContextEntry, peer: str) -> None:
        self._let_go(replaced)
        self._releaser.start(replaced)
        earlier_peer = replaced.registrant.peer.text
        self._publish(ContextReplaced(replaced.instance_id, replaced.model, earlier_peer, peer))

    def unregister_kv_cache(self, call: Call, instance_id: InstanceId) -> Pending | None:
        """Release a worker that says goodbye; answered once its memory is unmapped, or is slow.

        An unknown id is fine.

        Raises:
            NotTheSpeaker: another connection registered the id since, and is open.
        """
        entry = self._table.take_out(instance_id, call.connection)
        if entry is None:
            return None
        self._let_go(entry)
        done = Pending()
        self._releaser.start(entry, on_answer=lambda: done.settle(None))
        self._publish(InstanceUnregistered(instance_id, entry.model, call.connection.peer.text))
        return done

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
        with self._using(call, instance_id, key) as entry:
            return _NOTHING_OUTSTANDING, self._copies.store(entry, key, block_ids)

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
        peer = call.connection.peer.identity
        try:
            with self._using(call, instance_id, key) as entry:
                done = self._copies.retrieve(entry, key, block_ids, skip_first_n_tokens, peer)
                return _NOTHING_OUTSTANDING, done
        except NotRegistered:
            self._copies.give_back_share(key, peer)
            raise

    @contextmanager
    def _using(self, call: Call, instance_id: InstanceId, key: CacheKey) -> Iterator[ContextEntry]:
        entry = self._table.begin_use(instance_id, key.worker_id or 0, call)
        if entry is None:
            raise NotRegistered(
                f"instance {render_instance_id(instance_id)} is not registered;"
                " the worker registers again at a heartbeat that is answered false"
            )
        try:
            yield entry
        finally:
            self._table.end_use(entry)

    def touch_instance(
        self, instance_id: InstanceId, connection: Connection, *, ping: bool
    ) -> Touched:
        """Refresh an entry. Thread: zmq-router."""
        return self._table.touch(instance_id, connection, self._now(), ping=ping)

    def reap_stale_instances(self, decide: Decide) -> Sequence[ReapableEntry]:
        """Take out the condemned; the reaper releases them. Thread: reaper."""
        condemned = self._table.condemn(decide)
        for entry in condemned:
            self._let_go(entry)
        return condemned

    def visit_entries(self, visit: Callable[[ReapableEntry], None]) -> None:
        """Show every entry to `visit` under the lock."""
        self._table.visit(visit)

    def visit_entry(self, instance_id: InstanceId, visit: Callable[[ReapableEntry], None]) -> bool:
        """Show one entry to `visit` under the lock."""
        return self._table.visit_one(instance_id, visit)

    def tracked_instance_count(self) -> int:
        """Count the registered instances."""
        return len(self._table)

    def drop_instance_state(self, instance_id: InstanceId) -> None:
        """Note the end of a release: the id may register again."""
        self._table.left(instance_id)

    def context_entries_snapshot(self) -> Sequence[ContextEntry]:
        """Return the entries of one moment."""
        return self._table.entries()

    def _let_go(self, entry: ContextEntry) -> None:
        """Undo what a registration shares with others of its model."""
        self._layouts.remove(entry.model, entry.world_size, entry.layout_identity)
