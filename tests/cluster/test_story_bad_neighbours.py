"""One client that does what nobody should: the others on its node lose nothing by it."""

from __future__ import annotations

import pytest

from lmcache_nodeagent.operator_link.messages import MAX_INSTANCES
from lmcache_worker.wire import RequestRefused
from tests.cluster.story import Story
from tests.fakes.worker_process import Worker


def test_a_model_name_without_end(story: Story) -> None:
    """The operator would not take it: its node's stream goes on, and so do the others' proofs."""
    story.begin()
    bad, good = story.pod("bad"), story.engine("good", 1)
    with Worker(story.node.worker_url(bad.address), 66) as worker:
        worker.register("m" * 4_096)
        story.wait_annotated(bad, 66)
        story.workers[1].kill()
        good.end_container()
        story.wait_released(1)
        story.assert_live(66)


@pytest.mark.slow
def test_registrations_without_end(story: Story) -> None:
    """More than the operator takes of one agent, and as many as the agent takes of one peer."""
    story.begin()
    bad = story.pod("bad")
    with Worker(story.node.worker_url(bad.address), 66) as worker:
        with pytest.raises(RequestRefused, match="at most"):
            _register_without_end(worker)
        good = story.engine("good", 1)
        assert len(story.agent.instances()) > MAX_INSTANCES
        story.workers[1].kill()
        good.end_container()
        story.wait_released(1)
        story.assert_live(1_000)


def _register_without_end(worker: Worker) -> None:
    for worker.instance_id in range(1_000, 100_000):
        worker.register()
