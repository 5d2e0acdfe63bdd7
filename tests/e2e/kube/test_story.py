"""From `kubectl apply` to a reap with a name, on a real kubelet."""

from __future__ import annotations

import time
from functools import partial

import pytest

from tests.e2e.kube.worker_pods import (
    ServedNamespace,
    WorkerPod,
    is_alive,
    kill,
    mapped_segments,
    seconds_until,
)
from tests.polling import poll_until

_EAT = ("sh", "-c", "kill -USR1 1")  # what makes the engine take memory without end

pytestmark = pytest.mark.timeout(300)


def test_a_worker_is_known_by_its_pod(served: ServedNamespace) -> None:
    """Its pod bears the id of its instance soon after it registered, and loses it at the end."""
    with served.worker("annotated", on_term="unregister") as pod, served.agent() as agent:
        run = pod.started()
        seconds = pod.annotated(run.instance_id) - run.registered_at
        print(f"\nannotation {seconds:.2f} s after the registration")
        instance = agent.instances()[run.instance_id]
        assert instance["mapping"]["name"] == pod.name
        assert instance["mapping"]["container"] == "engine"
        assert seconds < 20


def test_a_killed_container_gives_its_memory_back(served: ServedNamespace) -> None:
    """Proven by the kubelet's word, said on the pod; the next run is another instance."""
    with served.worker("killed") as pod, served.agent() as agent:
        run = pod.started()
        pod.annotated(run.instance_id)
        before = mapped_segments(served.agent_process_id())
        assert before
        killed_at = kill(run.process_id)
        gone = seconds_until(
            killed_at, lambda: run.instance_id not in agent.instances(), "the instance is gone"
        )
        entry = agent.released(run.instance_id)
        print(f"\nmemory back {gone:.2f} s after SIGKILL: {entry['reason']}")
        assert entry["reason"] == "container_terminated"
        assert gone < 10
        second = pod.started(after=run.container_id)
        pod.annotated(second.instance_id)
        assert not set(before) & set(mapped_segments(served.agent_process_id()))
        assert second.instance_id in agent.instances()
        (event,) = poll_until(lambda: served.events("WorkerReaped", pod.name), 30, "an Event")
        assert run.instance_id in event["message"]
        described = pod.describe()
        print(described[described.index("Events:") :])
        assert "WorkerReaped" in described


def test_an_engine_out_of_memory_is_reaped(served: ServedNamespace) -> None:
    """The kernel kills it for its memory limit; the kubelet says so; the rest is the same."""
    with served.worker("hungry") as pod, served.agent() as agent:
        run = pod.started()
        pod.annotated(run.instance_id)
        served.cluster.kubectl("exec", "-n", served.name, pod.name, "--", *_EAT)
        entry = agent.released(run.instance_id)
        second = pod.started(after=run.container_id)
        end = pod.last_end()
        print(f"\nOOM kill: {entry['reason']}, latency {entry['latency_seconds']} s; {end}")
        assert end["reason"] == "OOMKilled"
        assert entry["reason"] == "container_terminated"
        assert second.instance_id in agent.instances()


def test_a_graceful_end_is_no_reap(served: ServedNamespace) -> None:
    """A worker that unregisters on SIGTERM leaves nothing to reap and nothing to tell."""
    with served.worker("polite", on_term="unregister") as pod, served.agent() as agent:
        run = pod.started()
        pod.annotated(run.instance_id)
        pod.delete()
        poll_until(lambda: pod.get() is None, 60, "the pod is gone")
        assert run.instance_id not in agent.instances()
        assert agent.reaps(run.instance_id) == []
        assert served.events("WorkerReaped", pod.name) == []


def test_a_worker_that_is_being_deleted_lives_until_it_has_ended(served: ServedNamespace) -> None:
    """It may ignore SIGTERM for the whole grace period; only its end is proof."""
    with served.worker("stubborn", grace_seconds=8) as pod, served.agent() as agent:
        run = pod.started()
        pod.annotated(run.instance_id)
        began = time.time()
        pod.delete()
        poll_until(
            lambda: any(line["event"] == "told_to_end" for line in pod.said()), 30, "SIGTERM"
        )
        assert (pod.get() or {})["metadata"]["deletionTimestamp"]
        assert run.instance_id in agent.instances()
        entry = agent.released(run.instance_id)
        print(f"\n{time.time() - began:.2f} s after the deletion: {entry['reason']}")
        assert entry["reason"] in {"container_terminated", "pod_terminated"}
        assert entry["silent_seconds"] < 8
        poll_until(lambda: served.events("WorkerReaped"), 30, "an Event")


