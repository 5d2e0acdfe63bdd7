"""What a look-up promised, at retrieve time."""

from __future__ import annotations

import pytest

from lmcache_nodeagent.errors import (
    LayoutError,
)
from lmcache_nodeagent.liveness.targets import Decide
from tests.fakes.module_bench import (
    PIN_TTL,
    Engine,
    ModuleBench,
)


def test_leases_end_while_nobody_retrieves() -> None:
    """Then the chunks may be gone, and the whole span fails or is right."""
    bench = ModuleBench(objects=8)
    engine = Engine(bench)
    engine.store(end=4)
    expected = bytes(engine.memory)
    assert engine.lookup(end=4) == 4
    bench.now.advance(PIN_TTL)
    bench.lookups.expire(bench.now())
    assert bench.pins() == 0
    assert engine.retrieve(end=4)
    assert engine.memory == expected
    engine.fill(seed=1)
    assert engine.store(prompt=1)
    assert not engine.retrieve(end=4)


def test_leased_chunks_are_not_evicted() -> None:
    """Another client fills L1 meanwhile: it gets what is left."""
    bench = ModuleBench(objects=8)
    first, second = Engine(bench, 1), Engine(bench, 2)
    first.store(end=4)
    assert first.lookup(end=4) == 4
    assert not second.store(prompt=1, end=5)
    assert second.store(prompt=1, end=4)
    assert second.store(prompt=2, end=4)
    assert first.retrieve(end=4)
    assert bench.pins() == 0


def test_two_look_ups_of_the_same_chunks_count_each() -> None:
    """One lease ends, the other does not."""
    bench = ModuleBench(objects=4)
    engine = Engine(bench)
    engine.store(end=4)
    engine.lookup(end=4, request="early")
    bench.now.advance(PIN_TTL / 2)
    engine.lookup(end=4, request="late")
    bench.now.advance(PIN_TTL / 2)
    bench.lookups.expire(bench.now())
    assert bench.pins() == 4
    assert not engine.store(prompt=1, end=1)
    assert engine.retrieve(end=4, request="late")
    assert not engine.retrieve(end=5, request="early")
    assert bench.pins() == 0


@pytest.mark.parametrize("fate", ["ok", "0 fails", "2 fails", "3 is killed", "1 twice"])
def test_ranks_of_one_request_may_have_different_fates(fate: str) -> None:
    """Each gives back its own pins once; a second request's are untouched."""
    bench = ModuleBench()
    ranks = [Engine(bench, number + 1, rank=number, world=4) for number in range(4)]
    for rank in ranks:
        assert rank.store(end=4)
    scheduler = ranks[0]
    assert scheduler.lookup(end=4) == 4
    assert scheduler.lookup(end=4, request="other") == 4
    for rank in ranks:
        if fate == f"{rank.rank} is killed":
            bench.transfer.reap_stale_instances(_condemn(rank))
            continue
        if fate == f"{rank.rank} fails":
            with pytest.raises(LayoutError):
                rank.retrieve([[1]], end=4)
            continue
        assert rank.retrieve(end=4)
        if fate == f"{rank.rank} twice":
            assert rank.retrieve(end=4)
    scheduler.end()
    bench.transfers_end()
    assert bench.pins() == 16
    scheduler.free(end=4, request="other")
    assert bench.pins() == 0


def _condemn(engine: Engine) -> Decide:
    return lambda entry: entry.instance_id == engine.instance_id
