"""Who is registered for transfers: the table that every thread meets at."""

from __future__ import annotations

from dataclasses import dataclass, replace
from threading import Lock
from typing import TYPE_CHECKING, Generic, TypeVar

from lmcache_nodeagent.errors import NotTheSpeaker, StillReleasing, TooManyRegistered
from lmcache_nodeagent.ids import render_instance_id
from lmcache_nodeagent.liveness.entry import Speaker
from lmcache_nodeagent.liveness.targets import UNTOUCHED, Touched
from lmcache_nodeagent.modules.context_entry import TransferEntry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from lmcache_nodeagent.ids import InstanceId
    from lmcache_nodeagent.liveness.evidence import Connection
    from lmcache_nodeagent.liveness.targets import Decide, ReapableEntry
    from lmcache_nodeagent.modules.calls import Call


EntryT = TypeVar("EntryT", bound=TransferEntry)

MAX_PEER_INSTANCES = 4_096
MAX_PEER_TENSORS = 8_192
"""What one peer may hold. An engine has a rank for each GPU and a tensor for each layer; eight of
the largest models on one node, behind one address, have some thousand tensors."""


@dataclass(frozen=True, slots=True)
class Installed(Generic[EntryT]):
    """What became of a registration: the entry now in force, and the one that gave way to it.

    `fresh` is False where the instance was registered with the same content: the new entry is
    then not needed, and the caller closes it.
    """

    entry: EntryT
    fresh: bool
    replaced: EntryT | None = None


