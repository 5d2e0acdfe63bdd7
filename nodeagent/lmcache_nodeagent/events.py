"""One frozen record per fact the agent reports; logs, counters and spans subscribe to them.

The records stand at the bottom of the layers, so that any part may publish without knowing who
listens; `observability/` holds the bus and the subscribers. `Publish` never blocks and never
raises: a full bus drops and counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lmcache_nodeagent.ids import InstanceId


@dataclass(frozen=True, slots=True)
class Event:
    """Root of all records. Subclass names in snake case are the log event names."""


@dataclass(frozen=True, slots=True)
class InstanceRegistered(Event):
    """A worker's memory was mapped. `replaced`: an older context of the same id gave way."""

    instance_id: InstanceId
    model: str
    peer: str
    mapped_bytes: int
    replaced: bool


@dataclass(frozen=True, slots=True)
class ContextReplaced(Event):
    """An id registered with other memory: a recovery, or two workers that share one id by mistake.

    `earlier_peer` and `peer` are who held it and who holds it now.
    """

    instance_id: InstanceId
    model: str
    earlier_peer: str
    peer: str


@dataclass(frozen=True, slots=True)
class InstanceUnregistered(Event):
    """A worker said goodbye itself."""

    instance_id: InstanceId
    model: str
    peer: str


@dataclass(frozen=True, slots=True)
class InstanceReaped(Event):
    """A dead worker's memory was fenced off; `InstanceReleased` follows once it is unmapped."""

    instance_id: InstanceId
    model: str
    reason: str
    evidence: tuple[str, ...]
    silent_seconds: float
    mapped_bytes: int


@dataclass(frozen=True, slots=True)
class InstanceWouldBeReaped(Event):
    """What enforcing would have reaped: observe mode, or a reap timeout of 0."""

    instance_id: InstanceId
    model: str
    reason: str
    evidence: tuple[str, ...]
    silent_seconds: float


@dataclass(frozen=True, slots=True)
class InstanceReleased(Event):
    """A context is closed and its bytes are returned. `release_seconds` counts from the fence."""

    instance_id: InstanceId
    released_bytes: int
    release_seconds: float


@dataclass(frozen=True, slots=True)
class ReleaseStuck(Event):
    """A context did not close within its deadline; nothing else waits for it."""

    instance_id: InstanceId
    waited_seconds: float
    transfers_in_flight: int


@dataclass(frozen=True, slots=True)
class ReleaseFailed(Event):
    """Closing a context raised; its memory may stay mapped until the agent restarts."""

    instance_id: InstanceId
    error: str


@dataclass(frozen=True, slots=True)
class HintCancelled(Event):
    """A sign of life cleared a shortened window: a closed connection, a hint, a proof that waited.

    `trigger` is what the operator had said, empty if it was the connection alone.
    """

    instance_id: InstanceId
    window: str
    trigger: str = ""


@dataclass(frozen=True, slots=True)
class FalseReap(Event):
    """A reaped instance was heard again: it was alive, or has thawed. `reason`: of the reap."""

    instance_id: InstanceId
    reason: str
    seconds_after_reap: float
    peer: str


@dataclass(frozen=True, slots=True)
class EvidenceTaken(Event):
    """The operator said something about an instance. `kind`: proof or hint.

    `outcome`: applied, contradicted (taken as a hint), or why it has no effect.
    """

    instance_id: InstanceId
    trigger: str
    kind: str
    outcome: str


@dataclass(frozen=True, slots=True)
class DevicePluginRegistered(Event):
    """The kubelet knows the resource: pods that ask for it can be placed here."""

    resource: str
    slots: int


@dataclass(frozen=True, slots=True)
class DevicePluginOff(Event):
    """The kubelet does not know the resource. `reason`: no_kubelet, conflict or failing."""

    resource: str
    reason: str
    problem: str


@dataclass(frozen=True, slots=True)
class PodResourcesUnread(Event):
    """The kubelet does not say which pod has which slot. Said once until it does again."""

    socket: str
    problem: str


@dataclass(frozen=True, slots=True)
class ContainerStarted(Event):
    """The kubelet was about to start a container at a slot.

    `outcome`: at_once; released, after `seconds` of waiting for memory of what ran there before; or
    gave_up, with memory of `instances` still mapped.
    """

    slots: tuple[str, ...]
    outcome: str
    seconds: float
    instances: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SharedMemoryExceeded(Event):
    """A container has more in its shared memory than it may. Said once for each of its runs.

    `pod`: `namespace/name`, empty if the kubelet has not said whose slot it is.
    """

    slot: str
    pod: str
    excess: str


@dataclass(frozen=True, slots=True)
class ReapingSettingsChanged(Event):
    """Other reaping settings are in force. `changed`: `name: old -> new`, each."""

    changed: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ReapingSettingsRefused(Event):
    """The file of the reaping settings cannot be used; those in force stay."""

    problem: str


@dataclass(frozen=True, slots=True)
class OperatorLinkConnected(Event):
    """The stream to the operator is open."""

    url: str


