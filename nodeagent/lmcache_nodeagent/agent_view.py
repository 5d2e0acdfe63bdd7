"""What people and Prometheus see of a running agent. Threads: any; it changes nothing."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmcache_nodeagent.clock import wall_time_text
from lmcache_nodeagent.ids import render_instance_id
from lmcache_nodeagent.liveness.policy import State
from lmcache_nodeagent.liveness.words import hint_words
from lmcache_nodeagent.observability import metric_catalog as catalog
from lmcache_nodeagent.protocol.operations import LMCACHE_RELEASE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from lmcache_nodeagent.clock import Now
    from lmcache_nodeagent.config import AgentConfig
    from lmcache_nodeagent.device_plugin.plugin import DevicePlugin
    from lmcache_nodeagent.liveness.journal import Journal
    from lmcache_nodeagent.liveness.live_settings import LiveSettings
    from lmcache_nodeagent.liveness.policy import Verdict
    from lmcache_nodeagent.liveness.reaper import Reaper
    from lmcache_nodeagent.liveness.release import Release, Releaser
    from lmcache_nodeagent.liveness.slots import SlotBook
    from lmcache_nodeagent.liveness.targets import ReapableEntry
    from lmcache_nodeagent.modules.kv_events import KvEventModule
    from lmcache_nodeagent.modules.layouts import LayoutRegistry
    from lmcache_nodeagent.modules.slot_quarantine import SlotQuarantine
    from lmcache_nodeagent.observability.bus import EventBus
    from lmcache_nodeagent.observability.metrics import Metrics, Reading
    from lmcache_nodeagent.operator_link.client import OperatorLink
    from lmcache_nodeagent.sessions import SessionTable
    from lmcache_nodeagent.storage.objects import L1Store
    from lmcache_nodeagent.transport.lanes import LanePool
    from lmcache_nodeagent.transport.pools import OrderedPool
    from lmcache_nodeagent.transport.router import Router
    from lmcache_nodeagent.transport.waiting_bytes import Waiting

ROUTER_STUCK_SECONDS = 30.0
"""A router loop that has not come round for this long serves nobody: the process is not healthy."""


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of an agent that have something to show."""

    config: AgentConfig
    boot_id: str
    settings: LiveSettings
    router: Router
    reaper: Reaper
    releaser: Releaser
    journal: Journal
    store: L1Store
    quarantine: SlotQuarantine
    sessions: SessionTable
    layouts: LayoutRegistry
    sync_pool: OrderedPool
    normal_pool: OrderedPool
    transfer_pool: LanePool
    waiting: Waiting
    bus: EventBus
    link: OperatorLink | None = None
    kv_events: KvEventModule | None = None
    plugin: DevicePlugin | None = None
    slots: SlotBook | None = None


