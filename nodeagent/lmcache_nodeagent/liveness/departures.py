"""Whether whoever looked up is gone, so that nobody comes for what its look-ups keep.

Pure. Schedulers have no instance id and are never reaped; what they leave is a connection. The
rules are those for workers' closed connections (docs/liveness.md), with the address for an id.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from lmcache_nodeagent.liveness.closes import NETWORK_EVENT_SECONDS
from lmcache_nodeagent.liveness.evidence import CloseKind

if TYPE_CHECKING:
    from lmcache_nodeagent.liveness.evidence import Connection, Link, Surroundings
    from lmcache_nodeagent.liveness.windows import LivenessSettings


def gone_at(
    connection: Connection, settings: LivenessSettings, surroundings: Surroundings
) -> float:
    """Return when (monotonic) the client of a connection counts as gone, as far as is known now.

    Infinity while the connection is open, was not closed by its client, or while a connection is
    open that may be the same client come back; for who is not known; and where nobody is reaped.
    """
    closed_at = connection.closed_at
    if closed_at is None or not settings.reaps:
        return math.inf
    if connection.process_gone:
        return closed_at
    is_known = connection.peer.identity != ""
    if connection.close_kind is not CloseKind.PEER or not is_known:
        return math.inf
    if any(_may_be_it(link, connection) for link in surroundings.links):
        return math.inf
    closes = [closed_at]
    closes += [
        link.closed_at
        for link in surroundings.gone
        if link.closed_at is not None and _may_be_it(link, connection)
    ]
    start = max(*closes, surroundings.router_stall_ended_at or closed_at)
    return start + _window_seconds(connection, closed_at, settings, surroundings)


def _may_be_it(link: Link, connection: Connection) -> bool:
    """Tell whether a later link has not shown that it is somebody else's.

    Stock clients count their uids on over a reconnect, and their schedulers speak for no instance.
    """
    if link.serial <= connection.accept_serial or link.slot != connection.slot.slot:
        return False
    other = link.connection
    if other is None:
        return True
    is_worker = bool(other.spoke_for) and not connection.spoke_for
    return other.same_peer(connection) and other.first_uid != 0 and not is_worker


def _window_seconds(
    connection: Connection,
    closed_at: float,
    settings: LivenessSettings,
    surroundings: Surroundings,
) -> float:
    """Closes of several peers at once are the network's doing, and take longer to heal."""
    together = any(
        identity != connection.peer.identity and abs(moment - closed_at) <= NETWORK_EVENT_SECONDS
        for identity, moment in surroundings.peer_closes
    )
    return settings.hint_confirm_seconds if together else settings.close_confirm_seconds