@dataclass(frozen=True, slots=True)
class OperatorLinkLost(Event):
    """An open stream to the operator ended. `reason` has few values, `detail` is for people."""

    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class OperatorLinkFailed(Event):
    """An attempt to reach the operator failed; `OperatorLinkDown` says so once."""

    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class OperatorLinkDown(Event):
    """There is no link, for a reason that was not reported since there was one."""

    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class SilenceBrakeApplied(Event):
    """Most peers fell silent together and the agent itself looks at fault: reaps wait."""

    silent_peers: int
    tracked_peers: int
    seconds: float


@dataclass(frozen=True, slots=True)
class HeartbeatMismatch(Event):
    """A worker pings more slowly than the reap timeout allows for; its window was widened."""

    instance_id: InstanceId
    observed_interval_seconds: float
    window_seconds: float


@dataclass(frozen=True, slots=True)
class StrangerRefused(Event):
    """A message for an instance came from a connection that may not speak for it."""

    instance_id: InstanceId
    operation: str
    peer: str
    bound_peer: str


@dataclass(frozen=True, slots=True)
class RequestRefused(Event):
    """A request was answered negatively because of the caller. `reason` is a RequestError code."""

    operation: str
    reason: str
    peer: str
    detail: str


@dataclass(frozen=True, slots=True)
class RequestFailed(Event):
    """A handler failed on our side; the caller got the negative reply. `detail`: the traceback."""

    operation: str
    error: str
    peer: str
    detail: str


@dataclass(frozen=True, slots=True)
class MalformedMessage(Event):
    """Bytes on the message port that are no request: logged once per peer and period."""

    reason: str
    peer: str
    detail: str


@dataclass(frozen=True, slots=True)
class ConnectionTurnedAway(Event):
    """A connection was ended as it came. `reason`: peer (it has half of all), or all are in use."""

    reason: str
    peer: str


@dataclass(frozen=True, slots=True)
class ReplyDropped(Event):
    """A reply could not be delivered. `reason`: peer_gone or peer_not_reading."""

    operation: str
    reason: str
    peer: str


@dataclass(frozen=True, slots=True)
class Stored(Event):
    """A store ended. `admitted_chunks` were copied, the others were there already or empty."""

    instance_id: InstanceId
    model: str
    requested_chunks: int
    admitted_chunks: int
    copied_bytes: int
    seconds: float
    ok: bool


@dataclass(frozen=True, slots=True)
class Retrieved(Event):
    """A retrieve ended; `ok` only if every chunk of the range was copied."""

    instance_id: InstanceId
    model: str
    requested_chunks: int
    copied_bytes: int
    seconds: float
    ok: bool


@dataclass(frozen=True, slots=True)
class MessagesTooSmall(Event):
    """A worker sends its KV in messages of which `max_message_bytes` hold few tokens.

    A longer store closes its connection and is lost; hits are cut to what one message has.
    """

    instance_id: InstanceId
    tokens: int
    max_message_bytes: int


@dataclass(frozen=True, slots=True)
class LeasesDropped(Event):
    """A client that had looked up is gone; what its look-ups kept can be evicted."""

    peer: str
    sessions: int
    objects: int


@dataclass(frozen=True, slots=True)
class HitCutShort(Event):
    """A look-up was told of `hit_chunks` and no more: a worker of the model could not get them.

    They come in one message of at most `--max-message-bytes`.
    """

    model: str
    requested_chunks: int
    hit_chunks: int


@dataclass(frozen=True, slots=True)
class SlotsQuarantined(Event):
    """An instance left with transfers that it had not confirmed; its process may still live.

    `quarantined_bytes` of L1 are nobody's until its connections are closed.
    """

    instance_id: InstanceId
    quarantined_bytes: int
    transfers: int


@dataclass(frozen=True, slots=True)
class SlotsRecovered(Event):
    """The slots of an instance that left are free again: nobody can use them any more."""

    instance_id: InstanceId
    recovered_bytes: int
    transfers: int
    seconds: float


@dataclass(frozen=True, slots=True)
class LookedUp(Event):
    """A lookup found `hit_chunks` of `requested_chunks` as its longest usable prefix."""

    model: str
    requested_chunks: int
    hit_chunks: int


@dataclass(frozen=True, slots=True)
class KvEventStreamEnded(Event):
    """A stream of KV events ended. `reason`: cancelled, replaced or connection_closed."""

    reason: str


@dataclass(frozen=True, slots=True)
class UnheldRelease(Event):
    """A free_lookup_locks named objects of which its request holds no pin: nothing was freed.

    Another cache salt than the lookup's, a request that ended or ran into its time-out.
    """

    peer: str
    objects: int


@dataclass(frozen=True, slots=True)
class UnknownInstanceTold(Event):
    """A ping of an id without a context was answered false once, so that it registers again."""

    instance_id: InstanceId
    peer: str


Publish = Callable[[Event], None]
"""Hands a record to the bus. Threads: any."""


def discard(event: Event) -> None:
    """Publish to nobody; for tests and tools that need no observer."""
    del event
