"""The one way tests wait: ask again until it is so, or fail with what was waited for."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

_INTERVAL_SECONDS = 0.01

_T = TypeVar("_T")


def poll_until(predicate: Callable[[], _T | None], timeout_seconds: float, what: str = "") -> _T:
    """Return the first true value of `predicate`; fail the test after `timeout_seconds`."""
    deadline = time.monotonic() + timeout_seconds
    while not (found := predicate()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_seconds} s: {what or predicate}")
        time.sleep(_INTERVAL_SECONDS)
    return found
