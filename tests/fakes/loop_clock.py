"""A clock for asynchronous code: its sleeps end when a test moves it on."""

from __future__ import annotations

import asyncio
import heapq
import itertools

_TURNS = 50  # of the loop, so that what woke up gets to its next sleep


class LoopClock:
    """Starts at 1,000 seconds. Give `now` and `sleep` to the code under test."""

    def __init__(self) -> None:
        self._now = 1_000.0
        self._order = itertools.count()
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []

    def now(self) -> float:
        """Return the moment."""
        return self._now

    async def sleep(self, seconds: float) -> None:
        """Sleep until a test has moved the clock on by that much."""
        waked = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now + seconds, next(self._order), waked))
        await waked

    def jump(self, seconds: float) -> None:
        """Let time pass in which nothing runs, as for a process that stands still."""
        self._now += seconds

    async def advance(self, seconds: float) -> None:
        """Let time pass; each sleeper wakes at its own moment, in order."""
        end = self._now + seconds
        await self.settle()
        while self._sleepers and self._sleepers[0][0] <= end:
            moment, _, waked = heapq.heappop(self._sleepers)
            self._now = max(self._now, moment)
            if not waked.done():
                waked.set_result(None)
            await self.settle()
        self._now = end

    async def settle(self) -> None:
        """Let everything run that can run now."""
        for _ in range(_TURNS):
            await asyncio.sleep(0)
