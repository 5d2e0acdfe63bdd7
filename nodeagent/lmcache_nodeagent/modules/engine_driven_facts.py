"""The events of engine-driven transfers, which count like those of LMCache-driven ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmcache_nodeagent.events import Retrieved, Stored

if TYPE_CHECKING:
    from lmcache_nodeagent.modules.engine_driven_entry import EngineDrivenContextEntry
    from lmcache_nodeagent.modules.pending_transfers import Transfer


def stored(
    entry: EngineDrivenContextEntry, transfer: Transfer, admitted: int, seconds: float, *, ok: bool
) -> Stored:
    """A store ended; `admitted` chunks are new."""
    return Stored(
        instance_id=entry.instance_id,
        model=entry.model,
        requested_chunks=len(transfer.keys),
        admitted_chunks=admitted,
        copied_bytes=admitted * entry.form.nbytes,
        seconds=seconds,
        ok=ok,
    )


def retrieved(
    entry: EngineDrivenContextEntry, transfer: Transfer, seconds: float, *, ok: bool
) -> Retrieved:
    """A retrieve ended: all of it, or nothing."""
    return Retrieved(
        instance_id=entry.instance_id,
        model=entry.model,
        requested_chunks=len(transfer.keys),
        copied_bytes=len(transfer.keys) * entry.form.nbytes if ok else 0,
        seconds=seconds,
        ok=ok,
    )
