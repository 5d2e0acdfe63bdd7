"""What the operator says: whom it is about, and what it is worth."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lmcache_nodeagent.events import Event, EvidenceTaken
from lmcache_nodeagent.liveness.kubelet_clock import KubeletClock
from lmcache_nodeagent.liveness.operator_word import OperatorWord, Outcome
from lmcache_nodeagent.liveness.stalls import Stalls
from lmcache_nodeagent.liveness.testimony import OperatorEvidence, PodRun, Registered
from lmcache_nodeagent.liveness.windows import LivenessSettings
from tests.fakes.liveness_parts import FakeClock, FakeTarget, close, connection, entry

POD = PodRun("default", "engine-0", "uid-1", "engine")
WALL_AHEAD = 1_800_000_000.0


class Bench:
    """An instance 7, third registration, in a known container, heard last at 1000."""

    def __init__(self) -> None:
        self.now = FakeClock(1000.0)
        self.ahead = WALL_AHEAD
        self.told: list[Event] = []
        self.wakes = 0
        self.settings = LivenessSettings()
        self.stalls = Stalls()
        self.target = FakeTarget(self.now)
        self.link = connection(serial=1)
        self.entry = entry(self.link, number=7, at=1000.0)
        self.entry.registered = Registered(3, self.wall(), POD)
        self.target.add(self.entry)
        self.word = OperatorWord(
            "boot",
            [FakeTarget(self.now), self.target],
            lambda: self.settings,
            self.stalls,
            self.wake,
            self.told.append,
            self.now,
            self.wall,
        )

    def wall(self) -> float:
        """The node's clock."""
        return self.now() + self.ahead

    def wake(self) -> None:
        """Count."""
        self.wakes += 1

    def evidence(self, **changes: object) -> OperatorEvidence:
        """Proof of the container's end at 1005 by the node's clock, unless told otherwise."""
        made = OperatorEvidence(
            id="e1",
            boot_id="boot",
            instance_id=7,
            registration=3,
            pod_uid="uid-1",
            container="engine",
            trigger="container_terminated",
            proof=True,
            finished_at=1005.0 + WALL_AHEAD,
        )
        return replace(made, **changes)  # type: ignore[arg-type]  # as of the record

    def take(self, **changes: object) -> Outcome:
        """Take it at 1006."""
        self.now.seconds = max(self.now.seconds, 1006.0)
        return self.word.take_evidence(self.evidence(**changes))

    def is_proof(self) -> bool:
        """Whether the last thing that was kept is proof."""
        return self.entry.hints[-1].ended_at is not None


def test_proof_about_a_closed_connection_is_applied_and_wakes_the_reaper() -> None:
    """The end is kept in monotonic time."""
    bench = Bench()
    close(bench.link, 1005.4)
    assert bench.take() is Outcome.APPLIED
    (hint,) = bench.entry.hints
    assert (hint.trigger, hint.received_at) == ("container_terminated", 1006.0)
    assert hint.ended_at == pytest.approx(1005.0)
    assert hint.refuted_after == pytest.approx(1007.0)
    assert bench.wakes == 1
    assert bench.told == [
        EvidenceTaken(bench.entry.instance_id, "container_terminated", "proof", "applied")
    ]


def test_an_open_connection_contradicts_but_the_proof_is_kept() -> None:
    """The close may be on its way."""
    bench = Bench()
    assert bench.take() is Outcome.CONTRADICTED
    assert bench.is_proof()
    assert bench.wakes == 1


