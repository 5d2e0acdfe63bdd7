"""Which servers are due for a pass: each is queued once, and never in two passes at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from typing import Generic, TypeVar

from lmcache_operator.clock import Now, Sleep, monotonic

_Key = TypeVar("_Key", bound=Hashable)


class WorkQueue(Generic[_Key]):
    """Keys with the moment at which each is due. Everything is called on the loop."""

    def __init__(self, now: Now = monotonic, sleep: Sleep = asyncio.sleep) -> None:
        self._now = now
        self._sleep = sleep
        self._due: dict[_Key, float] = {}
        self._taken: set[_Key] = set()
        self._changed = asyncio.Event()

    def add(self, key: _Key, delay_seconds: float = 0.0) -> None:
        """Have a key be due in some time, or earlier if it is already."""
        due = self._now() + delay_seconds
        if due < self._due.get(key, float("inf")):
            self._due[key] = due
            self._changed.set()

    async def take(self) -> _Key:
        """Wait for a key that is due and that nobody has taken; give it back by `done`."""
        while True:
            self._changed.clear()
            free = [(due, key) for key, due in self._due.items() if key not in self._taken]
            due, key = min(free, key=lambda pair: pair[0], default=(float("inf"), None))
            wait_seconds = due - self._now()
            if key is not None and wait_seconds <= 0:
                del self._due[key]
                self._taken.add(key)
                return key
            await self._wait(wait_seconds)

    def done(self, key: _Key) -> None:
        """Give a key back; what was added meanwhile counts from now on."""
        self._taken.discard(key)
        self._changed.set()

    async def _wait(self, seconds: float) -> None:
        """Wait for a change, at most some time."""
        waking: list[asyncio.Future[object]] = [asyncio.ensure_future(self._changed.wait())]
        if seconds != float("inf"):
            waking.append(asyncio.ensure_future(self._sleep(seconds)))
        try:
            await asyncio.wait(waking, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waking:
                each.cancel()
