"""Counts who is refused, and logs it so that nobody can fill the log."""

from __future__ import annotations

from collections import Counter, OrderedDict

import structlog

from lmcache_operator.clock import Now, monotonic

_PERIOD_SECONDS = 60.0
_MOST_REMEMBERED = 1_024  # (peer, reason) pairs; the longest unheard is forgotten first
_LONGEST_DETAIL = 300  # some of it is the peer's own words

log = structlog.get_logger(__name__)


class Refusals:
    """What one peer does again and again is logged once in a minute, with how often it was.

    Attributes:
        counts: by reason.
    """

    def __init__(self, now: Now = monotonic) -> None:
        self.counts: Counter[str] = Counter()
        self._now = now
        self._logged: OrderedDict[tuple[str, str], tuple[float, int]] = OrderedDict()

    def note(self, peer: str, reason: str, detail: str) -> None:
        """Take note of one refusal; `peer` is an address without a port."""
        self.counts[reason] += 1
        logged_at, unlogged = self._logged.pop((peer, reason), (None, 0))
        now = self._now()
        if logged_at is None or now >= logged_at + _PERIOD_SECONDS:
            words = detail[:_LONGEST_DETAIL]
            log.warning("agent_refused", peer=peer, reason=reason, detail=words, unlogged=unlogged)
            logged_at, unlogged = now, 0
        else:
            unlogged += 1
        self._logged[peer, reason] = (logged_at, unlogged)
        while len(self._logged) > _MOST_REMEMBERED:
            self._logged.popitem(last=False)
