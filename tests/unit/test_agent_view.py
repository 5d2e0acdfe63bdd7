"""What people and Prometheus see of an agent."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import pytest

from lmcache_nodeagent.agent_view import (
    ROUTER_STUCK_SECONDS,
    Parts,
    RunningAgent,
    metrics_snapshot,
)
from lmcache_nodeagent.config import AgentConfig
from lmcache_nodeagent.events import discard
from lmcache_nodeagent.ids import InstanceId
from lmcache_nodeagent.liveness.evidence import CloseKind, ConnectionLedger
from lmcache_nodeagent.liveness.live_settings import LiveSettings
from lmcache_nodeagent.liveness.reaper import Reaper
from lmcache_nodeagent.liveness.stalls import Stalls
from lmcache_nodeagent.observability import metric_catalog as catalog
from lmcache_nodeagent.observability.bus import EventBus
from lmcache_nodeagent.observability.metrics import Metrics
from lmcache_nodeagent.transport.lanes import LanePool
from lmcache_nodeagent.transport.pools import OrderedPool
from lmcache_nodeagent.transport.requests import Request
from lmcache_nodeagent.transport.router import Router
from lmcache_nodeagent.transport.waiting_bytes import Waiting
from tests.fakes.liveness_parts import close
from tests.fakes.module_bench import MODEL, Engine, ModuleBench

BIG_ID = 2**63 - 1


@dataclass
class FakeRouter:
    """What is shown of the router, and what the reaper asks of it."""

    turn_at: float
    open_connections: int = 3

    def last_turn_at(self) -> float:
        """As told."""
        return self.turn_at

    def connections_open(self) -> int:
        """As told."""
        return self.open_connections

    def last_read_at(self) -> float:
        """As the turn."""
        return self.turn_at

    def caught_up(self, timeout_seconds: float) -> bool:
        """Always."""
        return timeout_seconds > 0


class Bench(ModuleBench):
    """An agent's parts, with a view of them."""

    def __init__(self, **settings: object) -> None:
        super().__init__()
        self.router = FakeRouter(self.now())
        self.ledger = ConnectionLedger()
        self.config = AgentConfig(l1_size_gb=1, port=5556, **settings)  # type: ignore[arg-type]  # test's own
        self.settings = LiveSettings(self.config, lambda: None, discard)
        self.serving = True
        self.reaper = Reaper(
            [self.transfer],
            self.ledger,
            Stalls(),
            self.settings,
            self.releaser,
            self.journal,
            self.reaped_lately,
            discard,
            self.now,
            lambda _: 0.0,
        )
        self.reaper.watch(self.router)

        def run(_: Request) -> None:
            """Run nothing."""

        self.parts = Parts(
            config=self.config,
            boot_id="boot",
            settings=self.settings,
            router=cast("Router", self.router),
            reaper=self.reaper,
            releaser=self.releaser,
            journal=self.journal,
            store=self.store_,
            quarantine=self.quarantine,
            sessions=self.sessions,
            layouts=self.layouts,
            sync_pool=OrderedPool(run, 8),
            normal_pool=OrderedPool(run, 8),
            transfer_pool=LanePool(run, 8, self.now),
            bus=EventBus([]),
            waiting=Waiting.for_config(self.config, 0),
        )
        metrics = Metrics([lambda: metrics_snapshot(self.parts)])
        self.view = RunningAgent(self.parts, metrics, lambda: self.serving, self.now)

    def liveness(self) -> Mapping[str, object]:
        """The liveness part of the status."""
        return cast("Mapping[str, object]", self.view.status()["worker_liveness"])

    def states(self) -> list[object]:
        """The state of each instance."""
        return [instance["state"] for instance in self.view.instances()]


def test_an_agent_is_ready_while_it_serves_and_reads() -> None:
    """A stuck release is no reason not to be; a message loop that stands still is."""
    bench = Bench()
    assert bench.view.ready() == bench.view.healthy() == (True, "requests are served")
    bench.serving = False
    assert bench.view.ready() == (False, "starting or stopping")
    assert bench.view.healthy()[0]
    bench.serving = True
    bench.now.advance(ROUTER_STUCK_SECONDS)
    assert bench.view.ready()[0]
    bench.now.advance(1.0)
    for healthy, why in (bench.view.ready(), bench.view.healthy()):
        assert (healthy, why) == (False, "the message loop has not come round for 31 s")


