"""An API server that crashes and comes back: every watch is told that its version is gone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.control_plane import ControlPlane
from tests.cluster.story import PROOF_ONLY, Story, make_ready
from tests.polling import poll_until

NAMESPACE = "crash"


@pytest.mark.slow
def test_what_changed_around_a_crash_of_the_api_server_is_noticed(
    control_plane: ControlPlane, tmp_path: Path
) -> None:
    """A pod that ended and one that was deleted before anybody could watch again."""
    folder = tmp_path / "own"
    with ControlPlane(folder, control_plane.programs) as own:
        make_ready(own, NAMESPACE)
        with Story(own, NAMESPACE, tmp_path) as story:
            story.begin(PROOF_ONLY)
            ended = story.engine("ended", 1)
            deleted = story.engine("deleted", 2)
            story.engine("lives", 3)
            story.workers[1].kill()
            story.workers[2].kill()
            own.crash("kube-apiserver")
            own.wait("the API server", lambda: listens(own))
            ended.end_container()
            deleted.delete(grace_seconds=0)
            story.wait_released(1)
            poll_until(lambda: story.is_hinted(2), "the deleted one is hinted")
            story.wait_events("WorkerReaped", 2)
            story.assert_live(3)
            assert story.operator.process.poll() is None  # the Lease outlived it


def listens(control_plane: ControlPlane) -> bool:
    """Tell whether the API server serves."""
    try:
        return control_plane.api.request("GET", "/readyz").ok
    except OSError:
        return False
