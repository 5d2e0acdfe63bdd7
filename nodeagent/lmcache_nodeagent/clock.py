"""The clocks: monotonic seconds for every duration, wall-clock time only for people."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime

Now = Callable[[], float]
"""Monotonic seconds. Injected everywhere, so that tests drive time."""

monotonic: Now = time.monotonic


def wall_time_text() -> str:
    """Return the wall-clock time in ISO 8601, UTC, for journals and logs; never for durations."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")
