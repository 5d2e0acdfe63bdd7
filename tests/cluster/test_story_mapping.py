"""Which pod a worker is in, when addresses alone do not say."""

from __future__ import annotations

import time

import pytest

from tests.cluster.story import PROOF_ONLY, SMALLEST, Story
from tests.cluster.story_events import on


def test_a_finished_pod_that_still_shows_an_address_is_nobodys(story: Story) -> None:
    """The running pod of that address is the one; the old one's deletion says nothing."""
    story.begin(PROOF_ONLY)
    old = story.pod("old", running=False)
    old.run(at=time.time() - 600)
    old.end(phase="Succeeded", code=0, at=time.time() - 60)
    newer = story.engine("newer", 2, addresses=old.addresses)
    old.delete()
    story.engine("next", 3)  # the deletion has been seen by then
    story.assert_live(2, 3)
    assert newer.annotated_ids() == [2]


def test_pods_that_share_their_nodes_address_are_not_guessed(story: Story) -> None:
    """Two of them: none is hinted when one goes, and the server says that two are unmapped."""
    story.begin(SMALLEST)
    shared = ["127.0.9.9"]
    spec = {"hostNetwork": True}
    pods = [story.pod(f"h{n}", addresses=shared, spec=spec) for n in (1, 2)]
    for number, pod in enumerate(pods, 1):
        story.worker(pod, number).wait_registered()
    story.engine("mapped", 3)
    pods[0].delete(grace_seconds=0)
    story.assert_live_for(6, 1, 2, 3)
    assert pods[1].annotated_ids() == []
    assert story.events("ReapCancelled", "WorkerReaped") == []


def test_a_pod_without_an_address_harms_nobody(story: Story) -> None:
    """It is watched like any other, and its worker is mapped once the address is there."""
    story.begin(PROOF_ONLY)
    bare = story.pod("bare", addresses=[], running=False)
    bare.write(phase="Pending", ready=False)
    story.engine("w", 1)
    bare.addresses = ("127.0.8.8",)
    bare.run()
    story.worker(bare, 2).wait_registered()
    story.wait_annotated(bare, 2)


def test_a_second_address_of_a_dual_stack_pod_maps_too(story: Story) -> None:
    """The worker comes over IPv6, the pod's first address is IPv4."""
    story.begin(PROOF_ONLY)
    pod = story.pod("w", addresses=["127.0.7.7", "::1"])
    story.worker(pod, 1, address="::1").wait_registered()
    story.wait_annotated(pod, 1)
    story.workers[1].kill()
    pod.end_container()
    story.wait_released(1)


def test_pods_of_two_nodes_are_kept_apart_even_with_one_address(story: Story) -> None:
    """An agent's peers are its own node's pods."""
    story.begin(PROOF_ONLY, nodes=2)
    here = story.pod("here", addresses=["127.0.6.6"])
    there = story.pod("there", addresses=["127.0.6.6"], node=story.nodes[1])
    story.worker(here, 1).wait_registered()
    story.worker(there, 2, node=story.nodes[1]).wait_registered()
    story.wait_annotated(here, 1)
    story.wait_annotated(there, 2)
    story.workers[1].kill()
    here.end_container()
    story.wait_released(1)
    story.assert_live(2, node=story.nodes[1])


def test_workers_that_were_there_before_the_server_are_served_without_a_restart(
    story: Story,
) -> None:
    """Pods first, then the operator, then the server, then its agent; case 27."""
    node = story.add_node()
    pod = story.pod("early")
    waiting = story.worker(pod, 1)
    story.operator.start()
    story.apply(reaping=PROOF_ONLY)
    node.start_agent()
    waiting.wait_registered()
    story.wait_annotated(pod, 1)


def test_a_worker_that_registers_while_the_operator_is_away_is_mapped_later(story: Story) -> None:
    """The agent needs nobody to serve; the operator catches up."""
    story.begin(PROOF_ONLY)
    story.operator.stop()
    pod = story.pod("w")
    story.worker(pod, 1).wait_registered()
    story.operator.start()
    story.wait_annotated(pod, 1)
    story.workers[1].kill()
    pod.end_container()
    story.wait_released(1)
    assert len(on(story.wait_events("WorkerReaped", 2), "Pod", "w")) == 1


@pytest.mark.slow
def test_idle_ranks_of_a_running_pod_outlive_their_grace(story: Story) -> None:
    """Eight ranks of which one pings: all are counted and none goes; case 1."""
    story.begin({**SMALLEST, "registrationGraceSeconds": 30})
    pod = story.pod("w")
    for rank in range(1, 9):
        story.worker(pod, rank, ping_seconds=0.5 if rank == 1 else None)
    for rank in range(1, 9):
        story.workers[rank].wait_registered()
    story.wait_annotated(pod, *range(1, 9))
    story.wait_status(lambda status: status.get("registeredWorkers") == 8, "8 workers")
    story.assert_live_for(30 + 30 / 4 + 5, *range(1, 9))
    states = {story.agent.instances()[rank]["state"] for rank in range(2, 9)}
    assert states == {"idle"}
    assert story.status()["registeredWorkers"] == 8
