"""Store and retrieve: what is copied, what is said of it, and to whom."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from lmcache_nodeagent.errors import (
    LayoutError,
    MalformedRequest,
    NotRegistered,
    TransferError,
)
from lmcache_nodeagent.events import Retrieved, Stored
from lmcache_nodeagent.modules.calls import Call
from lmcache_nodeagent.storage.objects import ObjectKey
from tests.fakes.module_bench import (
    CHUNK,
    CHUNKS,
    PER_CHUNK,
    Engine,
    ModuleBench,
    blocks,
)

BLOCK_BYTES = 4 * 4 * 2


def block(engine: Engine, number: int) -> bytes:
    """K and V of one block."""
    half = len(engine.memory) // 2
    at = number * BLOCK_BYTES
    return bytes(engine.memory[at : at + BLOCK_BYTES] + engine.memory[half + at :][:BLOCK_BYTES])


# Store


def test_what_was_stored_is_retrieved() -> None:
    """Byte for byte, into other blocks."""
    engine = Engine(ModuleBench())
    assert engine.store(end=2)
    expected = [block(engine, number) for number in range(1, 9)]
    engine.fill(seed=1)
    assert engine.retrieve(blocks(4, 2), end=2)
    assert [block(engine, number) for number in range(17, 25)] == expected


def test_a_store_is_visible_when_it_is_answered() -> None:
    """A look-up right behind it hits."""
    engine = Engine(ModuleBench())
    assert engine.store(end=3)
    assert engine.lookup(end=CHUNKS) == 3


def test_a_store_is_idempotent() -> None:
    """Chunks that are there are not copied again, and the answer is true."""
    bench = ModuleBench()
    engine = Engine(bench)
    assert engine.store(end=2)
    engine.fill(seed=1)
    assert engine.store(end=4)
    assert bench.opener.counts.gathered_chunks == 4
    stored = [fact for fact in bench.facts if isinstance(fact, Stored)]
    assert [(f.requested_chunks, f.admitted_chunks, f.ok) for f in stored] == [
        (2, 2, True),
        (4, 2, True),
    ]
    assert stored[1].copied_bytes == 2 * bench.opener.contexts[0].layout.object_nbytes


def test_chunks_of_null_blocks_alone_are_left_out() -> None:
    """Nothing is in them; still true. A chunk with one real block is stored."""
    bench = ModuleBench()
    engine = Engine(bench)
    ids = [[0] * PER_CHUNK + [0, 0, 0, 9] + [5, 6, 7, 8]]
    assert engine.store(ids, end=3)
    assert bench.store_.stats().objects == 2
    assert engine.lookup(end=3) == 0
    assert engine.store([[0] * PER_CHUNK], prompt=1, end=1)
    assert bench.store_.stats().objects == 2


def test_an_empty_range_is_done() -> None:
    """No chunks, no copies; for a retrieve as well."""
    bench = ModuleBench()
    engine = Engine(bench)
    assert engine.store([[]], start=2, end=2)
    assert engine.retrieve([[]], start=2, end=2)
    assert bench.opener.counts.gathered_chunks == 0


@pytest.mark.parametrize(
    "ids",
    [
        [[1, 2, 3]],
        [[1, 2, 3, 4, 5]],
        [[1, 2, 3, 33]],
        [[1, 2, 3, 4], [1, 2, 3, 4]],
        [],
    ],
)
def test_block_ids_that_do_not_fit_store_nothing(ids: list[list[int]]) -> None:
    """Too few, no multiple, outside the tensor, another number of lists: no staging is left."""
    bench = ModuleBench()
    engine = Engine(bench)
    with pytest.raises(LayoutError):
        engine.store(ids, end=1)
    stats = bench.store_.stats()
    assert (stats.objects, stats.staging_bytes) == (0, 0)


@pytest.mark.parametrize(
    "wrong",
    [{"start": 1}, {"end": CHUNK + 1}, {"end": (CHUNKS + 1) * CHUNK}, {"worker_id": None}],
)
def test_a_key_that_means_no_chunks_of_a_worker_is_refused(wrong: dict[str, int | None]) -> None:
    """Off a boundary, beyond the tokens, or without a shard."""
    engine = Engine(ModuleBench())
    broken = msgspec.structs.replace(engine.key(end=1), **wrong)
    with pytest.raises(MalformedRequest):
        engine.bench.transfer.store(
            Call(engine.worker), broken, engine.instance_id, blocks(0, 1), b""
        )


def test_a_key_of_another_model_than_registered_is_refused() -> None:
    """A worker stores under its own name alone: its bytes are not the other's."""
    engine = Engine(ModuleBench())
    with pytest.raises(MalformedRequest, match="other/model"):
        engine.store(model="other/model", end=1)
    with pytest.raises(MalformedRequest, match="world size 2"):
        engine.store(world=2, end=1)


def test_a_full_l1_is_never_said_to_have_stored() -> None:
    """And the objects of this very store are not evicted for each other."""
    bench = ModuleBench(objects=4)
    engine = Engine(bench)
    assert not engine.store(end=5)
    assert bench.store_.stats().objects == 0
    assert engine.store(end=4)
    assert not engine.store(end=5)
    assert engine.lookup(end=CHUNKS) == 4
    assert not engine.store(prompt=1, end=1), "everything is pinned"
    engine.end()
    bench.transfers_end()
    assert engine.store(prompt=1, end=1)


def test_a_copy_that_fails_shows_nothing() -> None:
    """Its room is given back at once, not after a time-out."""
    bench = ModuleBench()
    engine = Engine(bench)

    def fail() -> None:
        raise TransferError("no")

    bench.hooks.before_gather = fail
    with pytest.raises(TransferError):
        engine.store(end=2)
    stats = bench.store_.stats()
    assert (stats.objects, stats.staging_bytes, stats.open_reservations) == (0, 0, 0)


