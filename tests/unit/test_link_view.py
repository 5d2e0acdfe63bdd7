"""What the operator sees of an agent, and what becomes of what it says."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from lmcache_nodeagent.config import AgentConfig
from lmcache_nodeagent.events import discard
from lmcache_nodeagent.ids import InstanceId
from lmcache_nodeagent.link_view import LinkView
from lmcache_nodeagent.liveness.evidence import CloseKind, Peer
from lmcache_nodeagent.liveness.live_settings import LiveSettings
from lmcache_nodeagent.liveness.operator_word import OperatorWord
from lmcache_nodeagent.liveness.testimony import PodOwner as KnownPodOwner
from lmcache_nodeagent.liveness.testimony import PodRun as KnownPodRun
from lmcache_nodeagent.liveness.testimony import Registered
from lmcache_nodeagent.operator_link.messages import (
    MAX_INSTANCES,
    MAX_MODEL_CHARACTERS,
    Ack,
    AgentState,
    Evidence,
    InstanceReport,
    LinkError,
    Mapping,
    PodOwner,
    PodRun,
)
from tests.fakes import liveness_parts
from tests.fakes.liveness_parts import close
from tests.fakes.reaper_bench import ReaperBench, T

WALL_AHEAD = 1_800_000_000.0
POD = PodRun(namespace="default", name="engine-0", uid="uid-1", container="engine", run="c://1")
OWNED = PodRun(
    namespace="default",
    name="engine-0",
    uid="uid-1",
    owner=PodOwner(api_version="apps/v1", kind="StatefulSet", name="engine", uid="uid-9"),
)


class Bench(ReaperBench):
    """A reaper with instance 7, and the view that the operator has of it."""

    def __init__(self) -> None:
        super().__init__()
        config = AgentConfig(l1_size_gb=1, worker_reap_timeout_seconds=T)
        self.live = LiveSettings(config, lambda: None, discard)
        word = OperatorWord(
            "boot",
            [self.target],
            self.live,
            self.stalls,
            lambda: None,
            discard,
            self.now,
            lambda: self.now() + WALL_AHEAD,
        )
        self.view = LinkView("boot", self.live, self.reaper, self.releaser, self.journal, word)
        self.entry = self.register(7)
        self.entry.registered = Registered(3, 1000.0 + WALL_AHEAD)

    @property
    def report(self) -> InstanceReport:
        """Of the one instance."""
        ((key, report),) = self.view.snapshot().instances.items()
        assert key == (report.instance_id, report.registration)
        return report

    @property
    def state(self) -> AgentState:
        """Of the agent."""
        return self.view.snapshot().state

    def evidence(self, **changes: object) -> Evidence:
        """Proof about that instance."""
        values: dict[str, object] = {
            "id": "e1",
            "boot_id": "boot",
            "instance_id": 7,
            "registration": 3,
            "pod_uid": "uid-1",
            "container": "engine",
            "trigger": "container_terminated",
            "proof": True,
            "observed_at": 0.0,
            "finished_at": 1000.0 + WALL_AHEAD,
        }
        return Evidence(**{**values, **changes})  # type: ignore[arg-type]  # as of the message


def test_an_agent_says_which_life_of_it_this_is() -> None:
    """Evidence for another one is about other registrations."""
    hello = Bench().view.hello()
    assert hello.boot_id == "boot"
    assert hello.release


def test_an_instance_as_it_is_reported() -> None:
    """The address without its port; nothing over a Unix socket, or where nothing is known."""
    bench = Bench()
    assert bench.report == InstanceReport(
        instance_id=7,
        registration=3,
        registered_at=1000.0 + WALL_AHEAD,
        model="demo/model",
        peer="10.0.0.7",
        connected=True,
        state="active",
        bytes=4096,
    )
    bench.entry.registrant.peer = Peer("pid:42", "process 42", local=True)
    close(bench.entry.last_connection, bench.now(), CloseKind.PEER)
    assert (bench.report.peer, bench.report.connected, bench.report.state) == ("", False, "closed")


def test_the_agent_as_a_whole() -> None:
    """Settings in force, what is wrong with the newest, memory that is not back, slow pings."""
    bench = Bench()
    assert bench.state.settings.worker_reap_timeout_seconds == T
    assert (bench.state.settings.reap_mode, bench.state.settings.hints) == ("enforce", "enforce")
    assert (bench.state.settings_problem, bench.state.releases_stuck) == ("", 0)
    bench.live.take(b"{")
    bench.entry.ping_intervals = [60.0]
    bench.register(8, at=1000.0 - T)
    bench.reaper.scan()
    bench.now.advance(31.0)
    bench.entry.last_seen = bench.now()
    assert "no JSON" in bench.state.settings_problem
    assert (bench.state.releases_stuck, bench.state.mismatched_heartbeats) == (1, 1)
    assert (7, 3) in bench.view.snapshot().instances
    assert len(bench.view.snapshot().instances) == 1


def test_one_peer_that_registers_without_end_costs_the_others_nothing() -> None:
    """The operator would end the stream, and with it everybody's hints on this node."""
    bench = Bench()
    for number in range(1000, 1000 + MAX_INSTANCES):
        bench.register(number, "10.0.0.66").registered = Registered(number, 1.0)
    bench.register(8, "10.0.0.8").registered = Registered(9_000, 1.0)
    said = bench.view.snapshot().instances
    assert len(said) == MAX_INSTANCES
    assert {(7, 3), (8, 9_000), (1000, 1000)} < said.keys()
    assert (999 + MAX_INSTANCES, 999 + MAX_INSTANCES) not in said
    assert said.keys() == bench.view.snapshot().instances.keys()


