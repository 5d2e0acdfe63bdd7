"""A pod is read from what the API server gives, whatever is missing in it."""

from __future__ import annotations

import json

import pytest

from lmcache_operator.errors import PodError
from lmcache_operator.workers.pod import Container, Termination, normal_address, read_pod
from tests.fakes.pods import LOST, container_status, pod, running, terminated


def test_bytes_and_objects_read_alike() -> None:
    """A list gives objects, a watch gives lines."""
    document = pod(container_status("engine", running(5), last=terminated(1, 2)))
    assert read_pod(json.dumps(document).encode()) == read_pod(document)


def test_what_is_kept_of_a_container() -> None:
    """Its run now and the one before, in seconds."""
    document = pod(
        container_status("engine", running(5), last=terminated(1, 2), run="containerd://b")
    )
    before = Termination("containerd://1", 1, 2, reported=True)
    kept = Container("engine", "containerd://b", running_since=5, ended_before=before)
    assert read_pod(document).containers == {"engine": kept}


def test_a_lost_status_is_no_report() -> None:
    """The kubelet made it up, since it had to say something."""
    ended = read_pod(pod(container_status("engine", LOST))).containers["engine"].ended
    assert ended == Termination("", None, None, reported=False)


def test_go_writes_no_time_as_year_one() -> None:
    """Which is before any end."""
    state = terminated(1, 2)
    state["terminated"] |= {
        "startedAt": "0001-01-01T00:00:00Z",
        "finishedAt": "0001-01-01T00:00:00Z",
    }
    ended = read_pod(pod(container_status("engine", state))).containers["engine"].ended
    assert ended is not None
    assert (ended.started_at, ended.finished_at, ended.reported) == (None, None, False)


def test_a_pod_that_nobody_has_scheduled() -> None:
    """No node, no address, no status."""
    bare = {
        "metadata": {"name": "p", "namespace": "default", "uid": "u"},
        "spec": {"containers": [{"name": "engine"}]},
    }
    found = read_pod(bare)
    assert (found.node, found.phase, found.addresses, found.containers) == ("", "", frozenset(), {})


@pytest.mark.parametrize("document", [b"{}", b"nonsense", b'{"metadata": []}', {"spec": 1}])
def test_what_is_no_pod_is_refused(document: bytes | dict[str, object]) -> None:
    """It says what is wrong, and ends nothing."""
    with pytest.raises(PodError, match="what the API server calls a pod is none"):
        read_pod(document)


def test_addresses_compare_in_one_form() -> None:
    """Two notations of one address are equal."""
    assert normal_address("::ffff:10.0.0.1") == normal_address("10.0.0.1")
    assert normal_address("FD00:0:0::1") == "fd00::1"
