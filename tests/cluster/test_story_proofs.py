"""The kubelet's own word: a run has ended, so its memory is back at once, and nobody else's."""

from __future__ import annotations

import time

import pytest

from tests.cluster.story import PROOF_ONLY, Story
from tests.cluster.story_pods import ENGINE, SIDECAR

WITH_SIDECAR = (ENGINE, SIDECAR)


@pytest.mark.parametrize(
    ("reason", "code"),
    [("Error", 137), ("OOMKilled", 137), ("Completed", 0), ("Error", 1)],
    ids=["killed", "out of memory", "completed", "failed"],
)
def test_a_container_that_terminated_takes_its_ranks_and_nobody_else(
    reason: str, code: int, story: Story
) -> None:
    """Two ranks in one container go; the sidecar runs on, and other pods notice nothing."""
    story.begin(nodes=2)
    dying = story.engine("dying", 1, 2, containers=WITH_SIDECAR)
    story.engine("beside", 3)
    story.engine("elsewhere", 4, node=story.nodes[1])
    for rank in (1, 2):
        story.workers[rank].kill()

    dying.end_container(reason=reason, code=code)

    reaps = story.wait_released(1, 2)
    assert {reap["reason"] for reap in reaps.values()} == {"container_terminated"}
    story.assert_live(3)
    story.assert_live(4, node=story.nodes[1])
    assert story.nodes[1].agent.reaps() == []
    story.wait_annotated(dying)


def test_the_end_of_a_sidecar_says_nothing_of_the_engine(story: Story) -> None:
    """Evidence belongs to one container."""
    story.begin()
    pod = story.engine("w", 1, 2, containers=WITH_SIDECAR)
    pod.end_container(SIDECAR)
    pod.restart_container(SIDECAR)
    # What comes after it in the same stream has been judged: so has this.
    story.workers[2].kill()
    pod.end_container()
    story.wait_released(2)


def test_a_restart_in_one_write_ends_the_run_before(story: Story) -> None:
    """The terminated state may go unseen: a newer run is proof too, and its own worker stays."""
    story.begin()
    pod = story.engine("w", 1)
    story.workers[1].kill()
    pod.restart_container()
    story.worker(pod, 2).wait_registered()

    reap = story.wait_released(1)[1]

    assert reap["reason"] == "container_terminated"
    story.wait_annotated(pod, 2)
    story.assert_live(2)


def test_a_crash_loop_releases_each_run_once(story: Story) -> None:
    """Run after run, as fast as a kubelet would ever start them."""
    story.begin()
    pod = story.pod("w")
    for run in range(1, 5):
        story.worker(pod, run).wait_registered()
        story.wait_annotated(pod, run)
        story.workers[run].kill()
        pod.end_container()
        pod.restart_container()
        story.wait_released(run)
    assert len(story.agent.reaps()) == 4


def test_with_several_containers_and_none_named_only_the_whole_pod_is_proof(story: Story) -> None:
    """Nobody says which of them the engine is."""
    story.operator.start()
    story.apply(reaping=PROOF_ONLY, workers={})
    story.add_node().start_agent()
    pod = story.engine("w", 1, containers=WITH_SIDECAR)
    pod.end_container(SIDECAR)
    story.assert_live_for(2, 1)
    story.workers[1].kill()
    pod.end(phase="Failed")
    assert story.wait_released(1)[1]["reason"] == "pod_terminated"


@pytest.mark.parametrize("phase", ["Failed", "Succeeded"])
def test_a_pod_that_ends_is_told_once_and_its_later_deletion_says_nothing(
    phase: str, story: Story
) -> None:
    """Such pods stay listed for days; case 54."""
    story.begin()
    ended = story.engine("ended", 1)
    other = story.engine("other", 2)
    story.workers[1].kill()
    code = 0 if phase == "Succeeded" else 137
    ended.end(phase=phase, code=code)
    story.wait_released(1)
    ended.delete()

    # The other one's end comes after that deletion in the same watch.
    story.workers[2].kill()
    other.end(phase=phase, code=code)
    story.wait_released(2)
    assert len(story.agent.reaps()) == 2
    assert len(story.wait_events("WorkerReaped", 4)) == 4  # each on its pod and on the server


def test_a_graceful_deletion_is_proof_only_once_the_kubelet_says_so(story: Story) -> None:
    """Nothing on the deletion mark, while the engine finishes its requests."""
    story.begin()
    pod = story.engine("w", 1)
    pod.delete()
    assert "deletionTimestamp" in pod.read()["metadata"]
    story.assert_live_for(3, 1)
    assert story.agent.instances()[1]["state"] == "active"

    story.workers[1].kill()
    pod.end(phase="Failed")
    assert story.wait_released(1)[1]["reason"] == "pod_terminated"
    pod.delete(grace_seconds=0)
    assert pod.read() == {}
    story.engine("next", 2)  # whatever the deletion brings has come by then
    assert len(story.agent.reaps()) == 1
    assert len(story.events("WorkerReaped")) == 2


def test_a_proof_that_a_worker_contradicts_does_nothing(story: Story) -> None:
    """Reported as terminated, yet it pings over an open connection."""
    story.begin()
    pod = story.engine("w", 1)
    story.engine("idle", 2, ping_seconds=None)
    pod.end_container()
    story.assert_live_for(5, 1, 2)


def test_the_same_id_in_the_next_run_is_another_registration(story: Story) -> None:
    """What is said of the old run, and said again after a restart, does not touch the new one."""
    story.begin(PROOF_ONLY)
    pod = story.engine("w", 1)
    story.workers[1].kill()
    restarted_at = time.time()
    story.worker(pod, 1).wait_registered()  # the kubelet takes a moment to report
    pod.restart_container(at=restarted_at)
    story.wait_annotated(pod, 1)
    for stop in (story.operator.kill, story.operator.stop):
        stop()
        story.operator.start()
        story.wait_linked()
    other = story.engine("other", 2)
    story.workers[2].kill()
    other.end_container()
    story.wait_released(2)
    story.assert_live(1)
