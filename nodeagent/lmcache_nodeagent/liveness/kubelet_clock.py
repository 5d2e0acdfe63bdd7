"""Moments that the kubelet reports, in the agent's own time."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmcache_nodeagent.clock import Now

CLOCK_SET_SECONDS = 0.1
"""Wall clock and monotonic clock run at one rate; a larger step between them is a clock that was
set, or a machine that was suspended."""


class KubeletClock:
    """Translates moments of the node's wall clock. Thread: operator-link.

    After the clock was set nobody can tell whether a moment is of before or after that, until as
    much time has passed as the clock was moved by.
    """

    def __init__(self, now: Now, wall: Now) -> None:
        self._now = now
        self._wall = wall
        self._offset = wall() - now()
        self._doubtful_until = -math.inf

    def look(self) -> None:
        """Notice that the clock was set; the sooner, the fewer moments are in doubt."""
        offset = self._wall() - self._now()
        moved = abs(offset - self._offset)
        if moved > CLOCK_SET_SECONDS:
            self._doubtful_until = max(self._doubtful_until, self._now() + moved)
            self._offset = offset

    def monotonic(self, wall_seconds: float) -> float | None:
        """Return a past moment in monotonic seconds; `None` if that cannot be told."""
        self.look()
        now = self._now()
        moment = now - (self._wall() - wall_seconds)
        return moment if self._doubtful_until < moment <= now else None
