"""The one way tests wait: ask again until it is so, or fail with what was waited for."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

_INTERVAL_SECONDS = 0.01

_T = TypeVar("_T")


def poll_until(
    predicate: Callable[[], _T | None],
    timeout_seconds: float,
    what: str | Callable[[], str] = "",
) -> _T:
    """Return the first true value of `predicate`; fail the test after `timeout_seconds`.

    `what` is asked for when it failed, if it tells how things are then.
    """
    deadline = time.monotonic() + timeout_seconds
    while not (found := predicate()):
        if time.monotonic() > deadline:
            told = what() if callable(what) else what
            raise AssertionError(f"not within {timeout_seconds} s: {told or predicate}")
        time.sleep(_INTERVAL_SECONDS)
    return found
