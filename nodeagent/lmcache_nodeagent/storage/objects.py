"""The objects of L1: their keys, and the store that decides who may see, read and write them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import NamedTuple

from lmcache_nodeagent.clock import Now, monotonic
from lmcache_nodeagent.errors import MalformedRequest
from lmcache_nodeagent.storage.allocator import ByteAllocator, aligned_bytes
from lmcache_nodeagent.storage.changes import ChangeLog, Changes
from lmcache_nodeagent.storage.eviction import EvictionPolicy
from lmcache_nodeagent.storage.stats import L1Stats, L1Totals

WRITE_TTL_SECONDS = 600.0
"""How long a reservation keeps its keys from other writers; LMCache 0.5.6 uses the same."""

MAX_WORLD_SIZE = 255
"""`kv_rank` has eight bits for each of its four fields."""


class ObjectKey(NamedTuple):
    """What makes two cached chunks the same bytes: LMCache 0.5.6's key, field by field.

    `kv_rank` comes from the function of that name; `object_group_id` numbers the groups of layers
    that are kept as objects of their own, from 0.
    """

    chunk_hash: bytes
    model_name: str
    kv_rank: int
    object_group_id: int
    cache_salt: str


class Extent(NamedTuple):
    """A slot: `nbytes` bytes of object at byte `offset` of the region."""

    offset: int
    nbytes: int


def kv_rank(world_size: int, rank: int) -> int:
    """Pack a worker's place into the integer that object keys carry, as LMCache 0.5.6 does.

    Raises:
        MalformedRequest: a world of more than 255 ranks, whose fields would run into each other,
            or a rank outside it.
    """
    if not 1 <= world_size <= MAX_WORLD_SIZE:
        raise MalformedRequest(f"world_size {world_size} lies outside 1..{MAX_WORLD_SIZE}")
    if not 0 <= rank < world_size:
        raise MalformedRequest(f"worker_id {rank} lies outside 0..{world_size - 1}")
    return world_size << 24 | rank << 16 | world_size << 8 | rank


@dataclass(frozen=True, slots=True, eq=False)
class Reservation:
    """Room for objects that one writer is about to fill; invisible until committed.

    A reservation with slots is settled once, by `L1Store.commit` or `abort`. Its memory is nobody
    else's until then, however late that is: a slow writer must not write into another's object.

    Attributes:
        keys: All keys asked for, in chunk order, without repetitions.
        slots: A writable view of `nbytes` bytes for each key the caller has to write, in order.
        offsets: Where those slots begin in the region, in the same order.
        already_present: Keys that are resident; nothing to do.
        being_written: Keys that another reservation is writing. They may still fail there, so a
            caller cannot say that they are stored.
        expires_at: When other writers may take the keys over, in the store's monotonic seconds.
    """

    keys: tuple[ObjectKey, ...]
    nbytes: int
    slots: Mapping[ObjectKey, memoryview]
    offsets: tuple[int, ...]
    already_present: frozenset[ObjectKey]
    being_written: frozenset[ObjectKey]
    expires_at: float


class L1Store:
    """Objects in one region of memory. Threads: any; bytes are copied by callers, without the lock.

    Pins belong to a key, not to one copy of it: they are plain counters, and the sessions that
    take them remember how many are theirs.
    """

    def __init__(
        self,
        region: memoryview,
        policy: EvictionPolicy[ObjectKey],
        *,
        now: Now = monotonic,
        write_ttl_seconds: float = WRITE_TTL_SECONDS,
        changes: ChangeLog | None = None,
    ) -> None:
        self._changes = changes or ChangeLog(0)
        self._region = region
        self._now = now
        self._write_ttl_seconds = write_ttl_seconds
        self._lock = Lock()  # guards: everything below, and the policy
        self._policy = policy
        self._space = ByteAllocator(region.nbytes)
        self._resident: dict[ObjectKey, Extent] = {}  # what contains() and read() see
        self._writers: dict[ObjectKey, Reservation] = {}  # who is writing a key
        self._unsettled: set[Reservation] = set()
        self._pins: dict[ObjectKey, int] = {}  # never 0
        self._detached: dict[ObjectKey, list[Extent]] = {}  # each key of it is pinned
        self._resident_bytes = 0
        self._pinned_bytes = 0  # of resident objects with pins
        self._pinned_objects = 0
        self._staging_bytes = 0
        self._totals = L1Totals()

    def reserve(self, keys: Sequence[ObjectKey], nbytes: int) -> Reservation | None:
        """Take room of `nbytes` bytes for every key that is neither resident nor being written.

        Evicts when the policy's watermark is passed or the room is not there, but never a pinned
        object nor one that this call names. Resident keys of the call count as used.

        Returns:
            A reservation, whose `slots` are empty when there is nothing to write; or None, with
            nothing reserved, when the missing keys do not fit all together.
        """
        wanted = dict.fromkeys(keys)
        now = self._now()
        with self._lock:
            present = frozenset(wanted.keys() & self._resident.keys())
            being_written = frozenset(
                key
                for key in wanted.keys() & self._writers.keys()
                if self._writers[key].expires_at > now
            )
            missing = [k for k in wanted if k not in present and k not in being_written]
            offsets = self._allocate_locked(nbytes, len(missing), present) if missing else []
            if offsets is None:
                self._totals.refused += 1
                return None
            slots = {
                key: self._region[offset : offset + nbytes]
                for key, offset in zip(missing, offsets, strict=True)
            }
            reservation = Reservation(
                keys=tuple(wanted),
                nbytes=nbytes,
                slots=slots,
                offsets=tuple(offsets),
                already_present=present,
                being_written=being_written,
                expires_at=now + self._write_ttl_seconds,
            )
            if slots:
                self._open_locked(reservation)
            self._touch_locked([key for key in wanted if key in present])
        return reservation

    def commit(self, reservation: Reservation) -> frozenset[ObjectKey]:
        """Make the written objects visible; call it when their bytes are complete.

        Counts as a use of every resident key of the reservation, first chunks youngest. Does
        nothing for a reservation that is settled or has no slots.

        Returns:
            The keys whose bytes are now resident because of this call. Keys that another writer
            took over, or that a forced clear dropped meanwhile, are not among them.
        """
        committed: list[ObjectKey] = []
        with self._lock:
            if not self._settle_locked(reservation):
                return frozenset()
            for key, offset in zip(reservation.slots, reservation.offsets, strict=True):
                if self._writers.get(key) is reservation:
                    del self._writers[key]
                    self._show_locked(key, Extent(offset, reservation.nbytes))
                    self._changes.stored(key)
                    committed.append(key)
                else:
                    self._space.free(offset)
                    self._totals.discarded += 1
            self._touch_locked(reservation.keys)
        return frozenset(committed)

    def abort(self, reservation: Reservation) -> None:
        """Give the room back; nothing of it was or becomes visible. Fine on a settled one."""
        with self._lock:
            if not self._settle_locked(reservation):
                return
            for key, offset in zip(reservation.slots, reservation.offsets, strict=True):
                if self._writers.get(key) is reservation:
                    del self._writers[key]
                self._space.free(offset)

    def renounce(self, reservation: Reservation) -> None:
        """Let other writers have the keys at once. The room stays taken until `abort`.

        For a writer that is given up but may still write where it was told to.
        """
        with self._lock:
            for key in reservation.slots:
                if self._writers.get(key) is reservation:
                    del self._writers[key]

    def contains(self, key: ObjectKey) -> bool:
        """Tell whether the object is resident; only a pin makes sure that it stays."""
        with self._lock:
            return key in self._resident

    def locate(self, key: ObjectKey) -> Extent | None:
        """Return where a resident object lies, for peers that map the region themselves.

        The caller holds a pin for as long as it uses the answer.
        """
        with self._lock:
            return self._resident.get(key)

    def read(self, key: ObjectKey) -> memoryview | None:
        """Return a read-only view of a resident object, or None.

        The bytes are this object's for as long as the caller holds a pin taken before, even if
        a forced clear hides the object meanwhile.
        """
        extent = self.locate(key)
        if extent is None:
            return None
        return self._region[extent.offset : extent.offset + extent.nbytes].toreadonly()

    def touch(self, keys: Sequence[ObjectKey]) -> None:
        """Note a use of `keys`, given in chunk order: later chunks are evicted first."""
        with self._lock:
            self._touch_locked(keys)

    def pin(self, keys: Sequence[ObjectKey], count: int = 1) -> bool:
        """Add `count` pins to each key, or none at all if one of them is not resident."""
        if count < 1:
            raise ValueError(f"cannot pin {count} times")
        with self._lock:
            if not all(key in self._resident for key in keys):
                return False
            for key in keys:
                pins = self._pins.get(key, 0)
                self._pins[key] = pins + count
                if not pins:
                    self._count_pinned_locked(key, 1)
        return True

    def unpin(self, key: ObjectKey, count: int = 1) -> int:
        """Take `count` pins off a key, resident or not, as far as it has them.

        Returns:
            How many were taken off; fewer than `count` is counted as excess.
        """
        if count < 1:
            raise ValueError(f"cannot unpin {count} times")
        with self._lock:
            pins = self._pins.get(key, 0)
            released = min(pins, count)
            self._totals.excess_unpins += count - released
            if released < pins:
                self._pins[key] = pins - released
            elif pins:
                del self._pins[key]
                self._count_pinned_locked(key, -1)
                for extent in self._detached.pop(key, ()):
                    self._space.free(extent.offset)
        return released

    def clear(self, *, force: bool) -> int:
        """Drop resident objects and what expired writers hold back.

        Args:
            force: Without it pinned objects stay. With it they become invisible at once, though
                their memory is freed with their last pin, and no write that began before becomes
                visible any more.

        Returns:
            How many objects became invisible.
        """
        now = self._now()
        with self._lock:
            gone = [key for key in self._resident if force or key not in self._pins]
            for key in gone:
                self._drop_locked(key)
            self._changes.removed(gone)
            kept = {} if force else self._writers
            self._writers = {k: writer for k, writer in kept.items() if writer.expires_at > now}
        return len(gone)

    def changes_since(self, cursor: int, limit: int) -> Changes:
        """See `ChangeLog.since`."""
        with self._lock:
            return self._changes.since(cursor, limit)

    def stats(self) -> L1Stats:
        """Return the figures of one moment."""
        with self._lock:
            detached_bytes = self._space.used_bytes - self._resident_bytes - self._staging_bytes
            return L1Stats(
                capacity_bytes=self._space.capacity_bytes,
                used_bytes=self._space.used_bytes,
                pinned_bytes=self._pinned_bytes + detached_bytes,
                staging_bytes=self._staging_bytes,
                detached_bytes=detached_bytes,
                objects=len(self._resident),
                pinned_objects=self._pinned_objects,
                open_reservations=len(self._unsettled),
                evicted_total=self._totals.evicted,
                refused_total=self._totals.refused,
                taken_over_total=self._totals.taken_over,
                discarded_total=self._totals.discarded,
                excess_unpins_total=self._totals.excess_unpins,
            )

    def _allocate_locked(
        self, nbytes: int, count: int, spared: frozenset[ObjectKey]
    ) -> list[int] | None:
        """Find room, evicting what is neither pinned nor `spared`; None if that cannot help."""
        assert self._lock.locked()
        spared_bytes = sum(
            aligned_bytes(self._resident[key].nbytes) for key in spared if key not in self._pins
        )
        within_reach = (
            self._space.free_bytes + self._resident_bytes - self._pinned_bytes - spared_bytes
        )
        if aligned_bytes(nbytes) * count > within_reach:
            return None  # do not empty the cache for a store that fails all the same
        if self._policy.is_due(self._space.used_bytes, self._space.capacity_bytes):
            self._evict_locked(spared)
        while (offsets := self._space.allocate(nbytes, count)) is None:
            if not self._evict_locked(spared):
                return None
        return offsets

    def _evict_locked(self, spared: frozenset[ObjectKey]) -> int:
        assert self._lock.locked()
        victims = self._policy.victims(
            lambda key: key not in self._pins and key not in spared,
            len(self._resident) - self._pinned_objects,
        )
        for key in victims:
            self._drop_locked(key)
        self._changes.removed(victims)
        self._totals.evicted += len(victims)
        return len(victims)

    def _open_locked(self, reservation: Reservation) -> None:
        assert self._lock.locked()
        for key in reservation.slots:
            if key in self._writers:
                self._totals.taken_over += 1
            self._writers[key] = reservation
        self._unsettled.add(reservation)
        self._staging_bytes += aligned_bytes(reservation.nbytes) * len(reservation.slots)

    def _settle_locked(self, reservation: Reservation) -> bool:
        """Close a reservation's account; False if that was done before."""
        assert self._lock.locked()
        if reservation not in self._unsettled:
            return False
        self._unsettled.remove(reservation)
        self._staging_bytes -= aligned_bytes(reservation.nbytes) * len(reservation.slots)
        return True

    def _show_locked(self, key: ObjectKey, extent: Extent) -> None:
        assert self._lock.locked()
        self._resident[key] = extent
        self._resident_bytes += aligned_bytes(extent.nbytes)
        if key in self._pins:  # a copy that was cleared by force is still in use
            self._count_pinned_locked(key, 1)

    def _drop_locked(self, key: ObjectKey) -> None:
        """Make an object invisible; its memory is freed now or with its last pin."""
        assert self._lock.locked()
        self._policy.forget(key)
        pinned = key in self._pins
        if pinned:
            self._count_pinned_locked(key, -1)
        extent = self._resident.pop(key)
        self._resident_bytes -= aligned_bytes(extent.nbytes)
        if pinned:
            self._detached.setdefault(key, []).append(extent)
        else:
            self._space.free(extent.offset)

    def _count_pinned_locked(self, key: ObjectKey, sign: int) -> None:
        """Count a key in or out of the pinned ones, if it is resident."""
        assert self._lock.locked()
        extent = self._resident.get(key)
        if extent is not None:
            self._pinned_objects += sign
            self._pinned_bytes += sign * aligned_bytes(extent.nbytes)

    def _touch_locked(self, keys: Iterable[ObjectKey]) -> None:
        assert self._lock.locked()
        self._policy.touch([key for key in reversed(tuple(keys)) if key in self._resident])