class ContextTable(Generic[EntryT]):
    """Entries of one transfer mode by instance id.

    Threads: any; every method holds the one leaf lock for a moment. An entry that is taken out is
    *leaving* until `left` is called: its id and its memory are refused to newcomers for that long.
    """

    def __init__(self, numbers: Iterator[int]) -> None:
        """Make an empty table; `numbers` count the registrations of all tables of an agent."""
        self._numbers = numbers
        self._lock = Lock()  # guards: _entries, _leaving and the fields of every entry
        self._entries: dict[InstanceId, EntryT] = {}
        self._leaving: list[EntryT] = []

    def install(self, entry: EntryT, now: float) -> Installed[EntryT]:
        """Put a registration into force.

        Raises:
            NotTheSpeaker: another peer holds the id and is not known to be gone.
            StillReleasing: the id, or a segment, is of a context that is being released.
        """
        connection = entry.registrant
        with self._lock:
            self._refuse_leaving_locked(entry)
            existing = self._entries.get(entry.instance_id)
            if existing is not None:
                self._require_speaker_locked(existing, connection)
            entry.registered = replace(entry.registered, serial=next(self._numbers))
            if existing is None:
                self._entries[entry.instance_id] = entry
                return Installed(entry, fresh=True)
            if existing.is_again(entry):
                existing.registered_again(connection, now, entry.registered)
                return Installed(existing, fresh=False)
            existing.give_way_to(connection)
            entry.inherit(existing)
            earlier = [*existing.superseded, *existing.connections]
            entry.superseded = [c for c in earlier if c.is_open and c is not connection]
            self._take_out_locked(existing)
            self._entries[entry.instance_id] = entry
            return Installed(entry, fresh=True, replaced=existing)

    def refuse_early(
        self, instance_id: InstanceId, connection: Connection, tensors: int = 0
    ) -> None:
        """Refuse what cannot come into force, before anything is mapped.

        What a peer may hold is bounded, so that one that registers without end does not use up
        the descriptors of all. Registrations come one at a time, so this need not be asked again.

        Raises:
            StillReleasing: the id is of a context that is being released.
            TooManyRegistered: the peer holds as much as one may.
        """
        with self._lock:
            if any(left.instance_id == instance_id for left in self._leaving):
                raise StillReleasing(_still_releasing(instance_id))
            held = [
                entry.tensors_held
                for entry in (*self._entries.values(), *self._leaving)
                if entry.instance_id != instance_id
                and entry.registrant.peer.identity == connection.peer.identity
            ]
        if len(held) >= MAX_PEER_INSTANCES or sum(held) + tensors > MAX_PEER_TENSORS:
            raise TooManyRegistered(
                f"{connection.peer.text} has registered {len(held)} instances with {sum(held)}"
                f" tensors; at most {MAX_PEER_INSTANCES} with {MAX_PEER_TENSORS} are taken of one"
                " peer: unregister those that are not used"
            )

    def take_out(self, instance_id: InstanceId, connection: Connection) -> EntryT | None:
        """Take out an instance that says goodbye; None if it is not here.

        Raises:
            NotTheSpeaker: the connection is not the one that registered it, which is still open.
        """
        with self._lock:
            entry = self._entries.get(instance_id)
            if entry is None:
                return None
            if not entry.may_unregister(connection):
                raise NotTheSpeaker(_not_the_speaker(entry, connection))
            self._take_out_locked(entry)
            return entry

    def give_way(self, instance_id: InstanceId, connection: Connection) -> EntryT | None:
        """Take out an instance that registers in another transfer mode; None if it is not here.

        Raises:
            NotTheSpeaker: another peer holds the id and is not known to be gone.
        """
        with self._lock:
            entry = self._entries.get(instance_id)
            if entry is None:
                return None
            self._require_speaker_locked(entry, connection)
            entry.give_way_to(connection)
            self._take_out_locked(entry)
            return entry

    def condemn(self, decide: Decide) -> list[EntryT]:
        """Take out every entry that `decide` condemns, all under one hold of the lock."""
        with self._lock:
            condemned = [entry for entry in self._entries.values() if decide(entry)]
            for entry in condemned:
                self._take_out_locked(entry)
        return condemned

    def left(self, instance_id: InstanceId) -> None:
        """Note that a context of this id has been released. Idempotent."""
        with self._lock:
            self._leaving = [
                e for e in self._leaving if e.instance_id != instance_id or not e.closed
            ]

    def touch(
        self, instance_id: InstanceId, connection: Connection, now: float, *, ping: bool
    ) -> Touched:
        """Take a sign of life; never inserts. Thread: zmq-router."""
        with self._lock:
            entry = self._entries.get(instance_id)
            if entry is None:
                return UNTOUCHED
            bound_peer = entry.last_connection.peer.text
            if entry.speaker(connection) is Speaker.STRANGER:
                return Touched(Speaker.STRANGER, bound_peer=bound_peer)
            cancelled = entry.seen(connection, now)
            if ping:
                entry.pinged(now)
            return Touched(Speaker.RIGHTFUL, cancelled, bound_peer, entry)

    def begin_use(
        self, instance_id: InstanceId, shard: int, call: Call, *, may_overtake: bool = True
    ) -> EntryT | None:
        """Become a user of the entry that a transfer is meant for, until `end_use`.

        Args:
            instance_id: Who transfers.
            shard: Its KV shard.
            call: The request.
            may_overtake: Serve a request that was read before the registration took effect.

        Returns:
            None if the instance is not here; or if the entry in force has replaced the one that
            the request was read for, whose block ids mean nothing here.
        """
        with self._lock:
            entry = self._entries.get(instance_id)
            if entry is None or not _is_meant(entry, call, may_overtake=may_overtake):
                return None
            entry.used_by(call.connection)
            entry.shard = shard
            return entry

    def end_use(self, entry: EntryT) -> None:
        """Stop using a context; the last user of a fenced one lets its release go on."""
        with self._lock:
            entry.users -= 1
            if entry.fenced and entry.users == 0:
                entry.drained.set()

    def amend(self, entry: EntryT, amend: Callable[[EntryT], None]) -> None:
        """Change an entry under the lock, unless it was taken out."""
        with self._lock:
            if not entry.fenced:
                amend(entry)

    def visit(self, visit: Callable[[ReapableEntry], None]) -> None:
        """Show each entry to `visit` under the lock."""
        with self._lock:
            for entry in self._entries.values():
                visit(entry)

    def visit_one(self, instance_id: InstanceId, visit: Callable[[ReapableEntry], None]) -> bool:
        """Show one entry to `visit` under the lock; False if it is not here."""
        with self._lock:
            entry = self._entries.get(instance_id)
            if entry is not None:
                visit(entry)
        return entry is not None

    def leaving(self) -> Sequence[EntryT]:
        """Return the entries that were taken out and whose context is not released yet."""
        with self._lock:
            return tuple(self._leaving)

    def entries(self) -> Sequence[EntryT]:
        """Return the entries of one moment; their fields go on changing."""
        with self._lock:
            return tuple(self._entries.values())

    def __len__(self) -> int:
        """Count the registered instances."""
        with self._lock:
            return len(self._entries)

    def _refuse_leaving_locked(self, entry: EntryT) -> None:
        assert self._lock.locked()
        for left in self._leaving:
            if left.instance_id == entry.instance_id or not left.handles.isdisjoint(entry.handles):
                raise StillReleasing(_still_releasing(left.instance_id))

    def _require_speaker_locked(self, entry: EntryT, connection: Connection) -> None:
        assert self._lock.locked()
        if entry.speaker(connection) is Speaker.STRANGER:
            raise NotTheSpeaker(_not_the_speaker(entry, connection))

    def _take_out_locked(self, entry: EntryT) -> None:
        """Fence an entry: nobody becomes its user any more."""
        assert self._lock.locked()
        del self._entries[entry.instance_id]
        self._leaving.append(entry)
        entry.fenced = True
        if entry.users == 0:
            entry.drained.set()


def _is_meant(entry: TransferEntry, call: Call, *, may_overtake: bool) -> bool:
    """A request may overtake its own registration, but not come after somebody else's."""
    if call.touched.entry is not None:
        return call.touched.entry is entry
    return may_overtake and entry.speaker(call.connection) is Speaker.RIGHTFUL


def _still_releasing(instance_id: InstanceId) -> str:
    return (
        f"instance {render_instance_id(instance_id)}: its previous memory is still being released;"
        " register again at the next heartbeat"
    )


def _not_the_speaker(entry: TransferEntry, connection: Connection) -> str:
    return (
        f"instance {render_instance_id(entry.instance_id)} belongs to"
        f" {entry.last_connection.peer.text}, whose connection is open;"
        f" {connection.peer.text} cannot speak for it: use an id of its own"
    )
