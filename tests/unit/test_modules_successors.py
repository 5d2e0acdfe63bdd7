"""Workers that take the place of a killed one: what that had open is not theirs."""

from __future__ import annotations

from typing import Any

import pytest

from lmcache_nodeagent.liveness.evidence import CloseKind
from tests.fakes.copying_engine import CopyingEngine, content
from tests.fakes.liveness_parts import close, connection
from tests.fakes.module_bench import BLOCK, CLOSE_CONFIRM, Engine, ModuleBench


@pytest.mark.parametrize("left", ["write", "read"])
@pytest.mark.parametrize("changes", [{}, {"block_size": 2 * BLOCK}])
def test_what_a_killed_worker_left_open_is_not_its_successors(
    left: str, changes: dict[str, Any]
) -> None:
    """A new process may well have the same id and register the same: it owes nothing of that."""
    bench = ModuleBench(objects=2)
    engine = CopyingEngine(bench)
    if left == "read":
        assert engine.store(end=2)
        assert engine.prepare_retrieve(end=2).success
    else:
        assert engine.prepare_store(end=2).slots
    killed, engine.worker = engine.worker, connection("10.0.0.1")
    engine.worker.first_uid = 0
    engine.call()  # the router hears it before it is served
    engine.register(**changes)
    assert not engine.store(end=2, prompt=1)
    bench.threads.run_all()
    close(killed, bench.now(), CloseKind.PEER)
    bench.now.advance(CLOSE_CONFIRM)
    assert bench.quarantine.sweep(bench.now()) == 1
    assert engine.store(end=2, prompt=1)
    assert engine.retrieve(end=2, prompt=1) == [content(1, 0), content(1, 1)]


@pytest.mark.parametrize("uid", [7, None])
def test_a_worker_that_reconnects_goes_on_with_what_it_has_open(uid: int | None) -> None:
    """Its client counts on; it registers again, and what it writes is shown."""
    bench = ModuleBench()
    engine = CopyingEngine(bench)
    context = engine.prepare_store(end=2)
    engine.worker = connection("10.0.0.1")
    engine.worker.first_uid = uid
    engine.register()
    engine.write(context)
    assert engine.commit_store(end=2)


def test_a_client_that_was_told_where_to_write_may_do_so_after_its_registration() -> None:
    """Its slots are its own until it has gone, although it is a new one and registers late."""
    bench = ModuleBench()
    engine = CopyingEngine(bench)
    earlier, engine.worker = engine.worker, connection("10.0.0.1")
    engine.worker.first_uid = 0
    context = engine.prepare_store(end=2)
    close(earlier, bench.now(), CloseKind.PEER)
    engine.register()
    engine.write(context)
    assert engine.commit_store(end=2)
    assert engine.retrieve(end=2) == [content(0, 0), content(0, 1)]


def test_a_killed_worker_that_comes_back_in_another_mode_leaves_nothing() -> None:
    """The agent maps its memory from now on; its old slots wait for its old connection only."""
    bench = ModuleBench()
    engine = CopyingEngine(bench)
    engine.prepare_store(end=2)
    again = Engine(bench, engine.instance_id, register=False)
    again.worker.first_uid = 0
    engine.call(again.worker)
    again.register()
    bench.threads.run_all()
    assert bench.store_.stats().staging_bytes == 2 * 4096
    close(engine.worker, bench.now(), CloseKind.PEER)
    bench.now.advance(CLOSE_CONFIRM)
    assert bench.quarantine.sweep(bench.now()) == 1
    assert bench.store_.stats().staging_bytes == 0
