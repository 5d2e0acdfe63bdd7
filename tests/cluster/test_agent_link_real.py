"""A real agent finds a real operator, and finds it again."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.cluster.control_plane import ControlPlane
from tests.cluster.operator_process import OperatorProcess
from tests.cluster.story import Story
from tests.polling import poll_until


def connection(operator: OperatorProcess, boot_id: str) -> dict[str, Any] | None:
    """Return the operator's record of a stream from this life of an agent."""
    records = operator.records("agent_connected")
    return next((each for each in records if each["boot_id"] == boot_id), None)


def wait_connected(operator: OperatorProcess, story: Story) -> dict[str, Any]:
    """Wait until the operator hears the agent in its present life, mounts kept up to date."""

    def connected() -> dict[str, Any] | None:
        story.node.mount()
        return connection(operator, story.agent.boot_id)

    try:
        return poll_until(connected)
    except AssertionError:
        said = story.agent.status()["operator_link"], operator.records("agent_refused")
        raise AssertionError(f"not connected: {said}") from None


def wait_counted(story: Story, count: int) -> None:
    """Wait until the server's status counts so many workers."""
    story.wait_status(lambda status: status.get("registeredWorkers") == count, f"{count} workers")


def test_an_agent_is_known_by_its_pod(story: Story) -> None:
    """Node, pod and server are those of the DaemonSet's pod; its workers are counted."""
    story.begin()
    record = wait_connected(story.operator, story)
    assert record["node"] == story.node.name
    assert record["pod"] == story.node.agent_pod["metadata"]["name"]
    assert record["server"] == f"{story.namespace}/kv"
    pod = story.engine("first", 1, 2)
    wait_counted(story, 2)
    story.engine("second", 3)
    wait_counted(story, 3)
    story.workers[1].kill()
    story.workers[2].kill()
    pod.end_container()
    wait_counted(story, 1)
    assert story.operator.metric("agents_connected") == 1
    assert story.agent.status()["operator_link"]["connected"]


@pytest.mark.parametrize("kill", [True, False], ids=["killed", "stopped"])
@pytest.mark.parametrize("first", ["agent", "operator"])
def test_they_find_each_other_again(story: Story, first: str, *, kill: bool) -> None:
    """Both end, both are started, one before the other: workers are counted and mapped again."""
    story.begin()
    pod = story.engine("engine", 1, 2)
    wait_counted(story, 2)
    (story.node.kill_agent if kill else story.agent.stop)()
    (story.operator.kill if kill else story.operator.stop)()
    if first == "agent":
        story.node.start_agent()
        story.operator.launch()
    else:
        story.operator.launch()
        story.operator.wait_for_record("operator_acts")
        story.node.start_agent()
    story.operator.wait_for_record("operator_acts")
    began = time.monotonic()
    wait_connected(story.operator, story)
    met = time.monotonic() - began
    poll_until(lambda: set(story.agent.instances()) == {1, 2}, "workers register again")
    wait_counted(story, 2)
    story.wait_annotated(pod, 1, 2)
    whole = time.monotonic() - began
    print(f"{first} first: a stream {met:.2f} s after both were up, all the same {whole:.2f} s")  # noqa: T201


def test_an_agent_whose_pod_is_gone_is_not_heard(story: Story) -> None:
    """Its process lives on, as on a node that is cut off; its next stream is refused, counted."""
    story.begin()
    path = f"/api/v1/namespaces/{story.namespace}/pods/{story.node.agent_pod['metadata']['name']}"
    assert story.api.request("DELETE", path, {"gracePeriodSeconds": 0}).ok
    story.operator.stop()
    story.operator.start()
    poll_until(lambda: story.operator.records("agent_refused"), "a refusal")
    (record, *_) = story.operator.records("agent_refused")
    assert record["reason"] in {"no_such_pod", "token_refused"}
    assert story.operator.metric("streams_refused_total", reason=record["reason"]) >= 1
    assert connection(story.operator, story.agent.boot_id) is None
    poll_until(
        lambda: "unauthorized" in str(story.agent.status()["operator_link"]),
        "the agent shows why",
    )


@pytest.mark.slow
def test_a_second_operator_takes_over(story: Story, control_plane: ControlPlane) -> None:
    """It waits, is not ready, and sends agents away; the first is killed, then it does all that.

    With the default times: the Lease lasts 15 s.
    """
    story.begin()
    story.engine("engine", 1)
    second = OperatorProcess(control_plane.kubeconfig, story.namespace)
    try:
        second.launch().wait_for_record("lease_waiting")
        assert story.operator.get("/readyz")[0] == 200
        assert second.get("/readyz")[0] == 503
        generation = daemon_set(story)["generation"]
        story.operator.kill()
        began = time.monotonic()
        second.wait_for_record("operator_acts")
        took = time.monotonic() - began
        assert second.get("/readyz")[0] == 200
        wait_connected(second, story)
        whole = time.monotonic() - began
        print(f"took over {took:.1f} s after SIGKILL, its agent came at {whole:.1f} s")  # noqa: T201
        wait_counted(story, 1)
        assert daemon_set(story)["generation"] == generation
    finally:
        second.close()


def daemon_set(story: Story) -> dict[str, Any]:
    """Return the metadata of the agents' DaemonSet."""
    path = f"/apis/apps/v1/namespaces/{story.namespace}/daemonsets/kv"
    metadata: dict[str, Any] = story.api.request("GET", path).body["metadata"]
    return metadata
