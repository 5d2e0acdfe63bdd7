"""One instance of engine-driven transfer: what its chunks look like, and how they travel."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from lmcache_nodeagent.errors import LayoutError
from lmcache_nodeagent.modules.context_entry import TransferEntry
from lmcache_nodeagent.modules.pending_transfers import PendingTransfers
from lmcache_nodeagent.protocol.descriptors import DTYPE_BYTES

if TYPE_CHECKING:
    from lmcache_nodeagent.liveness.evidence import Connection
    from lmcache_nodeagent.liveness.testimony import Registered
    from lmcache_nodeagent.modules.pending_transfers import Transfer
    from lmcache_nodeagent.modules.slot_quarantine import SlotQuarantine
    from lmcache_nodeagent.protocol.messages import (
        EncodedReply,
        EngineDrivenRegistration,
        PrepareRetrieveReply,
        SlotContext,
    )


@dataclass(frozen=True, slots=True)
class ChunkForm:
    """The tensor of one chunk: [planes], layers, token slots, hidden (wire reference, 4.6)."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Size of one chunk."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    @property
    def identity(self) -> int:
        """Number that stands for what a chunk's bytes mean: it goes into the object keys."""
        return zlib.crc32(f"engine_driven {self.dtype} {self.shape}".encode())


def chunk_form(registration: EngineDrivenRegistration, chunk_tokens: int) -> ChunkForm:
    """Work out the form of a registration's chunks.

    Raises:
        LayoutError: an unknown dtype, or blocks that do not make up a chunk.
    """
    dtype, block = registration.dtype_str, registration.block_size
    if dtype not in DTYPE_BYTES:
        raise LayoutError(f"dtype {dtype[:40]!r} is unknown; use one of {', '.join(DTYPE_BYTES)}")
    slots = registration.num_physical_slots or chunk_tokens
    if slots % block:
        raise LayoutError(
            f"a chunk has {slots} token slots, which is no multiple of the block size {block}"
        )
    planes = () if registration.use_mla else (2,)
    shape = (*planes, registration.num_layers, slots, registration.hidden_dim_size)
    return ChunkForm(shape, dtype)


class TransferStrategy(Protocol):
    """How the bytes of chunks get from the worker to L1 and back: what a prepare answers.

    What a commit means can be seen from the commit itself.
    """

    name: str

    def prepare_store(self, entry: EngineDrivenContextEntry, transfer: Transfer) -> SlotContext:
        """Say where to write the chunks that are wanted; nothing said: send them."""
        ...

    def prepare_retrieve(
        self, entry: EngineDrivenContextEntry, transfer: Transfer
    ) -> PrepareRetrieveReply | EncodedReply:
        """Say where the chunks are, or give their bytes: all of them or none."""
        ...


@dataclass(slots=True, eq=False, kw_only=True)
class EngineDrivenContextEntry(TransferEntry):
    """Form and strategy change as a pair, under the lock of the table that holds the entry.

    `offered` is the strategy that a registration begins with. A worker that cannot map the pool
    falls back to pickle by itself and shows it with its first store.
    """

    registration: EngineDrivenRegistration
    form: ChunkForm
    offered: TransferStrategy
    strategy: TransferStrategy
    quarantine: SlotQuarantine
    pending: PendingTransfers = field(default_factory=PendingTransfers)
    successor: Connection | None = None

    @property
    def content(self) -> object:
        """The registration."""
        return self.registration

    @property
    def model(self) -> str:
        """The model name of the cache keys."""
        return self.registration.model_name

    @property
    def world_size(self) -> int:
        """Number of KV shards of one chunk."""
        return self.registration.world_size

    @property
    def mode(self) -> str:
        """How bytes move: `engine_driven/` and the strategy."""
        return f"engine_driven/{self.strategy.name}"

    @property
    def nbytes(self) -> int:
        """No worker memory is mapped: the worker maps ours."""
        return 0

    @property
    def handles(self) -> frozenset[str]:
        """No segments either."""
        return frozenset()

    def is_again(self, newcomer: TransferEntry) -> bool:
        """Tell whether a registration is this one once more.

        Not if a new client comes and something is open: it may be of a process that has ended,
        which the registration does not tell, and then nobody ever confirms it.
        """
        is_new = self._is_new(newcomer.registrant)
        return self.content == newcomer.content and not (is_new and self.pending.has_any)

    def give_way_to(self, client: Connection) -> None:
        """Note a successor that was told nothing of what is open here."""
        if self._is_new(client):
            self.successor = client

    def _is_new(self, client: Connection) -> bool:
        """Tell whether a client has begun with its registration. One that reconnects counts on."""
        known = client is self.registrant or client in self.clients
        return client.first_uid == 0 and not known

    def registered_again(self, connection: Connection, now: float, registered: Registered) -> None:
        """Take the same registration again: the worker tries what is offered anew."""
        TransferEntry.registered_again(self, connection, now, registered)
        self.strategy = self.offered

    def let_go(self) -> None:
        """Leave to the quarantine what the worker has not confirmed."""
        known = dict.fromkeys((*self.superseded, *self.connections, self.registrant))
        users = tuple(client for client in known if client is not self.successor)
        self.quarantine.take(self.instance_id, self.layout_identity, self.pending, users)