@pytest.mark.parametrize(
    ("changes", "outcome"),
    [
        ({"boot_id": "another"}, Outcome.OTHER_BOOT),
        ({"instance_id": 8}, Outcome.NOT_REGISTERED),
        ({"registration": 2}, Outcome.REGISTERED_LATER),
        ({"registration": 4}, Outcome.NOT_REGISTERED),
        ({"pod_uid": "uid-2"}, Outcome.OTHER_POD),
        ({"container": "sidecar"}, Outcome.OTHER_CONTAINER),
    ],
)
def test_evidence_about_somebody_else_has_no_effect(
    changes: dict[str, object], outcome: Outcome
) -> None:
    """Another life of the agent, another owner of the id, another pod, another container."""
    bench = Bench()
    assert bench.take(**changes) is outcome
    assert (bench.entry.hints, bench.wakes) == ([], 0)
    assert [fact.outcome for fact in bench.told if isinstance(fact, EvidenceTaken)] == [outcome]


def test_evidence_about_an_instance_that_is_mapped_nowhere_has_no_effect() -> None:
    """The operator says first where it runs."""
    bench = Bench()
    bench.entry.registered = Registered(3)
    assert bench.take() is Outcome.NOT_MAPPED


def test_a_container_that_is_not_known_on_one_side_is_no_difference() -> None:
    """A pod's end is about all its containers."""
    bench = Bench()
    assert bench.take(container="") is Outcome.CONTRADICTED
    bench.entry.registered = Registered(3, 0.0, replace(POD, container=""))
    assert bench.take(id="e2") is Outcome.CONTRADICTED


def test_a_repeat_has_no_second_effect() -> None:
    """Not even after a sign of life took back what the first said."""
    bench = Bench()
    assert bench.take(trigger="pod_gone", proof=False) is Outcome.APPLIED
    assert bench.take(trigger="pod_gone", proof=False) is Outcome.REPEATED
    assert len(bench.entry.hints) == 1
    bench.target.touch_instance(bench.entry.instance_id, bench.link, ping=True)
    assert bench.take(trigger="pod_gone", proof=False) is Outcome.REPEATED
    assert bench.entry.hints == []


def test_what_was_refused_may_be_said_again() -> None:
    """The operator maps, and repeats."""
    bench = Bench()
    bench.entry.registered = Registered(3)
    assert bench.take() is Outcome.NOT_MAPPED
    bench.word.take_mapping(7, 3, POD)
    assert bench.take() is Outcome.CONTRADICTED


def test_disabled_means_that_the_operators_word_is_not_used() -> None:
    """Proof included."""
    bench = Bench()
    bench.settings = LivenessSettings(operator_word=False)
    assert bench.take() is Outcome.DISABLED
    assert bench.entry.hints == []


# Contradictions


@pytest.mark.parametrize(("heard_at", "proof"), [(1005.9, True), (1007.0, True), (1007.1, False)])
def test_who_was_heard_after_the_end_did_not_end_then(heard_at: float, *, proof: bool) -> None:
    """The kubelet rounds down, and reading takes a moment: two seconds are no contradiction."""
    bench = Bench()
    bench.entry.last_seen = bench.now.seconds = heard_at
    close(bench.link, heard_at)
    assert bench.take() is (Outcome.APPLIED if proof else Outcome.CONTRADICTED)
    assert bench.is_proof() is proof


def test_what_was_read_late_may_have_been_sent_before_the_end() -> None:
    """The router stood still for ten seconds."""
    bench = Bench()
    bench.stalls.record(1004.0, 1014.0)
    bench.entry.last_seen = bench.now.seconds = 1014.1
    close(bench.link, 1014.1)
    assert bench.take() is Outcome.APPLIED
    assert bench.is_proof()
    assert bench.entry.hints[-1].refuted_after == pytest.approx(1016.0)


@pytest.mark.parametrize("link_is_known", [True, False])
@pytest.mark.parametrize(("connected_at", "proof"), [(1005.9, True), (1006.0, False)])
def test_who_connected_after_the_end_is_the_next_runs_worker(
    connected_at: float, *, proof: bool, link_is_known: bool
) -> None:
    """Nobody is there within a second: kubelet, runtime and interpreter take longer."""
    bench = Bench()
    if link_is_known:
        assert bench.link.link is not None
        bench.link.link.accepted_at = connected_at
    else:
        bench.link.link, bench.link.opened_at = None, connected_at
    bench.entry.last_seen = bench.now.seconds = connected_at
    close(bench.link, connected_at)
    assert bench.take() is (Outcome.APPLIED if proof else Outcome.CONTRADICTED)
    assert bench.is_proof() is proof


