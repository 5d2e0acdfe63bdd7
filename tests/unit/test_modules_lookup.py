"""Look-ups and the locks they take."""

from __future__ import annotations

from collections.abc import Sequence
from unittest.mock import patch

import msgspec
import pytest

from lmcache_nodeagent import sessions
from lmcache_nodeagent.errors import MalformedRequest, Overloaded
from lmcache_nodeagent.events import LookedUp, UnheldRelease
from lmcache_nodeagent.modules.calls import Call, Pending
from lmcache_nodeagent.modules.lookup import MAX_READERS
from lmcache_nodeagent.storage.objects import ObjectKey
from tests.fakes.liveness_parts import connection
from tests.fakes.module_bench import (
    CHUNK,
    CHUNKS,
    MODEL,
    PIN_TTL,
    SESSION_TTL,
    Engine,
    ModuleBench,
)


def test_a_hit_is_the_longest_prefix_of_whole_chunks() -> None:
    """A hole ends it; a half chunk does not count."""
    bench = ModuleBench()
    engine = Engine(bench)
    engine.store(end=2)
    engine.store(start=3, end=5)
    assert engine.lookup(end=CHUNKS) == 2
    made = msgspec.structs.replace(engine.key(end=2, rank=None, request="r2"), end=2 * CHUNK - 1)
    call = Call(engine.scheduler)
    bench.lookups.lookup(call, made, 1)
    assert bench.lookups.wait_prefetch_status(call, "r2", 1.0) == 1
    assert [fact for fact in bench.facts if isinstance(fact, LookedUp)] == [
        LookedUp(MODEL, CHUNKS, 2),
        LookedUp(MODEL, 1, 1),
    ]


def test_a_hit_needs_every_rank() -> None:
    """The shortest of them; only what is needed is pinned."""
    bench = ModuleBench()
    ranks = [Engine(bench, number + 1, rank=number, world=2) for number in (0, 1)]
    ranks[0].store(end=4)
    assert ranks[0].lookup(end=CHUNKS) == 0
    ranks[1].store(end=2)
    assert ranks[0].lookup(end=CHUNKS, request="r2") == 2
    assert bench.pins() == 4


def test_without_a_registered_worker_nothing_is_a_hit() -> None:
    """Nobody could load it. Until the last one of the model leaves, everybody can."""
    bench = ModuleBench()
    first, second = Engine(bench, 1), Engine(bench, 2)
    first.store(end=2)
    assert first.lookup(end=2, model="other/model") == 0
    first.unregister()
    assert second.lookup(end=2) == 2
    assert second.retrieve(end=2)
    second.unregister()
    assert second.lookup(end=2, request="r2") == 0
    assert (len(bench.layouts), bench.pins()) == (0, 0)


@pytest.mark.parametrize("removal", ["unregister", "unregister twice", "reap", "replace"])
def test_one_replica_leaving_leaves_the_others_hits(removal: str) -> None:
    """The layout of a model is counted."""
    bench = ModuleBench()
    first, second = Engine(bench, 1), Engine(bench, 2)
    first.store(end=2)
    if removal == "reap":
        bench.transfer.reap_stale_instances(lambda entry: entry.instance_id == 1)
    elif removal == "replace":
        first.segment = "/lmcache_kv_1_1"
        first.register()
    else:
        first.unregister()
    if removal == "unregister twice":
        first.unregister()
    assert second.lookup(end=2) == 2
    assert second.retrieve(end=2)
    assert len(bench.layouts) == 1


@pytest.mark.parametrize(("end", "prompt", "salt"), [(0, 0, ""), (2, 1, ""), (2, 0, "s")])
def test_what_is_not_there_is_a_miss(end: int, prompt: int, salt: str) -> None:
    """No chunks at all, other tokens, another salt."""
    engine = Engine(ModuleBench())
    engine.store(end=2)
    assert engine.lookup(end=end, prompt=prompt, salt=salt) == 0
    assert engine.bench.pins() == 0


def test_a_range_beyond_the_tokens_is_a_miss() -> None:
    """There is nothing to hash."""
    bench = ModuleBench()
    engine = Engine(bench)
    made = msgspec.structs.replace(engine.key(rank=None), end=(CHUNKS + 1) * CHUNK)
    bench.lookups.lookup(Call(engine.scheduler), made, 1)
    assert bench.lookups.query_prefetch_status(Call(engine.scheduler), "r1") == 0


def test_a_look_up_of_no_readers_or_bad_tokens_is_refused() -> None:
    """Once a layout is registered, as upstream."""
    engine = Engine(ModuleBench())
    with pytest.raises(MalformedRequest, match="at least 1"):
        engine.lookup(readers=0)
    made = engine.key(rank=None)
    for token in (-1, 2**32):
        made.token_ids[3] = token
        with pytest.raises(MalformedRequest):
            engine.bench.lookups.lookup(Call(engine.scheduler), made, 1)
    assert engine.bench.pins() == 0


