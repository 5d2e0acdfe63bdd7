"""What looks like an end and is none: nobody alive is reaped for it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.cluster.story import SMALLEST, Story
from tests.cluster.story_pods import ENGINE, StoryPod
from tests.fakes.pods import LOST

LONG_ENOUGH_SECONDS = 6.0
"""Twice the smallest hint window: whatever should not act would have acted."""

Change = Callable[[StoryPod], object]

LOOKS_LIKE_AN_END: dict[str, Change] = {
    "evicted, no statuses": lambda pod: pod.write(
        phase="Failed", reason="Evicted", message="low on memory", containerStatuses=[]
    ),
    "status unknown": lambda pod: pod.replace_states({ENGINE: LOST}, phase="Failed"),
    "status unknown, runs on": lambda pod: pod.replace_states({ENGINE: LOST}, phase="Running"),
    "loses its label": lambda pod: pod.relabel(**{"lmcache-kube.dev/server": None}),
    "gets another server's label": lambda pod: pod.relabel(**{"lmcache-kube.dev/server": "b"}),
    "not ready": lambda pod: pod.write(ready=False),
    "phase unknown": lambda pod: pod.write(phase="Unknown", ready=False),
    "marked for deletion": lambda pod: pod.delete(),
    "garbage collected": lambda pod: pod.write(
        phase="Failed",
        conditions=[{"type": "DisruptionTarget", "status": "True", "reason": "DeletionByPodGC"}],
    ),
    "terminated, says the kubelet": lambda pod: pod.end_container(),
    "ended, says the kubelet": lambda pod: pod.end(),
    "deleted by force": lambda pod: pod.delete(grace_seconds=0),
}


@pytest.mark.parametrize("name", LOOKS_LIKE_AN_END)
def test_a_worker_that_lives_stays(name: str, story: Story) -> None:
    """One that pings and one that never did, each over an open connection, with small windows."""
    story.begin(SMALLEST)
    pod = story.engine("w", 1)
    idle = story.engine("idle", 2, ping_seconds=None)
    for each in (pod, idle):
        LOOKS_LIKE_AN_END[name](each)
    story.assert_live_for(LONG_ENOUGH_SECONDS, 1, 2)
    assert story.agent.instances()[2]["held_by"] == "open connection"


@pytest.mark.parametrize("ready", ["False", "Unknown"])
def test_a_node_without_news_loses_nobody(ready: str, story: Story) -> None:
    """Its pods turn not ready and are deleted, yet their processes run; case 56."""
    story.begin(SMALLEST)
    pods = [story.engine(f"w{number}", number) for number in range(1, 6)]
    story.node.report(ready=ready)
    for pod in pods:
        pod.write(ready=False)
        pod.delete()
    story.assert_live_for(LONG_ENOUGH_SECONDS, *range(1, 6))
    story.node.report(ready="True")
    story.assert_live_for(1, *range(1, 6))


def test_an_address_that_a_newer_pod_has_is_proof_for_nobody_else(story: Story) -> None:
    """The old pod's end comes late: its own worker goes, the newer pod's stays; case 53 (a)."""
    story.begin(SMALLEST)
    old = story.engine("old", 1)
    story.workers[1].kill()
    newer = story.pod("newer", addresses=old.addresses)
    story.worker(newer, 2).wait_registered()
    story.worker(newer, 3, ping_seconds=None).wait_registered()
    old.end()
    story.wait_released(1)
    old.delete(grace_seconds=0)
    story.assert_live_for(LONG_ENOUGH_SECONDS, 2, 3)


def test_a_newer_pod_whose_address_is_not_reported_yet_is_safe(story: Story) -> None:
    """Its worker looks like the old pod's then; what is heard after an end contradicts it."""
    story.begin(SMALLEST)
    old = story.engine("old", 1)
    story.workers[1].kill()
    newer = story.pod("newer", addresses=old.addresses, running=False)
    story.worker(newer, 2).wait_registered()
    story.worker(newer, 3, ping_seconds=None).wait_registered()
    old.end()
    story.wait_released(1)
    story.assert_live_for(LONG_ENOUGH_SECONDS, 2, 3)
    newer.run()
    old.delete(grace_seconds=0)
    story.assert_live_for(LONG_ENOUGH_SECONDS, 2, 3)


UNREPORTED: dict[str, Change] = {
    name: LOOKS_LIKE_AN_END[name]
    for name in ("evicted, no statuses", "status unknown", "garbage collected", "deleted by force")
}


@pytest.mark.parametrize("name", UNREPORTED)
def test_a_dead_worker_of_such_a_pod_goes_after_a_confirmation(name: str, story: Story) -> None:
    """A hint is not proof: it takes silence, here the smallest window of 3 s."""
    story.begin(SMALLEST)
    pod = story.engine("w", 1)
    story.engine("beside", 2)
    story.workers[1].kill()
    UNREPORTED[name](pod)
    reap = story.wait_released(1)[1]
    assert reap["reason"] in {"pod_hint", "connection_closed"}
    assert reap["silent_seconds"] >= 3
    story.assert_live(2)
