"""What the operator's metrics say of agents and workers."""

from __future__ import annotations

import re

from tests.cluster.story import PROOF_ONLY, Story
from tests.polling import poll_until


def test_workers_whose_pod_is_not_known_are_counted_by_reason(story: Story) -> None:
    """One comes from nobody's address; one from that of two pods, until one of these is gone."""
    story.begin(PROOF_ONLY)
    story.engine("mapped", 1)
    pods = [story.pod(f"p{number}", addresses=["127.0.9.9"]) for number in (1, 2)]
    story.worker(pods[0], 2).wait_registered()
    story.worker(pods[0], 3, address="127.0.9.8").wait_registered()
    for reason in ("several", "nobody"):
        _wait_unmapped(story, reason, 1)
    pods[1].delete(grace_seconds=0)
    story.wait_annotated(pods[0], 2)
    _wait_unmapped(story, "several", 0)
    assert story.operator.metric("instances_unmapped", reason="nobody") == 1


def test_every_metric_says_in_words_what_it_is(story: Story) -> None:
    """Also those that have no sample yet."""
    story.begin(PROOF_ONLY)
    page = story.operator.get("/metrics")[1]
    about = dict(re.findall(r"^# HELP lmcache_kube_operator_(\w+) (.+)$", page, re.MULTILINE))
    assert {"leader", "agents_connected", "instances_unmapped", "worker_told_total"} <= set(about)
    assert story.operator.metric("leader") == story.operator.metric("agents_connected") == 1


def _wait_unmapped(story: Story, reason: str, count: int) -> None:
    poll_until(
        lambda: story.operator.metric("instances_unmapped", reason=reason) == count,
        f"{count} unmapped ({reason})",
    )
