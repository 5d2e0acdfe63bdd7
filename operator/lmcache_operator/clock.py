"""The clocks: monotonic seconds for durations, wall-clock time for what other programs read."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime

Now = Callable[[], float]
"""Monotonic seconds, or seconds since 1970; injected, so that tests drive time."""

Sleep = Callable[[float], Awaitable[object]]
"""`asyncio.sleep`; injected together with `Now`."""

monotonic: Now = time.monotonic
wall: Now = time.time


def kube_time(seconds: float) -> str:
    """Write seconds since 1970 as Kubernetes writes moments in `metadata` and `status`."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def kube_micro_time(seconds: float) -> str:
    """Write seconds since 1970 with microseconds, as Leases and Events carry moments."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
