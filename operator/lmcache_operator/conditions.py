"""What each condition of a server says, and why. Pure.

`Ready` sums up the others, so its reason, the column Status of `kubectl get`, is the first thing to
mend.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from lmcache_nodeagent.operator_link.messages import AgentState
from lmcache_operator.api.root import Spec
from lmcache_operator.cluster import KubeObject
from lmcache_operator.names import AGENT_NAME, INSTANCE_LABEL, NAME_LABEL, device_resource
from lmcache_operator.spec import has_device_plugin
from lmcache_operator.troubles import Trouble

Answer = Literal["True", "False", "Unknown"]

_NAMED_NODES = 3

_PLUGIN_TROUBLES = {
    "conflict": Trouble(
        "ResourceTaken",
        "Another agent on {nodes} offers {resource}: servers of one name in two namespaces have "
        "one resource, and whose agent was first keeps it. Workers of this one cannot reach it "
        "there: choose other nodes by spec.nodeSelector, another name, or devicePlugin.mode "
        "Disabled.",
    ),
    "failing": Trouble(
        "PluginFails",
        "The kubelets on {nodes} do not take {resource} from the agents: no new worker starts "
        "there, and the agents go on trying.",
    ),
    "no_kubelet": Trouble(
        "KubeletMissing",
        "The agents on {nodes} find no kubelet in /var/lib/kubelet/device-plugins: no new worker "
        "starts there until they do.",
    ),
}
"""By what an agent says of its device plugin; the worst first."""


@dataclass(frozen=True, slots=True)
class AgentSeen:
    """What one connected agent says.

    Attributes:
        complete: it has said all its instances.
        state: of the agent as a whole, None until it has said so.
    """

    node: str
    complete: bool
    state: AgentState | None


@dataclass(frozen=True, slots=True)
class WorkersSeen:
    """What is known of the workers of a server, by what all its agents have said.

    Attributes:
        reaps: since the server was created; None while that is not known.
        suspects: those whose death is hinted at.
        pods_known: worker pods are listed in all namespaces.
    """

    registered: int = 0
    reaps: int | None = None
    last_reap_time: str | None = None
    last_reason: str | None = None
    suspects: int = 0
    pods_known: bool = True


@dataclass(frozen=True, slots=True)
class Seen:
    """Everything that a status is made of.

    Attributes:
        generation: of the object.
        spec: None if it cannot be served.
        daemon_set: as the API server has it, None if there is none.
        refusal: why what is wanted is not there.
        pods: why Agents are not ready.
        settled: agents have had time to connect to this operator.
    """

    name: str
    namespace: str
    uid: str
    generation: int
    spec: Spec | None
    daemon_set: KubeObject | None
    refusal: Trouble | None = None
    pods: Trouble | None = None
    agents: Sequence[AgentSeen] = ()
    workers: WorkersSeen = field(default_factory=WorkersSeen)
    settled: bool = True


@dataclass(frozen=True, slots=True)
class Nodes:
    """What the DaemonSet's controller has counted, for the present spec or an earlier one."""

    desired: int
    ready: int
    updated: int
    counted: bool
    on_delete: bool


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a condition says."""

    answer: Answer
    reason: str
    message: str


def count_nodes(daemon_set: KubeObject | None) -> Nodes:
    """Read what the DaemonSet's controller has counted."""
    found = daemon_set or {}
    status, spec = found.get("status") or {}, found.get("spec") or {}
    generation = (found.get("metadata") or {}).get("generation", 0)
    return Nodes(
        desired=status.get("desiredNumberScheduled", 0),
        ready=status.get("numberReady", 0),
        updated=status.get("updatedNumberScheduled", 0),
        counted=bool(found) and status.get("observedGeneration", 0) >= generation,
        on_delete=(spec.get("updateStrategy") or {}).get("type") == "OnDelete",
    )


def all_connected(seen: Seen, nodes: Nodes) -> bool:
    """Tell whether every ready agent has said all it knows."""
    return sum(agent.complete for agent in seen.agents) >= max(nodes.ready, 1)


