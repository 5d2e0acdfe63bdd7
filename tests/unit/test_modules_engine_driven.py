"""Engine-driven transfer: where workers write and read, and what is said to be stored."""

from __future__ import annotations

from typing import Any

import pytest

from lmcache_nodeagent.errors import (
    LayoutError,
    MalformedRequest,
    NotRegistered,
    NotTheSpeaker,
    Overloaded,
)
from lmcache_nodeagent.events import (
    ContextReplaced,
    InstanceRegistered,
    Retrieved,
    Stored,
)
from lmcache_nodeagent.ids import InstanceId
from lmcache_nodeagent.modules.calls import Call, Pending
from lmcache_nodeagent.modules.pending_transfers import MAX_AWAITED, MAX_PENDING
from lmcache_nodeagent.protocol.messages import PoolSlot, SharedPoolInfo, SlotContext
from lmcache_nodeagent.protocol.pickled_tensors import read_tensors, write_tensors
from tests.fakes.copying_engine import (
    CHUNK_BYTES,
    DTYPE,
    SHAPE,
    WORKER_NUMBER,
    CopyingEngine,
    content,
)
from tests.fakes.liveness_parts import close, connection
from tests.fakes.module_bench import CHUNK, MODEL, Engine, ModuleBench

NOTHING = SlotContext()
DONE = SlotContext(slots=[], chunk_indices=[])


def staging(bench: ModuleBench) -> int:
    """Bytes that writers hold."""
    return bench.store_.stats().staging_bytes


# Registering


def test_a_registration_tells_where_the_pool_is() -> None:
    """No worker memory is mapped; the same again only refreshes."""
    bench = ModuleBench()
    engine = CopyingEngine(bench)
    assert engine.pool == SharedPoolInfo("pool", len(bench.region))
    entry = engine.entry
    assert (entry.model, entry.world_size, entry.mode) == (MODEL, 1, "engine_driven/shm")
    assert (entry.nbytes, entry.handles, entry.engine_type) == (0, frozenset(), "vllm")
    assert bench.facts == [
        InstanceRegistered(engine.instance_id, MODEL, "10.0.0.1", 0, replaced=False)
    ]
    bench.now.advance(50.0)
    again = connection("10.0.0.1")
    assert engine.register(by=again) == engine.pool
    assert engine.entry is entry
    assert (entry.registrant, entry.last_seen) == (again, bench.now())
    assert bench.engine_driven.tracked_instance_count() == len(bench.layouts) == 1
    assert set(bench.engine_driven.handlers()) == {
        "register_kv_cache_engine_driven_context",
        "unregister_kv_cache_engine_driven_context",
        "prepare_store",
        "commit_store",
        "prepare_retrieve",
        "commit_retrieve",
    }


def test_without_a_pool_workers_send_their_bytes() -> None:
    """They are told no name."""
    engine = CopyingEngine(ModuleBench(shm=False))
    assert engine.pool == SharedPoolInfo("", 0)
    assert engine.entry.mode == "engine_driven/pickle"


def test_an_engine_with_process_ids_is_judged_by_silence_only() -> None:
    """Such clients are not vLLM's; their ways are not known."""
    engine = CopyingEngine(ModuleBench(), number=4711)
    assert engine.entry.engine_type == "unknown"


def test_single_planes_and_other_slots_make_other_chunks() -> None:
    """The form of a chunk follows the registration, and forms never share objects."""
    bench = ModuleBench()
    plain = CopyingEngine(bench)
    single = CopyingEngine(bench, WORKER_NUMBER + 1, register=False)
    single.register(use_mla=True, num_physical_slots=None)
    assert single.entry.form.shape == (1, CHUNK, 4)
    fewer = CopyingEngine(bench, WORKER_NUMBER + 2, register=False)
    fewer.register(num_physical_slots=CHUNK // 4)
    assert fewer.entry.form.shape == (2, 1, CHUNK // 4, 4)
    assert plain.store()
    assert single.prepare_retrieve().success is False
    assert fewer.prepare_retrieve().success is False


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype_str": "no_dtype"}, "dtype 'no_dtype' is unknown"),
        ({"block_size": 5}, "16 token slots, which is no multiple of the block size 5"),
        ({"num_layers": 10**9}, "does not fit an L1 of"),
    ],
)
def test_chunks_that_cannot_be_kept_are_refused_by_name(
    changes: dict[str, Any], reason: str
) -> None:
    """Value, limit and fix; nobody is registered."""
    bench = ModuleBench()
    engine = CopyingEngine(bench, register=False)
    with pytest.raises(LayoutError, match=reason):
        engine.register(**changes)
    assert len(bench.layouts) == bench.engine_driven.tracked_instance_count() == 0
    with pytest.raises(MalformedRequest, match="world_size 256"):
        engine.register(world_size=256)


