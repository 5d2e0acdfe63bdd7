"""The L1 store against a model so simple that it is right by inspection."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lmcache_nodeagent.storage.allocator import ALIGNMENT_BYTES, aligned_bytes
from lmcache_nodeagent.storage.eviction import LruPolicy
from lmcache_nodeagent.storage.objects import L1Store, ObjectKey, Reservation, kv_rank

PAGE = ALIGNMENT_BYTES
PAGES = 8
WRITE_TTL_SECONDS = 10
KEYS = [ObjectKey(bytes([n]) * 32, "demo/model", kv_rank(1, 0), 0, "") for n in range(8)]

some_keys = st.lists(st.sampled_from(KEYS), min_size=1, max_size=5)
sizes = st.sampled_from([1, 100, PAGE, PAGE, PAGE + 1, 3 * PAGE])


@dataclass(eq=False)
class Copy:
    """One copy of an object: what its bytes must be."""

    content: bytes
    views: list[memoryview] = field(default_factory=list)  # taken under a pin

    @property
    def taken_bytes(self) -> int:
        """Bytes of region, pages included."""
        return aligned_bytes(len(self.content))


@dataclass(eq=False)
class Write:
    """An open reservation and what its writer has put into its slots so far."""

    reservation: Reservation
    contents: dict[ObjectKey, bytes]

    @property
    def taken_bytes(self) -> int:
        """Bytes of region, pages included."""
        return sum(aligned_bytes(len(content)) for content in self.contents.values())


class StoreMachine(RuleBasedStateMachine):
    """Drives the store and the model alike; every byte is checked after every step."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0
        self.store = L1Store(
            memoryview(bytearray(PAGES * PAGE)),
            LruPolicy(trigger_ratio=0.8, evict_ratio=0.3),
            now=lambda: self.seconds,
            write_ttl_seconds=WRITE_TTL_SECONDS,
        )
        self.visible: dict[ObjectKey, Copy] = {}
        self.detached: list[tuple[ObjectKey, Copy]] = []
        self.writers: dict[ObjectKey, Write] = {}
        self.writes: list[Write] = []
        self.pins: Counter[ObjectKey] = Counter()
        self.serial = 0
        self.evicted = self.refused = self.excess = 0

    def fresh_content(self, nbytes: int) -> bytes:
        """Make bytes that no other write of this run has."""
        self.serial += 1
        return (self.serial.to_bytes(2) * nbytes)[:nbytes]

    def used_bytes(self) -> int:
        """Sum up everything the model knows of."""
        copies = [*self.visible.values(), *(copy for _, copy in self.detached)]
        return sum(copy.taken_bytes for copy in copies) + sum(w.taken_bytes for w in self.writes)

    @rule(keys=some_keys, nbytes=sizes)
    def reserve(self, keys: list[ObjectKey], nbytes: int) -> None:
        """Missing keys get slots, others are reported; eviction spares the pinned and named."""
        present = {key for key in keys if key in self.visible}
        foreign = {
            key
            for key in keys
            if key in self.writers and self.writers[key].reservation.expires_at > self.seconds
        }
        missing = [k for k in dict.fromkeys(keys) if k not in present and k not in foreign]
        kept = self.used_bytes() - sum(
            copy.taken_bytes
            for key, copy in self.visible.items()
            if not self.pins[key] and key not in keys
        )
        fits = aligned_bytes(nbytes) * len(missing) <= PAGES * PAGE - kept
        reservation = self.store.reserve(keys, nbytes)
        evicted = self.note_evictions(keys)
        assert fits or not evicted
        if reservation is None:
            self.refused += 1
            fragments_may_matter = nbytes > PAGE
            assert not fits or fragments_may_matter
            return
        assert fits
        assert reservation.already_present == present
        assert reservation.being_written == foreign
        assert list(reservation.slots) == missing
        if missing:
            write = Write(reservation, {})
            self.writes.append(write)
            self.writers.update(dict.fromkeys(missing, write))
            self.fill(write)

    def note_evictions(self, spared: list[ObjectKey]) -> int:
        """Remove from the model what the store let go, if it was allowed to; say how much."""
        gone = [key for key in self.visible if not self.store.contains(key)]
        for key in gone:
            assert not self.pins[key]
            assert key not in spared
            del self.visible[key]
        self.evicted += len(gone)
        return len(gone)

    def fill(self, write: Write) -> None:
        """Write into every slot of a reservation."""
        for key, slot in write.reservation.slots.items():
            content = self.fresh_content(write.reservation.nbytes)
            slot[:] = content
            write.contents[key] = content

    @precondition(lambda self: self.writes)
    @rule(data=st.data())
    def write_again(self, data: st.DataObject) -> None:
        """A writer, however late, may write until it settles; nobody else's bytes change."""
        self.fill(data.draw(st.sampled_from(self.writes)))

    @precondition(lambda self: self.writes)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        """What the writer still holds becomes visible with its last bytes."""
        write = self.take_write(data)
        expected = {key for key in write.contents if self.writers.get(key) is write}
        assert self.store.commit(write.reservation) == expected
        for key in expected:
            del self.writers[key]
            self.visible[key] = Copy(write.contents[key])

    @precondition(lambda self: self.writes)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        """Nothing becomes visible."""
        write = self.take_write(data)
        self.store.abort(write.reservation)
        self.writers = {k: other for k, other in self.writers.items() if other is not write}

    def take_write(self, data: st.DataObject) -> Write:
        """Choose an open write and close it in the model."""
        write = data.draw(st.sampled_from(self.writes))
        self.writes.remove(write)
        return write

    @precondition(lambda self: self.visible)
    @rule(data=st.data(), count=st.integers(1, 2))
    def pin(self, data: st.DataObject, count: int) -> None:
        """All keys or none; readers take their views now."""
        keys = data.draw(st.lists(st.sampled_from(sorted(self.visible)), max_size=4))
        keys += data.draw(st.lists(st.sampled_from(KEYS), max_size=1))
        expected = all(key in self.visible for key in keys)
        assert self.store.pin(keys, count) == expected
        if expected:
            for key in keys:
                self.pins[key] += count
                view = self.store.read(key)
                assert view is not None
                self.visible[key].views.append(view)

    @precondition(lambda self: self.pins)
    @rule(data=st.data(), count=st.integers(1, 2))
    def unpin(self, data: st.DataObject, count: int) -> None:
        """Never below zero; the last pin ends all views and frees the detached copies."""
        key = data.draw(st.sampled_from(sorted(self.pins)))
        released = min(count, self.pins[key])
        assert self.store.unpin(key, count) == released
        self.excess += count - released
        self.pins[key] -= released
        if not self.pins[key]:
            self.detached = [(other, copy) for other, copy in self.detached if other != key]
            if key in self.visible:
                self.visible[key].views.clear()

    @rule(keys=some_keys)
    def touch(self, keys: list[ObjectKey]) -> None:
        """Changes nothing that can be seen."""
        self.store.touch(keys)

    @rule(force=st.booleans())
    def clear(self, *, force: bool) -> None:
        """Pinned copies stay, or are detached by force; expired or all writers lose their keys."""
        gone = [key for key in self.visible if force or not self.pins[key]]
        assert self.store.clear(force=force) == len(gone)
        for key in gone:
            copy = self.visible.pop(key)
            if self.pins[key]:
                self.detached.append((key, copy))
        self.writers = {
            key: write
            for key, write in self.writers.items()
            if not force and write.reservation.expires_at > self.seconds
        }

    @rule(seconds=st.sampled_from([1, WRITE_TTL_SECONDS]))
    def wait(self, seconds: int) -> None:
        """Time passes; writers may expire."""
        self.seconds += seconds

    @invariant()
    def sees_exactly_the_committed_bytes(self) -> None:
        """Presence and contents agree for every key, and pinned views have not changed."""
        for key in KEYS:
            copy = self.visible.get(key)
            assert self.store.contains(key) == (copy is not None)
            view = self.store.read(key)
            assert (view and bytes(view)) == (copy and copy.content)
        for copy in [*self.visible.values(), *(copy for _, copy in self.detached)]:
            assert all(view == copy.content for view in copy.views)

    @invariant()
    def accounts_are_exact(self) -> None:
        """Every figure of the snapshot equals the model's."""
        stats = self.store.stats()
        pinned = [copy for key, copy in self.visible.items() if self.pins[key]]
        detached_bytes = sum(copy.taken_bytes for _, copy in self.detached)
        assert stats.used_bytes == self.used_bytes()
        assert stats.staging_bytes == sum(write.taken_bytes for write in self.writes)
        assert stats.detached_bytes == detached_bytes
        assert stats.pinned_bytes == sum(copy.taken_bytes for copy in pinned) + detached_bytes
        assert (stats.objects, stats.pinned_objects) == (len(self.visible), len(pinned))
        assert stats.open_reservations == len(self.writes)
        assert stats.evicted_total == self.evicted
        assert stats.refused_total == self.refused
        assert stats.excess_unpins_total == self.excess

    def teardown(self) -> None:
        """When everybody lets go, a forced clear leaves nothing behind."""
        for write in self.writes:
            self.store.abort(write.reservation)
        for key, count in self.pins.items():
            if count:
                self.store.unpin(key, count)
        self.store.clear(force=True)
        assert self.store.stats().used_bytes == 0


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=100, stateful_step_count=60, deadline=None)