class RunningAgent:
    """Implements `observability.http.AgentView`, and the snapshot that metrics read."""

    def __init__(
        self, parts: Parts, metrics: Metrics, is_serving: Callable[[], bool], now: Now
    ) -> None:
        self._parts = parts
        self._metrics = metrics
        self._is_serving = is_serving
        self._now = now

    def healthy(self) -> tuple[bool, str]:
        """Tell whether requests are read, and memory is released if that is asked for."""
        behind = self._now() - self._parts.router.last_turn_at()
        if behind > ROUTER_STUCK_SECONDS:
            return False, f"the message loop has not come round for {behind:.0f} s"
        if self._parts.settings().restart_when_stuck:
            for release in self._parts.releaser.stuck():
                waited = self._now() - release.started_at
                name = render_instance_id(release.entry.instance_id)
                return False, f"instance {name}: its memory is not back after {waited:.0f} s"
        return self._transfers_health()

    def _transfers_health(self) -> tuple[bool, str]:
        """A copy that hangs is one worker's trouble, until the threads for new ones run out."""
        pool = self._parts.transfer_pool
        overdue = pool.overdue()
        if not overdue.running:
            return True, "requests are served"
        hanging = f"{overdue.running} transfers hang, the oldest for {overdue.oldest_seconds:.0f} s"
        if pool.is_out_of_threads():
            return False, f"{hanging}: no thread is left for others"
        return True, f"requests are served, but {hanging}"

    def ready(self) -> tuple[bool, str]:
        """Tell whether workers are served now."""
        if not self._is_serving():
            return False, "starting or stopping"
        return self.healthy()

    def status(self) -> Mapping[str, object]:
        """Return the body of `/status`."""
        parts = self._parts
        config = parts.config
        return {
            "instance_id": config.instance_id or parts.boot_id,
            "boot_id": parts.boot_id,
            "lmcache_release": LMCACHE_RELEASE,
            "port": config.port,
            "ipc_path": config.ipc_path,
            "chunk_size": config.chunk_size,
            "worker_liveness": self._liveness(),
            "l1": self._l1(),
            "sessions": len(parts.sessions),
            "models": len(parts.layouts),
            "connections": parts.router.connections_open(),
            "queued_requests": {
                "sync": parts.sync_pool.depth(),
                "normal": parts.normal_pool.depth(),
                "affinity": parts.transfer_pool.depth(),
            },
            "oldest_transfer_seconds": round(parts.transfer_pool.oldest_seconds(), 3),
            "hanging_transfers": parts.transfer_pool.overdue().running,
            "operator_link": self._link(),
            "device_plugin": self._device_plugin(),
        }

    def _link(self) -> Mapping[str, object]:
        link, journal = self._parts.link, self._parts.journal
        status = None if link is None else link.status
        return {
            "configured": status is not None,
            "url": status.url if status else "",
            "connected": status.connected if status else False,
            "problem": status.problem if status else "",
            "journal_entries_unacknowledged": journal.waiting,
        }

    def _device_plugin(self) -> Mapping[str, object]:
        plugin, slots = self._parts.plugin, self._parts.slots
        if plugin is None or slots is None:
            return {"configured": False}
        return {
            "configured": True,
            "resource": plugin.resource,
            "state": plugin.status.state.value,
            "problem": plugin.status.problem,
            "slots": len(slots.names),
            "listed": slots.listed_count(),
        }

    def _liveness(self) -> Mapping[str, object]:
        parts, settings = self._parts, self._parts.settings()
        brake_until = parts.reaper.brake_until
        verdicts = parts.reaper.verdicts()
        return {
            "enabled": settings.reaps,
            "reap_mode": "enforce" if settings.enforce else "observe",
            "reap_timeout_seconds": settings.reap_timeout_seconds,
            "registration_grace_seconds": settings.registration_grace_seconds,
            "heartbeat_interval_seconds": settings.heartbeat_interval_seconds,
            "hint_confirm_seconds": settings.hint_confirm_seconds,
            "close_confirm_seconds": settings.close_confirm_seconds,
            "reap_idle_connected": settings.reap_idle_connected,
            "hints": parts.settings.config.hints,
            "stuck_release": parts.settings.config.stuck_release,
            "settings_file": parts.config.reaping_settings,
            "settings_problem": parts.settings.problem,
            "tracked_instances": len(verdicts),
            "mismatched_heartbeats": sum(entry.mismatch_reported for entry, _, _ in verdicts),
            "silence_brake_seconds_left": (
                None if brake_until is None else round(max(0.0, brake_until - self._now()), 3)
            ),
            "releases": [self._release(release) for release in parts.releaser.in_progress()],
        }

    def _release(self, release: Release) -> Mapping[str, object]:
        entry = release.entry
        return {
            "instance_id": render_instance_id(entry.instance_id),
            "bytes": entry.nbytes,
            "seconds": round(self._now() - release.started_at, 3),
            "transfers_in_flight": entry.transfers_in_flight,
            "stuck": self._parts.releaser.is_stuck(release),
        }

    def _l1(self) -> Mapping[str, object]:
        stats = self._parts.store.stats()
        return {
            "capacity_bytes": stats.capacity_bytes,
            "used_bytes": stats.used_bytes,
            "pinned_bytes": stats.pinned_bytes,
            "staging_bytes": stats.staging_bytes,
            "quarantined_bytes": self._parts.quarantine.held_bytes(),
            "objects": stats.objects,
            "pinned_objects": stats.pinned_objects,
            "evicted_total": stats.evicted_total,
        }

    def instances(self) -> Sequence[Mapping[str, object]]:
        """Return the entries of `/v1/instances`, those that are being released included."""
        now = self._now()
        living = [
            _instance(entry, now, verdict, silent, self._parts.slots)
            for entry, verdict, silent in self._parts.reaper.verdicts()
        ]
        leaving = [
            _instance(release.entry, now, None, now - release.entry.last_seen, self._parts.slots)
            for release in self._parts.releaser.in_progress()
        ]
        return living + leaving

    def leases(self) -> Sequence[Mapping[str, object]]:
        """Return the entries of `/v1/leases`: who keeps how much of L1 from eviction."""
        return [
            {
                **dataclasses.asdict(lease),
                "age_seconds": round(lease.age_seconds, 3),
                "seconds_left": round(lease.seconds_left, 3),
            }
            for lease in self._parts.sessions.leases()
        ]

    def reaps(self, since: int) -> Mapping[str, object]:
        """Return the body of `/v1/reaps`."""
        return self._parts.journal.since(since)

    def metrics_text(self) -> bytes:
        """Return the body of `/metrics`."""
        return self._metrics.text()