def test_chunks_that_another_is_writing_are_not_said_to_be_stored() -> None:
    """They may still fail there."""
    bench = ModuleBench()
    first, second = Engine(bench, 1), Engine(bench, 2)
    answers = list[bool]()
    bench.hooks.before_gather = lambda: answers.append(second.store(end=1))
    assert first.store(end=1)
    assert answers == [False]


def test_an_instance_that_is_not_registered_is_told() -> None:
    """The transport turns it into the in-band negative."""
    engine = Engine(ModuleBench(), register=False)
    with pytest.raises(NotRegistered):
        engine.store(end=1)
    with pytest.raises(NotRegistered):
        engine.retrieve(end=1)


# Retrieve


def test_a_missing_chunk_fails_the_whole_range() -> None:
    """Never a short success."""
    bench = ModuleBench()
    engine = Engine(bench)
    engine.store(end=2)
    before = bytes(engine.memory)
    assert not engine.retrieve(end=3)
    assert engine.memory == before
    (retrieved,) = [fact for fact in bench.facts if isinstance(fact, Retrieved)]
    assert (retrieved.ok, retrieved.copied_bytes, retrieved.requested_chunks) == (False, 0, 3)


def test_skipped_tokens_are_rounded_down_to_blocks_and_not_written() -> None:
    """Another request may be reading those blocks."""
    engine = Engine(ModuleBench())
    engine.store(end=1)
    stored = [block(engine, number) for number in range(1, 5)]
    engine.fill(seed=1)
    fresh = [block(engine, number) for number in range(1, 5)]
    assert engine.retrieve(skip=7, end=1)
    assert [block(engine, number) for number in range(1, 5)] == [fresh[0], *stored[1:]]


def test_a_retrieve_works_without_a_look_up() -> None:
    """It holds a pin of its own while it copies, and nobody else's."""
    bench = ModuleBench()
    engine = Engine(bench)
    engine.store(end=2)
    pinned = list[int]()
    bench.hooks.before_scatter = lambda: pinned.append(bench.pins())
    assert engine.retrieve(end=2)
    assert (pinned, bench.pins()) == ([2], 0)


@pytest.mark.parametrize("outcome", ["ok", "bad ids", "copy fails", "cleared"])
def test_a_retrieve_consumes_its_pins_whatever_becomes_of_it(outcome: str) -> None:
    """And no more than one of each."""
    bench = ModuleBench()
    engine = Engine(bench)
    engine.store(end=4)
    assert engine.lookup(end=4, readers=2) == 4

    def fail() -> None:
        raise TransferError("no")

    if outcome == "copy fails":
        bench.hooks.before_scatter = fail
        with pytest.raises(TransferError):
            engine.retrieve(end=4)
    elif outcome == "bad ids":
        with pytest.raises(LayoutError):
            engine.retrieve([[1]], end=4)
    elif outcome == "cleared":
        bench.store_.clear(force=True)
        assert not engine.retrieve(end=4)
    else:
        assert engine.retrieve(end=4)
    engine.free(end=4, readers=1)
    assert bench.pins() == 0
    assert bench.store_.stats().pinned_bytes == 0


def test_a_retrieve_of_a_lost_instance_gives_its_share_back() -> None:
    """Its rank's pins alone; the other ranks still have theirs to retrieve."""
    bench = ModuleBench()
    ranks = [Engine(bench, number + 1, rank=number, world=2) for number in (0, 1)]
    for rank in ranks:
        rank.store(end=2)
    assert ranks[0].lookup(end=2) == 2
    assert bench.pins() == 4
    ranks[1].unregister()
    with pytest.raises(NotRegistered):
        ranks[1].retrieve(end=2)
    assert bench.pins() == 2
    assert ranks[0].retrieve(end=2)
    assert bench.pins() == 0


def test_a_lost_share_that_nobody_can_name_is_left_to_the_end() -> None:
    """No worker of the model is here any more, or the key has no shard."""
    bench = ModuleBench()
    engine = Engine(bench)
    engine.store(end=1)
    engine.lookup(end=1)
    engine.unregister()
    with pytest.raises(NotRegistered):
        engine.retrieve(end=1)
    Engine(bench, 2)
    with pytest.raises(NotRegistered):
        engine.retrieve(end=1, rank=None)
    assert bench.pins() == 1
    engine.end()
    bench.transfers_end()
    assert bench.pins() == 0


def test_a_forced_clear_during_a_copy_changes_no_byte_of_it() -> None:
    """The memory is freed with the copy's pin."""
    bench = ModuleBench()
    engine = Engine(bench)
    engine.store(end=2)
    expected = [block(engine, number) for number in range(1, 9)]
    engine.fill(seed=1)

    def clear() -> None:
        bench.store_.clear(force=True)

    bench.hooks.before_scatter = clear
    assert engine.retrieve(end=2)
    assert [block(engine, number) for number in range(1, 9)] == expected
    stats = bench.store_.stats()
    assert (stats.objects, stats.used_bytes) == (0, 0)


def test_a_chunk_that_vanishes_between_pin_and_read_is_a_no() -> None:
    """Only a forced clear can do that; the next look-up tells the truth."""
    bench = ModuleBench()
    engine = Engine(bench)
    engine.store(end=1)
    pin = bench.store_.pin

    def pin_and_clear(keys: Sequence[ObjectKey], count: int = 1) -> bool:
        done = pin(keys, count)
        bench.store_.clear(force=True)
        return done

    bench.store_.pin = pin_and_clear  # type: ignore[method-assign]  # forces the race
    assert not engine.retrieve(end=1)
    assert bench.store_.stats().used_bytes == 0
