"""Workers that send their KV in messages, and what does not fit one."""

from __future__ import annotations

import pytest

from lmcache_nodeagent.errors import LayoutError, TooLarge
from lmcache_nodeagent.events import HitCutShort, LookedUp, MessagesTooSmall, RequestRefused
from tests.fakes.copying_engine import CHUNK_BYTES, WORKER_NUMBER, CopyingEngine
from tests.fakes.module_bench import CHUNK, CHUNKS, MODEL, Engine, ModuleBench

SMALL = 4000
"""Bytes of a message that holds three chunks with what is around them."""

TINY = 2000
"""One that holds one chunk, and never all eight of a prompt."""


def test_chunks_that_cannot_be_sent_are_refused_by_name() -> None:
    """PyTorch cannot read what it pickles of float8; a chunk has to fit a message."""
    engine = CopyingEngine(ModuleBench(shm=False), register=False)
    with pytest.raises(LayoutError, match=r"float8_e4m3fn.*--shm-name"):
        engine.register(dtype_str="float8_e4m3fn")
    small = CopyingEngine(ModuleBench(shm=False, max_message_bytes=1000), register=False)
    with pytest.raises(LayoutError, match="256 bytes does not fit a message"):
        small.register()
    with_pool = CopyingEngine(ModuleBench(), register=False)
    with_pool.register(dtype_str="float8_e4m3fn")
    assert with_pool.entry.form.nbytes == CHUNK_BYTES // 2


def test_messages_that_hold_few_tokens_are_warned_of() -> None:
    """A store that is longer would end the connection."""
    bench = ModuleBench(shm=False, max_message_bytes=1 << 14)
    engine = CopyingEngine(bench)
    engine.register()
    (warning,) = [fact for fact in bench.facts if isinstance(fact, MessagesTooSmall)]
    assert warning == MessagesTooSmall(engine.instance_id, 17 * CHUNK, 1 << 14)
    roomy = ModuleBench(shm=False, max_message_bytes=1 << 20)
    CopyingEngine(roomy)
    assert not [fact for fact in roomy.facts if isinstance(fact, MessagesTooSmall)]


def test_a_store_that_will_not_arrive_is_told_at_its_prepare() -> None:
    """Stock workers send it whatever is answered; size, limit and flag are in the log."""
    bench = ModuleBench(shm=False, max_message_bytes=TINY)
    engine = CopyingEngine(bench)
    assert engine.prepare_store(end=1).slots is None
    assert bench.lost == []
    assert engine.prepare_store(end=CHUNKS).slots is None
    assert bench.lost == [(engine.instance_id, engine.worker)]
    (refused,) = [fact for fact in bench.facts if isinstance(fact, RequestRefused)]
    assert (refused.operation, refused.reason) == ("commit_store", "too_large")
    said = f"a store of {CHUNKS * CHUNK_BYTES} bytes does not fit a message of at most {TINY} bytes"
    assert refused.detail.startswith(said)
    assert "--max-message-bytes" in refused.detail


def test_a_store_that_may_not_arrive_is_expected_not_to() -> None:
    """What is around the bytes is known roughly: nothing is said before it is so."""
    bench = ModuleBench(shm=False, max_message_bytes=SMALL)
    engine = CopyingEngine(bench)
    engine.prepare_store(end=CHUNKS)
    assert bench.lost == [(engine.instance_id, engine.worker)]
    assert not any(isinstance(fact, RequestRefused) for fact in bench.facts)


def test_a_worker_that_maps_the_pool_may_store_any_length() -> None:
    """Its bytes are in no message; if it turns out that it cannot map it, it is answered too."""
    bench = ModuleBench(max_message_bytes=CHUNK_BYTES)
    engine = CopyingEngine(bench)
    assert engine.store(end=CHUNKS)
    assert bench.lost == [(engine.instance_id, engine.worker)]
    assert not any(isinstance(fact, RequestRefused) for fact in bench.facts)
    assert engine.lookup(end=CHUNKS) == CHUNKS


def test_what_does_not_fit_a_message_is_declined() -> None:
    """A load of more than the agent may send: computed again, and said why."""
    engine = CopyingEngine(ModuleBench(shm=False, max_message_bytes=4000))
    assert engine.send(end=3)
    assert engine.send(end=6, start=3)
    assert engine.prepare_retrieve(end=3).success
    with pytest.raises(TooLarge, match=r"6 chunks of 256 bytes.*--max-message-bytes"):
        engine.prepare_retrieve(end=6)


def test_a_hit_is_no_longer_than_a_message() -> None:
    """An engine fails a request whose promised chunks cannot be loaded."""
    bench = ModuleBench(shm=False, max_message_bytes=SMALL)
    engine = CopyingEngine(bench)
    assert engine.send(end=3)
    assert engine.lookup(end=3) == 3
    assert engine.send(end=6, start=3)
    assert not any(isinstance(fact, HitCutShort) for fact in bench.facts)
    hit = engine.lookup(end=6, request="r2")
    assert HitCutShort(MODEL, 6, hit) in bench.facts
    assert bench.facts[-1] == LookedUp(MODEL, 6, hit)
    assert engine.prepare_retrieve(end=hit, request="r2").success
    assert hit == 3
    engine.end("r1")
    engine.end("r2")
    bench.transfers_end()
    assert bench.pins() == 0


def test_hits_of_other_models_and_modes_are_as_long_as_they_are() -> None:
    """A limit is that of the workers that have it, while they are here."""
    bench = ModuleBench(shm=False, max_message_bytes=SMALL)
    mapped = Engine(bench)
    mapped.register(model="demo/mapped")
    assert mapped.store(model="demo/mapped")
    limited = CopyingEngine(bench, WORKER_NUMBER)
    assert mapped.lookup(model="demo/mapped") == CHUNKS
    limited.register(model_name="demo/mapped")
    cut = mapped.lookup(model="demo/mapped", request="r2")
    assert 0 < cut < CHUNKS
    limited.unregister()
    bench.threads.run_all()
    assert mapped.lookup(model="demo/mapped", request="r3") == CHUNKS
