"""The half that both transfer modes share: who is registered, and how they come and go."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol

from lmcache_nodeagent.errors import NotRegistered
from lmcache_nodeagent.events import ContextReplaced, InstanceRegistered, InstanceUnregistered
from lmcache_nodeagent.ids import render_instance_id
from lmcache_nodeagent.liveness.targets import InstanceLivenessTarget
from lmcache_nodeagent.liveness.testimony import Registered
from lmcache_nodeagent.modules.calls import Pending
from lmcache_nodeagent.modules.context_table import ContextTable, EntryT, Installed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from lmcache_nodeagent.clock import Now
    from lmcache_nodeagent.events import Publish
    from lmcache_nodeagent.ids import InstanceId
    from lmcache_nodeagent.liveness.evidence import Connection
    from lmcache_nodeagent.liveness.reaped_lately import ReapedLately
    from lmcache_nodeagent.liveness.release import Releaser
    from lmcache_nodeagent.liveness.slots import SlotRun
    from lmcache_nodeagent.liveness.targets import Decide, ReapableEntry, Touched
    from lmcache_nodeagent.modules.absent_pings import AbsentPings
    from lmcache_nodeagent.modules.calls import Call
    from lmcache_nodeagent.modules.layouts import LayoutRegistry


@dataclass(frozen=True, slots=True)
class HolderParts:
    """What every holder of instances works with; `numbers` count all registrations of an agent."""

    layouts: LayoutRegistry
    releaser: Releaser
    absent_pings: AbsentPings
    reaped_lately: ReapedLately
    numbers: Iterator[int]
    publish: Publish
    now: Now
    wall: Now
    run_is_over: Callable[[SlotRun], bool] = lambda _: False


class Rival(Protocol):
    """A holder of another transfer mode."""

    def give_way(self, instance_id: InstanceId, connection: Connection) -> None:
        """See `InstanceHolder.give_way`."""


class InstanceHolder(InstanceLivenessTarget, Generic[EntryT]):
    """Holds the entries of one transfer mode.

    Registrations run on `sync`, transfers on `transfer-<n>`; liveness is asked from the router and
    the reaper. All of them meet in the table, whose lock is a leaf and is never held over a copy.
    An id is registered in one mode at most: `rivals` are the holders of the others.
    """

    def __init__(self, parts: HolderParts) -> None:
        self._parts = parts
        self._table: ContextTable[EntryT] = ContextTable(parts.numbers)
        self.rivals: Sequence[Rival] = ()

    def _registered_now(self) -> Registered:
        """The moment of a registration; the table numbers it."""
        return Registered(at=self._parts.wall())

    def _install(self, entry: EntryT, now: float) -> Installed[EntryT]:
        """Put a registration into force. Thread: sync.

        The layout is counted in first: as soon as the entry can be seen, it can be reaped.

        Raises:
            NotTheSpeaker: another peer holds the id.
            StillReleasing: the id or the memory is still being released; the client tries again.
        """
        parts, connection = self._parts, entry.registrant
        for rival in self.rivals:
            rival.give_way(entry.instance_id, connection)
        entry.layout_pod = connection.pod_identity
        parts.layouts.add(entry.model, entry.world_size, entry.layout_identity, entry.layout_pod)
        try:
            installed = self._table.install(entry, now)
        except BaseException:
            self._forget_layout(entry)
            raise
        parts.reaped_lately.registered(entry.instance_id)
        intervals = parts.absent_pings.registered(entry.instance_id)
        if not installed.fresh:
            self._forget_layout(entry)
            return installed
        entry.ping_intervals.extend(intervals)
        if installed.replaced is not None:
            self._replaced(installed.replaced, connection.peer.text)
        parts.publish(
            InstanceRegistered(
                instance_id=entry.instance_id,
                model=entry.model,
                peer=connection.peer.text,
                mapped_bytes=entry.nbytes,
                replaced=installed.replaced is not None,
            )
        )
        if connection.slot and parts.run_is_over(connection.slot):
            self._give_up(entry)
        return installed

    def _give_up(self, entry: EntryT) -> None:
        """Release what a container registered that has ended meanwhile: mapping may take long."""
        for ended in self._table.condemn(lambda other: other is entry):
            self._forget_layout(ended)
            self._parts.releaser.start(ended)

    def _replaced(self, replaced: EntryT, peer: str) -> None:
        self._forget_layout(replaced)
        self._parts.releaser.start(replaced)
        earlier_peer = replaced.registrant.peer.text
        self._parts.publish(
            ContextReplaced(replaced.instance_id, replaced.model, earlier_peer, peer)
        )

    def give_way(self, instance_id: InstanceId, connection: Connection) -> None:
        """Release an instance that is about to register in another mode. Thread: sync.

        Raises:
            NotTheSpeaker: another peer holds the id.
        """
        entry = self._table.give_way(instance_id, connection)
        if entry is not None:
            self._replaced(entry, connection.peer.text)

    def _goodbye(self, call: Call, instance_id: InstanceId) -> Pending | None:
        """Release an instance that says goodbye; answered once that is done, or is slow.

        An unknown id is fine.

        Raises:
            NotTheSpeaker: another connection registered the id since, and is open.
        """
        entry = self._table.take_out(instance_id, call.connection)
        if entry is None:
            return None
        self._forget_layout(entry)
        done = Pending()
        self._parts.releaser.start(entry, on_answer=lambda: done.settle(None))
        self._parts.publish(
            InstanceUnregistered(instance_id, entry.model, call.connection.peer.text)
        )
        return done

    @contextmanager
    def _using(
        self, call: Call, instance_id: InstanceId, shard: int | None, *, may_overtake: bool = True
    ) -> Iterator[EntryT]:
        """Use an instance's entry for one transfer.

        Raises:
            NotRegistered: no entry of this id.
        """
        entry = self._table.begin_use(instance_id, shard or 0, call, may_overtake=may_overtake)
        if entry is None:
            raise NotRegistered(
                f"instance {render_instance_id(instance_id)} is not registered;"
                " the worker registers again at a heartbeat that is answered false"
            )
        try:
            yield entry
        finally:
            self._table.end_use(entry)

    def touch_instance(
        self, instance_id: InstanceId, connection: Connection, *, ping: bool
    ) -> Touched:
        """Refresh an entry. Thread: zmq-router."""
        return self._table.touch(instance_id, connection, self._parts.now(), ping=ping)

    def reap_stale_instances(self, decide: Decide) -> Sequence[ReapableEntry]:
        """Take out the condemned; the reaper releases them. Thread: reaper."""
        condemned = self._table.condemn(decide)
        for entry in condemned:
            self._forget_layout(entry)
        return condemned

    def visit_entries(self, visit: Callable[[ReapableEntry], None]) -> None:
        """Show every entry to `visit` under the lock."""
        self._table.visit(visit)

    def visit_entry(self, instance_id: InstanceId, visit: Callable[[ReapableEntry], None]) -> bool:
        """Show one entry to `visit` under the lock."""
        return self._table.visit_one(instance_id, visit)

    def leaving_entries(self) -> Sequence[ReapableEntry]:
        """Return the entries that were taken out and still hold memory."""
        return self._table.leaving()

    def tracked_instance_count(self) -> int:
        """Count the registered instances."""
        return len(self._table)

    def drop_instance_state(self, instance_id: InstanceId) -> None:
        """Note the end of a release: the id may register again."""
        self._table.left(instance_id)

    def context_entries_snapshot(self) -> Sequence[EntryT]:
        """Return the entries of one moment."""
        return self._table.entries()

    def _forget_layout(self, entry: EntryT) -> None:
        """Undo what a registration shares with others of its model."""
        self._parts.layouts.remove(
            entry.model, entry.world_size, entry.layout_identity, entry.layout_pod
        )