@pytest.mark.parametrize("action", ["alert", "restart"])
def test_a_stuck_release_makes_an_agent_unhealthy_if_that_is_asked_for(action: str) -> None:
    """Whoever runs it starts it again; by default the others' cache is worth more."""
    bench = Bench(stuck_release=action)
    engine = Engine(bench, 7)
    engine.unregister()
    bench.now.advance(30.0)
    bench.router.turn_at = bench.now()
    assert bench.view.healthy()[0]
    bench.now.advance(1.0)
    healthy, why = bench.view.healthy()
    assert healthy is (action == "alert")
    if not healthy:
        assert why == "instance 7: its memory is not back after 31 s"
    bench.threads.run_all()
    assert bench.view.healthy()[0]


def test_the_status_shows_the_settings_in_force_and_what_is_wrong_with_the_newest() -> None:
    """And that there is no link."""
    bench = Bench(hints="disabled")
    shown = bench.liveness()
    assert (shown["hints"], shown["stuck_release"]) == ("disabled", "alert")
    assert (shown["settings_file"], shown["settings_problem"]) == ("", "")
    bench.settings.take(b'{"hints": "enforce", "reap-mode": "observe"}')
    bench.settings.take(b"{")
    shown = bench.liveness()
    assert (shown["hints"], shown["reap_mode"]) == ("enforce", "observe")
    assert "no JSON" in str(shown["settings_problem"])
    assert bench.view.status()["operator_link"] == {
        "configured": False,
        "url": "",
        "connected": False,
        "problem": "",
        "journal_entries_unacknowledged": 0,
    }


def test_the_status_of_an_agent_without_workers() -> None:
    """Everything is there before anything has happened, and is JSON."""
    bench = Bench()
    status = bench.view.status()
    json.dumps(status)
    assert (status["boot_id"], status["port"], status["lmcache_release"]) == (
        "boot",
        5556,
        "0.5.6",
    )
    assert (status["sessions"], status["models"], status["connections"]) == (0, 0, 3)
    assert status["queued_requests"] == {"sync": 0, "normal": 0, "affinity": 0}
    assert status["oldest_transfer_seconds"] == 0.0
    liveness = bench.liveness()
    assert (liveness["enabled"], liveness["reap_mode"]) == (True, "enforce")
    assert (liveness["tracked_instances"], liveness["releases"]) == (0, [])
    assert liveness["silence_brake_seconds_left"] is None


@pytest.mark.parametrize(
    ("settings", "enabled", "mode"),
    [
        ({"worker_reap_timeout_seconds": 0.0}, False, "enforce"),
        ({"reap_mode": "observe"}, False, "observe"),
    ],
)
def test_the_status_says_that_nothing_is_reaped(
    settings: dict[str, object], mode: str, *, enabled: bool
) -> None:
    """And why."""
    liveness = Bench(**settings).liveness()
    assert (liveness["enabled"], liveness["reap_mode"]) == (enabled, mode)


def test_the_status_shows_l1_and_what_is_promised_of_it() -> None:
    """Objects, pins, sessions, models."""
    bench = Bench()
    engine = Engine(bench)
    engine.store(end=4)
    engine.lookup(end=2)
    status = bench.view.status()
    l1 = cast("Mapping[str, object]", status["l1"])
    assert (l1["objects"], l1["pinned_objects"], l1["staging_bytes"]) == (4, 2, 0)
    assert (status["sessions"], status["models"]) == (1, 1)


def test_every_instance_is_shown_however_idle() -> None:
    """Eight ranks of which one pings are eight."""
    bench = Bench()
    engines = [Engine(bench, number) for number in range(1, 9)]
    bench.transfer.touch_instance(engines[0].instance_id, engines[0].worker, ping=True)
    assert bench.states() == ["active", *["idle"] * 7]
    assert bench.liveness()["tracked_instances"] == 8


def test_an_instance_in_words() -> None:
    """Ids are text: readers in JavaScript round 63-bit numbers."""
    bench = Bench()
    engine = Engine(bench, BIG_ID)
    engine.store(end=1)
    bench.now.advance(2.5)
    (shown,) = bench.view.instances()
    json.dumps(shown)
    assert shown == {
        "instance_id": str(BIG_ID),
        "registration": 1,
        "registered_at": "2027-01-15T08:00:00.000+00:00",
        "mapping": None,
        "model": MODEL,
        "world_size": 1,
        "rank": 0,
        "mode": "lmcache_driven/cpu_shm",
        "bytes": len(engine.memory),
        "peer": "10.0.0.1",
        "slot": "",
        "slot_pod": None,
        "state": "idle",
        "last_seen_seconds": 2.5,
        "has_liveness_signal": False,
        "window": "none",
        "deadline_seconds": None,
        "held_by": "open connection",
        "hints": [],
        "evidence": [
            "silent for 2.5 s",
            "never pinged",
            "connection from 10.0.0.1 open",
        ],
    }


