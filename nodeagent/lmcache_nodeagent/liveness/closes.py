"""What closed connections say: who may have come back, and since when nobody has.

Pure, as all of the policy. Rules and reasons: docs/liveness.md, "Closed connections".
"""

from __future__ import annotations

import math
from bisect import bisect_left
from typing import TYPE_CHECKING

from lmcache_nodeagent.liveness.evidence import CloseKind, all_closed
from lmcache_nodeagent.liveness.windows import hint_window_seconds

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from lmcache_nodeagent.liveness.entry import LivenessEntry
    from lmcache_nodeagent.liveness.evidence import Connection, Link, Surroundings
    from lmcache_nodeagent.liveness.windows import LivenessSettings

NETWORK_EVENT_SECONDS = 2.0
"""Closes from two or more peers within this time are the network's doing, not the workers'."""

FOUND_CLOSED_SECONDS = 2.0
"""By then a close is found; where it is not certain whose descriptor ended, that takes a moment."""


def closed_by_peer(entry: LivenessEntry) -> bool:
    """Tell whether the instance's connections are all closed, the last one by the worker's end."""
    return all_closed(entry.connections) and entry.last_connection.close_kind is CloseKind.PEER


def last_close(entry: LivenessEntry) -> float:
    """Return when the last of an instance's connections closed; all of them are."""
    return max(c.closed_at for c in entry.connections if c.closed_at is not None)


def open_candidates(entry: LivenessEntry, surroundings: Surroundings) -> Iterable[str]:
    """Yield a line for each open connection that might be the same worker come back."""
    for link in surroundings.links:
        if _may_be_the_worker(link, entry):
            who = link.connection.peer.text if link.connection else "somebody silent so far"
            yield f"link {link.serial} from {who}"


def has_come_back(entry: LivenessEntry, surroundings: Surroundings, until: float) -> bool:
    """Tell whether a link that may be the worker's was accepted after the close, and is open.

    Later than `until` it is not: then a next run's worker may connect. A close that the worker did
    not make is found when its new connection is long there, any other one within moments.
    """
    since = last_close(entry) - FOUND_CLOSED_SECONDS if closed_by_peer(entry) else -math.inf
    return any(
        since <= link.accepted_at < until and _may_be_the_worker(link, entry)
        for link in surroundings.links
    )


def _may_be_the_worker(link: Link, entry: LivenessEntry) -> bool:
    """Tell whether a link was accepted after the instance's last one and not shown to be another's.

    A worker at a slot can come back through that slot only, and nobody else through it.
    That one is excluded for good: a link that is not the worker's says nothing by its end either.
    """
    if link.serial <= entry.last_connection.accept_serial:
        return False
    if link.slot != entry.slot.slot:
        return False
    return link.connection is None or not _excluded(link.connection, entry)


def _excluded(candidate: Connection, entry: LivenessEntry) -> bool:
    """Tell whether a connection has shown that it is somebody else.

    Stock clients count their uids on over a reconnect, so uid 0 is a new process's first request.
    """
    if candidate.first_uid == 0 or candidate.spoke_for - {entry.instance_id}:
        return True
    return candidate.asked_lookups and not any(c.asked_lookups for c in entry.connections)


def close_window(
    entry: LivenessEntry, settings: LivenessSettings, surroundings: Surroundings
) -> tuple[float, float]:
    """Return start and length of the time in which a living worker has come back.

    It starts at the latest of: the close, a candidate's close, a router stall's end.
    """
    closes = _closes(entry, surroundings)
    start, stall_ended_at = max(closes), surroundings.router_stall_ended_at
    if stall_ended_at is not None:
        start = max(start, stall_ended_at)
    if _is_network_event(entry, surroundings, closes):
        return start, hint_window_seconds(entry, settings)
    return start, settings.close_confirm_seconds


def _closes(entry: LivenessEntry, surroundings: Surroundings) -> list[float]:
    """When the instance's connections closed, and links that may have been the worker come back."""
    closes = [c.closed_at for c in entry.connections if c.closed_at is not None]
    closes += [
        link.closed_at
        for link in surroundings.gone
        if link.closed_at is not None and _may_be_the_worker(link, entry)
    ]
    return closes


def _is_network_event(
    entry: LivenessEntry, surroundings: Surroundings, closes: Sequence[float]
) -> bool:
    """Tell whether another peer's connection closed within two seconds of one of this one's."""
    own, ordered = entry.last_connection.peer.identity, sorted(closes)
    for identity, moment in surroundings.peer_closes:
        if identity != own:
            after = bisect_left(ordered, moment - NETWORK_EVENT_SECONDS)
            if after < len(ordered) and ordered[after] <= moment + NETWORK_EVENT_SECONDS:
                return True
    return False