def test_an_id_is_registered_in_one_mode_at_a_time() -> None:
    """Its rightful speaker may change the mode, nobody else may."""
    bench = ModuleBench()
    engine = CopyingEngine(bench)
    other = Engine(bench, number=WORKER_NUMBER, register=False)
    stranger = Engine(bench, number=WORKER_NUMBER, address="10.0.0.2", register=False)
    with pytest.raises(NotTheSpeaker):
        stranger.register()
    other.register(by=engine.worker)
    bench.threads.run_all()
    assert bench.engine_driven.tracked_instance_count() == 0
    assert bench.transfer.tracked_instance_count() == len(bench.layouts) == 1
    assert [type(fact) for fact in bench.facts].count(ContextReplaced) == 1
    engine.register()
    bench.threads.run_all()
    assert bench.engine_driven.tracked_instance_count() == 1
    assert bench.transfer.tracked_instance_count() == 0
    assert bench.opener.counts.open_handles == {}


def test_a_goodbye_forgets_the_worker_and_keeps_its_chunks() -> None:
    """Its layout goes with the last of its model."""
    bench = ModuleBench()
    engine = CopyingEngine(bench)
    assert engine.store(end=2)
    done = engine.unregister()
    bench.threads.run_all()
    answers: list[object] = []
    assert isinstance(done, Pending)
    done.when_settled(answers.append)
    assert answers == [None]
    assert engine.unregister() is None
    assert bench.engine_driven.tracked_instance_count() == len(bench.layouts) == 0
    assert bench.store_.stats().objects == 2
    engine.register()
    assert engine.lookup(end=2) == 2


# Through the pool


def test_what_is_stored_is_found_and_read() -> None:
    """Byte for byte; slots are whole pages, their shape is the chunk's."""
    bench = ModuleBench()
    engine = CopyingEngine(bench)
    context = engine.prepare_store(end=2)
    assert context.chunk_indices == [0, 1]
    assert context.slots == [PoolSlot(n * 4096, CHUNK_BYTES, list(SHAPE), DTYPE) for n in (0, 1)]
    assert engine.lookup(end=2) == 0
    engine.write(context)
    assert engine.commit_store(end=2)
    assert engine.entry.shard == 0
    assert engine.lookup(end=2) == 2
    assert engine.retrieve(end=2) == [content(0, 0), content(0, 1)]
    assert bench.pins() == staging(bench) == 0
    stored = [fact for fact in bench.facts if isinstance(fact, Stored)]
    assert [(f.admitted_chunks, f.copied_bytes, f.ok) for f in stored] == [(2, 512, True)]
    read = [fact for fact in bench.facts if isinstance(fact, Retrieved)]
    assert [(f.requested_chunks, f.copied_bytes, f.ok) for f in read] == [(2, 512, True)]


def test_only_what_is_missing_is_written() -> None:
    """Slots come with their chunks' places in the range; nothing missing: nothing to commit."""
    engine = CopyingEngine(ModuleBench())
    assert engine.store(start=2, end=4)
    context = engine.prepare_store(start=1, end=6)
    assert context.chunk_indices == [0, 3, 4]
    engine.write(context, start=1)
    assert engine.commit_store(start=1, end=6)
    assert engine.prepare_store(start=1, end=6) == DONE
    assert engine.prepare_store(start=3, end=3) == DONE
    assert engine.retrieve(start=1, end=6) == [content(0, n) for n in range(1, 6)]


def test_a_commit_without_its_prepare_is_declined() -> None:
    """Other tokens, range, worker or request, a second time: nothing was written for them."""
    bench = ModuleBench()
    engine, other = CopyingEngine(bench), CopyingEngine(bench, WORKER_NUMBER + 1)
    engine.write(engine.prepare_store(end=2, request="a"))
    assert not engine.commit_store(end=2, prompt=1, request="a")
    assert not engine.commit_store(end=1)
    assert not other.commit_store(end=2)
    assert not engine.commit_store(end=2, request="b")
    assert engine.commit_store(end=2, request="a", readers=3)
    assert not engine.commit_store(end=2, request="a")


