"""Journal entries of agents in the words of Kubernetes Events. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, assert_never

from lmcache_nodeagent.operator_link.messages import EntryKind, JournalEntry

LONGEST_MESSAGE = 1024
"""As the API server wants it of newer Events; older forms of them have no limit."""

_LONGEST_MODEL = 100
_LONGEST_EVIDENCE = 500

# Where a latency starts, by what the agent judged on.
_SINCE = {
    "container_terminated": "the container ended",
    "pod_terminated": "the pod ended",
    "process_exit": "its process exited",
    "slot_restarted": "the kubelet began to start the next container in its slot",
    "slot_released": "its pod no longer had the slot",
    "connection_closed": "its connection closed",
    "heartbeat_timeout": "it was last heard",
    "registration_grace": "it was last heard",
    "pod_gone": "its pod was found gone",
    "ended_unreported": "its pod was found ended",
}
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")
_RELEASED = "released"  # why a container's start was held no longer
_STEP = 1024
_TEN = 10


_REASONS: Mapping[EntryKind, str] = {
    "reaped": "WorkerReaped",
    "would_reap": "WorkerWouldBeReaped",
    "cancelled": "ReapCancelled",
    "false_reap": "FalseReap",
    "stuck_release": "ReleaseStuck",
    "start_held": "ContainerStartHeld",
    "shared_memory_exceeded": "SharedMemoryExceeded",
}


def reason_of(kind: EntryKind) -> str:
    """Return the `reason` of the Event, by which people filter."""
    return _REASONS[kind]


def type_of(entry: JournalEntry) -> Literal["Normal", "Warning"]:
    """Return the `type` of the Event: whether somebody should look."""
    waited_in_vain = entry.kind == "start_held" and entry.reason != _RELEASED
    harmless = entry.kind in {"would_reap", "cancelled", "start_held"} and not waited_in_vain
    return "Normal" if harmless else "Warning"


def message_of(entry: JournalEntry, node: str) -> str:
    """Say what happened, why, and how long it took."""
    model = f" of {_cut(entry.model, _LONGEST_MODEL)}" if entry.model else ""
    who = f"instance {entry.instance_id}{model} on node {node}"
    why = f"{entry.reason}, silent for {_seconds(entry.silent_seconds)}"
    message = f"{_sentence(entry, who, why)}{_evidence(entry)}"
    if entry.missed:
        message += f" {entry.missed} earlier entries of this agent are lost."
    return _cut(message, LONGEST_MESSAGE)


def size_in_words(size_bytes: int) -> str:
    """Write a size: 512 MiB, 1.5 GiB."""
    size, unit = float(size_bytes), 0
    while size >= _STEP and unit < len(_UNITS) - 1:
        size /= _STEP
        unit += 1
    return (
        f"{size:.1f} {_UNITS[unit]}" if size % 1 and size < _TEN else f"{size:.0f} {_UNITS[unit]}"
    )


def _sentence(entry: JournalEntry, who: str, why: str) -> str:
    kind = entry.kind
    match kind:
        case "reaped":
            return f"Reaped {who}: {why}; {_release(entry)}."
        case "would_reap":
            held = size_in_words(entry.released_bytes) if entry.released_bytes else "its memory"
            return f"Would have reaped {who}: {why}; {held} stays, since reaping is off."
        case "cancelled":
            return f"Spared {who}: {why}, and then there was a sign of life."
        case "false_reap":
            return (
                f"Heard again of {who} after it was reaped ({why}). It was told to register anew; "
                "if this happens often, raise spec.reaping.reapTimeoutSeconds."
            )
        case "stuck_release":
            size = size_in_words(entry.released_bytes) if entry.released_bytes else "The memory"
            return (
                f"{size} of dead {who} ({why}) does not come back: the release is stuck. See "
                "spec.reaping.stuckRelease."
            )
        case "start_held" | "shared_memory_exceeded":
            return _about_slot(entry, who)
        case _:
            assert_never(kind)


def _about_slot(entry: JournalEntry, who: str) -> str:
    """Say what a container has to do with its slot; of a start, `who` is of an earlier one."""
    if entry.kind == "shared_memory_exceeded":
        return (
            f"The container of {who} has more shared memory than it may. It goes on, but cannot "
            "register anew with that: make its KV memory smaller, or raise "
            "spec.transport.devicePlugin.sharedMemory."
        )
    pod = entry.slot_pod
    container = f" {pod.namespace}/{pod.name} ({pod.container})" if pod else ""
    began = f"The start of container{container} waited for memory of an earlier one, {who}"
    if entry.reason == _RELEASED:
        return f"{began}: that is back, and it starts."
    return (
        f"{began}: that is still mapped, and it starts all the same, maybe to run out of memory. "
        "See spec.transport.devicePlugin.preStartWaitSeconds and the condition ReaperHealthy."
    )


def _release(entry: JournalEntry) -> str:
    size = size_in_words(entry.released_bytes)
    if entry.latency_seconds is not None:
        since = _SINCE.get(entry.reason) or _SINCE.get(entry.trigger, "its end was noticed")
        return f"released {size} {_seconds(entry.latency_seconds)} after {since}"
    if entry.release_seconds is not None:
        return f"released {size} in {_seconds(entry.release_seconds)}"
    return "its memory is not released yet"


def _evidence(entry: JournalEntry) -> str:
    if not entry.evidence:
        return ""
    return f" Evidence: {_cut('; '.join(entry.evidence), _LONGEST_EVIDENCE)}."


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds < _TEN else f"{seconds:.0f} s"


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else text[: longest - 1] + "…"
