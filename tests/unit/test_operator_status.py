"""From what was seen to conditions and figures: what stands first is the first thing to mend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from lmcache_nodeagent.operator_link.messages import AgentState, ReapingSettings
from lmcache_operator.api.root import Spec
from lmcache_operator.api.status import Condition, Status
from lmcache_operator.conditions import AgentSeen, Seen, WorkersSeen
from lmcache_operator.spec import read_spec, reaping_settings
from lmcache_operator.status import (
    build_status,
    changed_conditions,
    is_urgent,
    read_status,
    trouble_of,
    write_status,
)
from lmcache_operator.troubles import Trouble, creation_trouble, pod_trouble

UID = "0b0f7c9e-6c1f-4f4e-8a55-2f8f6e9f3c11"
FIRST, LATER = "2026-01-01T00:00:00Z", "2026-01-01T00:10:00Z"
SPEC = read_spec({"cache": {"size": "1Gi"}})


def settings(spec: Spec = SPEC, **changed: object) -> ReapingSettings:
    """Return what an agent reports that follows a spec."""
    written = {
        n.replace("-", "_"): v for n, v in reaping_settings(spec, uid=UID, name="kv").items()
    }
    return msgspec.convert({**written, **changed}, ReapingSettings, strict=False)


def daemon_set(
    desired: int = 2, ready: int = 2, updated: int = 2, *, observed: int = 1, kind: str = "OnDelete"
) -> dict[str, Any]:
    """Make a DaemonSet as its controller has counted it."""
    return {
        "metadata": {"generation": 1, "uid": "d"},
        "spec": {"updateStrategy": {"type": kind}},
        "status": {
            "observedGeneration": observed,
            "desiredNumberScheduled": desired,
            "numberReady": ready,
            "updatedNumberScheduled": updated,
        },
    }


def agents(count: int = 2, **state: object) -> Sequence[AgentSeen]:
    """Make agents that are connected and say they are well, or what is given."""
    known: dict[str, Any] = {"settings": settings(), "device_plugin": "registered", **state}
    return [AgentSeen(f"n{number}", True, AgentState(**known)) for number in range(count)]  # noqa: FBT003  # complete


WELL = Seen(
    name="kv",
    namespace="serving",
    uid=UID,
    generation=1,
    spec=SPEC,
    daemon_set=daemon_set(),
    agents=agents(),
    workers=WorkersSeen(registered=3, reaps=7, suspects=1),
)


def verdict(seen: Seen, kind: str, earlier: Status | None = None) -> Condition:
    """Return one condition."""
    status = build_status(seen, earlier or Status(), FIRST)
    return next(found for found in status.conditions if found.type == kind)


def said(seen: Seen, kind: str) -> tuple[str, str]:
    """Return status and reason of a condition."""
    found = verdict(seen, kind)
    return found.status, found.reason


def test_all_is_well() -> None:
    """Figures, effective settings, and no trouble."""
    status = build_status(WELL, Status(), FIRST)
    assert trouble_of(status) is None
    answers = {found.type: found.status for found in status.conditions}
    assert answers == {
        "Ready": "True",
        "Available": "True",
        "Progressing": "False",
        "ReaperHealthy": "True",
        "HintsFlowing": "True",
        "DevicePlugin": "True",
    }
    assert (status.desired_nodes, status.ready_nodes, status.updated_nodes) == (2, 2, 2)
    assert status.registered_workers == 3
    assert status.reaping is not None
    assert (status.reaping.total, status.reaping.suspects) == (7, 1)
    effective = status.reaping.effective
    assert effective is not None
    assert (effective.nodes, effective.nodes_in_sync) == (2, 2)
    assert (effective.reap_timeout_seconds, effective.mode) == (120, "Enforce")


@pytest.mark.parametrize(
    ("seen", "kind", "answer"),
    [
        (replace(WELL, daemon_set=None), "Available", ("False", "NoDaemonSet")),
        (replace(WELL, daemon_set=None), "Progressing", ("Unknown", "NotObserved")),
        (
            replace(WELL, daemon_set=daemon_set(observed=0)),
            "Available",
            ("Unknown", "NotObserved"),
        ),
        (replace(WELL, daemon_set=daemon_set(0, 0, 0)), "Available", ("False", "NoNodesMatch")),
        (replace(WELL, daemon_set=daemon_set(ready=1)), "Available", ("False", "AgentsNotReady")),
        (
            replace(WELL, daemon_set=daemon_set(ready=1), pods=Trouble("ImagePullFailed", "x.")),
            "Available",
            ("False", "ImagePullFailed"),
        ),
        (
            replace(WELL, daemon_set=daemon_set(updated=1)),
            "Progressing",
            ("True", "WaitsForDeletion"),
        ),
        (
            replace(WELL, daemon_set=daemon_set(updated=1, kind="RollingUpdate")),
            "Progressing",
            ("True", "RollingOut"),
        ),
        (replace(WELL, agents=()), "ReaperHealthy", ("Unknown", "NoAgentConnected")),
        (
            replace(WELL, agents=agents(releases_stuck=1)),
            "ReaperHealthy",
            ("False", "ReleaseStuck"),
        ),
        (
            replace(WELL, agents=agents(settings_problem="no")),
            "ReaperHealthy",
            ("False", "SettingsRefused"),
        ),
        (
            replace(WELL, agents=agents(mismatched_heartbeats=1)),
            "ReaperHealthy",
            ("True", "HeartbeatMismatch"),
        ),
        (replace(WELL, agents=agents(1)), "HintsFlowing", ("False", "AgentsNotConnected")),
        (
            replace(WELL, workers=WorkersSeen(pods_known=False)),
            "HintsFlowing",
            ("False", "WorkerPodsUnknown"),
        ),
        (
            replace(WELL, daemon_set=daemon_set(ready=0), agents=()),
            "HintsFlowing",
            ("Unknown", "NoAgents"),
        ),
        (
            replace(WELL, agents=agents(device_plugin="conflict")),
            "DevicePlugin",
            ("False", "ResourceTaken"),
        ),
        (
            replace(WELL, agents=agents(device_plugin="failing")),
            "DevicePlugin",
            ("False", "PluginFails"),
        ),
        (
            replace(WELL, agents=agents(device_plugin="no_kubelet")),
            "DevicePlugin",
            ("False", "KubeletMissing"),
        ),
        (
            replace(WELL, agents=agents(device_plugin="")),
            "DevicePlugin",
            ("Unknown", "PluginNotOffered"),
        ),
        (replace(WELL, agents=()), "DevicePlugin", ("Unknown", "NoAgentReported")),
    ],
)
def test_conditions(seen: Seen, kind: str, answer: tuple[str, str]) -> None:
    """Each with its reason."""
    assert said(seen, kind) == answer


@pytest.mark.parametrize(
    ("seen", "reason"),
    [
        (replace(WELL, daemon_set=daemon_set(0, 0, 0), agents=()), "NoNodesMatch"),
        (
            replace(WELL, daemon_set=daemon_set(ready=1), agents=agents(1, releases_stuck=1)),
            "AgentsNotReady",
        ),
        (replace(WELL, agents=agents(releases_stuck=1)), "ReleaseStuck"),
        (replace(WELL, agents=()), "AgentsNotConnected"),
        (replace(WELL, agents=agents(1, device_plugin="conflict")), "ResourceTaken"),
    ],
)
def test_ready_shows_what_is_to_be_mended_first(seen: Seen, reason: str) -> None:
    """Agents before their reapers, those before the way to the operator."""
    assert said(seen, "Ready") == ("False", reason)


def test_pods_of_an_earlier_spec_are_ready_all_the_same() -> None:
    """When they are replaced is a person's choice."""
    assert said(replace(WELL, daemon_set=daemon_set(updated=0)), "Ready") == ("True", "Ready")