def test_each_reader_has_a_pin_up_to_a_bound() -> None:
    """Ranks that share an object each read it; one that asks again takes no other one's pin."""
    bench = ModuleBench()
    engine, *others = (Engine(bench, number) for number in (1, 2, 3))
    engine.store(end=1)
    assert engine.lookup(end=1, readers=3) == 1
    for reader in (engine, engine, *others):
        assert bench.pins() == 1
        assert reader.retrieve(end=1)
    assert bench.pins() == 0
    assert engine.lookup(end=1, readers=100_000, request="r2") == 1
    engine.free(end=1, readers=MAX_READERS, request="r2")
    assert bench.pins() == 0


def test_a_chunk_that_is_evicted_while_it_is_looked_up_shortens_the_hit() -> None:
    """The promise is only given for what is pinned."""
    bench = ModuleBench()
    engine = Engine(bench)
    engine.store(end=2)
    pin, tries = bench.store_.pin, list[int]()

    def evict_first(keys: object, count: int = 1) -> bool:
        tries.append(1)
        bench.store_.clear(force=True)
        return pin(keys, count)  # type: ignore[arg-type]  # passed on

    bench.store_.pin = evict_first  # type: ignore[method-assign]  # forces the race
    assert engine.lookup(end=2) == 0
    assert (len(tries), bench.pins()) == (1, 0)


def test_a_store_that_goes_on_losing_races_is_a_miss() -> None:
    """Three attempts."""
    bench = ModuleBench()
    engine = Engine(bench)
    engine.store(end=2)
    bench.store_.pin = lambda *_: False  # type: ignore[method-assign]  # forces the race
    assert engine.lookup(end=2) == 0


# Locks


def test_the_scheduler_frees_what_will_not_be_loaded() -> None:
    """A range of its own look-up; the rest stays for the retrieve."""
    bench = ModuleBench()
    engine = Engine(bench)
    engine.store(end=4)
    engine.lookup(end=4)
    engine.free(start=1, end=3)
    assert bench.pins() == 2
    engine.free(start=1, end=3)
    engine.free(start=3, end=3)
    assert bench.pins() == 2
    assert engine.retrieve(start=3, end=4)
    assert bench.pins() == 1


def test_another_salt_or_connection_frees_nothing_of_anybodys() -> None:
    """Release by a key that differs from the acquire; and two engines with one request id."""
    bench = ModuleBench()
    one, two = Engine(bench, 1), Engine(bench, 2, address="10.0.0.2")
    one.store(end=4, salt="s1")
    assert one.lookup(end=4, salt="s1") == 4
    one.free(end=4)
    two.free(end=4, salt="s1")
    two.end()
    assert bench.pins() == 4
    unheld = [fact for fact in bench.facts if isinstance(fact, UnheldRelease)]
    assert [fact.objects for fact in unheld] == [4, 4]
    one.end()
    bench.transfers_end()
    assert bench.pins() == 0


def test_nothing_is_freed_for_a_model_that_is_not_here() -> None:
    """Its last worker has left: the end of the session frees what is left."""
    bench = ModuleBench()
    engine = Engine(bench)
    engine.store(end=2)
    engine.lookup(end=2)
    engine.unregister()
    engine.free(end=2)
    assert bench.pins() == 2
    engine.end()
    bench.transfers_end()
    assert bench.pins() == 0


# Sessions


@pytest.mark.parametrize("loaded", [0, 4])
def test_an_aborted_request_leaves_no_pin(loaded: int) -> None:
    """LOOKUP, some RETRIEVE or none, END: the room is there for others."""
    bench = ModuleBench(objects=16)
    engine = Engine(bench)
    engine.store()
    engine.store(prompt=1)
    engine.lookup()
    if loaded:
        engine.retrieve(end=loaded)
    engine.end()
    bench.transfers_end()
    assert bench.pins() == 0
    assert engine.store(prompt=2)
    assert engine.store(prompt=3)


def test_a_client_that_dies_after_its_look_up_keeps_pins_for_their_lease() -> None:
    """Not for ever; the session goes with its age."""
    bench = ModuleBench()
    engine = Engine(bench)
    engine.store(end=2)
    bench.lookups.lookup(Call(engine.scheduler), engine.key(end=2, rank=None), 1)
    bench.now.advance(PIN_TTL)
    bench.lookups.expire(bench.now())
    assert (bench.pins(), len(bench.sessions)) == (0, 1)
    bench.now.advance(SESSION_TTL - PIN_TTL)
    bench.lookups.expire(bench.now())
    assert len(bench.sessions) == 0