def available(seen: Seen, nodes: Nodes) -> Verdict:
    """Judge whether every node has a ready agent."""
    if seen.daemon_set is None:
        trouble = seen.refusal or Trouble("NoDaemonSet", "The DaemonSet does not exist yet.")
        return Verdict("False", trouble.reason, trouble.message)
    if not nodes.counted:
        return Verdict("Unknown", "NotObserved", "The DaemonSet is not looked at yet.")
    if nodes.desired == 0:
        return Verdict(
            "False",
            "NoNodesMatch",
            "No node gets an agent: none has the labels of spec.nodeSelector and spec.affinity, or "
            "all that have them carry a taint that spec.tolerations does not name.",
        )
    if nodes.ready >= nodes.desired:
        return Verdict("True", "AgentsReady", f"{_count(nodes.desired)} ready.")
    trouble = seen.pods or Trouble("AgentsNotReady", "Agents are not ready.")
    return Verdict(
        "False",
        trouble.reason,
        f"{nodes.ready} of {_count(nodes.desired)} ready. {trouble.message}",
    )


def progressing(seen: Seen, nodes: Nodes) -> Verdict:
    """Judge whether pods of an earlier spec are left."""
    if seen.daemon_set is None or not nodes.counted:
        return Verdict("Unknown", "NotObserved", "The DaemonSet is not looked at yet.")
    behind = nodes.desired - nodes.updated
    if behind <= 0:
        return Verdict("False", "UpToDate", "Every agent is of the current spec.")
    if not nodes.on_delete:
        return Verdict("True", "RollingOut", f"{_count(behind)} being replaced.")
    return Verdict(
        "True",
        "WaitsForDeletion",
        f"{_count(behind)} of an earlier spec: each node follows when its pod is deleted, and its "
        f"cache is empty then: kubectl delete pod -n {seen.namespace} -l "
        f"{NAME_LABEL}={AGENT_NAME},{INSTANCE_LABEL}={seen.name}",
    )


def reaper_healthy(seen: Seen) -> Verdict:
    """Judge whether Dead workers' memory is released, by what the connected agents say."""
    states = [(agent.node, agent.state) for agent in seen.agents if agent.state is not None]
    if not states:
        return Verdict("Unknown", "NoAgentConnected", "No agent has reported.")
    stuck = sum(state.releases_stuck for _, state in states)
    if stuck:
        return Verdict(
            "False",
            "ReleaseStuck",
            f"The memory of {stuck} dead workers does not come back on "
            f"{_nodes_with(states, lambda state: state.releases_stuck > 0)}. Delete the agent's "
            "pod there, or have it restarted by spec.reaping.stuckRelease.action: RestartServer.",
        )
    refused = next(((node, s) for node, s in states if s.settings_problem), None)
    if refused:
        node, state = refused
        return Verdict(
            "False",
            "SettingsRefused",
            f"The agent on {node} keeps its earlier settings: {state.settings_problem}. Correct "
            "spec.reaping, or give the agents the operator's release.",
        )
    return _working_reaper(seen, states)


def _working_reaper(seen: Seen, states: Sequence[tuple[str, AgentState]]) -> Verdict:
    late = sum(state.mismatched_heartbeats for _, state in states)
    if late:
        return Verdict(
            "True",
            "HeartbeatMismatch",
            f"{late} workers ping more slowly than the time-out allows for, and are given longer: "
            f"restart them on {_nodes_with(states, lambda s: s.mismatched_heartbeats > 0)}, so "
            "that they take the interval of the connection ConfigMap.",
        )
    if seen.spec is not None and seen.spec.reaping.reap_timeout_seconds == 0:
        return Verdict("True", "ReapingOff", "reapTimeoutSeconds is 0: nobody is reaped.")
    if seen.spec is not None and seen.spec.reaping.mode == "Observe":
        return Verdict("True", "ObserveOnly", "Who would be reaped is only counted.")
    return Verdict("True", "ReaperWorks", "Dead workers' memory is released.")


