"""A pod's state proves a worker's end only where the kubelet says that its run has ended."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_operator.workers.evidence import (
    Evidence,
    Instance,
    Trigger,
    evidence_of_absence,
    evidence_of_state,
    is_proven_ended,
)
from lmcache_operator.workers.pod import read_pod
from tests.fakes.pods import LOST, WAITING, Json, container_status, pod, running, terminated

NOW = 2000.0
BEGAN, ENDED = 1000.0, 1500.0


def instance(registered_at: float = 1010.0, container: str | None = "engine") -> Instance:
    """Make an instance that registered ten seconds after its container began."""
    return Instance(7, "uid-1", container, registered_at)


def judge(document: Json, *instances: Instance) -> list[Evidence]:
    """Return what a pod's state says about its instances, one of them if none is given."""
    return evidence_of_state(read_pod(document), instances or (instance(),), observed_at=NOW)


def engine(state: Json, *, last: Json | None = None, run: str = "containerd://1") -> Json:
    """Make the status of the engine's container."""
    return container_status("engine", state, last=last, run=run)


class TestProof:
    """The kubelet's own word."""

    @pytest.mark.parametrize("reason", ["Error", "OOMKilled", "Completed"])
    def test_a_terminated_container(self, reason: str) -> None:
        """Whatever it ended of; the pod may go on."""
        state = terminated(BEGAN, ENDED, run="containerd://a", reason=reason)
        assert judge(pod(engine(state))) == [
            Evidence(
                instance_id=7,
                pod_uid="uid-1",
                container="engine",
                run="containerd://a",
                trigger=Trigger.CONTAINER_TERMINATED,
                proof=True,
                observed_at=NOW,
                finished_at=ENDED,
            )
        ]

    def test_a_newer_run(self) -> None:
        """The container was restarted: the run before it has ended."""
        last = terminated(BEGAN, ENDED, run="containerd://a")
        (found,) = judge(pod(engine(running(1501), last=last, run="containerd://b")))
        assert (found.proof, found.run, found.finished_at) == (True, "containerd://a", ENDED)

    @pytest.mark.parametrize("last", [None, LOST], ids=["none", "lost"])
    def test_a_newer_run_without_word_of_the_one_before(self, last: Json | None) -> None:
        """The kubelet starts a run only after the end of the other, seen or not."""
        (found,) = judge(pod(engine(running(1501), last=last)))
        assert (found.proof, found.run, found.finished_at) == (True, "", 1501)

    def test_a_run_before_those_that_are_reported(self) -> None:
        """It ended, at the latest, when the first run after it began."""
        last = terminated(1200, 1300, run="containerd://b")
        (found,) = judge(pod(engine(running(1501), last=last, run="containerd://c")))
        assert (found.proof, found.run, found.finished_at) == (True, "", 1200)

    def test_a_lost_run_before_one_that_is_reported(self) -> None:
        """Nobody saw the first end; the second began after it."""
        state = terminated(1200, 1300, run="containerd://b")
        (found,) = judge(pod(engine(state, last=LOST)))
        assert (found.proof, found.run, found.finished_at) == (True, "", 1200)

    def test_runs_within_a_second_are_told_apart_by_their_ids(self) -> None:
        """The kubelet's times are whole seconds; the run was known when it was mapped."""
        last = terminated(BEGAN, BEGAN + 0.6, run="containerd://a")
        document = pod(engine(running(BEGAN + 0.8), last=last, run="containerd://b"))
        old = Instance(7, "uid-1", "engine", BEGAN + 0.3, "containerd://a", BEGAN)
        new = Instance(8, "uid-1", "engine", BEGAN + 0.9, "containerd://b", BEGAN)
        assert [(each.instance_id, each.proof) for each in judge(document, old, new)] == [(7, True)]

    def test_a_lost_run_that_is_known_by_its_id(self) -> None:
        """Its end was not seen, whoever came after it in that second."""
        state = {**LOST["terminated"], "containerID": "containerd://a", "finishedAt": None}
        known = Instance(7, "uid-1", "engine", BEGAN + 10, "containerd://a", BEGAN)
        (found,) = judge(pod(engine({"terminated": state})), known)
        assert (found.trigger, found.proof) == (Trigger.ENDED_UNREPORTED, False)

    def test_a_container_that_waits_to_restart(self) -> None:
        """Its last run is in the last state."""
        (found,) = judge(pod(engine(WAITING, last=terminated(BEGAN, ENDED))))
        assert (found.proof, found.finished_at) == (True, ENDED)

    def test_only_the_run_that_the_registration_belongs_to(self) -> None:
        """Of two instances in one container, the one of the old run has ended."""
        document = pod(engine(running(1501), last=terminated(BEGAN, ENDED)))
        old, new = instance(), Instance(8, "uid-1", "engine", 1501.0)
        assert [found.instance_id for found in judge(document, old, new)] == [7]

    def test_of_two_ended_runs_each_instance_has_its_own(self) -> None:
        """Also if the second began in the second in which the first ended."""
        last = terminated(BEGAN, ENDED, run="containerd://a")
        state = terminated(ENDED, 1600, run="containerd://b")
        old, new = instance(), Instance(8, "uid-1", "engine", ENDED + 0.5)
        runs = [found.run for found in judge(pod(engine(state, last=last)), old, new)]
        assert runs == ["containerd://a", "containerd://b"]

    def test_the_whole_pod(self) -> None:
        """Every container has ended, and the pod is over: also for instances of unknown ones."""
        document = pod(
            engine(terminated(BEGAN, ENDED)),
            container_status("proxy", terminated(BEGAN, 1503)),
            containers=("engine", "proxy"),
            phase="Failed",
        )
        known, unknown = judge(document, instance(), instance(container=None))
        assert known.trigger is unknown.trigger is Trigger.POD_TERMINATED
        assert (known.finished_at, unknown.finished_at) == (ENDED, 1503)
        assert known.proof
        assert unknown.proof

    def test_a_sidecar_goes_on(self) -> None:
        """The engine's instances have ended; of an unknown container nothing is known."""
        document = pod(
            engine(terminated(BEGAN, ENDED)),
            container_status("proxy", running(BEGAN)),
            containers=("engine", "proxy"),
        )
        found = judge(
            document, instance(), Instance(8, "uid-1", "proxy", 1010), instance(1010, None)
        )
        assert [(each.instance_id, each.trigger) for each in found] == [
            (7, Trigger.CONTAINER_TERMINATED)
        ]