def test_expired_leases_are_given_back_by_the_next_look_up() -> None:
    """Also where no reaper calls."""
    bench = ModuleBench()
    engine = Engine(bench)
    engine.store(end=2)
    engine.lookup(end=2)
    bench.now.advance(SESSION_TTL)
    assert engine.lookup(end=1, request="r2") == 1
    assert (bench.pins(), len(bench.sessions)) == (1, 1)


def test_the_end_waits_for_the_transfers_under_way() -> None:
    """It comes over another connection than the retrieve: they have no order."""
    bench = ModuleBench()
    engine = Engine(bench)
    engine.store(end=4)
    engine.lookup(end=4)
    engine.end()
    assert bench.pins() == 4
    assert engine.retrieve(end=2)
    assert bench.pins() == 2
    bench.transfers_end()
    assert bench.pins() == 0
    assert not bench.after


def test_ends_in_any_number_and_order_are_fine() -> None:
    """END twice, early, for nobody; a completion after it revives nothing."""
    bench = ModuleBench()
    engine = Engine(bench)
    engine.store(end=2)
    engine.lookup(end=2)
    for request in ("r1", "r1", "never"):
        engine.end(request)
    bench.transfers_end()
    assert engine.store(end=3)
    assert engine.retrieve(end=3)
    assert (len(bench.sessions), bench.pins()) == (0, 0)
    assert engine.lookup(end=3) == 3
    assert len(bench.sessions) == 1


def test_a_reused_request_id_means_its_new_tokens() -> None:
    """Upstream remembers hashes by id: another prompt under one id got the first one's bytes."""
    bench = ModuleBench()
    engine = Engine(bench)
    engine.store(end=2)
    assert engine.lookup(end=2) == 2
    engine.fill(seed=1)
    assert engine.lookup(end=2, prompt=1) == 0
    assert bench.pins() == 0
    assert engine.store(end=2, prompt=1)
    second = bytes(engine.memory)
    assert engine.lookup(end=2) == 2
    engine.fill(seed=2)
    assert engine.retrieve(end=2, prompt=1)
    half = len(second) // 2
    for start in (32, half + 32):
        assert engine.memory[start : start + 256] == second[start : start + 256]


def test_a_status_belongs_to_the_connection_that_looked_up() -> None:
    """Consumed once, by nobody else."""
    bench = ModuleBench()
    engine = Engine(bench)
    engine.store(end=2)
    bench.lookups.lookup(Call(engine.scheduler), engine.key(end=2, rank=None), 1)
    stranger = Call(connection("10.0.0.9"))
    assert bench.lookups.query_prefetch_status(stranger, "r1") == 0
    assert bench.lookups.query_prefetch_status(Call(engine.scheduler), "r1") == 2
    assert bench.lookups.query_prefetch_status(Call(engine.scheduler), "r1") == 0


def test_a_wait_for_a_lookup_is_answered_with_its_end() -> None:
    """No thread waits meanwhile; without one that runs the answer is there at once."""
    bench = ModuleBench()
    engine = Engine(bench)
    engine.store(end=2)
    call = Call(engine.scheduler)
    answers: list[object] = []

    def wait() -> None:
        later = bench.lookups.wait_prefetch_status(call, "r1", 5.0)
        assert isinstance(later, Pending)
        later.when_settled(answers.append)

    real_pin = bench.store_.pin

    def pin(keys: Sequence[ObjectKey], count: int = 1) -> bool:
        wait()
        assert bench.lookups.query_prefetch_status(call, "r1") is None
        return real_pin(keys, count)

    with patch.object(bench.store_, "pin", pin):
        bench.lookups.lookup(call, engine.key(end=2, rank=None), 1)
    assert answers == [2]
    assert bench.lookups.wait_prefetch_status(call, "r1", 5.0) == 0


def test_every_operation_of_the_module_is_served() -> None:
    """By its name on the wire."""
    assert set(ModuleBench().lookups.handlers()) == {
        "lookup",
        "query_prefetch_status",
        "wait_prefetch_status",
        "free_lookup_locks",
        "end_session",
    }


def test_what_a_peer_may_not_pin_is_no_hit() -> None:
    """It is told so, and nothing stays pinned; the status says 0, so that the engine computes."""
    with patch.object(sessions, "MAX_PINNED_OBJECTS", 8):
        bench = ModuleBench()
    engine = Engine(bench)
    engine.store(end=4)
    assert engine.lookup(end=4) == 4
    with pytest.raises(Overloaded, match="1 objects more would be pinned"):
        engine.lookup(end=1, request="r2")
    call = Call(engine.scheduler)
    assert bench.lookups.wait_prefetch_status(call, "r2", 1.0) == 0
    assert bench.pins() == 4
    bench.lookups.end_session(call, "r1")
    bench.after.pop()()
    assert engine.lookup(end=1, request="r2") == 1
