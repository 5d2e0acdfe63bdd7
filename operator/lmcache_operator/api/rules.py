"""What the API server checks beyond types and bounds, in CEL, each with the sentence it answers.

A message carries the offending figure, the needed one and the fix: Kubernetes prints no more of an
object than its type. `string(int)` has no length bound for the cost estimate, hence `.format`.
The windows' rules are those of the agent's `config_rules.py`; one table of specs is fed to both.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass

from lmcache_operator.api.fields import FLAGS, FreeForm

MISSED_HEARTBEATS = 3
"""Pings that a worker may miss before its silence counts, as in the agent."""

GIB = 1 << 30

OWNED_FLAGS = {
    "--host": "no field: agents listen on every address of their pod",
    "--port": "spec.server.port",
    "--ipc-path": "spec.transport.unixSocket",
    "--http-host": "no field: agents listen on every address of their pod",
    "--http-port": "spec.server.httpPort",
    "--l1-size-gb": "spec.cache.size",
    "--chunk-size": "spec.server.chunkSize",
    "--eviction-policy": "spec.cache.eviction.policy",
    "--eviction-trigger-watermark": "spec.cache.eviction.triggerPercent",
    "--eviction-ratio": "spec.cache.eviction.evictPercent",
    "--shm-name": "spec.transport.memorySharing",
    "--supported-transfer-mode": "spec.transport.memorySharing",
    "--device-plugin-resource": "spec.transport.devicePlugin.mode",
    "--device-plugin-slots": "spec.transport.devicePlugin.slots",
    "--device-plugin-folder": "no field: the kubelet has one place for it",
    "--slots-folder": "no field: agents have a folder of their own on the node",
    "--slots-host-folder": "no field: agents have a folder of their own on the node",
    "--prestart-wait-seconds": "spec.transport.devicePlugin.preStartWaitSeconds",
    "--slot-shared-memory-bytes": "spec.transport.devicePlugin.sharedMemory",
    "--slot-shared-memory-folder": "spec.transport.devicePlugin.sharedMemory",
    "--slot-shared-memory-host-folder": "spec.transport.devicePlugin.sharedMemory",
    "--max-cpu-workers": "spec.server.maxCPUWorkers",
    "--max-gpu-workers": "spec.server.maxGPUWorkers",
    "--worker-reap-timeout-seconds": "spec.reaping.reapTimeoutSeconds",
    "--worker-registration-grace-seconds": "spec.reaping.registrationGraceSeconds",
    "--worker-heartbeat-interval-seconds": "spec.reaping.heartbeatIntervalSeconds",
    "--hint-confirm-seconds": "spec.reaping.hints.confirmSeconds",
    "--close-confirm-seconds": "spec.reaping.hints.closeConfirmSeconds",
    "--reap-mode": "spec.reaping.mode",
    "--reap-idle-connected": "spec.reaping.reapIdleConnected",
    "--no-reap-idle-connected": "spec.reaping.reapIdleConnected",
    "--hints": "spec.reaping.hints.mode",
    "--stuck-release": "spec.reaping.stuckRelease.action",
    "--reaping-settings": "spec.reaping",
    "--operator-link": "no field: agents are told where the operator is",
    "--operator-token-file": "no field: agents have a token of their own",
    "--log-level": "spec.server.logLevel",
    "--log-format": "no field: agents write JSON lines",
}
"""Flags that the operator sets itself, and the field that each is set by."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule at an object or a value of the schema.

    Attributes:
        path: where it stands, `[]` for the items of a list.
        holds: CEL that is true for what is allowed.
        message: the sentence when `figures` cannot be evaluated.
        figures: CEL that makes the sentence with the figures in it.
        field_path: property that the answer names, below the object.
    """

    path: str
    holds: str
    message: str
    figures: str = ""
    field_path: str = ""

    def schema(self) -> FreeForm:
        """Write it as an entry of `x-kubernetes-validations`."""
        entry = {"rule": self.holds, "message": self.message}
        if self.figures:
            entry["messageExpression"] = self.figures
        if self.field_path:
            entry["fieldPath"] = self.field_path
        return entry


def all_rules() -> Iterator[Rule]:
    """Yield every rule beside those that belong to a single flag's bounds."""
    yield from _windows()
    yield from _size()
    yield from _shared_memory()
    yield from _server()
    yield from _ways()
    yield from _selector()
    yield from _pods()


