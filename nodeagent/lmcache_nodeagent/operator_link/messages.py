"""What agent and operator say to each other: one JSON object in each text frame of a WebSocket.

The agent opens the stream. Both sides ignore fields they do not know, so that a later release may
add some; a change that this does not cover gets a new subprotocol. Everything may be said twice.
Moments are seconds since 1970, by the clock of the side that says them unless stated otherwise.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import Struct

SUBPROTOCOL = "v1.link.lmcache-kube.dev"
"""Of the WebSocket handshake; an operator accepts this version and the one before it."""

TOKEN_AUDIENCE = "lmcache-kube-operator"  # noqa: S105  # the public name of who tokens are for

MAX_FRAME_BYTES = 1 << 20
"""Larger frames end the stream; long lists are said in several messages."""

INSTANCES_PER_MESSAGE = 500

MAX_INSTANCES = 4_000
"""Registrations that an agent says; an operator ends the stream of one that says more. A node runs
some tens of workers; the rest is head-room."""

MAX_MODEL_CHARACTERS = 256
"""Longer names are said cut: workers choose them, and they are only for people here."""

EntryKind = Literal[
    "reaped",
    "would_reap",
    "cancelled",
    "false_reap",
    "stuck_release",
    "start_held",
    "shared_memory_exceeded",
]
"""Kinds of journal entries. `cancelled`: a hint or an end that a sign of life refuted.
`false_reap`: a reaped instance that was heard again. `stuck_release`: memory not back in time.
`start_held`: the start of a container waited for memory of an earlier one in its slot; `reason` is
`released` or `gave_up`, and the instance is the earlier one. `shared_memory_exceeded`: the
container of a living instance has more in its shared memory than it may."""


class LinkError(Exception):
    """A frame that is none of these messages, with the reason in words."""


class PodOwner(Struct, frozen=True, kw_only=True):
    """The object that controls a pod, in its namespace: Events go there once the pod is gone."""

    api_version: str
    kind: str
    name: str
    uid: str


class PodRun(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where an instance runs. `container` and `run` (the runtime's id) are empty if not known."""

    namespace: str
    name: str
    uid: str
    container: str = ""
    run: str = ""
    owner: PodOwner | None = None


class SlotPod(Struct, frozen=True, kw_only=True):
    """Who has a slot of the device plugin, as the kubelet lists it: without the pod's uid."""

    namespace: str
    name: str
    container: str