class TestNoEvidence:
    """What looks like an end and is none."""

    @pytest.mark.parametrize(
        "document",
        [
            pod(engine(running(BEGAN))),
            pod(engine(running(BEGAN)), phase="Unknown", reason="NodeLost"),
            pod(engine(running(BEGAN)), conditions=({"type": "Ready", "status": "False"},)),
            pod(engine({**running(BEGAN)}), conditions=({"type": "Ready", "status": "Unknown"},)),
            pod(phase="Pending", addresses=()),
            pod(),
            pod(engine({})),
            pod(engine(WAITING)),
        ],
        ids=[
            "running",
            "phase unknown",
            "not ready",
            "node unreachable",
            "pending",
            "no status yet",
            "empty state",
            "waiting for its first run",
        ],
    )
    def test_states(self, document: Json) -> None:
        """The process may run, or has not begun."""
        assert judge(document, instance(), instance(container=None)) == []

    def test_a_deletion_mark(self) -> None:
        """A graceful delete gives the process its time; the terminal status will say."""
        document = pod(engine(running(BEGAN)))
        document["metadata"]["deletionTimestamp"] = "1970-01-01T00:30:00Z"
        document["metadata"]["deletionGracePeriodSeconds"] = 0
        assert judge(document) == []


class TestHints:
    """An end without the kubelet's word."""

    @pytest.mark.parametrize(
        "document",
        [
            pod(phase="Failed", reason="Evicted"),
            pod(engine(running(BEGAN)), phase="Failed", reason="DeadlineExceeded"),
            pod(engine(LOST), phase="Failed"),
            pod(engine(LOST)),
            pod(
                engine(running(BEGAN)),
                phase="Failed",
                conditions=(
                    {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByPodGC"},
                ),
            ),
            pod(engine(terminated(BEGAN, ENDED, run="")), phase="Failed"),
        ],
        ids=["evicted", "deadline", "lost", "lost, pod goes on", "garbage collected", "no run"],
    )
    def test_states(self, document: Json) -> None:
        """The agent waits for silence."""
        (found,) = judge(document)
        assert (found.trigger, found.proof) == (Trigger.ENDED_UNREPORTED, False)

    def test_another_run_that_began_when_this_one_did(self) -> None:
        """No kubelet says so; whatever it means, it is no proof."""
        known = Instance(7, "uid-1", "engine", BEGAN + 10, "containerd://a", BEGAN)
        (found,) = judge(pod(engine(running(BEGAN), run="containerd://b")), known)
        assert (found.trigger, found.proof) == (Trigger.ENDED_UNREPORTED, False)
        assert judge(pod(engine(running(BEGAN), run="containerd://a")), known) == []
        assert judge(pod(engine(running(BEGAN + 5), run="containerd://b")), known) == []

    def test_a_lost_container_spoils_the_proof_for_the_pod(self) -> None:
        """Nobody saw its end; the other's end was seen."""
        document = pod(
            engine(terminated(BEGAN, ENDED)),
            container_status("proxy", LOST),
            containers=("engine", "proxy"),
            phase="Failed",
        )
        known, unknown = judge(document, instance(), instance(container=None))
        assert (known.trigger, known.proof) == (Trigger.CONTAINER_TERMINATED, True)
        assert (unknown.trigger, unknown.proof) == (Trigger.ENDED_UNREPORTED, False)

    @pytest.mark.parametrize("policy", ["Always", None])
    def test_a_sidecar_without_status_spoils_it_an_init_container_does_not(
        self, policy: str | None
    ) -> None:
        """Init containers that restart run until the pod ends; the others are long over."""
        init = {"name": "i", "image": "none", **({"restartPolicy": policy} if policy else {})}
        document = pod(engine(terminated(BEGAN, ENDED)), init=(init,), phase="Succeeded")
        assert is_proven_ended(read_pod(document)) is (policy is None)

    def test_garbage_collection_is_not_the_kubelets_word(self) -> None:
        """Even if every container had ended before, the phase is the control plane's."""
        collected = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByPodGC"}
        document = pod(engine(terminated(BEGAN, ENDED)), phase="Failed", conditions=(collected,))
        assert not is_proven_ended(read_pod(document))

    def test_a_registration_after_the_end_contradicts_it(self) -> None:
        """The status is older than the instance: somebody runs there."""
        document = pod(engine(terminated(BEGAN, ENDED)))
        (late,) = judge(document, instance(ENDED + 2.5))
        assert (late.proof, late.contradicted, late.finished_at) == (False, True, ENDED)
        (in_time,) = judge(document, instance(ENDED + 1.5))
        assert (in_time.proof, in_time.contradicted) == (True, False)


class TestAbsence:
    """A pod that is no longer in the list."""

    def test_gone_without_a_word(self) -> None:
        """Deleted by force, or its name has another pod now: a hint."""
        last = read_pod(pod(engine(running(BEGAN))))
        other = read_pod(pod(engine(running(1900)), uid="uid-2"))
        for live in (None, other):
            found = evidence_of_absence(last, live, (instance(),), observed_at=NOW)
            assert found is not None
            assert [(each.trigger, each.proof) for each in found] == [(Trigger.POD_GONE, False)]

    def test_gone_after_its_end_was_reported(self) -> None:
        """The proof is repeated, and nothing is added."""
        last = read_pod(pod(engine(terminated(BEGAN, ENDED)), phase="Failed"))
        found = evidence_of_absence(last, None, (instance(),), observed_at=NOW)
        assert found == evidence_of_state(last, (instance(),), observed_at=NOW)
        assert found[0].proof

    @pytest.mark.parametrize(
        "document",
        [
            pod(phase="Failed", reason="Evicted"),
            pod(engine(terminated(BEGAN, ENDED, reason="OOMKilled")), phase="Failed"),
            pod(engine(terminated(BEGAN, ENDED, reason="Completed")), phase="Succeeded"),
        ],
        ids=["evicted", "killed", "succeeded"],
    )
    def test_the_deletion_of_a_finished_pod_is_no_news(self, document: Json) -> None:
        """Such pods stay listed for days; the evidence was given at the transition."""
        last = read_pod(document)
        at_end = evidence_of_state(last, (instance(),), observed_at=NOW)
        later = evidence_of_absence(last, None, (instance(),), observed_at=NOW + 86_400)
        assert later is not None
        assert [each.identity for each in later] == [each.identity for each in at_end]

    def test_gone_after_an_end_that_was_another_runs(self) -> None:
        """The instance registered after that end, so its run is not reported; the pod is gone."""
        last = read_pod(pod(engine(terminated(BEGAN, ENDED)), containers=("engine", "proxy")))
        late = instance(ENDED + 10)
        found = evidence_of_absence(last, None, (late,), observed_at=NOW)
        assert found is not None
        assert [(each.trigger, each.proof) for each in found] == [(Trigger.POD_GONE, False)]

    def test_a_label_was_edited(self) -> None:
        """The pod is there and runs: it only left the selection."""
        last = read_pod(pod(engine(running(BEGAN))))
        assert evidence_of_absence(last, last, (instance(),), observed_at=NOW) is None

    def test_the_list_was_older_than_the_end(self) -> None:
        """The pod that is still there under its name says how it ended."""
        last = read_pod(pod(engine(running(BEGAN))))
        live = read_pod(pod(engine(terminated(BEGAN, ENDED)), phase="Failed"))
        found = evidence_of_absence(last, live, (instance(),), observed_at=NOW)
        assert found is not None
        assert found[0].trigger is Trigger.POD_TERMINATED


class TestAnyHistory:
    """Containers that run and end at any time, and a kubelet that reports when it gets to it."""

    runs = st.lists(
        st.tuples(st.floats(0.1, 50), st.floats(0, 50)), min_size=1, max_size=6
    )  # (how long it ran, how long until the next)

    @given(runs, st.data())
    def test_no_proof_about_an_instance_that_runs(
        self, runs: list[tuple[float, float]], data: st.DataObject
    ) -> None:
        """Whichever run the report stops at, and wherever the instance registered."""
        spans, clock = [], BEGAN
        for ran, paused in runs:
            spans.append((clock, clock + ran))
            clock += ran + paused
        reported = data.draw(st.integers(0, len(spans) - 1), "last run that is reported")
        goes_on = data.draw(st.booleans(), "it is reported as running")
        mine = data.draw(st.integers(0, reported), "run of the instance")
        began, ended = spans[mine]
        registered_at = data.draw(st.floats(began, ended), "registration")
        state, last = _report(spans, reported, goes_on=goes_on)
        found = judge(pod(engine(state, last=last)), instance(registered_at))
        has_ended = mine < reported or not goes_on
        if not has_ended:
            assert found == []
        elif registered_at < int(spans[reported][0]) or not goes_on:
            assert [each.proof for each in found] == [True]
        # else: two runs within one second of the kubelet's clock; silence decides

    @given(st.permutations([7, 8, 9]))
    def test_instances_do_not_influence_each_other(self, order: list[int]) -> None:
        """The same evidence in any order."""
        document = pod(engine(running(1501), last=terminated(BEGAN, ENDED)))
        times = {7: 1010.0, 8: 1400.0, 9: 1600.0}
        instances = [Instance(each, "uid-1", "engine", times[each]) for each in order]
        assert {found.instance_id for found in judge(document, *instances)} == {7, 8}

    @given(
        st.sampled_from(["Pending", "Running", "Succeeded", "Failed", "Unknown"]),
        st.lists(
            st.sampled_from([running(BEGAN), terminated(BEGAN, ENDED), LOST, WAITING, {}]),
            max_size=3,
        ),
        st.sampled_from(["DeletionByPodGC", "EvictionByEvictionAPI"]),
    )
    def test_a_pod_is_proven_ended_only_by_all_of_its_containers(
        self, phase: str, states: list[Json], reason: str
    ) -> None:
        """Terminal, not collected, and every end seen."""
        names = ("a", "b", "c")
        document = pod(
            *(container_status(name, state) for name, state in zip(names, states, strict=False)),
            containers=names,
            phase=phase,
            conditions=({"type": "DisruptionTarget", "status": "True", "reason": reason},),
        )
        seen = [state.get("terminated", {}).get("containerID") for state in states]
        expected = (
            phase in {"Succeeded", "Failed"}
            and reason != "DeletionByPodGC"
            and len(states) == len(names)
            and all(seen)
        )
        assert is_proven_ended(read_pod(document)) is expected


def _report(
    spans: list[tuple[float, float]], reported: int, *, goes_on: bool
) -> tuple[Json, Json | None]:
    """Write state and last state as of the moment of one run, in whole seconds."""

    def ended(run: int) -> Json:
        began, end = spans[run]
        return terminated(began, end, run=f"containerd://{run}")

    last = ended(reported - 1) if reported else None
    return (running(spans[reported][0]) if goes_on else ended(reported)), last
