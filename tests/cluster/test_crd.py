"""The API server takes and refuses what the definition says, and explains it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lmcache_operator.api.crd import PLURAL
from lmcache_operator.errors import SpecError
from lmcache_operator.spec import agent_config, read_spec
from tests.cluster.api import Api
from tests.cluster.control_plane import ControlPlane
from tests.cluster.specs.row import Judge, Row
from tests.cluster.specs.table import ROWS

UID = "0b0f7c9e-6c1f-4f4e-8a55-2f8f6e9f3c11"
DRY_RUN = "fieldValidation=Strict&dryRun=All"  # what kubectl sends
MERGE = "application/merge-patch+json"


def server(**spec: object) -> dict[str, Any]:
    """Make an object whose spec has a size and the given parts."""
    return Row("", {"cache": {"size": "1Gi"}, **spec}).document


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.label)
def test_the_table(row: Row, kind: str, api: Api) -> None:
    """The API server, the operator's reader and the agent agree on every row."""
    path = f"{kind}/namespaces/default/{PLURAL}?{DRY_RUN}"
    answer = api.request("POST", path, row.document)
    assert answer.ok == row.accepted, answer.message
    assert row.sentence in answer.message
    if row.accepted:
        agent_config(read_spec(answer.body["spec"]), uid=UID, name="kv")
    elif row.judge is not Judge.SERVER:
        with pytest.raises(SpecError):
            agent_config(read_spec(row.spec), uid=UID, name="kv")


def test_a_refused_spec_is_not_stored(api: Api, servers: str) -> None:
    """Neither as a new object nor over an old one."""
    assert not api.request("POST", servers, server(server={"port": 8080})).ok
    assert api.request("GET", servers).body["items"] == []
    assert api.request("POST", servers, server()).ok
    change = {"spec": {"server": {"port": 8080}}}
    assert api.request("PATCH", f"{servers}/kv", change, content_type=MERGE).status == 422
    assert api.request("GET", f"{servers}/kv").body["spec"]["server"]["port"] == 5555


def test_a_size_is_all_it_takes(api: Api, servers: str) -> None:
    """What comes back says every default, and reads as the same spec as without them."""
    stored = api.request("POST", servers, server()).body["spec"]
    assert read_spec(stored) == read_spec({"cache": {"size": "1Gi"}})
    assert stored["reaping"]["hints"] == {
        "mode": "Enforce",
        "confirmSeconds": 15,
        "closeConfirmSeconds": 10,
    }


def test_null_is_the_default(api: Api, servers: str) -> None:
    """A key that is there without a value counts as left out."""
    stored = api.request("POST", servers, server(reaping=None, nodeSelector=None)).body["spec"]
    assert stored["reaping"]["reapTimeoutSeconds"] == 120
    assert "nodeSelector" not in stored


def test_a_whole_number_with_a_point_in_a_file(
    control_plane: ControlPlane, api: Api, servers: str, namespace: str
) -> None:
    """`120.0` in YAML means 120, and the operator reads it so."""
    document = json.dumps(server(reaping={"reapTimeoutSeconds": 120.0}))
    done = control_plane.kubectl("create", "-n", namespace, "-f", "-", given=document)
    assert done.returncode == 0, done.stderr
    stored = api.request("GET", f"{servers}/kv").body["spec"]
    assert read_spec(stored).reaping.reap_timeout_seconds == 120


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"matchLabels": {"app": "a"}}, {"matchLabels": {"app": "b"}}),
        ({"matchLabels": {"app": "a"}}, None),
        (None, {"matchLabels": {"app": "a"}}),
    ],
    ids=["changed", "removed", "added"],
)
def test_the_selector_stays(before: object, after: object, api: Api, servers: str) -> None:
    """Changed, removed or added later, workers would be forgotten."""
    assert api.request("POST", servers, server(workers={"podSelector": before})).ok
    change = {"spec": {"workers": {"podSelector": after}}}
    answer = api.request("PATCH", f"{servers}/kv", change, content_type=MERGE)
    assert answer.status == 422
    assert "podSelector cannot be changed" in answer.message
    assert "make another LMCacheServer" in answer.message


def test_all_broken_rules_are_told_together(api: Api, servers: str) -> None:
    """One apply, one list of what to change."""
    body = server(reaping={"heartbeatIntervalSeconds": 41}, server={"port": 8080})
    message = api.request("POST", servers, body).message
    assert "= 123 or more" in message
    assert "must differ from port" in message


def test_status_is_a_document_of_its_own(api: Api, servers: str) -> None:
    """A status does not come in with the spec, and does not raise the generation."""
    stored = api.request("POST", servers, {**server(), "status": {"readyNodes": 9}}).body
    assert "status" not in stored
    condition = {
        "type": "Ready",
        "status": "True",
        "reason": "Serving",
        "message": "",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }
    reaping = {"total": 3, "lastReapTime": "2026-01-01T00:00:00Z", "lastReason": "process_exit"}
    status = {"readyNodes": 2, "desiredNodes": 2, "conditions": [condition], "reaping": reaping}
    change = {"status": {**status, "registeredWorkers": 8, "observedGeneration": 1}}
    answer = api.request("PATCH", f"{servers}/kv/status", change, content_type=MERGE)
    assert answer.ok, answer.message
    assert answer.body["metadata"]["generation"] == 1


def test_a_person_sees_the_state_in_one_line(
    control_plane: ControlPlane, api: Api, servers: str, namespace: str
) -> None:
    """`kubectl get lmcs` with our columns."""
    test_status_is_a_document_of_its_own(api, servers)
    shown = control_plane.kubectl("get", "lmcs", "--namespace", namespace).stdout
    head, line = shown.splitlines()
    assert " ".join(head.split()) == "NAME DESIRED READY WORKERS REAPS LAST-REAP STATUS AGE"
    name, desired, ready, workers, reaps, last_reap, status, _ = line.split()
    assert (name, desired, ready, workers, reaps) == ("kv", "2", "2", "8", "3")
    assert (last_reap[-1] in "dy", status) == (True, "Serving")


@pytest.mark.usefixtures("kind")
def test_kubectl_explains_reaping(control_plane: ControlPlane) -> None:
    """It reads like a manual: what, default, what is allowed."""
    text = " ".join(control_plane.kubectl("explain", "lmcs.spec.reaping").stdout.split())
    assert "reapTimeoutSeconds <integer> Silence after which a worker that has pinged" in text
    assert "Allowed: 0, or 30 to 31536000. Default: 120." in text
    assert "enum: Enforce, Observe" in text


@pytest.mark.usefixtures("kind")
def test_kubectl_explains_every_field(control_plane: ControlPlane) -> None:
    """No field goes without words."""
    shown = control_plane.kubectl("explain", "lmcs", "--recursive").stdout
    assert shown.count("<no description>") == 0
    for part in ("spec", "spec.server", "spec.cache.eviction", "status.reaping.effective"):
        assert "<no description>" not in control_plane.kubectl("explain", f"lmcs.{part}").stdout
