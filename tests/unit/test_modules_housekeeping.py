"""What is given back though nobody asks."""

from __future__ import annotations

import math

from lmcache_nodeagent.events import LeasesDropped
from lmcache_nodeagent.liveness.evidence import ConnectionLedger
from lmcache_nodeagent.liveness.windows import LivenessSettings
from lmcache_nodeagent.modules.calls import Call, Pending
from lmcache_nodeagent.modules.housekeeping import Housekeeping
from tests.fakes.liveness_parts import close
from tests.fakes.module_bench import PIN_TTL, Engine, ModuleBench

WINDOW = LivenessSettings().close_confirm_seconds


def housekeeping(bench: ModuleBench) -> Housekeeping:
    """That of a bench."""
    ledger = ConnectionLedger()
    parts = (bench.lookups, bench.sessions, bench.quarantine, ledger, LivenessSettings)
    return Housekeeping(*parts, bench.facts.append)


def test_what_a_client_keeps_that_is_gone_is_given_back() -> None:
    """After the window, long before its lease ends; what others keep stays."""
    bench = ModuleBench()
    first, second = Engine(bench, 1), Engine(bench, 2, address="10.0.0.2")
    first.store(end=4)
    assert (first.lookup(end=4), second.lookup(end=2)) == (4, 2)
    keep = housekeeping(bench)
    assert keep(bench.now()) <= bench.now() + PIN_TTL
    close(first.scheduler, bench.now())
    assert keep(bench.now()) == bench.now() + WINDOW
    bench.now.advance(WINDOW - 0.1)
    keep(bench.now())
    assert bench.pins() == 4
    bench.now.advance(0.2)
    keep(bench.now())
    assert bench.pins() == 2
    (dropped,) = [fact for fact in bench.facts if isinstance(fact, LeasesDropped)]
    assert (dropped.sessions, dropped.objects) == (1, 4)
    assert second.retrieve(end=2)
    assert bench.pins() == 0


def test_a_look_up_that_runs_while_its_client_goes_keeps_nothing() -> None:
    """And who waits for its end, waits no longer."""
    bench = ModuleBench()
    engine = Engine(bench)
    engine.store(end=1)
    keep = housekeeping(bench)
    peer = engine.scheduler.peer.identity
    session, _ = bench.sessions.begin(engine.scheduler, peer, "r1", bench.now())
    later = bench.lookups.wait_prefetch_status(Call(engine.scheduler), "r1", 5.0)
    assert isinstance(later, Pending)
    answers: list[object] = []
    later.when_settled(answers.append)
    close(engine.scheduler, bench.now())
    engine.scheduler.process_gone = True
    assert keep(bench.now()) < math.inf
    assert answers == [0]
    assert bench.sessions.finish(session, 1, {"key": 1}) == {"key": 1}
    assert len(bench.sessions) == 0