@pytest.mark.parametrize(
    ("trigger", "proof", "finished_at", "shown"),
    [
        ("pod_gone", False, None, "pod_gone"),
        ("ended_unreported", False, None, "ended_unreported"),
        ("container_terminated", False, 1005.0, "container_terminated"),
        ("container_terminated", True, None, "container_terminated"),
        ("slot_restarted", True, 1005.0, "other"),
    ],
)
def test_what_is_no_proof_is_a_hint(
    trigger: str, shown: str, finished_at: float | None, *, proof: bool
) -> None:
    """So is proof without a moment that signs of life can be compared with, and of a new kind."""
    bench = Bench()
    moment = None if finished_at is None else finished_at + WALL_AHEAD
    assert bench.take(trigger=trigger, proof=proof, finished_at=moment) is Outcome.APPLIED
    assert not bench.is_proof()
    (fact,) = bench.told
    assert isinstance(fact, EvidenceTaken)
    assert (fact.trigger, fact.kind) == (shown, "proof" if proof else "hint")


# The node's clock


def test_an_end_in_the_future_is_not_believed() -> None:
    """Two clocks are at work."""
    bench = Bench()
    close(bench.link, 1005.0)
    assert bench.take(finished_at=1006.5 + WALL_AHEAD) is Outcome.CONTRADICTED
    assert not bench.is_proof()


@pytest.mark.parametrize("moved", [-1.5, 1.5])
def test_a_clock_that_was_set_is_believed_again_after_as_long_as_it_was_moved(moved: float) -> None:
    """Until then a moment may be of before that."""
    now, ahead = FakeClock(1000.0), FakeClock(WALL_AHEAD)
    clock = KubeletClock(now, lambda: now() + ahead())
    assert clock.monotonic(995.0 + WALL_AHEAD) == pytest.approx(995.0)
    ahead.advance(0.05)
    assert clock.monotonic(995.05 + WALL_AHEAD) == pytest.approx(995.0)
    ahead.advance(moved - 0.05)
    clock.look()
    assert clock.monotonic(999.0 + ahead()) is None
    now.advance(10.0)
    assert clock.monotonic(1001.4 + ahead()) is None
    assert clock.monotonic(1001.6 + ahead()) == pytest.approx(1001.6)


# Mappings


def test_a_mapping_is_kept_and_taken_back() -> None:
    """With the registration that it is about, and no other."""
    bench = Bench()
    elsewhere = PodRun("default", "engine-1", "uid-2")
    assert not bench.word.take_mapping(8, 3, elsewhere)
    assert not bench.word.take_mapping(7, 2, elsewhere)
    assert bench.entry.registered.pod == POD
    assert bench.word.take_mapping(7, 3, elsewhere)
    assert bench.entry.registered == Registered(3, bench.entry.registered.at, elsewhere)
    assert bench.word.take_mapping(7, 3, None)
    assert bench.entry.registered.pod is None


@pytest.mark.parametrize(
    ("pod", "kept"),
    [
        (replace(POD, run="containerd://1"), True),
        (replace(POD, container="other"), False),
        (replace(POD, uid="uid-2"), False),
        (None, False),
    ],
)
def test_evidence_about_another_place_is_void(pod: PodRun | None, *, kept: bool) -> None:
    """A run may become known later; another pod was a mistake."""
    bench = Bench()
    bench.take(trigger="pod_gone", proof=False)
    bench.word.take_mapping(7, 3, pod)
    assert bool(bench.entry.hints) is kept


def test_a_first_mapping_voids_nothing() -> None:
    """There was none that evidence could have been about."""
    bench = Bench()
    bench.entry.registered = Registered(3)
    assert bench.word.take_mapping(7, 3, POD)
