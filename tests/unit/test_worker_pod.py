"""A pod is read from what the API server gives, whatever is missing in it."""

from __future__ import annotations

import json

import pytest

from lmcache_operator.errors import PodError
from lmcache_operator.names import INSTANCE_IDS_ANNOTATION
from lmcache_operator.workers.pod import Container, Owner, Termination, normal_address, read_pod
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


def test_what_is_kept_of_the_metadata() -> None:
    """Our annotation and no other, who controls it, and whether it is being deleted."""
    document = pod()
    document["metadata"] |= {
        "annotations": {"other": "x" * 100_000, INSTANCE_IDS_ANNOTATION: "7,12"},
        "deletionTimestamp": "2030-01-01T00:00:00Z",
        "ownerReferences": [
            {"apiVersion": "v1", "kind": "Node", "name": "n1", "uid": "u1"},
            {
                "apiVersion": "apps/v1",
                "kind": "ReplicaSet",
                "name": "rs",
                "uid": "u2",
                "controller": True,
            },
        ],
    }
    found = read_pod(document)
    assert (found.instance_ids, found.deleting) == ("7,12", True)
    assert found.owner == Owner("apps/v1", "ReplicaSet", "rs", "u2")
    plain = read_pod(pod())
    assert (plain.instance_ids, plain.deleting, plain.owner) == (None, False, None)


def test_when_the_kubelet_took_it_over() -> None:
    """By its own word, or else when it was created."""
    document = pod()
    assert read_pod(document).acknowledged_at is None
    document["metadata"]["creationTimestamp"] = "1970-01-01T00:00:05Z"
    assert read_pod(document).acknowledged_at == 5
    document["status"]["startTime"] = "1970-01-01T00:00:07Z"
    assert read_pod(document).acknowledged_at == 7


def test_an_address_that_is_none() -> None:
    """Nobody connects from it, and the others count."""
    assert read_pod(pod(addresses=("10.1.0.1", "bogus"))).addresses == {"10.1.0.1"}


@pytest.mark.parametrize("document", [b"{}", b"nonsense", b'{"metadata": []}', {"spec": 1}])
def test_what_is_no_pod_is_refused(document: bytes | dict[str, object]) -> None:
    """It says what is wrong, and ends nothing."""
    with pytest.raises(PodError, match="what the API server calls a pod is none"):
        read_pod(document)


def test_addresses_compare_in_one_form() -> None:
    """Two notations of one address are equal."""
    assert normal_address("::ffff:10.0.0.1") == normal_address("10.0.0.1")
    assert normal_address("FD00:0:0::1") == "fd00::1"