def test_a_window_that_runs_shows_its_deadline_and_what_holds_it() -> None:
    """Never a negative one."""
    bench = Bench()
    engine = Engine(bench)
    close(engine.worker, bench.now())
    bench.now.advance(4.0)
    (shown,) = bench.view.instances()
    assert (shown["state"], shown["window"], shown["deadline_seconds"]) == ("closed", "close", 6.0)
    bench.now.advance(60.0)
    assert bench.view.instances()[0]["deadline_seconds"] == 0.0
    bench.ledger.accepted(9, bench.now())
    assert bench.view.instances()[0]["held_by"] == "1 candidate connection(s)"


def test_an_instance_that_is_being_released_is_shown_to_its_end() -> None:
    """And says when it is stuck."""
    bench = Bench()
    engine = Engine(bench)
    bench.transfer.touch_instance(engine.instance_id, engine.worker, ping=True)
    bench.now.advance(120.0)
    bench.reaper.scan()
    (shown,) = bench.view.instances()
    assert (shown["state"], shown["window"], shown["evidence"]) == ("releasing", "none", [])
    bench.now.advance(31.0)
    assert bench.liveness()["releases"] == [
        {
            "instance_id": "1",
            "bytes": len(engine.memory),
            "seconds": 31.0,
            "transfers_in_flight": 0,
            "stuck": True,
        }
    ]
    bench.router.turn_at = bench.now()
    assert bench.view.healthy()[0], "a stuck release is shown, no more"
    bench.threads.run_all()
    assert bench.view.instances() == []
    reaps = cast("list[Mapping[str, object]]", bench.view.reaps(0)["reaps"])
    assert [reap["reason"] for reap in reaps] == ["heartbeat_timeout"]
    assert bench.view.reaps(1)["reaps"] == []


def test_the_brake_is_visible() -> None:
    """With the seconds that are left of it."""
    bench = Bench()
    for number in (1, 2, 3):
        engine = Engine(bench, number, address=f"10.0.0.{number}")
        bench.transfer.touch_instance(engine.instance_id, engine.worker, ping=True)
    bench.now.advance(120.0)
    bench.reaper.scan()
    bench.now.advance(20.0)
    assert bench.liveness()["silence_brake_seconds_left"] == 100.0


def test_gauges_follow_the_present() -> None:
    """States, bytes, releases, mismatches; each known label value is there from the start."""
    bench = Bench()
    empty = metrics_snapshot(bench.parts)
    assert empty[catalog.INSTANCES] == {
        "active": 0.0,
        "idle": 0.0,
        "closed": 0.0,
        "suspect": 0.0,
        "releasing": 0.0,
    }
    engines = [Engine(bench, number) for number in (1, 2, 3)]
    bench.transfer.touch_instance(engines[0].instance_id, engines[0].worker, ping=True)
    close(engines[1].worker, bench.now(), CloseKind.TIMED_OUT)
    engines[2].unregister()
    bench.transfer.context_entries_snapshot()[0].mismatch_reported = True
    reading = metrics_snapshot(bench.parts)
    assert reading[catalog.INSTANCES] == {
        "active": 1.0,
        "idle": 0.0,
        "closed": 1.0,
        "suspect": 0.0,
        "releasing": 1.0,
    }
    assert reading[catalog.WORKER_MAPPED_BYTES] == 2 * len(engines[0].memory)
    assert reading[catalog.HEARTBEAT_MISMATCHED_INSTANCES] == 1
    assert (reading[catalog.RELEASES_IN_PROGRESS], reading[catalog.RELEASES_STUCK]) == (1, 0)
    assert reading[catalog.MODELS] == 1


def test_metrics_carry_no_instance() -> None:
    """Series would grow with every worker that ever was."""
    bench = Bench()
    Engine(bench, InstanceId(1234567))
    text = bench.view.metrics_text()
    assert b"lmcache" in text
    assert b"1234567" not in text
