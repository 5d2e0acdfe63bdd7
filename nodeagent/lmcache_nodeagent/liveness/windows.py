"""How long silence must last to mean something: the settings, and what a worker's own rhythm adds.

Rules and reasons: docs/liveness.md. All of it is in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmcache_nodeagent.liveness.entry import LivenessEntry

HINT_LASTS_SECONDS = 60.0
"""A hint means nothing this long after its window has ended: something held the instance, and
what ends later is judged by itself."""


@dataclass(frozen=True, slots=True)
class LivenessSettings:
    """The windows, in seconds. `reap_timeout_seconds` 0 means that nothing is ever reaped.

    `operator_word` False: what the operator says is not used, nor what it said before.
    `restart_when_stuck`: a release past its deadline makes the process unhealthy.
    """

    reap_timeout_seconds: float = 120.0
    registration_grace_seconds: float = 3600.0
    heartbeat_interval_seconds: float = 10.0
    hint_confirm_seconds: float = 15.0
    close_confirm_seconds: float = 10.0
    enforce: bool = True
    reap_idle_connected: bool = False
    operator_word: bool = True
    restart_when_stuck: bool = False

    @property
    def reaps(self) -> bool:
        """False: verdicts are only reported (observe mode, or a reap timeout of 0)."""
        return self.enforce and self.reap_timeout_seconds > 0


def silence_window_seconds(entry: LivenessEntry, settings: LivenessSettings) -> float:
    """T, or three observed ping intervals if that is longer, at most the grace."""
    widened = min(3 * entry.observed_interval_seconds, settings.registration_grace_seconds)
    return max(settings.reap_timeout_seconds, widened)


def hint_window_seconds(entry: LivenessEntry, settings: LivenessSettings) -> float:
    """The confirm time, or one and a half ping intervals if that is longer, at most the grace.

    The interval is the observed one; for a worker that has pinged once, the one that is set.
    """
    interval = entry.observed_interval_seconds
    if not interval and entry.has_liveness_signal:
        interval = settings.heartbeat_interval_seconds
    widened = min(1.5 * interval, settings.registration_grace_seconds)
    return max(settings.hint_confirm_seconds, widened)


def heartbeat_is_mismatched(entry: LivenessEntry, settings: LivenessSettings) -> bool:
    """Tell whether the worker pings too slowly for T; 10 % of jitter is not a mismatch."""
    timeout = settings.reap_timeout_seconds
    return timeout > 0 and 3 * entry.observed_interval_seconds > 1.1 * timeout


def fell_silent(entry: LivenessEntry, now: float, settings: LivenessSettings) -> bool:
    """Tell whether half of the silence window has passed without a word: a ping is overdue."""
    window = silence_window_seconds(entry, settings)
    return entry.has_liveness_signal and 0 < window / 2 < now - entry.last_seen
