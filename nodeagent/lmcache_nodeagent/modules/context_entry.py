"""One registered instance of LMCache-driven transfer: its liveness and its mapped memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from threading import Event
from typing import TYPE_CHECKING

from lmcache_nodeagent.liveness.targets import ReapableEntry

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lmcache_nodeagent.contexts.base import WorkerContext
    from lmcache_nodeagent.ids import InstanceId
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
class ContextEntry(ReapableEntry):
    """Guarded by the lock of the table that holds it, but for `context`, which never changes.

    `users` counts the transfers that use the context now. `fenced` is set when the entry is taken
    out: from then on nobody becomes a user, and `drained` is set with the last one.
    """

    registration: Registration
    context: WorkerContext
    layout_identity: int
    users: int = 0
    fenced: bool = False
    shard: int | None = None  # the KV shard, once a transfer has named it
    drained: Event = field(default_factory=Event)
    closed: bool = False

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

    @property
    def transfers_in_flight(self) -> int:
        """Transfers that use the context now."""
        return self.users

    def wait_drained(self) -> None:
        """Return once no transfer uses the memory. Thread: release-<instance>."""
        self.drained.wait()

    def close(self) -> None:
        """Unmap. Thread: release-<instance>."""
        try:
            self.context.close()
        finally:
            self.closed = True