@pytest.mark.parametrize(
    ("reaping", "reason"),
    [({"reapTimeoutSeconds": 0}, "ReapingOff"), ({"mode": "Observe"}, "ObserveOnly")],
)
def test_a_reaper_that_is_not_to_reap_is_healthy(reaping: dict[str, Any], reason: str) -> None:
    """And says so."""
    spec = read_spec({"cache": {"size": "1Gi"}, "reaping": reaping})
    assert said(replace(WELL, spec=spec), "ReaperHealthy") == ("True", reason)


def test_a_resource_that_another_server_has() -> None:
    """Two servers of one name on a node: the nodes and the agent's words are in the message."""
    taken = agents(1, device_plugin="conflict", device_plugin_problem="another plugin has it")
    message = verdict(replace(WELL, agents=[*taken, *agents(2)]), "DevicePlugin").message
    assert message.startswith("Another agent on n0 offers lmcache-kube.dev/kv: ")
    assert message.endswith(" The agent says: another plugin has it.")


def test_a_device_plugin_that_is_switched_off_is_no_trouble() -> None:
    """It is not True, and the server is ready all the same, also without one that says so."""
    spec = read_spec(
        {"cache": {"size": "1Gi"}, "transport": {"devicePlugin": {"mode": "Disabled"}}}
    )
    off = replace(WELL, spec=spec, agents=agents(device_plugin=""))
    assert said(off, "DevicePlugin") == ("False", "DevicePluginDisabled")
    assert said(off, "Ready") == ("True", "Ready")


def test_agents_of_an_earlier_release_are_ready_without_a_device_plugin() -> None:
    """When they are replaced is a person's choice."""
    assert said(replace(WELL, agents=agents(device_plugin="")), "Ready") == ("True", "Ready")


