"""What people are told: Events, the annotation, the status, and settings that take effect."""

from __future__ import annotations

import signal

from tests.cluster.story import PROOF_ONLY, SMALLEST, Story
from tests.cluster.story_events import on
from tests.polling import poll_until


def test_a_reap_is_an_event_on_the_pod_and_on_the_server(story: Story) -> None:
    """Reason, evidence, silence and latency in words; the status counts it."""
    story.begin(PROOF_ONLY)
    pod = story.engine("w", 41)
    story.workers[41].kill()
    pod.end_container(reason="OOMKilled")
    story.wait_released(41)
    events = story.wait_events("WorkerReaped", 2)
    (about_pod,), (about_server,) = on(events, "Pod", "w"), on(events, "LMCacheServer", "kv")
    assert about_pod.uid == pod.uid
    assert about_server.uid == story.server()["metadata"]["uid"]
    for event in events:
        for word in ("41", "container_terminated", "silent", "released"):
            assert word in event.note, event.note
        assert event.count == 1
    assert "w" in about_server.note
    status = story.wait_status(lambda status: status["reaping"]["total"] == 1, "one reap")
    assert status["reaping"]["lastReason"] == "container_terminated"
    assert status["reaping"]["lastReapTime"]
    assert status.get("registeredWorkers", 0) == 0


def test_the_event_of_a_pod_that_is_gone_is_its_owners(story: Story) -> None:
    """Nobody looks at a pod that is not there."""
    story.begin(SMALLEST)
    owner = story.add_owner("engine")
    pod = story.engine("w", 1, owner=owner)
    story.workers[1].kill()
    pod.delete(grace_seconds=0)
    story.wait_released(1)
    events = story.wait_events("WorkerReaped", 2)
    assert len(on(events, "StatefulSet", "engine")) == 1
    assert len(on(events, "LMCacheServer", "kv")) == 1


def test_in_observe_mode_it_is_said_who_would_be_reaped(story: Story) -> None:
    """And nobody is."""
    story.begin({**PROOF_ONLY, "mode": "Observe"})
    pod = story.engine("w", 1)
    story.workers[1].kill()
    pod.end_container()
    events = story.wait_events("WorkerWouldBeReaped", 2)
    assert len(on(events, "Pod", "w")) == 1
    assert len(on(events, "LMCacheServer", "kv")) == 1
    assert 1 in story.agent.instances()
    assert story.events("WorkerReaped") == []


def test_a_worker_that_is_heard_after_its_reap_is_a_false_reap(story: Story) -> None:
    """A frozen process that thaws; it registers anew, and people learn that the window is short."""
    story.begin(SMALLEST)
    pod = story.engine("w", 1)
    story.wait_rhythm(1)
    story.workers[1].signal(signal.SIGSTOP)
    pod.delete(grace_seconds=0)
    story.wait_released(1)
    story.workers[1].signal(signal.SIGCONT)
    story.wait_events("FalseReap", 1)
    poll_until(lambda: 1 in story.agent.instances())


def test_the_annotation_follows_what_is_registered(story: Story) -> None:
    """Sorted, soon, and gone with the last of them; nothing else of the pod is touched."""
    story.begin(PROOF_ONLY)
    pod = story.pod("w")
    before = pod.read()
    story.worker(pod, 12).wait_registered()
    story.wait_annotated(pod, 12)
    story.worker(pod, 7).wait_registered()
    story.wait_annotated(pod, 7, 12)
    written = pod.read()
    assert written["metadata"]["annotations"]["lmcache-kube.dev/instance-ids"] == "7,12"
    for part in ("spec", "status"):
        assert written[part] == before[part]
    metadata = {k: v for k, v in written["metadata"].items() if k != "annotations"}
    for name in ("resourceVersion", "managedFields"):
        metadata[name] = before["metadata"][name]
    assert metadata == before["metadata"]
    story.workers[7].kill()
    story.workers[12].kill()
    pod.end_container()
    story.wait_annotated(pod)


def test_no_annotation_if_that_is_not_wanted(story: Story) -> None:
    """`annotate: false`; the proof works all the same."""
    story.operator.start()
    story.apply(reaping=PROOF_ONLY, workers={"annotate": False})
    story.add_node().start_agent()
    pod = story.pod("w")
    story.worker(pod, 1).wait_registered()
    story.wait_status(lambda status: status.get("registeredWorkers") == 1, "1 worker")
    story.workers[1].kill()
    pod.end_container()
    story.wait_released(1)
    assert "annotations" not in pod.read()["metadata"]


def test_an_edit_of_the_settings_reaches_running_agents(story: Story) -> None:
    """They say what they use; no process and no pod is replaced, so no cache is lost."""
    story.begin(PROOF_ONLY, nodes=2)
    story.engine("w", 1)
    boots = [node.agent.boot_id for node in story.nodes]
    pods = [node.agent_pod["metadata"]["uid"] for node in story.nodes]
    story.edit(
        reaping={
            "reapTimeoutSeconds": 90,
            "hints": {"confirmSeconds": 12, "closeConfirmSeconds": 6},
        }
    )

    def in_force() -> bool:
        for node in story.nodes:
            node.mount()
        effective = story.status()["reaping"]["effective"]
        return bool(
            effective.get("reapTimeoutSeconds") == 90
            and effective.get("confirmSeconds") == 12
            and effective["nodesInSync"] == 2
        )

    poll_until(in_force, lambda: f"settings in force: {story.status()}")
    for node in story.nodes:
        shown = node.agent.status()["worker_liveness"]
        assert shown["reap_timeout_seconds"] == 90
        assert shown["hint_confirm_seconds"] == 12
    assert [node.agent.boot_id for node in story.nodes] == boots
    assert [node.read_agent_pod()["metadata"]["uid"] for node in story.nodes] == pods
    story.assert_live(1)
