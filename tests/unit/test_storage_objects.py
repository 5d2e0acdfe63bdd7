"""The L1 store: reservations, visibility, pins, eviction, clearing, accounting."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from lmcache_nodeagent.errors import MalformedRequest
from lmcache_nodeagent.storage.allocator import ALIGNMENT_BYTES
from lmcache_nodeagent.storage.eviction import LruPolicy, NoEvictionPolicy
from lmcache_nodeagent.storage.objects import (
    Extent,
    L1Store,
    ObjectKey,
    Reservation,
    kv_rank,
)

PAGE = ALIGNMENT_BYTES
PAGES = 10
WRITE_TTL_SECONDS = 600.0


def chunks(*numbers: int, salt: str = "") -> list[ObjectKey]:
    """Make the keys of a prompt's chunks."""
    rank = kv_rank(1, 0)
    return [ObjectKey(number.to_bytes(32), "demo/model", rank, 0, salt) for number in numbers]


class StoreOfPages:
    """A store of ten pages, each object one page, with a clock that the test moves."""

    def __init__(self, policy: LruPolicy[ObjectKey] | NoEvictionPolicy[ObjectKey]) -> None:
        self.seconds = 0.0
        self.region = bytearray(PAGES * PAGE)
        self.l1 = L1Store(
            memoryview(self.region),
            policy,
            now=lambda: self.seconds,
            write_ttl_seconds=WRITE_TTL_SECONDS,
        )

    def reserve(self, keys: Sequence[ObjectKey], nbytes: int = PAGE) -> Reservation:
        """Reserve what must fit."""
        reservation = self.l1.reserve(keys, nbytes)
        assert reservation is not None
        return reservation

    def put(self, keys: Sequence[ObjectKey], content: bytes = b"x") -> frozenset[ObjectKey]:
        """Store objects of one page each, filled with `content`."""
        reservation = self.reserve(keys)
        for slot in reservation.slots.values():
            slot[:] = content * PAGE
        return self.l1.commit(reservation)

    def read(self, key: ObjectKey) -> bytes:
        """Return a resident object's bytes as they are now."""
        view = self.l1.read(key)
        assert view is not None
        return bytes(view)

    def resident(self, keys: Sequence[ObjectKey]) -> list[ObjectKey]:
        """Return those of `keys` that can be seen."""
        return [key for key in keys if self.l1.contains(key)]


@pytest.fixture
def store() -> StoreOfPages:
    """Make a store that evicts half of what may go, once it is full."""
    return StoreOfPages(LruPolicy(trigger_ratio=1.0, evict_ratio=0.5))


# --- keys


def test_kv_rank_packs_the_recorded_values() -> None:
    """Rank 1 of 2 and 0 of 1, as recorded from LMCache 0.5.6."""
    assert kv_rank(2, 1) == 0x02010201
    assert kv_rank(1, 0) == 0x01000100


@pytest.mark.parametrize(("world_size", "rank"), [(0, 0), (256, 0), (2, 2), (2, -1)])
def test_kv_rank_refuses_what_would_collide(world_size: int, rank: int) -> None:
    """Each field has eight bits; beyond them two workers would share keys."""
    with pytest.raises(MalformedRequest, match="lies outside"):
        kv_rank(world_size, rank)


# --- reserve, commit, abort


def test_an_object_is_seen_only_after_its_commit(store: StoreOfPages) -> None:
    """A reservation is invisible; the commit shows the bytes written, read-only."""
    (key,) = chunks(1)
    reservation = store.reserve([key], nbytes=100)
    assert not store.l1.contains(key)
    assert store.l1.read(key) is None
    assert not store.l1.pin([key])
    reservation.slots[key][:] = bytes(range(100))
    assert store.l1.commit(reservation) == {key}
    view = store.l1.read(key)
    assert view is not None
    assert view.readonly
    assert bytes(view) == bytes(range(100))


def test_slots_lie_where_the_offsets_say(store: StoreOfPages) -> None:
    """Peers that map the region themselves find an object by offset and length."""
    keys = chunks(1, 2)
    reservation = store.reserve(keys, nbytes=PAGE + 1)
    assert list(reservation.slots) == keys
    assert reservation.offsets == (0, 2 * PAGE)
    reservation.slots[keys[1]][:1] = b"!"
    assert store.region[2 * PAGE] == ord("!")
    assert store.l1.locate(keys[1]) is None
    store.l1.commit(reservation)
    assert store.l1.locate(keys[1]) == Extent(2 * PAGE, PAGE + 1)


def test_an_aborted_reservation_leaves_nothing(store: StoreOfPages) -> None:
    """Aborted room is free again and was never visible."""
    reservation = store.reserve(chunks(1, 2))
    store.l1.abort(reservation)
    assert store.resident(chunks(1, 2)) == []
    assert store.l1.stats().used_bytes == 0
    assert store.l1.commit(reservation) == frozenset()