def test_a_reused_request_id_keeps_prompts_apart() -> None:
    """Each prompt has its own slots and bytes, whatever the request is called."""
    engine = CopyingEngine(ModuleBench())
    first = engine.prepare_store(end=1)
    second = engine.prepare_store(end=1, prompt=1)
    engine.write(second, prompt=1)
    assert engine.commit_store(end=1, prompt=1)
    assert engine.lookup(end=1) == 0
    engine.write(first)
    assert engine.commit_store(end=1)
    assert engine.retrieve(end=1) == [content(0, 0)]
    assert engine.retrieve(end=1, prompt=1) == [content(1, 0)]


def test_a_full_l1_is_said() -> None:
    """The worker is told nothing about slots, and its commit is declined."""
    bench = ModuleBench(objects=2)
    engine = CopyingEngine(bench)
    assert engine.prepare_store(end=3) == NOTHING
    assert not engine.commit_store(end=3)
    assert not [fact for fact in bench.facts if isinstance(fact, Stored)][-1].ok
    assert engine.store(end=2)
    assert engine.retrieve(end=2) == [content(0, 0), content(0, 1)]


def test_a_slot_that_nobody_wrote_is_never_shown() -> None:
    """A commit does not make it true: an earlier pool is mapped, or the worker gave up."""
    bench = ModuleBench()
    engine = CopyingEngine(bench)
    context = engine.prepare_store(end=2)
    assert context.slots is not None
    engine.bytes_of(context.slots[0])[:] = content(0, 0)
    with pytest.raises(MalformedRequest, match="1 of 2 slots were committed but never written"):
        engine.commit_store(end=2)
    assert engine.lookup(end=2) == staging(bench) == 0
    half = engine.prepare_store(end=1)
    assert half.slots is not None
    engine.bytes_of(half.slots[0])[: CHUNK_BYTES // 2] = bytes(CHUNK_BYTES // 2)
    with pytest.raises(MalformedRequest, match="never written"):
        engine.commit_store(end=1)
    assert engine.store(end=2)


def test_chunks_that_somebody_else_writes_are_stored_only_once_they_are() -> None:
    """The second worker is told at its commit whether the first one made it."""
    bench = ModuleBench()
    first, second = CopyingEngine(bench), CopyingEngine(bench, WORKER_NUMBER + 1)
    context = first.prepare_store(end=2)
    assert second.prepare_store(end=2) == NOTHING
    assert not second.commit_store(end=2)
    assert second.prepare_store(end=2) == NOTHING
    partly = second.prepare_store(end=3)
    assert partly.chunk_indices == [2]
    first.write(context)
    assert first.commit_store(end=2)
    assert second.commit_store(end=2)
    second.write(partly)
    assert second.commit_store(end=3)
    assert second.retrieve(end=3) == [content(0, n) for n in range(3)]
    assert staging(bench) == 0


def test_chunks_that_are_prepared_twice_are_shown_after_both_commits() -> None:
    """The commits of two threads of a worker look alike: the first may be of either."""
    bench = ModuleBench()
    engine = CopyingEngine(bench)
    context = engine.prepare_store(end=1)
    assert engine.prepare_store(end=1) == NOTHING
    assert not engine.commit_store(end=1)
    assert engine.lookup(end=1) == 0
    engine.write(context)
    assert engine.commit_store(end=1)
    assert engine.lookup(end=1) == 1
    assert staging(bench) == 0


def test_a_worker_that_never_commits_does_not_take_all_of_l1() -> None:
    """It is refused by name, with what it has prepared kept for it."""
    bench = ModuleBench(objects=MAX_PENDING + 2)
    engine = CopyingEngine(bench)
    for prompt in range(MAX_PENDING):
        assert engine.prepare_store(end=1, prompt=prompt).slots
    with pytest.raises(Overloaded, match="256 prepared stores"):
        engine.prepare_store(end=1, prompt=MAX_PENDING)
    assert staging(bench) == MAX_PENDING * 4096
    other = CopyingEngine(bench, WORKER_NUMBER + 1)
    assert other.store(end=1, prompt=MAX_PENDING)
    for _ in range(MAX_PENDING):
        assert other.prepare_retrieve(end=1, prompt=MAX_PENDING).success
    with pytest.raises(Overloaded, match="256 prepared retrieves"):
        other.prepare_retrieve(end=1, prompt=MAX_PENDING)
    for _ in range(MAX_PENDING + 1):
        assert other.commit_retrieve(end=1, prompt=MAX_PENDING)
    assert bench.pins() == 0


def test_a_worker_that_is_told_no_without_end_is_told_so() -> None:
    """What it was told is remembered for its commits, up to a bound."""
    bench = ModuleBench(objects=1)
    engine = CopyingEngine(bench)
    assert engine.prepare_store(end=1).slots
    for number in range(MAX_AWAITED - 1):
        assert engine.prepare_store(end=2, request=str(number)) == NOTHING
    with pytest.raises(Overloaded, match="prepared stores"):
        engine.prepare_store(end=2, request="one more")
    assert not engine.commit_store(end=2, request="0")
    assert engine.prepare_store(end=2, request="one more") == NOTHING


def test_what_is_read_stays_until_the_commit() -> None:
    """Neither a full L1 nor a forced clear touches the bytes meanwhile."""
    bench = ModuleBench(objects=2)
    engine = CopyingEngine(bench)
    assert engine.store(end=1)
    reply = engine.prepare_retrieve(end=1)
    assert reply.context.slots is not None
    (slot,) = reply.context.slots
    assert not engine.store(end=2, prompt=1)
    bench.store_.clear(force=True)
    assert not engine.store(end=2, prompt=1)
    assert bytes(engine.bytes_of(slot)) == content(0, 0)
    assert engine.commit_retrieve(end=1)
    assert engine.store(end=2, prompt=1)
    assert bench.pins() == 0


def test_a_missing_chunk_fails_the_whole_read() -> None:
    """Its lookup's pins are used up all the same, and the commit is fine."""
    bench = ModuleBench()
    engine = CopyingEngine(bench)
    assert engine.store(end=2)
    assert engine.lookup(end=2) == 2
    reply = engine.prepare_retrieve(end=3)
    assert (reply.success, reply.data, reply.context) == (False, b"", NOTHING)
    assert engine.commit_retrieve(end=3)
    assert bench.pins() == 0
    assert not [fact for fact in bench.facts if isinstance(fact, Retrieved)][-1].ok


def test_a_read_uses_up_the_pins_of_its_own_lookup() -> None:
    """Somebody else's stay."""
    bench = ModuleBench()
    engine, other = (
        CopyingEngine(bench),
        CopyingEngine(bench, WORKER_NUMBER + 1, address="10.9.9.9"),
    )
    assert engine.store(end=2)
    assert engine.lookup(end=2) == other.lookup(end=2, request="other") == 2
    assert engine.retrieve(end=2) == [content(0, 0), content(0, 1)]
    assert bench.pins() == 2
    engine.end()
    bench.transfers_end()
    assert bench.pins() == 2
    other.end("other")
    bench.transfers_end()
    assert bench.pins() == 0


# Inside the messages


def test_what_is_sent_is_found_and_given_back() -> None:
    """Byte for byte, as tensors of the registered shape."""
    bench = ModuleBench(shm=False)
    engine = CopyingEngine(bench)
    assert engine.prepare_store(end=2) == NOTHING
    assert engine.send(end=2)
    assert engine.lookup(end=2) == 2
    reply = engine.prepare_retrieve(end=2)
    assert (reply.success, reply.context) == (True, NOTHING)
    tensors = read_tensors(reply.data, 2)
    assert [bytes(tensor.data) for tensor in tensors] == [content(0, 0), content(0, 1)]
    assert {(tensor.dtype, tensor.shape) for tensor in tensors} == {(DTYPE, SHAPE)}
    assert bench.pins() == staging(bench) == 0
    assert engine.commit_retrieve(end=2)
    assert engine.send(end=4)
    admitted = [fact.admitted_chunks for fact in bench.facts if isinstance(fact, Stored)]
    assert admitted == [2, 2]
    assert engine.prepare_retrieve(end=5).success is False


@pytest.mark.parametrize(
    "data",
    [
        b"garbage",
        CopyingEngine.pickled(0, [0]),
        CopyingEngine.pickled(0, [0, 1, 2]),
        b"".join(write_tensors("bfloat16", SHAPE, [memoryview(bytes(CHUNK_BYTES))] * 2)),
        b"".join(write_tensors(DTYPE, (2, 1, 4, CHUNK), [memoryview(bytes(CHUNK_BYTES))] * 2)),
    ],
    ids=["garbage", "too few", "too many", "dtype", "shape"],
)
def test_data_that_are_not_these_chunks_store_nothing(data: bytes) -> None:
    """Whatever they are."""
    bench = ModuleBench(shm=False)
    engine = CopyingEngine(bench)
    with pytest.raises(MalformedRequest):
        engine.commit_store(data, end=2)
    assert bench.store_.stats().used_bytes == 0


def test_what_is_sent_to_a_full_l1_is_declined() -> None:
    """Nothing of it is stored."""
    bench = ModuleBench(objects=2, shm=False)
    engine = CopyingEngine(bench)
    assert not engine.send(end=3)
    assert bench.store_.stats().objects == 0


def test_a_worker_that_cannot_map_the_pool_is_found_out_by_its_first_store() -> None:
    """Until then it reads misses; a registration tries the pool anew."""
    bench = ModuleBench()
    engine, other = CopyingEngine(bench), CopyingEngine(bench, WORKER_NUMBER + 1)
    assert engine.send(end=2)
    assert staging(bench) == 0
    assert engine.entry.mode == "engine_driven/pickle"
    reply = engine.prepare_retrieve(end=2)
    assert [bytes(tensor.data) for tensor in read_tensors(reply.data, 2)] == [
        content(0, 0),
        content(0, 1),
    ]
    assert engine.send(end=3)
    assert other.retrieve(end=3) == [content(0, n) for n in range(3)]
    engine.register()
    assert engine.entry.mode == "engine_driven/shm"
    assert engine.retrieve(end=1) == [content(0, 0)]


# Who may


def test_a_stranger_to_the_agent_is_declined() -> None:
    """An unknown id, and its share of a lookup's pins is given back once."""
    bench = ModuleBench()
    engine = CopyingEngine(bench)
    stranger = CopyingEngine(bench, WORKER_NUMBER + 1, register=False)
    assert engine.store(end=2)
    assert stranger.lookup(end=2) == 2
    for ask in (
        stranger.prepare_store,
        stranger.commit_store,
        stranger.prepare_retrieve,
        stranger.commit_retrieve,
    ):
        with pytest.raises(NotRegistered):
            ask(end=2)
    assert bench.pins() == 0


def test_a_request_that_came_before_the_registration_is_declined() -> None:
    """It is of a worker that maps an earlier agent's pool, or none."""
    engine = CopyingEngine(ModuleBench())
    made = engine.key(end=1)
    with pytest.raises(NotRegistered):
        engine.bench.engine_driven.prepare_store(Call(engine.worker), made, engine.instance_id)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model": "other"}, "key is of model 'other'"),
        ({"world": 2}, "world size 2; the instance registered 'demo/model', world size 1"),
        ({"rank": None}, "worker_id is nil"),
    ],
)
def test_a_key_of_something_else_is_refused(changes: dict[str, object], reason: str) -> None:
    """Model, world size and shard are those of the registration."""
    engine = CopyingEngine(ModuleBench())
    with pytest.raises(MalformedRequest, match=reason):
        engine.prepare_store(**changes)


