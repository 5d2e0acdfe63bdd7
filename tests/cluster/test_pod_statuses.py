"""Statuses as a kubelet writes them pass through the API server and mean what they should."""

from __future__ import annotations

import pytest

from lmcache_operator.workers.evidence import Instance, Trigger, evidence_of_state
from lmcache_operator.workers.pod import read_pod
from tests.cluster.api import Api
from tests.fakes.pods import LOST, Json, container_status, pod, running, terminated

BEGAN, ENDED = 1_700_000_000.0, 1_700_000_500.0
MERGE = "application/merge-patch+json"
PROXY = container_status("proxy", running(BEGAN))

STATES: dict[str, tuple[Json, Trigger | None, bool]] = {
    "running": (pod(container_status("engine", running(BEGAN)), PROXY), None, False),
    "phase unknown": (
        pod(container_status("engine", running(BEGAN)), phase="Unknown"),
        None,
        False,
    ),
    "evicted": (
        pod(phase="Failed", reason="Evicted", message="low on memory"),
        Trigger.ENDED_UNREPORTED,
        False,
    ),
    "lost": (
        pod(container_status("engine", LOST, run=""), PROXY, phase="Failed"),
        Trigger.ENDED_UNREPORTED,
        False,
    ),
    "killed for memory, sidecar goes on": (
        pod(container_status("engine", terminated(BEGAN, ENDED, reason="OOMKilled")), PROXY),
        Trigger.CONTAINER_TERMINATED,
        True,
    ),
    "restarted": (
        pod(container_status("engine", running(ENDED + 1), last=terminated(BEGAN, ENDED)), PROXY),
        Trigger.CONTAINER_TERMINATED,
        True,
    ),
    "completed": (
        pod(
            container_status("engine", terminated(BEGAN, ENDED, reason="Completed", code=0)),
            container_status("proxy", terminated(BEGAN, ENDED)),
            phase="Succeeded",
        ),
        Trigger.POD_TERMINATED,
        True,
    ),
}


@pytest.mark.parametrize("name", STATES)
def test_a_status_that_the_api_server_kept(name: str, api: Api, namespace: str) -> None:
    """The evidence of what comes back is the evidence of what was written."""
    document, trigger, proof = STATES[name]
    path = f"/api/v1/namespaces/{namespace}/pods"
    containers = [{"name": each, "image": "none"} for each in ("engine", "proxy")]
    spec = {"nodeName": "n1", "containers": containers}
    assert api.request("POST", path, {"metadata": {"name": "w"}, "spec": spec}).ok
    status = {"status": document["status"]}
    answer = api.request("PATCH", f"{path}/w/status", status, content_type=MERGE)
    assert answer.ok, answer.message
    found = read_pod(answer.body)
    instance = Instance(7, found.uid, "engine", BEGAN + 10)
    evidence = evidence_of_state(found, [instance], observed_at=ENDED + 2)
    expected = [] if trigger is None else [(trigger, proof)]
    assert [(each.trigger, each.proof) for each in evidence] == expected
