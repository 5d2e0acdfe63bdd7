"""The clocks: monotonic seconds for every duration, wall-clock time for people and the kubelet."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime

Now = Callable[[], float]
"""Monotonic seconds. Injected everywhere, so that tests drive time."""

monotonic: Now = time.monotonic

wall: Now = time.time
"""Seconds since 1970: for people, and to compare with what the kubelet reports; it may jump."""


def wall_time_text(seconds: float) -> str:
    """Write seconds since 1970 in ISO 8601, UTC."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
