"""What the reaper asks of the holders of instance state (worker-liveness design, 5.4)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from lmcache_nodeagent.liveness.entry import LivenessEntry, Speaker
from lmcache_nodeagent.liveness.testimony import NOTHING_CANCELLED, Cancelled

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lmcache_nodeagent.ids import InstanceId
    from lmcache_nodeagent.liveness.evidence import Connection

Decide = Callable[[LivenessEntry], bool]
"""Runs under the target's lock, for each entry: True condemns it. Must not block or call out."""


@dataclass(frozen=True, slots=True)
class Touched:
    """What became of a sign of life: who spoke, and what it cancelled.

    `entry` is the instance's entry at that moment; a transfer is meant for no other.
    """

    speaker: Speaker
    cancelled: Cancelled = NOTHING_CANCELLED
    bound_peer: str = ""
    entry: ReapableEntry | None = None


UNTOUCHED = Touched(Speaker.UNKNOWN_INSTANCE)


class ReapableEntry(LivenessEntry):
    """An entry that holds a worker's memory; each transfer module has its own kind."""

    __slots__ = ()

    shard: int | None

    @property
    def model(self) -> str:
        """The model name of the cache keys."""
        raise NotImplementedError

    @property
    def world_size(self) -> int:
        """Number of KV shards of one chunk."""
        raise NotImplementedError

    @property
    def mode(self) -> str:
        """How bytes move between the worker and L1."""
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        """Worker memory mapped, in bytes."""
        raise NotImplementedError

    @property
    def handles(self) -> frozenset[str]:
        """Identities of the mapped segments."""
        raise NotImplementedError

    @property
    def transfers_in_flight(self) -> int:
        """Transfers that still use the memory."""
        raise NotImplementedError

    def wait_drained(self) -> None:
        """Return once no transfer uses the memory. Call only after the entry was taken out."""
        raise NotImplementedError

    def close(self) -> None:
        """Unmap. May be slow, raise or never return; called on a thread of its own."""
        raise NotImplementedError


class InstanceLivenessTarget(Protocol):
    """A holder of per-instance state. All methods default to nothing: override what applies.

    Threads: any. `touch_instance` runs on the router thread for every sign of life: it must be
    short and never wait for anything but the module's own leaf lock.
    """

    def touch_instance(
        self, instance_id: InstanceId, connection: Connection, *, ping: bool
    ) -> Touched:
        """Refresh `last_seen` if the id is here and the connection its speaker; never insert."""
        del instance_id, connection, ping
        return UNTOUCHED

    def reap_stale_instances(self, decide: Decide) -> Sequence[ReapableEntry]:
        """Take out, under one hold of the lock, every entry that `decide` condemns."""
        del decide
        return ()

    def visit_entries(self, visit: Callable[[ReapableEntry], None]) -> None:
        """Show every entry to `visit` under the lock."""
        del visit

    def visit_entry(self, instance_id: InstanceId, visit: Callable[[ReapableEntry], None]) -> bool:
        """Show one entry to `visit` under the lock; False if it is not here."""
        del instance_id, visit
        return False

    def leaving_entries(self) -> Sequence[ReapableEntry]:
        """Return the entries that were taken out and still hold memory."""
        return ()

    def tracked_instance_count(self) -> int:
        """Count the instances that have state here."""
        return 0

    def drop_instance_state(self, instance_id: InstanceId) -> None:
        """Forget mirrored state of a released instance. Must be idempotent."""
        del instance_id