def test_ranks_have_chunks_of_their_own() -> None:
    """A prompt is found once all have stored theirs."""
    bench = ModuleBench()
    ranks = [CopyingEngine(bench, WORKER_NUMBER + n, rank=n, world=2) for n in (0, 1)]
    assert ranks[0].store(end=2)
    assert ranks[0].lookup(end=2) == 0
    assert ranks[1].store(end=2, prompt=0)
    assert ranks[0].lookup(end=2) == 2
    assert [rank.retrieve(end=2) for rank in ranks] == [[content(0, 0), content(0, 1)]] * 2


def test_salts_and_modes_do_not_share() -> None:
    """Neither do workers whose memory the agent maps, under the same model."""
    bench = ModuleBench()
    engine, mapped = CopyingEngine(bench), Engine(bench)
    assert engine.store(end=2, salt="a")
    assert engine.lookup(end=2) == 0
    assert engine.lookup(end=2, salt="a") == 2
    assert not mapped.retrieve(end=2, salt="a")
    assert mapped.store(end=1)
    assert not engine.prepare_retrieve(end=1).success


def test_liveness_is_kept_as_for_any_other() -> None:
    """Seen, shown, and dropped: by the entry's own connection, not by others."""
    bench = ModuleBench()
    engine = CopyingEngine(bench)
    module = bench.engine_driven
    bench.now.advance(5.0)
    assert module.touch_instance(engine.instance_id, engine.worker, ping=True).entry is engine.entry
    assert engine.entry.has_liveness_signal
    assert engine.entry.last_seen == bench.now()
    assert module.touch_instance(InstanceId(1), engine.worker, ping=True).entry is None
    close(engine.worker, bench.now())
    engine.reap()
    assert module.tracked_instance_count() == len(bench.layouts) == 0
    engine.register(by=connection("10.0.0.1"))
    assert engine.entry.registered.serial == 2