def hints_flowing(seen: Seen, nodes: Nodes) -> Verdict:
    """Judge whether agents are told what the operator sees of worker pods."""
    if seen.spec is not None and seen.spec.reaping.hints.mode == "Disabled":
        return Verdict("False", "HintsDisabled", "spec.reaping.hints.mode is Disabled.")
    connected = sum(agent.complete for agent in seen.agents)
    if connected == 0 and nodes.ready == 0:
        return Verdict("Unknown", "NoAgents", "No agent is ready.")
    if connected < nodes.ready and not seen.settled:
        return Verdict(
            "Unknown",
            "AgentsConnecting",
            f"{connected} of {_count(nodes.ready)} connected to the operator so far.",
        )
    if connected < nodes.ready:
        return Verdict(
            "False",
            "AgentsNotConnected",
            f"{connected} of {_count(nodes.ready)} connected to the operator: they judge workers "
            "by what they see themselves, which takes longer. Their logs say why; a NetworkPolicy "
            "may forbid the way to the operator's Service.",
        )
    if not seen.workers.pods_known:
        return Verdict(
            "False",
            "WorkerPodsUnknown",
            "Worker pods are not listed in all namespaces: the operator's log says why; it needs "
            "get, list and watch of pods there.",
        )
    return Verdict("True", "AgentsConnected", "The operator tells agents what it sees of pods.")


def device_plugin(seen: Seen) -> Verdict:
    """Judge whether workers can reach agents by the kubelet, by what the connected agents say."""
    if seen.spec is not None and not has_device_plugin(seen.spec):
        return Verdict(
            "False",
            "DevicePluginDisabled",
            "spec.transport.devicePlugin.mode is Disabled: workers connect over TCP or unixSocket.",
        )
    states = [(agent.node, agent.state) for agent in seen.agents if agent.state is not None]
    resource = device_resource(seen.name)
    failing = _failing_plugin(states, resource)
    if failing is not None:
        return failing
    if not states:
        return Verdict("Unknown", "NoAgentReported", "No agent has reported.")
    behind = _nodes_with(states, lambda state: not state.device_plugin)
    if behind:
        return Verdict(
            "Unknown",
            "PluginNotOffered",
            f"The agents on {behind} offer nothing to their kubelets: they are of an earlier spec "
            "or release, see the condition Progressing.",
        )
    return Verdict(
        "True", "PluginRegistered", f"Workers reach their agent by resources.limits {resource}."
    )


def _failing_plugin(states: Sequence[tuple[str, AgentState]], resource: str) -> Verdict | None:
    for said, trouble in _PLUGIN_TROUBLES.items():
        found = [(node, state) for node, state in states if state.device_plugin == said]
        if found:
            nodes = _nodes_with(found, lambda _: True)
            message = trouble.message.format(nodes=nodes, resource=resource)
            problem = next(
                (s.device_plugin_problem for _, s in found if s.device_plugin_problem), ""
            )
            words = f" The agent says: {problem}." if problem else ""
            return Verdict("False", trouble.reason, f"{message}{words}")
    return None


def ready(
    seen: Seen, availability: Verdict, reaper: Verdict, hints: Verdict, plugin: Verdict
) -> Verdict:
    """Sum up the others: the first that does not hold, or that all do."""
    if seen.refusal is not None:
        return Verdict("False", seen.refusal.reason, seen.refusal.message)
    if availability.answer != "True":
        return availability
    if reaper.answer == "False":
        return reaper
    if plugin.answer == "False" and plugin.reason != "DevicePluginDisabled":
        return plugin
    if hints.answer != "True" and hints.reason != "HintsDisabled":
        return hints
    parts = (availability.message, reaper.message, hints.message, plugin.message)
    return Verdict("True", "Ready", " ".join(parts))


def _nodes_with(
    states: Sequence[tuple[str, AgentState]], holds: Callable[[AgentState], bool]
) -> str:
    nodes = sorted(node for node, state in states if holds(state))
    more = len(nodes) - _NAMED_NODES
    return ", ".join(nodes[:_NAMED_NODES]) + (f" and {more} more" if more > 0 else "")


def _count(agents: int) -> str:
    return f"{agents} agent" if agents == 1 else f"{agents} agents"