def _windows() -> Iterator[Rule]:
    """Relations of the liveness windows; a timeout of 0 switches them off."""
    at, off = "spec.reaping", "self.reapTimeoutSeconds == 0 || "
    bounds = FLAGS["worker_reap_timeout_seconds"].flag.bounds
    assert bounds is not None, "the timeout has bounds"
    least = f"{bounds.low:.0f}"
    yield Rule(
        f"{at}.reapTimeoutSeconds",
        f"self == 0 || self >= {least}",
        f"reapTimeoutSeconds must be 0 (off) or {least} or more",
        f"'reapTimeoutSeconds is %d, but must be 0 (off) or {least} or more: raise it to {least}'"
        ".format([self])",
    )
    yield Rule(
        at,
        off + "self.registrationGraceSeconds >= self.reapTimeoutSeconds",
        "registrationGraceSeconds must be reapTimeoutSeconds or more, unless that is 0",
        "'registrationGraceSeconds is %d, but must be reapTimeoutSeconds (%d) or more: raise the "
        "grace to %d or lower the timeout'.format([self.registrationGraceSeconds, "
        "self.reapTimeoutSeconds, self.reapTimeoutSeconds])",
        ".registrationGraceSeconds",
    )
    missed = MISSED_HEARTBEATS
    yield Rule(
        at,
        f"{off}self.reapTimeoutSeconds >= {missed} * self.heartbeatIntervalSeconds",
        f"reapTimeoutSeconds must be 0 (off), or {missed} x heartbeatIntervalSeconds or more",
        f"'reapTimeoutSeconds is %d, but must be {missed} x heartbeatIntervalSeconds (%d) = %d or "
        "more: raise the timeout to %d or lower the interval to %d'.format("
        "[self.reapTimeoutSeconds, self.heartbeatIntervalSeconds, "
        f"{missed} * self.heartbeatIntervalSeconds, {missed} * self.heartbeatIntervalSeconds, "
        f"self.reapTimeoutSeconds / {missed}])",
        ".reapTimeoutSeconds",
    )
    yield Rule(
        at,
        off + "self.hints.confirmSeconds <= self.reapTimeoutSeconds",
        "hints.confirmSeconds must be reapTimeoutSeconds or less, unless that is 0",
        "'confirmSeconds is %d, but must be reapTimeoutSeconds (%d) or less: lower it to %d'"
        ".format([self.hints.confirmSeconds, self.reapTimeoutSeconds, self.reapTimeoutSeconds])",
        ".hints.confirmSeconds",
    )
    yield Rule(
        at,
        off + "self.hints.closeConfirmSeconds <= self.hints.confirmSeconds",
        "hints.closeConfirmSeconds must be hints.confirmSeconds or less, unless "
        "reapTimeoutSeconds is 0",
        "'closeConfirmSeconds is %d, but must be confirmSeconds (%d) or less: lower it to %d, or "
        "raise confirmSeconds to %d'.format([self.hints.closeConfirmSeconds, "
        "self.hints.confirmSeconds, self.hints.confirmSeconds, self.hints.closeConfirmSeconds])",
        ".hints.closeConfirmSeconds",
    )


def size_bounds_bytes() -> tuple[int, int]:
    """Return the least and the largest cache that the agent takes, in bytes."""
    bounds = FLAGS["l1_size_gb"].flag.bounds
    assert bounds is not None, "the cache's size has bounds"
    return math.ceil(bounds.low * GIB), math.floor(bounds.high * GIB)


def shared_memory_bounds_bytes() -> tuple[int, int]:
    """Return the least and the largest shared memory of a slot, in bytes; 0 is off."""
    bounds = FLAGS["slot_shared_memory_bytes"].flag.bounds
    assert bounds is not None, "the shared memory has bounds"
    return math.ceil(bounds.low), math.floor(bounds.high)


def _size() -> Iterator[Rule]:
    """A quantity of bytes, within the bounds of the agent's flag."""
    least, most = size_bounds_bytes()
    too_small = f"must be {least} bytes (0.001 GiB) or more: raise it to 2Mi or more"
    yield from _quantity("spec.cache.size", "20Gi", (least, too_small), most)


def _shared_memory() -> Iterator[Rule]:
    least, most = shared_memory_bounds_bytes()
    too_small = "must be 0 (off) or 1Mi or more: raise it to 1Mi"
    at = "spec.transport.devicePlugin.sharedMemory"
    yield from _quantity(at, "64Gi", (least, too_small), most, zero_is_off=True)


