"""Engine-driven transfer: the worker copies chunks between its own memory and L1."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmcache_nodeagent.errors import LayoutError, MalformedRequest, NotRegistered, TooLarge
from lmcache_nodeagent.events import MessagesTooSmall, RequestRefused
from lmcache_nodeagent.ids import InstanceId
from lmcache_nodeagent.modules.engine_driven_entry import EngineDrivenContextEntry, chunk_form
from lmcache_nodeagent.modules.instance_holder import HolderParts, InstanceHolder
from lmcache_nodeagent.modules.object_keys import object_keys, transfer_hashes
from lmcache_nodeagent.modules.pending_transfers import Transfer
from lmcache_nodeagent.protocol.messages import PrepareStoreReply, SharedPoolInfo
from lmcache_nodeagent.protocol.pickled_tensors import PICKLED_DTYPES
from lmcache_nodeagent.storage.objects import kv_rank

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from lmcache_nodeagent.hashing import ChunkHasher
    from lmcache_nodeagent.liveness.evidence import Connection
    from lmcache_nodeagent.modules.calls import Call, Pending
    from lmcache_nodeagent.modules.engine_driven_entry import ChunkForm, TransferStrategy
    from lmcache_nodeagent.modules.kv_events import TokenBindings
    from lmcache_nodeagent.modules.pickled_transfer import PickledTransfer
    from lmcache_nodeagent.modules.shared_pool_transfer import SharedPoolTransfer
    from lmcache_nodeagent.modules.slot_quarantine import SlotQuarantine
    from lmcache_nodeagent.protocol.messages import (
        CacheKey,
        EncodedReply,
        EngineDrivenRegistration,
        PrepareRetrieveReply,
    )
    from lmcache_nodeagent.sessions import SessionTable
    from lmcache_nodeagent.storage.objects import L1Store

_LARGEST_PROCESS_ID = 1 << 22
"""Of Linux. vLLM's workers draw ids of 63 bits; other engines' are process ids."""

_TOKENS_OF_A_STEP = 8192
"""What one store of an engine may well have: a scheduler step's worth of prompt."""