def test_settling_twice_changes_nothing(store: StoreOfPages) -> None:
    """A second commit stores nothing, an abort after the commit removes nothing."""
    (key,) = chunks(1)
    reservation = store.reserve([key])
    assert store.l1.commit(reservation) == {key}
    assert store.l1.commit(reservation) == frozenset()
    store.l1.abort(reservation)
    assert store.l1.contains(key)
    assert store.l1.stats().used_bytes == PAGE


def test_present_and_foreign_keys_are_told_apart(store: StoreOfPages) -> None:
    """Only what nobody has is reserved; what another writer has is not called stored."""
    present, foreign, missing = chunks(1, 2, 3)
    store.put([present])
    other = store.reserve([foreign])
    ours = store.reserve([present, foreign, missing, missing])
    assert ours.keys == (present, foreign, missing)
    assert ours.already_present == {present}
    assert ours.being_written == {foreign}
    assert set(ours.slots) == {missing}
    store.l1.abort(other)
    assert store.l1.commit(ours) == {missing}
    assert not store.l1.contains(foreign)


def test_nothing_to_write_is_a_reservation_without_slots(store: StoreOfPages) -> None:
    """It needs no settling, and settling it does no harm."""
    store.put(chunks(1))
    reservation = store.reserve(chunks(1))
    assert not reservation.slots
    assert store.l1.stats().open_reservations == 0
    assert store.l1.commit(reservation) == frozenset()
    assert store.reserve([]).keys == ()


def test_a_size_below_one_is_refused(store: StoreOfPages) -> None:
    """An object without bytes is a programming error, and reserves nothing."""
    with pytest.raises(ValueError, match="cannot allocate"):
        store.l1.reserve(chunks(1), 0)
    assert store.l1.stats().open_reservations == 0


# --- expiry


def test_an_expired_reservation_gives_way(store: StoreOfPages) -> None:
    """A new writer gets the key, in other memory; the late one can no longer store it."""
    (key,) = chunks(1)
    late = store.reserve([key])
    store.seconds = WRITE_TTL_SECONDS - 1
    assert store.reserve([key]).being_written == {key}
    store.seconds = WRITE_TTL_SECONDS
    heir = store.reserve([key])
    assert set(heir.slots) == {key}
    assert heir.offsets != late.offsets
    late.slots[key][:] = b"L" * PAGE
    heir.slots[key][:] = b"H" * PAGE
    assert store.l1.commit(late) == frozenset()
    assert store.l1.commit(heir) == {key}
    assert store.read(key) == b"H" * PAGE
    stats = store.l1.stats()
    assert (stats.taken_over_total, stats.discarded_total, stats.used_bytes) == (1, 1, PAGE)


def test_a_late_commit_counts_if_nobody_took_over(store: StoreOfPages) -> None:
    """Expiry only lets others in; complete bytes are welcome whenever they come."""
    reservation = store.reserve(chunks(1))
    store.seconds = 2 * WRITE_TTL_SECONDS
    assert store.l1.commit(reservation) == set(chunks(1))


def test_an_abort_after_the_takeover_leaves_the_heir_alone(store: StoreOfPages) -> None:
    """Only the late writer's own memory is freed."""
    late = store.reserve(chunks(1))
    store.seconds = WRITE_TTL_SECONDS
    heir = store.reserve(chunks(1))
    store.l1.abort(late)
    assert store.l1.stats().staging_bytes == PAGE
    assert store.reserve(chunks(1)).being_written == set(chunks(1))
    assert store.l1.commit(heir) == set(chunks(1))


# --- room and eviction


def test_what_can_never_fit_evicts_nothing(store: StoreOfPages) -> None:
    """A store larger than free room and all that may go is refused before anything goes."""
    store.put(chunks(*range(8)))
    store.l1.pin(chunks(0))
    assert store.l1.reserve(chunks(*range(100, 110)), PAGE) is None
    assert len(store.resident(chunks(*range(8)))) == 8
    stats = store.l1.stats()
    assert (stats.refused_total, stats.evicted_total, stats.staging_bytes) == (1, 0, 0)


def test_a_store_into_a_full_l1_evicts_until_it_fits(store: StoreOfPages) -> None:
    """Batch after batch, oldest first, within the one call."""
    store.put(chunks(*range(10)))
    assert len(store.put(chunks(*range(100, 110)))) == 10
    assert store.l1.stats().evicted_total == 10


