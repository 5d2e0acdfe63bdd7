"""How long to wait before trying again. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Sequence

_WINDOW_SECONDS = 60.0
_GAPS_SECONDS = (0.0, 1.0, 10.0, 30.0)

CONNECTION_STEPS = (0.2, 0.5, 1.0, 2.0, 3.0)
"""After a cut or a refused connection: the server should be seen within seconds of its return."""

REFUSAL_STEPS = (1.0, 5.0, 15.0, 30.0)
"""After an answer that will not change by itself, such as a missing right."""


Sleep = Callable[[float], Awaitable[object]]
"""`asyncio.sleep`; injected, so that tests drive time."""


class Backoff:
    """Growing delays, the last of which repeats.

    Args:
        steps: seconds.
    """

    def __init__(self, steps: Sequence[float]) -> None:
        self._steps = steps
        self._tries = 0

    def next_seconds(self) -> float:
        """Return the delay after one more failure."""
        step = self._steps[min(self._tries, len(self._steps) - 1)]
        self._tries += 1
        return step

    def reset(self) -> None:
        """Start over, after a success."""
        self._tries = 0


class ListPace:
    """Keeps lists apart: the first ones follow at once, but never more than four in a minute.

    A list of ten thousand pods is the dearest thing the API server is asked for, and whatever makes
    one necessary (a gap in history, a restart of the server) may happen again and again.
    """

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=len(_GAPS_SECONDS))

    def wait_seconds(self, now: float) -> float:
        """Return how long to wait before the next list, by the monotonic clock."""
        if not self._recent:
            return 0.0
        lately = sum(now - moment < _WINDOW_SECONDS for moment in self._recent)
        gap = _GAPS_SECONDS[min(lately, len(_GAPS_SECONDS) - 1)]
        return max(0.0, self._recent[-1] + gap - now)

    def listed(self, began: float) -> None:
        """Tell when a list began; only of those that were answered, since only they cost."""
        self._recent.append(began)
