"""One registered instance: its liveness, and what its transfers use until the last one ends."""

from __future__ import annotations

from dataclasses import dataclass, field
from threading import Event
from typing import TYPE_CHECKING

from lmcache_nodeagent.liveness.targets import ReapableEntry

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lmcache_nodeagent.contexts.base import WorkerContext
    from lmcache_nodeagent.ids import InstanceId
    from lmcache_nodeagent.liveness.evidence import Connection
    from lmcache_nodeagent.protocol.messages import (
        EngineGroupInfo,
        LayoutHints,
        TensorDescriptor,
    )


@dataclass(frozen=True, slots=True)
class Registration:
    """The content of a registration: two that are equal mean the same worker memory."""

    instance_id: InstanceId
    tensors: Sequence[TensorDescriptor]
    model: str
    world_size: int
    engine_type: str
    hints: LayoutHints
    groups: Sequence[EngineGroupInfo]


@dataclass(slots=True, eq=False, kw_only=True)
class TransferEntry(ReapableEntry):
    """What the entries of both transfer modes share. Guarded by the lock of their table.

    `layout_pod` is where it was registered from, for the layout's count. `users` counts the
    transfers that use the entry now, `clients` are the open connections that have transferred.
    `fenced` is set when it is taken out: from then on nobody becomes a user, and `drained` is set
    with the last one.
    """

    layout_identity: int
    layout_pod: str = ""
    users: int = 0
    clients: list[Connection] = field(default_factory=list)
    fenced: bool = False
    shard: int | None = None  # the KV shard, once a transfer has named it
    drained: Event = field(default_factory=Event)
    closed: bool = False

    @property
    def content(self) -> object:
        """What was registered: equal contents are one and the same registration."""
        raise NotImplementedError

    def is_again(self, newcomer: TransferEntry) -> bool:
        """Tell whether a registration is this one once more."""
        return self.content == newcomer.content

    def give_way_to(self, client: Connection) -> None:
        """Note by whom this one is replaced."""

    def used_by(self, connection: Connection) -> None:
        """Count a transfer in."""
        self.users += 1
        if connection not in self.clients:
            self.clients = [*(client for client in self.clients if client.is_open), connection]

    @property
    def transfers_in_flight(self) -> int:
        """Transfers that use the entry now."""
        return self.users

    @property
    def tensors_held(self) -> int:
        """Tensors that were mapped for it: each may take a descriptor and a mapping."""
        return 0

    def wait_drained(self) -> None:
        """Return once no transfer uses the entry. Thread: release-<instance>."""
        self.drained.wait()

    def close(self) -> None:
        """Give back what the instance held. Thread: release-<instance>."""
        try:
            self.let_go()
        finally:
            self.closed = True

    def let_go(self) -> None:
        """What `close` does for this kind of entry."""
        raise NotImplementedError


@dataclass(slots=True, eq=False, kw_only=True)
class ContextEntry(TransferEntry):
    """An instance of LMCache-driven transfer and its mapped memory; `context` never changes."""

    registration: Registration
    context: WorkerContext

    @property
    def content(self) -> object:
        """The registration and the memory it was found to mean, as long as that is there."""
        return self.registration, self.handles, self.context.is_usable

    @property
    def tensors_held(self) -> int:
        """Its layers' tensors."""
        return len(self.registration.tensors)

    @property
    def model(self) -> str:
        """The model name of the cache keys."""
        return self.registration.model

    @property
    def world_size(self) -> int:
        """Number of KV shards of one chunk."""
        return self.registration.world_size

    @property
    def mode(self) -> str:
        """How bytes move: `lmcache_driven/` and the kind of memory."""
        kinds = sorted({tensor.type for tensor in self.registration.tensors})
        return "lmcache_driven/" + "+".join(kinds)

    @property
    def nbytes(self) -> int:
        """Worker memory mapped, in bytes."""
        return self.context.nbytes

    @property
    def handles(self) -> frozenset[str]:
        """Identities of the mapped segments."""
        return self.context.handles

    def let_go(self) -> None:
        """Unmap the memory."""
        self.context.close()