def test_a_store_never_evicts_its_own_chunks(store: StoreOfPages) -> None:
    """Chunks that are named in the call stay, even as the oldest ones."""
    store.put(chunks(1, 2, 3, 4))
    store.put(chunks(*range(50, 56)))
    reservation = store.reserve(chunks(1, 2, 3, 4, 5, 6, 7, 8, 9, 10))
    assert len(reservation.slots) == 6
    assert store.resident(chunks(1, 2, 3, 4)) == chunks(1, 2, 3, 4)
    assert store.l1.reserve(chunks(1, 2, 3, 4, 20), PAGE) is None


def test_own_chunks_that_are_pinned_too_count_once(store: StoreOfPages) -> None:
    """Named and pinned at the same time, a chunk is still one page that cannot go."""
    store.put(chunks(1, 2))
    store.put(chunks(*range(50, 58)))
    store.l1.pin(chunks(1, 2))
    assert len(store.reserve(chunks(1, 2, *range(100, 108))).slots) == 8


def test_pinned_objects_are_not_evicted(store: StoreOfPages) -> None:
    """A store that would need pinned memory is refused, and one that would not evicts the rest."""
    store.put(chunks(*range(10)))
    assert store.l1.pin(chunks(0, 8, 9))  # the youngest and the two oldest
    assert store.l1.reserve(chunks(*range(100, 108)), PAGE) is None
    store.put(chunks(*range(100, 107)))
    assert store.resident(chunks(*range(10))) == chunks(0, 8, 9)


def test_holes_between_pinned_objects_may_be_too_small(store: StoreOfPages) -> None:
    """Enough bytes in pieces are not enough: the store is refused, not split."""
    store.put(chunks(*range(10)))
    assert store.l1.pin(chunks(1, 3, 5, 7, 9))
    assert store.l1.reserve(chunks(100), 2 * PAGE) is None
    assert store.l1.stats().refused_total == 1


def test_the_watermark_makes_room_ahead() -> None:
    """At the mark a share of the unpinned objects goes, although the store would still fit."""
    store = StoreOfPages(LruPolicy(trigger_ratio=0.8, evict_ratio=0.25))
    store.put(chunks(*range(8)))
    store.put(chunks(8))
    assert store.resident(chunks(*range(9))) == chunks(0, 1, 2, 3, 4, 5, 8)


def test_later_chunks_of_a_prompt_are_evicted_first(store: StoreOfPages) -> None:
    """A prefix without its end is of use, an end without its prefix is not."""
    store.put(chunks(*range(10)))
    store.put(chunks(10))
    assert store.resident(chunks(*range(10))) == chunks(0, 1, 2, 3, 4)


def test_storing_the_rest_of_a_prompt_uses_its_prefix(store: StoreOfPages) -> None:
    """Chunks found present are as young as the ones stored behind them."""
    store.put(chunks(1, 2))
    store.put(chunks(*range(50, 56)))
    store.put(chunks(1, 2, 3, 4))
    store.put(chunks(60))
    assert store.resident(chunks(1, 2, 3, 4)) == chunks(1, 2, 3, 4)


def test_a_store_of_what_is_there_counts_as_use(store: StoreOfPages) -> None:
    """Even with nothing to write and no commit the chunks become young."""
    store.put(chunks(1, 2))
    store.put(chunks(*range(50, 58)))
    store.reserve(chunks(1, 2))
    store.put(chunks(60))
    assert store.resident(chunks(1, 2)) == chunks(1, 2)


def test_touch_makes_a_prompt_young(store: StoreOfPages) -> None:
    """Touched chunks stay, those unknown are ignored."""
    store.put(chunks(*range(10)))
    store.l1.touch(chunks(8, 9, 77))
    store.put(chunks(100))
    assert store.resident(chunks(*range(10))) == chunks(0, 1, 2, 8, 9)


def test_without_eviction_a_full_l1_refuses() -> None:
    """The noop policy waits for somebody to clear."""
    store = StoreOfPages(NoEvictionPolicy())
    store.put(chunks(*range(10)))
    assert store.l1.reserve(chunks(100), PAGE) is None
    store.l1.clear(force=False)
    assert store.put(chunks(100)) == set(chunks(100))


# --- pins


def test_pinning_is_all_or_nothing(store: StoreOfPages) -> None:
    """One absent key, and no key gets a pin."""
    store.put(chunks(1))
    assert not store.l1.pin(chunks(1, 2))
    assert store.l1.stats().pinned_objects == 0
    assert store.l1.pin(chunks(1, 1), count=2)
    assert store.l1.unpin(chunks(1)[0], 4) == 4
    assert store.l1.pin([])


