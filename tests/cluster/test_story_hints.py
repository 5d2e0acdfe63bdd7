"""A pod that is deleted by force: a hint, which silence confirms and a sign of life cancels."""

from __future__ import annotations

import time

import pytest

from tests.cluster.story import PROOF_ONLY, SMALLEST, Story
from tests.cluster.story_events import on
from tests.fakes.netns import NetNamespace, needs_root
from tests.polling import BUSY_SECONDS

CONFIRM_SECONDS = 3


def test_a_live_worker_cancels_it_and_people_are_told(story: Story) -> None:
    """Its owner gets the Event, since the pod is gone; the server gets one too."""
    story.begin(SMALLEST)
    owner = story.add_owner("engine")
    pod = story.engine("w", 1, owner=owner)
    pod.delete(grace_seconds=0)
    events = story.wait_events("ReapCancelled", 2)
    assert len(on(events, "StatefulSet", "engine")) == 1
    assert len(on(events, "LMCacheServer", "kv")) == 1
    assert all("1" in event.note for event in events)
    story.assert_live_for(2 * CONFIRM_SECONDS, 1)
    assert len(story.events("ReapCancelled")) == 2


def test_a_silent_worker_with_an_open_connection_is_held_and_visible(story: Story) -> None:
    """An idle rank of a healthy engine looks like this: never reaped, but shown."""
    story.begin(SMALLEST)
    pod = story.engine("w", 1, ping_seconds=None)
    pod.delete(grace_seconds=0)
    story.wait_status(lambda status: status["reaping"].get("suspects") == 1, "one suspect")
    story.assert_live_for(2 * CONFIRM_SECONDS, 1)
    shown = story.agent.instances()[1]
    assert shown["held_by"] == "open connection"
    assert shown["state"] == "suspect"
    assert any("pod_gone" in line for line in shown["evidence"]), shown


@needs_root
def test_a_dead_worker_behind_a_half_open_connection_goes_after_the_confirmation(
    story: Story,
) -> None:
    """No close ever arrives; without the operator's word it would take T."""
    windows = {**SMALLEST, "reapTimeoutSeconds": 300}
    with NetNamespace() as network:
        story.begin(windows)
        pod = story.pod("w", addresses=[network.address])
        url = f"tcp://{network.host}:{story.node.port}"
        worker = story.worker(pod, 1, wrapper=network.wrapper, url=url).wait_registered()
        story.wait_annotated(pod, 1)
        story.wait_rhythm(1)
        network.lose_everything()
        worker.kill()
        began = pod.delete(grace_seconds=0)

        reap = story.wait_released(1)[1]

        seconds = time.monotonic() - began
        assert reap["reason"] == "pod_hint"
        assert any("open" in line for line in reap["evidence"]), reap
        assert CONFIRM_SECONDS <= seconds <= CONFIRM_SECONDS + BUSY_SECONDS


@pytest.mark.parametrize("end", ["deleted by force", "restarted"])
def test_a_worker_that_died_before_its_first_ping_does_not_wait_for_the_grace(
    end: str, story: Story
) -> None:
    """The grace is ten minutes; its replacement is untouched; case 3."""
    story.begin(PROOF_ONLY if end == "restarted" else SMALLEST)
    pod = story.engine("w", 7, ping_seconds=None)
    other = story.engine("other", 8, ping_seconds=None)
    story.workers[7].kill()
    if end == "restarted":
        pod.restart_container()
    else:
        pod.delete(grace_seconds=0)
    reap = story.wait_released(7)[7]
    proofs, windows = {"container_terminated"}, {"pod_hint", "connection_closed"}
    assert reap["reason"] in (proofs if end == "restarted" else windows)
    (record,) = story.agent.log_records("instance_reaped")
    assert record["reason"] == reap["reason"]
    story.assert_live(8)
    story.wait_annotated(other, 8)
