"""What is given back though nobody asks: leases that ended, what the dead had promised to do."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from lmcache_nodeagent.events import LeasesDropped
from lmcache_nodeagent.liveness.departures import gone_at
from lmcache_nodeagent.liveness.evidence import Connection

if TYPE_CHECKING:
    from collections.abc import Callable

    from lmcache_nodeagent.events import Publish
    from lmcache_nodeagent.liveness.evidence import ConnectionLedger
    from lmcache_nodeagent.liveness.windows import LivenessSettings
    from lmcache_nodeagent.modules.lookup import LookupModule
    from lmcache_nodeagent.modules.slot_quarantine import SlotQuarantine
    from lmcache_nodeagent.sessions import SessionTable


class Housekeeping:
    """Done with every scan of the reaper. Thread: reaper."""

    def __init__(
        self,
        lookup: LookupModule,
        sessions: SessionTable,
        quarantine: SlotQuarantine,
        ledger: ConnectionLedger,
        settings: Callable[[], LivenessSettings],
        publish: Publish,
    ) -> None:
        self._lookup = lookup
        self._sessions = sessions
        self._quarantine = quarantine
        self._ledger = ledger
        self._settings = settings
        self._publish = publish

    def __call__(self, now: float) -> float:
        """Give back what is due at `now` (monotonic); return when to come again at the latest."""
        self._lookup.expire(now)
        self._quarantine.sweep(now)
        departure = self._drop_what_the_gone_left(now)
        return min(self._sessions.expiry_due_at, self._quarantine.sweep_due_at, departure)

    def _drop_what_the_gone_left(self, now: float) -> float:
        """Unpin what look-ups of clients keep that are gone; return when the next may be."""
        next_at = math.inf
        closed = self._sessions.closed_owners()
        if not closed:
            return next_at
        surroundings, settings = self._ledger.surroundings(), self._settings()
        for owner in closed:
            assert isinstance(owner, Connection)
            at = gone_at(owner, settings, surroundings)
            if at > now:
                next_at = min(next_at, at)
            else:
                self._publish(LeasesDropped(owner.peer.text, *self._lookup.drop(owner)))
        return next_at
