"""The one way tests wait: ask again until it is so, or fail with what was waited for."""

from __future__ import annotations

import time
from collections.abc import Callable

_INTERVAL_SECONDS = 0.01


def poll_until(predicate: Callable[[], object], timeout_seconds: float, what: str = "") -> None:
    """Return once `predicate` is true; fail the test after `timeout_seconds`."""
    deadline = time.monotonic() + timeout_seconds
    while not predicate():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_seconds} s: {what or predicate}")
        time.sleep(_INTERVAL_SECONDS)