def test_pins_count_and_never_fall_below_zero(store: StoreOfPages) -> None:
    """What is unpinned too often is counted, and takes nothing from later holders."""
    (key,) = store.put(chunks(1))
    store.l1.pin([key], count=3)
    assert store.l1.unpin(key) == 1
    assert store.l1.stats().pinned_bytes == PAGE
    assert store.l1.unpin(key, 5) == 2
    assert store.l1.unpin(key) == 0
    stats = store.l1.stats()
    assert (stats.pinned_bytes, stats.pinned_objects, stats.excess_unpins_total) == (0, 0, 4)
    store.l1.pin([key])
    assert store.l1.stats().pinned_objects == 1


def test_another_salt_is_another_object(store: StoreOfPages) -> None:
    """An unpin with the wrong salt frees nothing of anybody else's."""
    (key,), (salted,) = chunks(1), chunks(1, salt="s1")
    store.put([salted])
    store.l1.pin([salted])
    assert store.l1.unpin(key) == 0
    assert store.l1.stats().pinned_objects == 1


def test_pin_and_unpin_counts_start_at_one(store: StoreOfPages) -> None:
    """A count below one is a programming error."""
    (key,) = store.put(chunks(1))
    with pytest.raises(ValueError, match="cannot pin"):
        store.l1.pin([key], 0)
    with pytest.raises(ValueError, match="cannot unpin"):
        store.l1.unpin(key, -1)


# --- clear


def test_clear_drops_the_unpinned(store: StoreOfPages) -> None:
    """Pinned objects and writes in progress stay."""
    store.put(chunks(1, 2, 3))
    store.l1.pin(chunks(2))
    writing = store.reserve(chunks(4))
    assert store.l1.clear(force=False) == 2
    assert store.resident(chunks(1, 2, 3)) == chunks(2)
    assert store.l1.commit(writing) == set(chunks(4))


def test_clear_drops_expired_writers(store: StoreOfPages) -> None:
    """Their keys are free at once, their memory when they settle."""
    late = store.reserve(chunks(1))
    store.seconds = WRITE_TTL_SECONDS
    assert store.l1.clear(force=False) == 0
    assert store.l1.commit(late) == frozenset()
    assert store.l1.stats().used_bytes == 0


def test_a_forced_clear_leaves_readers_their_bytes(store: StoreOfPages) -> None:
    """A pinned object is invisible at once, and freed with its last pin."""
    (key,) = store.put(chunks(1), b"a")
    store.l1.pin([key], 2)
    view = store.l1.read(key)
    assert view is not None
    assert store.l1.clear(force=True) == 1
    assert not store.l1.contains(key)
    assert not store.l1.pin([key])
    store.put(chunks(*range(2, 11)), b"b")
    assert bytes(view) == b"a" * PAGE
    stats = store.l1.stats()
    assert (stats.detached_bytes, stats.pinned_bytes, stats.pinned_objects) == (PAGE, PAGE, 0)
    store.l1.unpin(key)
    assert store.l1.stats().detached_bytes == PAGE
    store.l1.unpin(key)
    assert store.l1.stats().detached_bytes == 0


def test_a_forced_clear_ends_writes_that_began_before(store: StoreOfPages) -> None:
    """What was computed before the clear does not become visible after it."""
    before = store.reserve(chunks(1))
    assert store.l1.clear(force=True) == 0
    after = store.reserve(chunks(1))
    assert set(after.slots) == set(chunks(1))
    assert store.l1.commit(before) == frozenset()
    assert store.l1.commit(after) == set(chunks(1))
    assert store.l1.stats().discarded_total == 1


def test_pins_protect_old_and_new_copies_of_a_key(store: StoreOfPages) -> None:
    """Pins are anonymous: until the last one goes no copy of the key is freed or evicted."""
    (key,) = store.put(chunks(1), b"a")
    store.l1.pin([key])
    old = store.l1.read(key)
    assert old is not None
    store.l1.clear(force=True)
    store.put([key], b"b")
    assert store.l1.stats().pinned_objects == 1
    store.l1.pin([key])
    store.l1.unpin(key)
    assert bytes(old) == b"a" * PAGE
    assert store.l1.reserve(chunks(*range(2, 11)), PAGE) is None
    store.l1.unpin(key)
    assert len(store.put(chunks(*range(2, 11)))) == 9


def test_stats_add_up(store: StoreOfPages) -> None:
    """Used bytes are those of resident objects, open writers and detached objects."""
    store.put(chunks(1, 2))
    store.l1.pin(chunks(1, 2))
    store.l1.clear(force=True)
    store.put(chunks(3))
    store.reserve(chunks(4, 5, 6), nbytes=1)
    stats = store.l1.stats()
    assert stats.capacity_bytes == PAGES * PAGE
    assert stats.used_bytes == 6 * PAGE
    assert stats.detached_bytes == 2 * PAGE
    assert stats.staging_bytes == 3 * PAGE
    assert (stats.objects, stats.open_reservations) == (1, 1)
