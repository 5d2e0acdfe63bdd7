"""The one way tests wait: ask again until it is so, or fail with what was waited for.

No wait has a time of its own. What must come in a given time is shown by the times that the agent
and the operator record, or by a reason that only the quick way has; a wait that ends early on a
busy machine shows nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

PATIENCE_SECONDS = 200.0
"""After this, what was waited for is taken never to come. Only tests that fail wait so long."""

BUSY_SECONDS = 30.0
"""What a busy machine may add to a time that a test measures; benchmarks show what is usual."""

_INTERVAL_SECONDS = 0.01

_T = TypeVar("_T")


def poll_until(
    predicate: Callable[[], _T | None],
    what: str | Callable[[], str] = "",
    *,
    patience_seconds: float = PATIENCE_SECONDS,
) -> _T:
    """Return the first true value of `predicate`; fail the test if there never is one.

    `what` is asked for when it failed, if it tells how things are then. Work that takes minutes by
    itself, such as a machine's start, brings a longer patience.
    """
    deadline = time.monotonic() + patience_seconds
    while not (found := predicate()):
        if time.monotonic() > deadline:
            told = what() if callable(what) else what
            raise AssertionError(f"not within {patience_seconds} s: {told or predicate}")
        time.sleep(_INTERVAL_SECONDS)
    return found