class EngineDrivenTransferModule(InstanceHolder[EngineDrivenContextEntry]):
    """Serves operations 14 to 19. `pool` is what workers are offered to map; nothing, if empty.

    A request is served only by the registration that was in force when it was read: what came
    before is of a worker that maps an earlier agent's pool, or none.
    """

    def __init__(
        self,
        parts: HolderParts,
        pool: SharedPoolInfo,
        shared: SharedPoolTransfer,
        pickled: PickledTransfer,
        quarantine: SlotQuarantine,
        store: L1Store,
        sessions: SessionTable,
        hasher: ChunkHasher,
        give_back_share: Callable[[CacheKey, str, InstanceId], None],
        bindings: TokenBindings,
        expect_lost: Callable[[InstanceId, Connection], None],
    ) -> None:
        """`expect_lost` is told of stores that are too large to be read."""
        super().__init__(parts)
        self._pool = pool
        self._shared = shared
        self._pickled = pickled
        self._quarantine = quarantine
        self._store = store
        self._sessions = sessions
        self._hasher = hasher
        self._give_back_share = give_back_share
        self._bindings = bindings
        self._expect_lost = expect_lost

    def handlers(self) -> Mapping[str, Callable[..., object]]:
        """Return the handlers by operation name."""
        return {
            "register_kv_cache_engine_driven_context": self.register_context,
            "unregister_kv_cache_engine_driven_context": self.unregister_context,
            "prepare_store": self.prepare_store,
            "commit_store": self.commit_store,
            "prepare_retrieve": self.prepare_retrieve,
            "commit_retrieve": self.commit_retrieve,
        }

    def register_context(
        self, call: Call, registration: EngineDrivenRegistration
    ) -> SharedPoolInfo:
        """Take a worker's description of its chunks; tell it where L1 is. Thread: sync.

        The same content again only refreshes; other content replaces the old entry as a whole.

        Raises:
            MalformedRequest: a world size beyond what object keys can name.
            LayoutError: chunks that cannot be kept or moved here.
            NotTheSpeaker: another peer holds the id.
            StillReleasing: the id is still being released; the client tries again.
            TooManyRegistered: the peer holds as much as one may.
        """
        kv_rank(registration.world_size, 0)  # raises for a world that no lookup could name
        instance_id = InstanceId(registration.instance_id)
        self._table.refuse_early(instance_id, call.connection)
        form = chunk_form(registration, self._hasher.chunk_tokens)
        strategy = self._strategy_for(form)
        now = self._parts.now()
        entry = EngineDrivenContextEntry(
            instance_id=instance_id,
            engine_type="vllm" if instance_id > _LARGEST_PROCESS_ID else "unknown",
            registered_at=now,
            registered=self._registered_now(),
            last_seen=now,
            last_ping_at=self._parts.absent_pings.last_ping_at(instance_id),
            registrant=call.connection,
            layout_identity=form.identity,
            registration=registration,
            form=form,
            offered=strategy,
            strategy=strategy,
            quarantine=self._quarantine,
        )
        if self._install(entry, now).fresh and strategy is self._pickled:
            self._warn_of_small_messages(entry)
        return self._pool

    def _strategy_for(self, form: ChunkForm) -> TransferStrategy:
        """Choose how bytes move, and refuse what can never move."""
        capacity = self._store.stats().capacity_bytes
        if form.nbytes > capacity:
            raise LayoutError(
                f"a chunk of {form.nbytes} bytes does not fit an L1 of {capacity} bytes;"
                " raise --l1-size-gb or lower --chunk-size"
            )
        if self._pool.shm_name:
            return self._shared
        if form.dtype not in PICKLED_DTYPES:
            raise LayoutError(
                f"PyTorch cannot read back pickled tensors of dtype {form.dtype};"
                " start the agent with --shm-name, so that workers map L1"
            )
        if not self._pickled.chunks_per_message(form):
            raise LayoutError(
                f"a chunk of {form.nbytes} bytes does not fit a message; raise"
                " --max-message-bytes or set --shm-name"
            )
        return self._pickled

    def _warn_of_small_messages(self, entry: EngineDrivenContextEntry) -> None:
        """A store that does not fit a message is lost: libzmq ends the connection."""
        tokens = self._pickled.chunks_per_message(entry.form) * self._hasher.chunk_tokens
        if tokens < _TOKENS_OF_A_STEP:
            limit = self._pickled.max_message_bytes
            self._parts.publish(MessagesTooSmall(entry.instance_id, tokens, limit))

    def longest_hit(self, model: str, world_size: int) -> int | None:
        """Return how many chunks every worker of a model can load at once; None for any number."""
        most = (
            self._pickled.chunks_per_message(entry.form)
            for entry in self._table.entries()
            if (entry.model, entry.world_size) == (model, world_size)
            and entry.strategy is self._pickled
        )
        return min(most, default=None)

    def unregister_context(self, call: Call, instance_id: InstanceId) -> Pending | None:
        """Forget a worker that says goodbye. An unknown id is fine.

        Raises:
            NotTheSpeaker: another connection registered the id since, and is open.
        """
        return self._goodbye(call, instance_id)

    def prepare_store(
        self, call: Call, key: CacheKey, instance_id: InstanceId
    ) -> PrepareStoreReply:
        """Say which chunks of [start, end) to write, and where. Thread: transfer-<n>.

        Raises:
            NotRegistered: no entry of this id.
            MalformedRequest: the range does not fit.
            Overloaded: too many stores of this worker were never committed.
        """
        with self._using(call, instance_id, key.worker_id, may_overtake=False) as entry:
            transfer = self._transfer(entry, key)
            self._look_ahead(call, entry, transfer)
            return PrepareStoreReply(entry.strategy.prepare_store(entry, transfer))

    def _look_ahead(self, call: Call, entry: EngineDrivenContextEntry, transfer: Transfer) -> None:
        """Tell of a store that will not arrive. Stock workers send it whatever is answered here."""
        if len(transfer.keys) <= self._pickled.chunks_per_message(entry.form):
            return
        self._expect_lost(entry.instance_id, call.connection)
        limit = self._pickled.max_message_bytes
        store_bytes = len(transfer.keys) * entry.form.nbytes
        if entry.strategy is self._pickled and store_bytes > limit:
            reason = (
                f"a store of {store_bytes} bytes does not fit a message of at most {limit} bytes;"
                " raise --max-message-bytes, or set --shm-name"
            )
            peer = call.connection.peer.text
            self._parts.publish(RequestRefused("commit_store", TooLarge.code, peer, reason))

    def commit_store(
        self, call: Call, key: CacheKey, instance_id: InstanceId, data: bytes | memoryview
    ) -> bool:
        """Make stored chunks visible. Thread: transfer-<n>.

        Returns:
            True only if every chunk of [start, end) is in L1 now.

        Raises:
            NotRegistered: no entry of this id; what it had prepared is dropped.
            MalformedRequest: the range, or the data, do not fit.
        """
        try:
            with self._using(call, instance_id, key.worker_id, may_overtake=False) as entry:
                transfer = self._transfer(entry, key)
                self._bindings.bind(
                    key, self._hasher.hashes(key.token_ids, key.end), range(len(transfer.keys))
                )
                if not data:
                    return self._shared.commit_store(entry, transfer)
                if entry.strategy is not self._pickled:
                    self._fall_back(entry, transfer)
                return self._pickled.commit_store(entry, transfer, data)
        except NotRegistered:
            self._left_earlier(key, instance_id, self._quarantine.end_write)
            raise

    def _fall_back(self, entry: EngineDrivenContextEntry, transfer: Transfer) -> None:
        """The worker sends bytes, so it has not mapped the pool that it was offered."""
        self._shared.withdraw(entry, transfer)

        def amend(entry: EngineDrivenContextEntry) -> None:
            entry.strategy = self._pickled

        self._table.amend(entry, amend)

    def prepare_retrieve(
        self, call: Call, key: CacheKey, instance_id: InstanceId
    ) -> PrepareRetrieveReply | EncodedReply:
        """Say where the chunks of [start, end) are, or give their bytes. Thread: transfer-<n>.

        Consumes one pin per chunk of the request's own lookup, whatever the outcome.

        Raises:
            NotRegistered: no entry of this id; its share of the lookup's pins is given back.
            MalformedRequest: the range does not fit.
            TooLarge: too much for a message.
            Overloaded: too many retrieves that were never committed.
        """
        peer = call.connection.peer.identity
        try:
            with self._using(call, instance_id, key.worker_id, may_overtake=False) as entry:
                transfer = self._transfer(entry, key)
                consumed = self._sessions.consume(peer, key.request_id, transfer.keys, instance_id)
                try:
                    return entry.strategy.prepare_retrieve(entry, transfer)
                finally:
                    for object_key in consumed:
                        self._store.unpin(object_key)  # type: ignore[arg-type]  # sessions keep keys opaque
        except NotRegistered:
            self._give_back_share(key, peer, instance_id)
            raise

    def commit_retrieve(self, call: Call, key: CacheKey, instance_id: InstanceId) -> bool:
        """Take note that the worker has read what it was told of. Always True.

        Raises:
            NotRegistered: no entry of this id.
            MalformedRequest: the range does not fit.
        """
        try:
            with self._using(call, instance_id, key.worker_id, may_overtake=False) as entry:
                self._shared.commit_retrieve(entry, self._transfer(entry, key))
        except NotRegistered:
            self._left_earlier(key, instance_id, self._quarantine.end_read)
            raise
        return True

    def _left_earlier(
        self,
        key: CacheKey,
        instance_id: InstanceId,
        end: Callable[[InstanceId, Transfer], bool],
    ) -> None:
        """A worker that was given up confirms what it was told: its slots need not wait longer."""
        for identity in self._quarantine.identities(instance_id):
            if end(instance_id, self._transfer_of(key, identity)):
                return

    def _transfer(self, entry: EngineDrivenContextEntry, key: CacheKey) -> Transfer:
        if key.model_name != entry.model or key.world_size != entry.world_size:
            raise MalformedRequest(
                f"key is of model {key.model_name!r}, world size {key.world_size}; the instance"
                f" registered {entry.model!r}, world size {entry.world_size}"
            )
        return self._transfer_of(key, entry.layout_identity)

    def _transfer_of(self, key: CacheKey, identity: int) -> Transfer:
        if key.worker_id is None:
            raise MalformedRequest("worker_id is nil; a transfer needs the worker's KV shard")
        hashes = transfer_hashes(key, self._hasher)
        return Transfer(key.request_id, tuple(object_keys(key, hashes, key.worker_id, identity)))