def test_hints_that_are_switched_off_are_no_trouble() -> None:
    """They do not flow, and the server is ready all the same."""
    spec = read_spec({"cache": {"size": "1Gi"}, "reaping": {"hints": {"mode": "Disabled"}}})
    seen = replace(WELL, spec=spec, agents=())
    assert said(seen, "HintsFlowing") == ("False", "HintsDisabled")
    assert said(seen, "Ready") == ("True", "Ready")


def test_what_is_refused_stands_before_everything_else() -> None:
    """Agents of an earlier spec may run on."""
    refusal = Trouble("InvalidSpec", "spec.x: wrong.")
    seen = replace(WELL, spec=None, refusal=refusal)
    assert said(seen, "Ready") == ("False", "InvalidSpec")
    assert said(seen, "Available") == ("True", "AgentsReady")


def test_nodes_are_named_but_not_all_of_them() -> None:
    """A message has room for people's eyes, not for a thousand nodes."""
    seen = replace(WELL, daemon_set=daemon_set(9, 9, 9), agents=agents(9, releases_stuck=1))
    assert "n0, n1, n2 and 6 more" in verdict(seen, "ReaperHealthy").message


def test_transition_times_move_with_the_status_alone() -> None:
    """Not with reasons, words, or the clock."""
    first = build_status(WELL, Status(), FIRST)
    assert build_status(WELL, first, LATER) == first
    other = replace(WELL, agents=agents(mismatched_heartbeats=2))
    times = {c.type: c.last_transition_time for c in build_status(other, first, LATER).conditions}
    assert set(times.values()) == {FIRST}
    broken = replace(WELL, daemon_set=daemon_set(ready=1))
    times = {c.type: c.last_transition_time for c in build_status(broken, first, LATER).conditions}
    assert times["Available"] == times["Ready"] == LATER
    assert times["ReaperHealthy"] == FIRST


def test_words_alone_may_wait() -> None:
    """A figure, a status or a reason may not."""
    first = build_status(replace(WELL, agents=agents(releases_stuck=1)), Status(), FIRST)
    words = build_status(replace(WELL, agents=agents(releases_stuck=2)), first, LATER)
    assert words != first
    assert not is_urgent(words, first)
    assert changed_conditions(words, first) == []
    figure = build_status(
        replace(WELL, agents=agents(releases_stuck=1), workers=WorkersSeen(4, 7)), first, LATER
    )
    assert is_urgent(figure, first)
    reason = build_status(WELL, first, LATER)
    assert is_urgent(reason, first)
    assert {found.type for found in changed_conditions(reason, first)} == {"Ready", "ReaperHealthy"}


def test_agents_that_only_connect_again_change_nothing() -> None:
    """At a restart of the operator, what they had said stays for a while; then it is not known."""
    before = build_status(WELL, Status(), FIRST)
    away = replace(WELL, agents=(), workers=WorkersSeen(reaps=None), settled=False)
    assert build_status(away, before, LATER) == before
    given_up = build_status(replace(away, settled=True), before, LATER)
    trouble = trouble_of(given_up)
    assert trouble is not None
    assert trouble.reason == "AgentsNotConnected"
    assert given_up.registered_workers == 0
    assert given_up.reaping is not None
    assert given_up.reaping.total == 7


def test_agents_that_connect_for_the_first_time_are_no_trouble_yet() -> None:
    """Ready is not known before they have said something."""
    seen = replace(WELL, agents=(), settled=False)
    assert said(seen, "HintsFlowing") == ("Unknown", "AgentsConnecting")
    assert said(seen, "Ready") == ("Unknown", "AgentsConnecting")


def test_settings_that_agents_do_not_agree_on_are_left_out() -> None:
    """Who follows already is counted."""
    old = AgentSeen("n9", complete=True, state=AgentState(settings=settings(reap_mode="observe")))
    status = build_status(replace(WELL, agents=[*agents(1), old]), Status(), FIRST)
    assert status.reaping is not None
    effective = status.reaping.effective
    assert effective is not None
    assert (effective.nodes, effective.nodes_in_sync) == (2, 1)
    assert effective.mode is None
    assert effective.reap_timeout_seconds is None


def test_a_status_that_is_written_reads_the_same() -> None:
    """Zeros included; what nobody can read counts as never written."""
    status = build_status(replace(WELL, workers=WorkersSeen(reaps=0)), Status(), FIRST)
    written = write_status(status)
    assert written["reaping"]["total"] == 0
    assert written["reaping"]["suspects"] == 0
    assert read_status(written) == status
    assert read_status({"conditions": "none"}) == Status()


# Why pods are not ready


