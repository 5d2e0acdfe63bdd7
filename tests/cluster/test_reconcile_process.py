"""The process itself: who acts, health, stops, and what it says when it cannot work."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Generator
from http import HTTPStatus

import pytest

from lmcache_operator.api.crd import GROUP, PLURAL, definition
from tests.cluster.api import Api
from tests.cluster.control_plane import ControlPlane
from tests.cluster.operator_process import OperatorProcess
from tests.cluster.reconcile_world import Json, World
from tests.polling import poll_until

CRD = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{PLURAL}.{GROUP}"


@pytest.fixture
def second(control_plane: ControlPlane, world: World) -> Generator[OperatorProcess]:
    """Another operator with the same settings; a test starts it."""
    process = OperatorProcess(control_plane.kubeconfig, world.namespace)
    yield process
    process.close()


def acts(operator: OperatorProcess) -> bool:
    """Tell whether an operator says that it is the one that acts."""
    return operator.get("/readyz")[0] == HTTPStatus.OK


def test_it_serves_health_and_stops(operator: OperatorProcess) -> None:
    """It is ready once it holds the Lease; SIGTERM ends it in order."""
    assert operator.get("/healthz")[0] == HTTPStatus.OK
    poll_until(lambda: acts(operator), "ready")
    assert operator.metric("leader") == 1
    assert operator.get("/metrics")[1].startswith("# HELP")
    assert operator.stop() == 0
    assert operator.records("operator_stopped")
    assert operator.records("lease_released")


def has_edit_20(daemon_set: Json) -> bool:
    """Tell whether the last of twenty edits has reached the pods."""
    annotations = daemon_set["spec"]["template"]["metadata"].get("annotations", {})
    return bool(annotations.get("edit") == "20")


def test_of_two_operators_one_acts(
    operator: OperatorProcess, second: OperatorProcess, world: World
) -> None:
    """Case 47: each edit changes the pods once, and the waiting one writes nothing."""
    second.launch().wait_for_record("http_listening")
    world.apply()
    first = world.wait("DaemonSet", "kv")["metadata"]["generation"]
    for number in range(1, 21):
        world.patch_server({"spec": {"podAnnotations": {"edit": str(number)}}})
    world.wait("DaemonSet", "kv", has_edit_20)
    assert world.wait("DaemonSet", "kv")["metadata"]["generation"] - first <= 20
    assert acts(operator)
    assert not acts(second)
    assert second.metric("leader") == 0
    assert second.metric("writes_total", kind="DaemonSet") == 0
    assert second.metric("passes_total") == 0


def test_a_killed_operator_is_replaced(
    operator: OperatorProcess, second: OperatorProcess, world: World
) -> None:
    """Case 47: within a minute another one acts, and nothing is rewritten by that alone."""
    world.apply()
    world.wait_condition("Ready", "False", "NoNodesMatch")
    second.launch().wait_for_record("http_listening")
    operator.kill()
    second.wait_for_record("operator_acts")
    generation = world.wait("DaemonSet", "kv")["metadata"]["generation"]
    world.patch_server({"spec": {"server": {"port": 6000}}})
    world.wait("Service", "kv", lambda obj: obj["spec"]["ports"][0]["port"] == 6000)
    world.wait("DaemonSet", "kv", lambda obj: obj["metadata"]["generation"] == generation + 1)


def test_a_stopped_operator_makes_way_at_once(
    operator: OperatorProcess, second: OperatorProcess
) -> None:
    """It gives the Lease back: the next one need not wait for its end."""
    second.launch().wait_for_record("http_listening")
    assert operator.stop() == 0
    second.wait_for_record("operator_acts")


@pytest.fixture
def without_definition(control_plane: ControlPlane, api: Api, kind: str) -> Generator[None]:
    """No definition of our kind during a test."""
    assert api.request("DELETE", CRD).ok
    poll_until(lambda: not api.request("GET", kind).ok, "it goes")
    yield
    install(control_plane, api, kind)


def install(control_plane: ControlPlane, api: Api, kind: str) -> None:
    """Bring the definition back for the tests that follow."""
    answer = control_plane.kubectl(
        "apply", "--server-side", "-f", "-", given=json.dumps(definition())
    )
    assert answer.returncode == 0, answer.stderr
    poll_until(lambda: api.request("GET", f"{kind}/{PLURAL}").ok, "our kind")


@pytest.mark.usefixtures("without_definition")
def test_without_the_definition_it_says_so_and_ends(second: OperatorProcess) -> None:
    """One clear line with the command that mends it; not an operator that waits in silence."""
    second.launch()
    assert second.wait_ended() == 1
    (record,) = second.records("operator_failed")
    assert f"crds/{PLURAL}.{GROUP}.yaml" in record["error"]
    assert "Traceback" not in second.log_text()


def test_a_definition_that_is_deleted_ends_it(
    control_plane: ControlPlane, api: Api, kind: str, operator: OperatorProcess
) -> None:
    """It cannot do its work, says why, and is started again by whoever runs it."""
    assert api.request("DELETE", CRD).ok
    try:
        assert operator.wait_ended() == 1
        (record,) = operator.records("operator_failed")
        assert f"crds/{PLURAL}.{GROUP}.yaml" in record["error"]
    finally:
        install(control_plane, api, kind)


def test_wrong_flags_are_said_all_together() -> None:
    """Each with its value, the limit and the fix; the status tells them from a failure."""
    command = [sys.executable, "-m", "lmcache_operator", "--link-port=70000", "--link-url=ws://x"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    assert answer.returncode == 2
    assert "operator-namespace is missing" in answer.stderr
    assert "link-port is 70000" in answer.stderr
    assert "wss://" in answer.stderr