def test_long_texts_are_said_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of models are the workers' own choice, up to 4,096 characters."""
    monkeypatch.setattr(liveness_parts, "MODEL", "m" * 4_096)
    bench = Bench()
    assert bench.report.model == "m" * (MAX_MODEL_CHARACTERS - 1) + "…"
    bench.live.take(json.dumps({f"x{number}": 0 for number in range(5_000)}).encode())
    assert len(bench.state.settings_problem) == 1_000
    bench.register(8, at=1000.0 - T)
    bench.reaper.scan()
    bench.threads.run_all()
    (entry,) = bench.view.journal(0)
    assert len(entry.model) == MAX_MODEL_CHARACTERS


@pytest.mark.parametrize("pod", [POD, OWNED])
def test_a_mapping_is_repeated_as_it_was_said(pod: PodRun) -> None:
    """So that it survives the operator that said it."""
    bench = Bench()
    bench.view.hear(Mapping(instance_id=7, registration=3, pod=pod))
    assert bench.report.mapping == pod
    bench.view.hear(Mapping(instance_id=7, registration=2))
    assert bench.report.mapping == pod
    bench.view.hear(Mapping(instance_id=7, registration=3))
    assert bench.report.mapping is None


def test_evidence_reaches_the_instance() -> None:
    """And the reap says who had a word in it."""
    bench = Bench()
    bench.view.hear(Mapping(instance_id=7, registration=3, pod=POD))
    close(bench.entry.last_connection, 1000.5)
    bench.now.advance(1.0)
    bench.view.hear(bench.evidence())
    bench.reaper.scan()
    bench.now.advance(0.25)
    bench.threads.run_all()
    (entry,) = bench.view.journal(0)
    assert (entry.seq, entry.kind, entry.reason) == (1, "reaped", "container_terminated")
    assert (entry.instance_id, entry.registration, entry.trigger) == (
        7,
        3,
        "container_terminated",
    )
    assert (entry.released_bytes, entry.release_seconds) == (4096, 0.25)
    assert entry.latency_seconds == pytest.approx(0.75)
    assert entry.mapping == POD
    assert entry.evidence[0] == "silent for 1.0 s"


def test_the_journal_goes_on_until_it_is_acknowledged() -> None:
    """By an operator that means this life of the agent."""
    bench = Bench()
    bench.now.advance(T)
    bench.reaper.scan()
    bench.threads.run_all()
    assert len(bench.view.journal(0)) == 1
    bench.view.hear(Ack(boot_id="another", seq=1))
    bench.view.hear(Ack(boot_id="another", seq=99))
    assert len(bench.view.journal(0)) == 1
    with pytest.raises(LinkError, match="entry 2, which there is not"):
        bench.view.hear(Ack(boot_id="boot", seq=2))
    bench.view.hear(Ack(boot_id="boot", seq=1))
    assert bench.view.journal(0) == []


def test_the_owner_of_a_pod_is_kept_with_it() -> None:
    """Events go there once the pod is gone."""
    bench = Bench()
    bench.view.hear(Mapping(instance_id=7, registration=3, pod=OWNED))
    known = bench.entry.registered.pod
    assert known == KnownPodRun(
        "default",
        "engine-0",
        "uid-1",
        owner=KnownPodOwner("apps/v1", "StatefulSet", "engine", "uid-9"),
    )
    assert replace(known, container="engine").words == "pod default/engine-0 (engine)"
    assert known.words == "pod default/engine-0"


def test_instances_of_one_id_are_told_apart_by_their_registration() -> None:
    """What was said of the one before has no effect on this one."""
    bench = Bench()
    bench.view.hear(Mapping(instance_id=7, registration=3, pod=POD))
    again = bench.register(7, at=bench.now())
    again.registered = Registered(4, bench.now() + WALL_AHEAD)
    bench.view.hear(bench.evidence())
    assert bench.target.entries[InstanceId(7)].hints == []
    assert bench.report.registration == 4
