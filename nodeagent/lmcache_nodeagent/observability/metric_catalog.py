"""Every metric of the agent, in one table: what feeds it and what it means.

The registry (`metrics.py`) and the reference `docs/metrics.md` derive from it. Labels have few
values by design: never an instance id, a request or a peer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lmcache_nodeagent import events
from lmcache_nodeagent.events import Event

PREFIX = "lmcache_kube_"

COPY_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
"""Seconds: from a chunk in host memory to a long prompt under load."""

RELEASE_BUCKETS = (0.001, 0.005, 0.02, 0.1, 0.5, 1.0, 5.0, 15.0, 30.0, 60.0)
"""Seconds: from unmapping host memory to the release deadline and beyond."""


@dataclass(frozen=True, slots=True)
class Counted:
    """A counter or histogram that events feed.

    `labels` and `amount` name fields of `event`; without an amount each event counts 1.
    With `buckets` it is a histogram of the amount.
    """

    name: str
    about: str
    event: type[Event]
    labels: tuple[str, ...] = ()
    amount: str = ""
    buckets: tuple[float, ...] = ()

    @property
    def kind(self) -> str:
        """Prometheus type."""
        return "histogram" if self.buckets else "counter"


@dataclass(frozen=True, slots=True)
class Sampled:
    """A gauge or counter that is read from a snapshot at each scrape; `label` if it has one."""

    name: str
    about: str
    kind: Literal["gauge", "counter"] = "gauge"
    label: str = ""

    @property
    def labels(self) -> tuple[str, ...]:
        """Label names, as `Counted` has them."""
        return (self.label,) if self.label else ()


COUNTED: tuple[Counted, ...] = (
    Counted(
        "instances_registered_total",
        "Registrations that mapped a worker's memory.",
        events.InstanceRegistered,
    ),
    Counted(
        "instances_unregistered_total",
        "Workers that said goodbye themselves.",
        events.InstanceUnregistered,
    ),
    Counted(
        "instances_reaped_total",
        "Workers found dead, by reason.",
        events.InstanceReaped,
        labels=("reason",),
    ),
    Counted(
        "instances_would_be_reaped_total",
        "Workers that enforcing would have reaped: observe mode, or a reap timeout of 0.",
        events.InstanceWouldBeReaped,
        labels=("reason",),
    ),
    Counted(
        "released_bytes_total",
        "Worker memory unmapped again.",
        events.InstanceReleased,
        amount="released_bytes",
    ),
    Counted(
        "release_seconds",
        "Time from fencing an instance off to its memory being unmapped.",
        events.InstanceReleased,
        amount="release_seconds",
        buckets=RELEASE_BUCKETS,
    ),
    Counted("releases_stuck_total", "Releases that overran their deadline.", events.ReleaseStuck),
    Counted("releases_failed_total", "Releases that raised.", events.ReleaseFailed),
    Counted(
        "hints_cancelled_total",
        "Shortened windows that a sign of life cleared.",
        events.HintCancelled,
        labels=("window",),
    ),
    Counted(
        "false_reaps_total",
        "Reaped workers that were heard again, by the reason they were reaped for.",
        events.FalseReap,
        labels=("reason",),
    ),
    Counted(
        "operator_evidence_total",
        "What the operator said about workers. outcome: applied, contradicted (a hint then), or "
        "why it has no effect.",
        events.EvidenceTaken,
        labels=("trigger", "kind", "outcome"),
    ),
    Counted(
        "operator_link_connects_total",
        "Streams to the operator that were opened.",
        events.OperatorLinkConnected,
    ),
    Counted(
        "operator_link_lost_total",
        "Open streams to the operator that ended.",
        events.OperatorLinkLost,
        labels=("reason",),
    ),
    Counted(
        "operator_link_failures_total",
        "Attempts to reach the operator that failed.",
        events.OperatorLinkFailed,
        labels=("reason",),
    ),
    Counted(
        "device_plugin_registrations_total",
        "Times that the kubelet was told of the resource: once for each start of either.",
        events.DevicePluginRegistered,
    ),
    Counted(
        "container_starts_total",
        "Containers that the kubelet was about to start at a slot, by what the start waited for.",
        events.ContainerStarted,
        labels=("outcome",),
    ),
    Counted(
        "container_start_wait_seconds",
        "Time that the start of a container waited for memory of what ran there before.",
        events.ContainerStarted,
        amount="seconds",
        buckets=RELEASE_BUCKETS,
    ),
    Counted(
        "slot_shared_memory_exceeded_total",
        "Runs of containers that had more in their shared memory than they may.",
        events.SharedMemoryExceeded,
    ),
    Counted(
        "reaping_settings_changes_total",
        "Times that other reaping settings were put into force.",
        events.ReapingSettingsChanged,
    ),
    Counted(
        "reaping_settings_refusals_total",
        "Files of reaping settings that could not be used.",
        events.ReapingSettingsRefused,
    ),
    Counted(
        "silence_brakes_total",
        "Times that reaping waited because most peers fell silent together.",
        events.SilenceBrakeApplied,
    ),
    Counted(
        "heartbeat_mismatches_total",
        "Workers found to ping more slowly than the reap timeout allows for.",
        events.HeartbeatMismatch,
    ),
    Counted(
        "strangers_refused_total",
        "Messages for an instance from a connection that may not speak for it.",
        events.StrangerRefused,
        labels=("operation",),
    ),
    Counted(
        "unknown_instances_told_total",
        "Pings answered false so that the worker registers again.",
        events.UnknownInstanceTold,
    ),
    Counted(
        "requests_refused_total",
        "Requests answered negatively because of the caller.",
        events.RequestRefused,
        labels=("operation", "reason"),
    ),
    Counted(
        "requests_failed_total",
        "Requests answered negatively because the agent failed.",
        events.RequestFailed,
        labels=("operation",),
    ),
    Counted(
        "malformed_messages_total",
        "Messages on the message port that are no request.",
        events.MalformedMessage,
        labels=("reason",),
    ),
    Counted(
        "connections_turned_away_total",
        "Connections that were ended as they came: their peer had half of all, or all were in use.",
        events.ConnectionTurnedAway,
        labels=("reason",),
    ),
    Counted(
        "replies_dropped_total",
        "Replies that could not be delivered.",
        events.ReplyDropped,
        labels=("reason",),
    ),
    Counted("stores_total", "Stores, by outcome.", events.Stored, labels=("ok",)),
    Counted(
        "stored_chunks_total",
        "Chunks copied into L1.",
        events.Stored,
        amount="admitted_chunks",
    ),
    Counted("stored_bytes_total", "Bytes copied into L1.", events.Stored, amount="copied_bytes"),
    Counted(
        "store_seconds",
        "Time of a store.",
        events.Stored,
        amount="seconds",
        buckets=COPY_BUCKETS,
    ),
    Counted("retrieves_total", "Retrieves, by outcome.", events.Retrieved, labels=("ok",)),
    Counted(
        "retrieved_bytes_total",
        "Bytes copied from L1 to workers.",
        events.Retrieved,
        amount="copied_bytes",
    ),
    Counted(
        "retrieve_seconds",
        "Time of a retrieve.",
        events.Retrieved,
        amount="seconds",
        buckets=COPY_BUCKETS,
    ),
    Counted(
        "kv_event_streams_ended_total",
        "Streams of KV events that ended.",
        events.KvEventStreamEnded,
        labels=("reason",),
    ),
    Counted(
        "unheld_releases_total",
        "Releases of lookup locks that their request does not hold; nothing was freed.",
        events.UnheldRelease,
    ),
    Counted(
        "leases_dropped_total",
        "Sessions that ended because the client that had looked up is gone.",
        events.LeasesDropped,
        amount="sessions",
    ),
    Counted("lookups_total", "Lookups.", events.LookedUp),
    Counted(
        "lookups_cut_short_total",
        "Lookups that were told of no more chunks than --max-message-bytes lets a worker load.",
        events.HitCutShort,
    ),
    Counted(
        "lookup_requested_chunks_total",
        "Chunks that lookups asked for.",
        events.LookedUp,
        amount="requested_chunks",
    ),
    Counted(
        "lookup_hit_chunks_total",
        "Chunks that lookups found.",
        events.LookedUp,
        amount="hit_chunks",
    ),
)

INSTANCES = Sampled("instances", "Registered workers, by state.", label="state")
WORKER_MAPPED_BYTES = Sampled("worker_mapped_bytes", "Worker memory that is mapped.")
RELEASES_IN_PROGRESS = Sampled("releases_in_progress", "Contexts that are being released.")
RELEASES_STUCK = Sampled("releases_stuck", "Releases that are past their deadline now.")
HEARTBEAT_MISMATCHED_INSTANCES = Sampled(
    "heartbeat_mismatched_instances",
    "Workers that ping more slowly than the reap timeout allows for; their window is wider.",
)
REAPING_SETTINGS_REFUSED = Sampled(
    "reaping_settings_refused",
    "1 if the newest file of reaping settings is not in force because it cannot be used.",
)
OPERATOR_LINK_CONNECTED = Sampled(
    "operator_link_connected", "1 if a stream to the operator is open."
)
DEVICE_PLUGIN_REGISTERED = Sampled(
    "device_plugin_registered", "1 if the kubelet knows the resource of this agent."
)
SLOTS = Sampled("slots", "Slots of the device plugin, by whether a pod has them.", label="state")
JOURNAL_UNACKNOWLEDGED_ENTRIES = Sampled(
    "journal_unacknowledged_entries",
    "Reaps and the like that no operator has acknowledged; without an operator, all of them.",
)
JOURNAL_MISSED_ENTRIES_TOTAL = Sampled(
    "journal_missed_entries_total",
    "Such entries that gave way to newer ones before they were acknowledged.",
    kind="counter",
)
CONNECTIONS = Sampled("connections", "Open connections on the message port.")
QUEUED_REQUESTS = Sampled("queued_requests", "Requests that wait for a thread.", label="pool")
WAITING_BYTES = Sampled(
    "waiting_bytes",
    "Bytes of requests that wait or run, and of replies that clients have not read.",
    label="kind",
)
OLDEST_TRANSFER_SECONDS = Sampled(
    "oldest_transfer_seconds", "Age of the oldest store or retrieve that waits or runs."
)
TRANSFERS_HANGING = Sampled(
    "transfers_hanging",
    "Transfers that were answered at their deadline and still hold a thread and their memory.",
)
TRANSFERS_OVERDUE_TOTAL = Sampled(
    "transfers_overdue_total",
    "Transfers that were answered negatively because of their deadline.",
    kind="counter",
)
SESSIONS = Sampled("sessions", "Requests whose lookup is remembered.")
KV_EVENT_STREAMS = Sampled("kv_event_streams", "Streams of KV events that are open.")
LEASES = Sampled("leases", "Sessions that keep objects from eviction.")
OLDEST_LEASE_SECONDS = Sampled("oldest_lease_seconds", "Age of the oldest of these sessions.")
MODELS = Sampled("models", "Models, by name and world size, that have a registered worker.")
L1_CAPACITY_BYTES = Sampled("l1_capacity_bytes", "Size of L1.")
L1_USED_BYTES = Sampled("l1_used_bytes", "Bytes of L1 in use, unfinished stores included.")
L1_PINNED_BYTES = Sampled("l1_pinned_bytes", "Bytes of L1 that cannot be evicted now.")
L1_PINNED_OBJECTS = Sampled("l1_pinned_objects", "Objects that cannot be evicted now.")
L1_EXCESS_UNPINS_TOTAL = Sampled(
    "l1_excess_unpins_total",
    "Pins taken off that were not there: a fault of the agent's own books.",
    kind="counter",
)
L1_QUARANTINED_BYTES = Sampled(
    "l1_quarantined_bytes",
    "Bytes of L1 that workers which left may still write to; free once they are gone.",
)
L1_OBJECTS = Sampled("l1_objects", "Objects that lookups can find.")
L1_EVICTED_TOTAL = Sampled("l1_evicted_total", "Objects that gave way to others.", kind="counter")
L1_REFUSED_TOTAL = Sampled("l1_refused_total", "Reservations that did not fit.", kind="counter")
EVENTS_DROPPED_TOTAL = Sampled(
    "events_dropped_total",
    "Events that the full bus dropped; the log lacks them, the counters have them.",
    kind="counter",
)
EVENT_FAILURES_TOTAL = Sampled(
    "event_failures_total", "Times that a subscriber of events raised.", kind="counter"
)

SAMPLED: tuple[Sampled, ...] = (
    INSTANCES,
    WORKER_MAPPED_BYTES,
    HEARTBEAT_MISMATCHED_INSTANCES,
    RELEASES_IN_PROGRESS,
    RELEASES_STUCK,
    REAPING_SETTINGS_REFUSED,
    OPERATOR_LINK_CONNECTED,
    DEVICE_PLUGIN_REGISTERED,
    SLOTS,
    JOURNAL_UNACKNOWLEDGED_ENTRIES,
    JOURNAL_MISSED_ENTRIES_TOTAL,
    CONNECTIONS,
    QUEUED_REQUESTS,
    WAITING_BYTES,
    OLDEST_TRANSFER_SECONDS,
    TRANSFERS_HANGING,
    TRANSFERS_OVERDUE_TOTAL,
    SESSIONS,
    KV_EVENT_STREAMS,
    LEASES,
    OLDEST_LEASE_SECONDS,
    MODELS,
    L1_CAPACITY_BYTES,
    L1_USED_BYTES,
    L1_PINNED_BYTES,
    L1_PINNED_OBJECTS,
    L1_EXCESS_UNPINS_TOTAL,
    L1_QUARANTINED_BYTES,
    L1_OBJECTS,
    L1_EVICTED_TOTAL,
    L1_REFUSED_TOTAL,
    EVENTS_DROPPED_TOTAL,
    EVENT_FAILURES_TOTAL,
)
