"""Lookups: how much of a prompt is cached, and the pins that keep the promise."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import TYPE_CHECKING

from lmcache_nodeagent.errors import MalformedRequest, Overloaded
from lmcache_nodeagent.events import HitCutShort, LookedUp, UnheldRelease
from lmcache_nodeagent.modules.calls import Pending
from lmcache_nodeagent.modules.object_keys import object_keys
from lmcache_nodeagent.sessions import MAX_PINNED_OBJECTS, NO_PINS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lmcache_nodeagent.clock import Now
    from lmcache_nodeagent.events import Publish
    from lmcache_nodeagent.hashing import ChunkHasher
    from lmcache_nodeagent.liveness.evidence import Connection
    from lmcache_nodeagent.modules.calls import Call
    from lmcache_nodeagent.modules.layouts import LayoutRegistry
    from lmcache_nodeagent.protocol.messages import CacheKey
    from lmcache_nodeagent.sessions import Pins, SessionTable
    from lmcache_nodeagent.storage.objects import L1Store, ObjectKey

MAX_READERS = 128
"""More read locks than this per object are cut down, as LMCache 0.5.6 does."""

_PIN_ATTEMPTS = 3

_HASH_BATCH = 32
"""Chunks that are hashed before the store is asked for them."""

LongestHit = Callable[[str, int], int | None]
"""How many chunks the workers of (model, world size) can load at once; None for any number."""

AfterTransfers = Callable[[Callable[[], None]], None]
"""Runs a callback once every transfer that is queued or running now has finished."""


class LookupModule:
    """Serves lookup, its status, free_lookup_locks and end_session. Threads: normal-<n>."""

    def __init__(
        self,
        store: L1Store,
        sessions: SessionTable,
        layouts: LayoutRegistry,
        hasher: ChunkHasher,
        after_transfers: AfterTransfers,
        publish: Publish,
        now: Now,
    ) -> None:
        """`longest_hit` is set once the modules that know it are there, before anything runs."""
        self._store = store
        self._sessions = sessions
        self._layouts = layouts
        self._hasher = hasher
        self._after_transfers = after_transfers
        self._publish = publish
        self._now = now
        self.longest_hit: LongestHit = _any_length

    def handlers(self) -> Mapping[str, Callable[..., object]]:
        """Return the handlers by operation name."""
        return {
            "lookup": self.lookup,
            "query_prefetch_status": self.query_prefetch_status,
            "wait_prefetch_status": self.wait_prefetch_status,
            "free_lookup_locks": self.free_lookup_locks,
            "end_session": self.end_session,
        }

    def lookup(self, call: Call, key: CacheKey, shards: int) -> None:
        """Find the longest prefix that all ranks can serve, pin it, remember it for the status.

        Only layouts count that a worker of the scheduler's own pod would load, if there are such.
        Without a registered worker of the model the result is 0: nobody could load it. More than
        its workers can load at once is not told of either: vLLM fails a request whose load fails.
        There is no tier below L1 yet, so the result is known at once.

        Raises:
            MalformedRequest: fewer than one reader, or a token that is no uint32.
            Overloaded: too many requests are open, or have too much pinned. Stock clients take that
                as any answer; the status then says 0.
        """
        del shards  # the world size of the key counts
        now = self._now()
        self.expire(now)
        chunks = key.end // self._hasher.chunk_tokens
        connection = call.connection
        identities = self._layouts.find(key.model_name, key.world_size, connection.pod_identity)
        session, replaced = self._sessions.begin(
            connection, connection.peer.identity, key.request_id, now
        )
        hit, pins, pinned = 0, NO_PINS, 0
        try:
            if identities and chunks and key.end <= len(key.token_ids):
                most = self.longest_hit(key.model_name, key.world_size)
                hit, pins = self._pin_longest_prefix(key, identities, most)
                if hit == most and hit < chunks:
                    self._publish(HitCutShort(key.model_name, chunks, hit))
            pinned = len(pins)
            if not self._sessions.has_room_for(session.peer, pinned):
                self._unpin(pins)
                hit, pins = 0, NO_PINS
        finally:
            self._unpin(self._sessions.finish(session, hit, pins))
            self._unpin(replaced)  # not before: chunks of both stay throughout
        if pinned and not hit:
            raise Overloaded(
                f"lookup: {pinned} objects more would be pinned; one peer may have"
                f" {MAX_PINNED_OBJECTS // 2}, all {MAX_PINNED_OBJECTS}: end requests (end_session)"
            )
        self._publish(LookedUp(key.model_name, chunks, hit))

    def _pin_longest_prefix(
        self, key: CacheKey, identities: Sequence[int], most: int | None
    ) -> tuple[int, Pins]:
        if key.num_kv_readers < 1:
            raise MalformedRequest(
                f"lookup with num_kv_readers {key.num_kv_readers}; each object needs at least 1"
            )
        readers = min(key.num_kv_readers, MAX_READERS)
        hashes = self._hashes_up_to_a_miss(key, identities, most)
        for _ in range(_PIN_ATTEMPTS):
            rows = [
                self._longest_row(key, hashes, rank, identities) for rank in range(key.world_size)
            ]
            hit = min(self._present(row) for row in rows)
            wanted = [object_key for row in rows for object_key in row[:hit]]
            if not wanted:
                break
            if self._store.pin(wanted, readers):
                self._store.touch(
                    [k for chunk in zip(*rows, strict=True) for k in chunk][: hit * key.world_size]
                )
                return hit, dict.fromkeys(wanted, readers)
        return 0, NO_PINS

    def _hashes_up_to_a_miss(
        self, key: CacheKey, identities: Sequence[int], most: int | None
    ) -> list[bytes]:
        """Hash the prompt as far as the first rank has it, in any layout: no hit is longer.

        The beginning alone comes first: a new prompt's other tokens need not even be packed.
        """
        chunk_tokens = self._hasher.chunk_tokens
        end = key.end if most is None else min(key.end, most * chunk_tokens)
        beginning = min(end, _HASH_BATCH * chunk_tokens)
        hashes = self._hashes_within(key, identities, beginning)
        if end > beginning == len(hashes) * chunk_tokens:
            hashes = self._hashes_within(key, identities, end)
        return hashes

    def _hashes_within(self, key: CacheKey, identities: Sequence[int], end: int) -> list[bytes]:
        hashes: list[bytes] = []
        chain = self._hasher.chain(key.token_ids, end)
        while batch := list(islice(chain, _HASH_BATCH)):
            rows = (object_keys(key, batch, 0, identity) for identity in identities)
            present = max(map(self._present, rows))
            hashes += batch[:present]
            if present < len(batch):
                break
        return hashes

    def _longest_row(
        self, key: CacheKey, hashes: Sequence[bytes], rank: int, identities: Sequence[int]
    ) -> list[ObjectKey]:
        """Choose the layout of which a rank has the longest prefix; ranks may differ in theirs."""
        rows = [object_keys(key, hashes, rank, identity) for identity in identities]
        return rows[0] if len(rows) == 1 else max(rows, key=self._present)

    def _present(self, row: list[ObjectKey]) -> int:
        """Count the chunks of one rank that are there from the first one on."""
        for index, object_key in enumerate(row):
            if not self._store.contains(object_key):
                return index
        return len(row)

    def query_prefetch_status(self, call: Call, request_id: str) -> int | None:
        """Return the hit in chunks, once; 0 for a request that is unknown or was answered.

        None while the lookup runs on another thread.
        """
        connection = call.connection
        return self._sessions.take_status(connection, connection.peer.identity, request_id)

    def wait_prefetch_status(self, call: Call, request_id: str, timeout: float) -> int | Pending:
        """Answer as the query does, but with the end of a lookup that runs; no thread waits.

        A lookup ends by itself, there is no tier below L1 to wait for: the time-out is not needed.
        """
        del timeout
        later, connection = Pending(), call.connection
        hit = self._sessions.wait_status(
            connection, connection.peer.identity, request_id, later.settle
        )
        return later if hit is None else hit

    def free_lookup_locks(self, call: Call, key: CacheKey, shards: int) -> None:
        """Unpin the chunks of [start, end) that this request's own lookup pinned.

        Raises:
            MalformedRequest: a token that is no uint32.
        """
        del shards
        identities = self._layouts.find(key.model_name, key.world_size)
        chunk = self._hasher.chunk_tokens
        first, last = key.start // chunk, min(key.end, len(key.token_ids)) // chunk
        if not identities or first >= last:
            return
        hashes = self._hasher.hashes(key.token_ids, last * chunk)[first:]
        keys = [
            object_key
            for rank in range(key.world_size)
            for identity in identities
            for object_key in object_keys(key, hashes, rank, identity)
        ]
        connection = call.connection
        readers = max(1, min(key.num_kv_readers, MAX_READERS))
        released = self._sessions.release(
            connection, connection.peer.identity, key.request_id, keys, readers
        )
        self._unpin(released)
        if not released:
            self._publish(UnheldRelease(connection.peer.text, len(keys)))

    def end_session(self, call: Call, request_id: str) -> None:
        """End a request; its pins go once the transfers that are under way have finished.

        The end comes from the scheduler's connection, a retrieve from the worker's: they have no
        order. Unknown ids are fine.
        """
        connection = call.connection
        settle = self._sessions.end(connection, connection.peer.identity, request_id)
        if settle is not None:
            self._after_transfers(lambda: self._unpin(settle()))

    def expire(self, now: float) -> None:
        """Give back the pins of sessions and leases that are too old. Threads: any."""
        for pins in self._sessions.expire(now):
            self._unpin(pins)

    def drop(self, owner: Connection) -> tuple[int, int]:
        """Give back what the look-ups of a client keep that is gone; sessions and objects of them.

        Thread: reaper.
        """
        dropped = self._sessions.drop(owner)
        for pins in dropped:
            self._unpin(pins)
        return len(dropped), sum(map(len, dropped))

    def _unpin(self, pins: Pins) -> None:
        for object_key, count in pins.items():
            self._store.unpin(object_key, count)  # type: ignore[arg-type]  # sessions keep keys opaque


def _any_length(model: str, world_size: int) -> None:
    """Where no worker gets its chunks in a message."""
    del model, world_size