def _quantity(
    at: str, example: str, least: tuple[int, str], most: int, *, zero_is_off: bool = False
) -> Iterator[Rule]:
    """A quantity of bytes within bounds; `least` comes with the words for what is below it."""
    name, given = at.rpartition(".")[2], "quantity(string(self))"
    is_quantity = "(type(self) == int || isQuantity(self))"
    form = f"must be a quantity of bytes: write {example}, 500M or a plain number"
    yield Rule(at, is_quantity, f"{name} {form}", f"'{name} is \"%s\", but {form}'.format([self])")
    limit, too_small = least
    is_off = f"{given}.compareTo(quantity('0')) == 0 || " if zero_is_off else ""
    yield Rule(
        at,
        # Parts of a byte count as one, as they do for the agent.
        f"!{is_quantity} || {is_off}{given}.compareTo(quantity('{limit - 1}')) > 0",
        f"{name} {too_small}",
        f"'{name} is %s, but {too_small}'.format([self])",
    )
    too_large = f"must be {most // GIB}Gi or less: lower it"
    yield Rule(
        at,
        f"!{is_quantity} || {given}.compareTo(quantity('{most}')) <= 0",
        f"{name} {too_large}",
        f"'{name} is %s, but {too_large}'.format([self])",
    )


def _server() -> Iterator[Rule]:
    yield Rule(
        "spec.server",
        "self.port != self.httpPort",
        "httpPort must differ from port",
        "'httpPort is %d, but must differ from port (%d): give one of them another number'"
        ".format([self.httpPort, self.port])",
        ".httpPort",
    )
    owned = json.dumps(list(OWNED_FLAGS)).replace('"', "'")
    fields = json.dumps(OWNED_FLAGS).replace('"', "'")
    yield Rule(
        "spec.server.extraArgs[]",
        f"!(self.split('=')[0] in {owned})",
        "a flag that the operator sets from this spec may not stand in extraArgs",
        "'\"%s\" sets a flag that the operator sets itself: remove it and use %s'"
        f".format([self, {fields}[self.split('=')[0]]])",
    )


def _ways() -> Iterator[Rule]:
    yield Rule(
        "spec.transport",
        "self.unixSocket == 'Disabled' || self.devicePlugin.mode == 'Disabled'",
        "unixSocket is HostPath, but must be Disabled while devicePlugin.mode is Enabled, which "
        "gives each worker a socket of its own: leave unixSocket out, or set devicePlugin.mode to "
        "Disabled",
        field_path=".unixSocket",
    )


def _selector() -> Iterator[Rule]:
    yield Rule(
        "spec.workers",
        "has(self.podSelector) == has(oldSelf.podSelector) && "
        "(!has(self.podSelector) || self.podSelector == oldSelf.podSelector)",
        "podSelector cannot be changed, since workers of the old selection would be forgotten "
        "while they run: make another LMCacheServer and move the workers to it",
    )
    yield Rule(
        "spec.workers.podSelector",
        "(has(self.matchLabels) && size(self.matchLabels) > 0) || "
        "(has(self.matchExpressions) && size(self.matchExpressions) > 0)",
        "podSelector is empty and would take every pod for a worker: name a label in matchLabels "
        "or matchExpressions, or leave podSelector out",
    )
    yield Rule(
        "spec.workers.podSelector.matchExpressions[]",
        "(self.operator in ['In', 'NotIn']) == (has(self.values) && size(self.values) > 0)",
        "In and NotIn need values, Exists and DoesNotExist take none",
    )


def _pods() -> Iterator[Rule]:
    yield Rule(
        "spec.updateStrategy.maxUnavailable",
        "type(self) == int ? self > 0 : string(self).matches('^([1-9][0-9]?|100)%$')",
        "maxUnavailable must be a number of 1 or more, or 1% to 100%: set 1 or 10%",
        "'maxUnavailable is %s, but must be a number of 1 or more, or 1%% to 100%%: set 1 or 10%%'"
        ".format([self])",
    )
    yield Rule(
        "spec.env[]",
        "!self.name.startsWith('LMCACHE_KUBE_')",
        "names that begin with LMCACHE_KUBE_ are flags of the agent: use the fields of this spec "
        "or server.extraArgs",
        "'%s is a flag of the agent: use the fields of this spec or server.extraArgs'"
        ".format([self.name])",
    )
    yield Rule(
        "spec.env[]",
        "!(has(self.value) && has(self.valueFrom))",
        "value and valueFrom exclude each other: remove one of them",
    )