class InstanceReport(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One registered instance.

    Attributes:
        instance_id: the engine's number for it, 0 to 2**63 - 1.
        registration: number of this registration, unique over one boot of the agent, rising.
        registered_at: by the node's clock, which is the kubelet's too.
        peer: IP address in normal form, without a port; empty over a Unix socket.
        connected: a connection that spoke for it is open.
        state: as in `/v1/instances`.
        mapping: what the operator said earlier, also an operator before this one.
        claimed_pod_uid: what the worker itself said, empty if it said nothing.
        slot: of the device plugin, through which it registered; empty elsewhere.
        slot_pod: whose that slot was at that time. It may become known a moment later.
    """

    instance_id: int
    registration: int
    registered_at: float
    model: str
    peer: str
    connected: bool
    state: str
    bytes: int
    mapping: PodRun | None = None
    claimed_pod_uid: str = ""
    slot: str = ""
    slot_pod: SlotPod | None = None


class ReapingSettings(Struct, frozen=True, kw_only=True):
    """The reaping settings in force; names and units as the agent's flags."""

    worker_reap_timeout_seconds: float
    worker_registration_grace_seconds: float
    worker_heartbeat_interval_seconds: float
    hint_confirm_seconds: float
    close_confirm_seconds: float
    reap_mode: str
    reap_idle_connected: bool
    hints: str
    stuck_release: str


class Hello(Struct, frozen=True, kw_only=True, tag="hello", omit_defaults=True):
    """First message of an agent. `boot_id` is new at each start of its process."""

    boot_id: str
    release: str


class Instances(Struct, frozen=True, kw_only=True, tag="instances", omit_defaults=True):
    """Registered instances, changed or all.

    After a connect all are said, in one or several messages, the last of which has
    `complete` set; from then on whatever changed. `gone` are (instance id, registration).
    """

    changed: tuple[InstanceReport, ...] = ()
    gone: tuple[tuple[int, int], ...] = ()
    complete: bool = False


class AgentState(Struct, frozen=True, kw_only=True, tag="state", omit_defaults=True):
    """The agent as a whole; said after a connect and on every change.

    Attributes:
        settings_problem: why the newest settings are not in force, empty if they are.
        releases_stuck: dead instances whose memory does not come back.
        mismatched_heartbeats: instances that ping too slowly for the timeout.
        device_plugin: `registered`, `no_kubelet`, `conflict` (another agent of the node has the
            resource) or `failing`; empty if there is no plugin.
        device_plugin_problem: in words, empty if there is none.
    """

    settings: ReapingSettings
    settings_problem: str = ""
    releases_stuck: int = 0
    mismatched_heartbeats: int = 0
    device_plugin: str = ""
    device_plugin_problem: str = ""


class JournalEntry(Struct, frozen=True, kw_only=True, tag="journal", omit_defaults=True):
    """Something that happened to an instance, until it is acknowledged.

    Attributes:
        seq: numbered from 1 over one boot, without gaps unless `missed` entries were dropped.
        missed: entries just before this one that are no longer kept.
        evidence: in words.
        trigger: the operator's trigger if its word had a part in it, else empty.
        happened_at: by the node's clock.
        latency_seconds: from the worker's end as far as it is known (evidence observed, connection
            closed, last word) to the memory's release; None if it is not released.
        slot, slot_pod: the instance's; of `start_held`, those of the container that waited.
    """

    seq: int
    kind: EntryKind
    instance_id: int
    registration: int
    model: str
    reason: str
    evidence: tuple[str, ...]
    silent_seconds: float
    happened_at: float
    released_bytes: int = 0
    release_seconds: float | None = None
    latency_seconds: float | None = None
    trigger: str = ""
    mapping: PodRun | None = None
    missed: int = 0
    slot: str = ""
    slot_pod: SlotPod | None = None


class Mapping(Struct, frozen=True, kw_only=True, tag="mapping", omit_defaults=True):
    """Where a registration runs; the agent keeps it and repeats it. None takes it back."""

    instance_id: int
    registration: int
    pod: PodRun | None = None


class Evidence(Struct, frozen=True, kw_only=True, tag="evidence", omit_defaults=True):
    """What the operator saw of a registration's container or pod. Only the agent judges.

    Attributes:
        id: the same for repeats of one observation, different for everything else.
        boot_id: of the agent it is meant for; another boot's registrations are not these.
        trigger: as in the operator's `Trigger`.
        proof: the kubelet's own word that the run has ended; else a hint.
        observed_at: by the operator's clock: for people, never compared with the node's.
        finished_at: by the kubelet's clock, which is the node's; None if not known.
    """

    id: str
    boot_id: str
    instance_id: int
    registration: int
    pod_uid: str
    trigger: str
    proof: bool
    observed_at: float
    container: str = ""
    run: str = ""
    finished_at: float | None = None


class Ack(Struct, frozen=True, kw_only=True, tag="ack"):
    """Every journal entry up to `seq` of this boot is dealt with and need not be said again."""

    boot_id: str
    seq: int


FromAgent = Hello | Instances | AgentState | JournalEntry
FromOperator = Mapping | Evidence | Ack

_encoder = msgspec.json.Encoder()
_from_agent: msgspec.json.Decoder[FromAgent] = msgspec.json.Decoder(FromAgent)
_from_operator: msgspec.json.Decoder[FromOperator] = msgspec.json.Decoder(FromOperator)


def encode(message: FromAgent | FromOperator) -> str:
    """Write a message as the text of one frame. Threads: any."""
    return _encoder.encode(message).decode()


def decode_from_agent(frame: str | bytes) -> FromAgent:
    """Read a frame of an agent.

    Raises:
        LinkError: it is none of an agent's messages.
    """
    try:
        return _from_agent.decode(frame)
    except msgspec.MsgspecError as error:
        raise LinkError(str(error)) from None


def decode_from_operator(frame: str | bytes) -> FromOperator:
    """Read a frame of the operator.

    Raises:
        LinkError: it is none of an operator's messages.
    """
    try:
        return _from_operator.decode(frame)
    except msgspec.MsgspecError as error:
        raise LinkError(str(error)) from None