def pod(
    *statuses: dict[str, Any], policy: str = "IfNotPresent", **status: object
) -> dict[str, Any]:
    """Make an agent's pod that is not ready."""
    return {
        "metadata": {"name": "kv-1", "namespace": "serving"},
        "spec": {"containers": [{"imagePullPolicy": policy}]},
        "status": {"phase": "Pending", "containerStatuses": list(statuses), **status},
    }


def waiting(reason: str, message: str = "") -> dict[str, Any]:
    """Make the status of a container that waits."""
    state = {"waiting": {"reason": reason, "message": message}}
    return {"name": "agent", "image": "r/agent:1", "ready": False, "state": state}


def ended(reason: str, code: int) -> dict[str, Any]:
    """Make the status of a container that waits to be started again."""
    last = {"terminated": {"reason": reason, "exitCode": code}}
    return {**waiting("CrashLoopBackOff"), "lastState": last}


def ready_pod() -> dict[str, Any]:
    """Make an agent's pod that is ready."""
    return pod(conditions=[{"type": "Ready", "status": "True"}])


UNSCHEDULABLE = {"type": "PodScheduled", "status": "False", "message": "Insufficient memory."}


@pytest.mark.parametrize(
    ("found", "reason", "words"),
    [
        (pod(waiting("ErrImagePull")), "ImagePullFailed", "r/agent:1"),
        (pod(waiting("ErrImageNeverPull"), policy="Never"), "ImagePullFailed", "load it there"),
        (pod(waiting("CreateContainerConfigError", "no x")), "ContainerCannotStart", "no x"),
        (pod(ended("OOMKilled", 137)), "AgentsOutOfMemory", "spec.resources.limits.memory"),
        (pod(ended("Error", 2)), "AgentsCrash", "exit code 2"),
        (pod(conditions=[UNSCHEDULABLE]), "Unschedulable", "Insufficient memory"),
        (pod(waiting("ContainerCreating")), "AgentsStarting", "not ready"),
        (pod(initContainerStatuses=[waiting("ImagePullBackOff")]), "ImagePullFailed", "r/agent"),
    ],
)
def test_why_a_pod_is_not_ready(found: dict[str, Any], reason: str, words: str) -> None:
    """What the kubelet or the scheduler says, and what to do about it."""
    trouble = pod_trouble([found])
    assert trouble is not None
    assert trouble.reason == reason
    assert words in trouble.message
    assert trouble.message.startswith("1 of 1 agent: ")


def test_the_worst_of_several_pods_is_shown() -> None:
    """With how many have it; those that are ready or leave do not count."""
    leaving = pod(waiting("ErrImagePull"))
    leaving["metadata"]["deletionTimestamp"] = FIRST
    pods = [
        pod(ended("Error", 1)),
        pod(waiting("ErrImagePull")),
        pod(waiting("ImagePullBackOff")),
        ready_pod(),
        leaving,
    ]
    trouble = pod_trouble(pods)
    assert trouble is not None
    assert trouble.reason == "ImagePullFailed"
    assert trouble.message.startswith("2 of 5 agents: ")
    assert pod_trouble([ready_pod()]) is None


def test_the_words_of_a_trouble_do_not_change_from_try_to_try() -> None:
    """Or they would be written again and again."""
    first = pod_trouble([pod(waiting("ErrImagePull", "rpc error: not found"))])
    assert first == pod_trouble([pod(waiting("ImagePullBackOff", "Back-off 10s pulling image"))])


def refused(message: str, at: str = FIRST, **more: object) -> dict[str, Any]:
    """Make the Event of a pod that could not be created."""
    words = f'Error creating: pods "kv-" is forbidden: {message}'
    return {"reason": "FailedCreate", "message": words, "lastTimestamp": at, **more}


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ('violates PodSecurity "restricted:latest": hostPath volumes', "PodSecurityRefused"),
        ("exceeded quota: memory", "QuotaExceeded"),
        ('RuntimeClass "nope" not found', "PodsRefused"),
    ],
)
def test_why_pods_are_not_created(message: str, reason: str) -> None:
    """The API server's words, and what to do."""
    trouble = creation_trouble([refused(message)])
    assert trouble is not None
    assert trouble.reason == reason
    assert message.split(":", maxsplit=1)[0] in trouble.message
    assert "is forbidden" not in trouble.message


def test_the_latest_refusal_counts() -> None:
    """Whichever of its times the Event has."""
    newer = refused("exceeded quota: x", "", series={"lastObservedTime": LATER})
    trouble = creation_trouble([newer, refused("violates PodSecurity"), {"reason": "Other"}])
    assert trouble is not None
    assert trouble.reason == "QuotaExceeded"
    assert creation_trouble([{"reason": "SuccessfulCreate"}]) is None


def test_long_words_are_cut() -> None:
    """A webhook may say much."""
    trouble = creation_trouble([refused("x" * 5000)])
    assert trouble is not None
    assert len(trouble.message) < 1000
