"""When to try again to reach the operator. Pure, but for the dice."""

from __future__ import annotations

import random
from collections.abc import Callable

FIRST_SECONDS = 0.1
LONGEST_SECONDS = 3.0
"""An operator that comes back finds its agents within five seconds; a refused connect is cheap."""

LONGEST_WHEN_REFUSED_SECONDS = 15.0
"""An operator that is there and says no has work with it."""

STEADY_SECONDS = 10.0
"""A stream that lasted this long was a good one: what ends it is a new trouble."""


class Retry:
    """Delays that double, each shortened at random so that many agents do not come at once."""

    def __init__(self, dice: Callable[[], float] = random.random) -> None:
        self._dice = dice
        self._next = FIRST_SECONDS

    def delay(self, *, refused: bool, lasted_seconds: float = 0.0) -> float:
        """Return how long to wait now.

        Args:
            refused: the operator, or what it showed, was the reason: trying soon helps nobody.
            lasted_seconds: how long the stream was open that ended.
        """
        if lasted_seconds >= STEADY_SECONDS:
            self._next = FIRST_SECONDS
        longest = LONGEST_WHEN_REFUSED_SECONDS if refused else LONGEST_SECONDS
        seconds = min(self._next, longest)
        self._next = min(2 * seconds, LONGEST_WHEN_REFUSED_SECONDS)
        return seconds * (0.5 + self._dice() / 2)
