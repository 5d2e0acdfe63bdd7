"""From `kubectl apply` to a reap with a name, on a real kubelet."""

from __future__ import annotations

import time
from functools import partial

import pytest

from tests.e2e.kube.worker_pods import (
    KUBELET_PROOFS,
    ServedNamespace,
    WorkerPod,
    is_alive,
    kill,
    mapped_segments,
    seconds_until,
)
from tests.polling import poll_until

_EAT = ("sh", "-c", "kill -USR1 1")  # what makes the engine take memory without end

pytestmark = pytest.mark.timeout(600)


def test_a_worker_is_known_by_its_pod(served: ServedNamespace) -> None:
    """Its pod bears the id of its instance soon after it registered."""
    with served.worker("annotated", on_term="unregister") as pod:
        run = pod.started()
        seconds = pod.annotated(run.instance_id) - run.registered_at
        print(f"\nannotation {seconds:.2f} s after the registration")
        instance = served.agent().instances()[run.instance_id]
        assert instance["mapping"]["name"] == pod.name
        assert instance["mapping"]["container"] == "engine"


def test_a_killed_container_gives_its_memory_back(served: ServedNamespace) -> None:
    """Proven by the kubelet's word, said on the pod; the next run is another instance."""
    with served.worker("killed") as pod:
        run = pod.started()
        pod.annotated(run.instance_id)
        agent = served.agent_process_id()
        its = set(mapped_segments(agent))
        assert its
        killed_at = kill(run.process_id)
        gone = seconds_until(
            killed_at, lambda: not its & set(mapped_segments(agent)), "the memory is back"
        )
        entry = served.reaped(run.instance_id)
        print(f"\nmemory back {gone:.2f} s after SIGKILL: {entry['reason']}")
        assert entry["reason"] == "container_terminated"
        second = pod.started(after=run.container_id)
        pod.annotated(second.instance_id)
        assert second.instance_id in served.agent().instances()
        poll_until(partial(served.told, run.instance_id), "an Event")
        described = pod.describe()
        print(described[described.index("Events:") :])
        assert "WorkerReaped" in described


def test_an_engine_out_of_memory_is_reaped(served: ServedNamespace) -> None:
    """The kernel kills it at its limit and the kubelet says so; the rest is the same."""
    with served.worker("hungry") as pod:
        run = pod.started()
        pod.annotated(run.instance_id)
        began = time.time()
        served.cluster.kubectl("exec", "-n", served.name, pod.name, "--", *_EAT)
        entry = served.reaped(run.instance_id)
        print(f"\nreaped {time.time() - began:.2f} s after it was made to eat: {entry['reason']}")
        second = pod.started(after=run.container_id)
        assert pod.last_end()["reason"] == "OOMKilled"
        assert entry["reason"] == "container_terminated"
        assert second.instance_id in served.agent().instances()


def test_a_graceful_end_is_no_reap(served: ServedNamespace) -> None:
    """A worker that unregisters on SIGTERM leaves nothing to reap and nothing to tell."""
    with served.worker("polite", on_term="unregister") as pod:
        run = pod.started()
        pod.annotated(run.instance_id)
        began = time.time()
        pod.delete()
        poll_until(lambda: pod.get() is None, "the pod is gone")
        print(f"\npod gone {time.time() - began:.2f} s after its deletion")
        agent = served.agent()
        assert run.instance_id not in agent.instances()
        assert agent.reaps(run.instance_id) == []
        assert served.told(run.instance_id) == []


def test_a_worker_that_is_being_deleted_lives_until_it_has_ended(served: ServedNamespace) -> None:
    """It may ignore SIGTERM for the whole grace period; only its end is proof."""
    with served.worker("stubborn", grace_seconds=8) as pod:
        run = pod.started()
        pod.annotated(run.instance_id)
        began = time.time()
        pod.delete()
        poll_until(partial(pod.has_said, "told_to_end"), "SIGTERM")
        assert (pod.get() or {})["metadata"]["deletionTimestamp"]
        agent = served.agent()
        seen_alive = 0
        while is_alive(run.process_id):
            seen_alive += run.instance_id in agent.instances() or not is_alive(run.process_id)
            assert not agent.reaps(run.instance_id) or not is_alive(run.process_id)
            time.sleep(0.05)
        assert seen_alive
        ended_at = time.time()
        entry = served.reaped(run.instance_id)
        print(
            f"\nended {ended_at - began:.2f} s after its deletion, reaped "
            f"{time.time() - ended_at:.2f} s later: {entry['reason']}"
        )
        assert entry["reason"] in KUBELET_PROOFS
        poll_until(partial(served.told, run.instance_id), "an Event")