def metrics_snapshot(parts: Parts) -> Reading:
    """Read the gauges of an agent."""
    states: dict[str, float] = {state.value: 0.0 for state in State}
    mapped, mismatched = 0, 0
    for entry, verdict, _ in parts.reaper.verdicts(describe=False):
        states[verdict.state.value] += 1
        mapped += entry.nbytes
        mismatched += entry.mismatch_reported
    releases = parts.releaser.in_progress()
    states[State.RELEASING.value] = len(releases)
    stats = parts.store.stats()
    overdue = parts.transfer_pool.overdue()
    held = [lease for lease in parts.sessions.leases() if lease.pins]
    return {
        catalog.INSTANCES: states,
        catalog.WORKER_MAPPED_BYTES: mapped,
        catalog.HEARTBEAT_MISMATCHED_INSTANCES: mismatched,
        catalog.RELEASES_IN_PROGRESS: len(releases),
        catalog.RELEASES_STUCK: len(parts.releaser.stuck()),
        catalog.REAPING_SETTINGS_REFUSED: bool(parts.settings.problem),
        catalog.OPERATOR_LINK_CONNECTED: parts.link is not None and parts.link.status.connected,
        catalog.DEVICE_PLUGIN_REGISTERED: (
            parts.plugin is not None and parts.plugin.status.state.value == "registered"
        ),
        catalog.SLOTS: _slots(parts.slots),
        catalog.JOURNAL_UNACKNOWLEDGED_ENTRIES: parts.journal.waiting,
        catalog.JOURNAL_MISSED_ENTRIES_TOTAL: parts.journal.missed,
        catalog.CONNECTIONS: parts.router.connections_open(),
        catalog.QUEUED_REQUESTS: {
            "sync": parts.sync_pool.depth(),
            "normal": parts.normal_pool.depth(),
            "affinity": parts.transfer_pool.depth(),
        },
        catalog.WAITING_BYTES: {
            "requests": parts.waiting.requests.held_bytes(),
            "unread_replies": parts.waiting.unread_replies.held_bytes(),
        },
        catalog.OLDEST_TRANSFER_SECONDS: parts.transfer_pool.oldest_seconds(),
        catalog.TRANSFERS_HANGING: overdue.running,
        catalog.TRANSFERS_OVERDUE_TOTAL: overdue.total,
        catalog.SESSIONS: len(parts.sessions),
        catalog.KV_EVENT_STREAMS: 0 if parts.kv_events is None else parts.kv_events.streams(),
        catalog.LEASES: len(held),
        catalog.OLDEST_LEASE_SECONDS: held[0].age_seconds if held else 0.0,
        catalog.MODELS: len(parts.layouts),
        catalog.L1_CAPACITY_BYTES: stats.capacity_bytes,
        catalog.L1_USED_BYTES: stats.used_bytes,
        catalog.L1_PINNED_BYTES: stats.pinned_bytes,
        catalog.L1_PINNED_OBJECTS: stats.pinned_objects,
        catalog.L1_EXCESS_UNPINS_TOTAL: stats.excess_unpins_total,
        catalog.L1_QUARANTINED_BYTES: parts.quarantine.held_bytes(),
        catalog.L1_OBJECTS: stats.objects,
        catalog.L1_EVICTED_TOTAL: stats.evicted_total,
        catalog.L1_REFUSED_TOTAL: stats.refused_total,
        catalog.EVENTS_DROPPED_TOTAL: parts.bus.dropped,
        catalog.EVENT_FAILURES_TOTAL: parts.bus.failures,
    }


def _slots(slots: SlotBook | None) -> Mapping[str, float]:
    listed = 0 if slots is None else slots.listed_count()
    return {"listed": listed, "free": (0 if slots is None else len(slots.names)) - listed}


def _instance(
    entry: ReapableEntry,
    now: float,
    verdict: Verdict | None,
    silent_seconds: float,
    slots: SlotBook | None,
) -> Mapping[str, object]:
    """Render one instance; without a verdict it is being released."""
    deadline = None if verdict is None else verdict.deadline
    registered = entry.registered
    owner = None if slots is None else slots.owner(entry.slot)
    return {
        "instance_id": render_instance_id(entry.instance_id),
        "registration": registered.serial,
        "registered_at": wall_time_text(registered.at),
        "mapping": None if registered.pod is None else dataclasses.asdict(registered.pod),
        "model": entry.model,
        "world_size": entry.world_size,
        "rank": entry.shard,
        "mode": entry.mode,
        "bytes": entry.nbytes,
        "peer": entry.last_connection.peer.text,
        "slot": entry.slot.slot,
        "slot_pod": None if owner is None else dataclasses.asdict(owner),
        "state": (State.RELEASING if verdict is None else verdict.state).value,
        "last_seen_seconds": round(silent_seconds, 3),
        "has_liveness_signal": entry.has_liveness_signal,
        "window": "none" if verdict is None else verdict.window.value,
        "deadline_seconds": None if deadline is None else round(max(0.0, deadline - now), 3),
        "held_by": None if verdict is None else verdict.held_by,
        "hints": [hint_words(hint, now) for hint in entry.hints],
        "evidence": [] if verdict is None else list(verdict.evidence),
    }