def test_a_worker_deleted_by_force_is_reaped_once_it_is_dead(served: ServedNamespace) -> None:
    """Its object is gone at once, whatever its process does: that alone ends nobody."""
    with served.worker("forced") as pod, served.agent() as agent:
        run = pod.started()
        pod.annotated(run.instance_id)
        pod.delete("--force", "--grace-period=0")
        poll_until(lambda: pod.get() is None, 30, "the object is gone")
        began = time.time()
        alive = True
        while not any(e["kind"] == "reaped" for e in agent.reaps(run.instance_id)):
            alive = is_alive(run.process_id)
            assert time.time() - began < 120
        entry = agent.released(run.instance_id)
        print(f"\n{time.time() - began:.2f} s after the force deletion: {entry['reason']}")
        assert not alive or entry["reason"] in {"container_terminated", "pod_terminated"}


def test_workers_outlive_their_agent(served: ServedNamespace) -> None:
    """The agent is killed and comes back: they register again, and none of them is reaped."""
    with served.worker("survivor-a") as a, served.worker("survivor-b") as b:
        runs = [a.started(), b.started()]
        for pod, run in zip((a, b), runs, strict=True):
            pod.annotated(run.instance_id)
        killed_at = kill(served.agent_process_id())
        for pod in (a, b):
            poll_until(partial(_registered_again, pod), 90, f"{pod.name} registers again")
        print(f"\nboth registered again {time.time() - killed_at:.2f} s after the agent's SIGKILL")
        with served.agent() as agent:
            assert {run.instance_id for run in runs} <= set(agent.instances())
            assert agent.reaps() == []
        for pod, run in zip((a, b), runs, strict=True):
            pod.annotated(run.instance_id)
            assert served.events("WorkerReaped", pod.name) == []
            assert pod.last_end() == {}


def test_the_operator_may_be_away(served: ServedNamespace) -> None:
    """Agents judge by themselves meanwhile; what they did is told afterwards, once."""
    with served.worker("unwatched") as pod, served.worker("spared") as other:
        run, spared = pod.started(), other.started()
        for each, its in ((pod, run), (other, spared)):
            each.annotated(its.instance_id)
        with served.agent() as agent:
            with served.without_operator():
                killed_at = kill(run.process_id)
                entry = agent.released(run.instance_id)
                print(f"\nwithout an operator: {entry['reason']}, {time.time() - killed_at:.2f} s")
                assert entry["reason"] == "connection_closed"
                second = pod.started(after=run.container_id)
                assert {second.instance_id, spared.instance_id} <= set(agent.instances())
                began = time.time()
            poll_until(partial(served.told, run.instance_id), 60, "an Event")
            pod.annotated(second.instance_id)
            print(f"the operator is back, and all is told {time.time() - began:.2f} s later")
            assert [e["kind"] for e in agent.reaps(run.instance_id)] == ["reaped"]
            assert agent.reaps(spared.instance_id) == []
        assert len(served.told(run.instance_id)) == 1


def test_an_operator_that_is_killed_loses_and_doubles_nothing(served: ServedNamespace) -> None:
    """Again and again, while workers die."""
    with served.worker("unlucky") as pod, served.agent() as agent:
        run = pod.started()
        pod.annotated(run.instance_id)
        ended = []
        for _ in range(3):
            kill(served.operator_process_id())
            kill(run.process_id)
            agent.released(run.instance_id)
            ended.append(run.instance_id)
            run = pod.started(after=run.container_id)
        for instance_id in ended:
            poll_until(partial(served.told, instance_id), 120, f"an Event for {instance_id}")
        pod.annotated(run.instance_id)
        for instance_id in ended:
            assert len(served.told(instance_id)) == 1
            assert len(agent.reaps(instance_id)) == 1


def _registered_again(pod: WorkerPod) -> bool:
    return pod.registrations() > 1
