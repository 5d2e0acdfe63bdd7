"""Operator and agents restarted in any order while pods come and go: it always comes right."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from tests.cluster.story import PROOF_ONLY, SMALLEST, Story
from tests.cluster.story_chaos import Chaos

ROUNDS = int(os.environ.get("LMCACHE_KUBE_STORY_ROUNDS", "4"))
SECONDS_PER_ROUND = 45


@pytest.mark.parametrize("reported_only", [True, False], ids=["reported", "unreported too"])
@pytest.mark.slow
@pytest.mark.timeout(600 + ROUNDS * SECONDS_PER_ROUND)
def test_random_rounds_converge(
    reported_only: bool,  # noqa: FBT001  # a parameter of the test
    story: Story,
    record_property: Callable[[str, object], None],
) -> None:
    """No live worker is reaped, and each reap is told exactly once.

    If every end is reported the windows are so long that only proof releases anything.
    More rounds by LMCACHE_KUBE_STORY_ROUNDS; the seconds of each are in the report.
    """
    story.begin(PROOF_ONLY if reported_only else SMALLEST, nodes=2)
    chaos = Chaos(story, seed=ROUNDS, reported_only=reported_only)
    chaos.begin()
    seconds = [chaos.round() for _ in range(ROUNDS)]
    record_property("converged_after_seconds", [round(each, 2) for each in seconds])
    print(f"converged after {sorted(round(each, 2) for each in seconds)} s")  # noqa: T201
    print(f"slowest: {chaos.slowest}")  # noqa: T201
