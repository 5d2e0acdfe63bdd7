"""Workers that connect over a Unix socket on the node: their end needs nobody's word."""

from __future__ import annotations

import json
from collections.abc import Generator

import pytest

from tests.e2e.kube.worker_pods import (
    ServedNamespace,
    kill,
    mapped_segments,
    over_socket,
    pod_object,
    seconds_until,
)

SERVER = "socket"

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def with_socket(served: ServedNamespace) -> Generator[ServedNamespace]:
    """A second server in the namespace, whose agents listen on a socket too."""
    made = {
        "apiVersion": "lmcache-kube.dev/v1alpha1",
        "kind": "LMCacheServer",
        "metadata": {"name": SERVER},
        "spec": {
            "cache": {"size": "256Mi"},
            "server": {"port": 5556, "httpPort": 8080},
            "transport": {
                "memorySharing": "HostShm",
                "unixSocket": "HostPath",
                "devicePlugin": {"mode": "Disabled"},
            },
        },
    }
    served.cluster.kubectl("apply", "-n", served.name, "-f", "-", given=json.dumps(made))
    served.wait_ready(SERVER)
    yield served
    served.cluster.kubectl("delete", "lmcs", SERVER, "-n", served.name)


def test_a_killed_engine_is_proven_dead_by_its_process(with_socket: ServedNamespace) -> None:
    """The kernel says so across the containers, before the kubelet or anybody else knows.

    Which pod it was nobody knows either: such a connection has no address, and this worker did not
    say.
    """
    connection = with_socket.connection(SERVER)
    made = over_socket(pod_object("near", server=SERVER), connection)
    with with_socket.worker_of(made) as pod:
        run = pod.started()
        agent = with_socket.agent_process_id(SERVER)
        its = set(mapped_segments(agent))
        assert its
        gone = seconds_until(
            kill(run.process_id), lambda: not its & set(mapped_segments(agent)), "memory is back"
        )
        entry = with_socket.reaped(run.instance_id, SERVER)
        print(f"\nmemory back {gone:.3f} s after SIGKILL: {entry['reason']}")
        assert entry["reason"] == "process_exit"
        assert entry["mapping"] is None
