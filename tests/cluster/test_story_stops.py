"""Stops in a bad moment: nothing hangs, and whoever comes next finds its way."""

from __future__ import annotations

from tests.cluster.story import PROOF_ONLY, Story

ATTEMPTS = 3  # the moment is hit by chance, most of the time


def test_an_operator_that_stops_while_an_agent_connects_ends_at_once(story: Story) -> None:
    """A handshake that is under way holds nobody up."""
    story.operator.start()
    story.apply(reaping=PROOF_ONLY)
    node = story.add_node()
    for _ in range(ATTEMPTS):
        node.start_agent()  # it connects as soon as it is ready
        assert story.operator.stop() == 0
        assert story.operator.records("lease_released")
        node.kill_agent()
        story.operator.start()
    node.start_agent()
    story.wait_linked()