def test_a_worker_deleted_by_force_is_reaped_once_it_is_dead(served: ServedNamespace) -> None:
    """Its object is gone at once, whatever its process does: that alone ends nobody."""
    with served.worker("forced") as pod:
        run = pod.started()
        pod.annotated(run.instance_id)
        agent = served.agent()
        began = time.time()
        pod.delete("--force", "--grace-period=0")
        poll_until(lambda: pod.get() is None, "the object is gone")
        while is_alive(run.process_id):
            assert not agent.reaps(run.instance_id) or not is_alive(run.process_id)
            time.sleep(0.05)
        ended_at = time.time()
        entry = served.reaped(run.instance_id)
        print(
            f"\nended {ended_at - began:.2f} s after its deletion, reaped "
            f"{time.time() - ended_at:.2f} s later: {entry['reason']}"
        )
        poll_until(partial(served.told, run.instance_id), "an Event")


def test_workers_outlive_their_agent(served: ServedNamespace) -> None:
    """The agent is killed and comes back: they register again, and none of them is reaped."""
    with served.worker("survivor-a") as a, served.worker("survivor-b") as b:
        runs = [a.started(), b.started()]
        for pod, run in zip((a, b), runs, strict=True):
            pod.annotated(run.instance_id)
        killed_at = kill(served.agent_process_id())
        for pod in (a, b):
            poll_until(partial(_registered_again, pod), f"{pod.name} registers again")
        print(f"\nboth registered again {time.time() - killed_at:.2f} s after the agent's SIGKILL")
        agent = served.agent()
        assert {run.instance_id for run in runs} <= set(agent.instances())
        for pod, run in zip((a, b), runs, strict=True):
            pod.annotated(run.instance_id)
            assert served.told(run.instance_id) == []
            assert pod.last_end() == {}
        assert agent.reap_count() == 0


def test_the_operator_may_be_away(served: ServedNamespace) -> None:
    """Agents judge by themselves meanwhile; what they did is told afterwards, once."""
    with served.worker("unwatched") as pod, served.worker("spared") as other:
        run, spared = pod.started(), other.started()
        pod.annotated(run.instance_id)
        other.annotated(spared.instance_id)
        with served.without_operator():
            killed_at = kill(run.process_id)
            entry = served.reaped(run.instance_id)
            print(f"\nwithout an operator: {entry['reason']}, {time.time() - killed_at:.2f} s")
            assert entry["reason"] == "connection_closed"
            second = pod.started(after=run.container_id)
            assert {second.instance_id, spared.instance_id} <= set(served.agent().instances())
            began = time.time()
        poll_until(partial(served.told, run.instance_id), "an Event")
        pod.annotated(second.instance_id)
        print(f"the operator was called back, and all is told {time.time() - began:.2f} s later")
        assert served.agent().reaps(spared.instance_id) == []
        assert len(served.told(run.instance_id)) == 1


def test_an_operator_that_is_killed_loses_and_doubles_nothing(served: ServedNamespace) -> None:
    """Again and again, while workers die. Whose pod it was may be lost: nobody was there to see."""
    with served.worker("unlucky") as pod:
        run = pod.started()
        pod.annotated(run.instance_id)
        ended = []
        for _ in range(3):
            kill(served.operator_process_id())
            killed_at = kill(run.process_id)
            entry = served.reaped(run.instance_id)
            print(f"\nreaped {time.time() - killed_at:.2f} s after both: {entry['reason']}")
            ended.append(run.instance_id)
            run = pod.started(after=run.container_id)
        for instance_id in ended:
            what = f"an Event for {instance_id}"
            poll_until(partial(served.told, instance_id, "LMCacheServer"), what)
        pod.annotated(run.instance_id)
        for instance_id in ended:
            (event,) = served.told(instance_id, "LMCacheServer")
            assert event.get("count", 1) == 1
            assert len(served.told(instance_id)) <= 1
            assert len(served.agent().reaps(instance_id)) == 1


def _registered_again(pod: WorkerPod) -> bool:
    return pod.registrations() > 1
