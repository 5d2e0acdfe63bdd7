"""Asks once more for a pod that is missing from a list: is it gone, or did it only leave?"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from typing import NoReturn, Protocol

import structlog

from lmcache_operator.errors import ApiError, Forbidden, PodError, Unreachable
from lmcache_operator.workers.pacing import CONNECTION_STEPS, Backoff, Sleep
from lmcache_operator.workers.pod import Pod
from lmcache_operator.workers.selection import Selection

_AT_ONCE = 8
_LATER_SECONDS = 30.0

_log = structlog.get_logger(__name__)

_Key = tuple[Selection, str]
"""A pod, by uid, that is missing from a selection: it may be in several, of several servers."""


@dataclass(frozen=True, slots=True)
class Absence:
    """A pod that is not where it was.

    Attributes:
        last_seen: the pod as it was.
        live: what its name stands for now; None if for nothing.
    """

    last_seen: Pod
    live: Pod | None


class PodReader(Protocol):
    """Reads one pod; see `PodSource.read`."""

    async def read(self, namespace: str, name: str) -> Pod | None:
        """Read one pod, None if there is none of that name."""


class AbsenceListener(Protocol):
    """Is told of absences, on the loop. Must return at once."""

    def pod_absent(self, selection: Selection, absence: Absence) -> None:
        """Tell what became of a pod that is in no complete list of its selection."""


class AbsenceChecks:
    """The pods to ask for, each once, some at a time. Thread: the loop."""

    def __init__(
        self,
        reader: PodReader,
        listener: AbsenceListener,
        counts: Counter[str],
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self._reader = reader
        self._listener = listener
        self._counts = counts
        self._sleep = sleep
        self._waiting: dict[_Key, Pod] = {}
        self._queue: asyncio.Queue[_Key] = asyncio.Queue()
        self._group: asyncio.TaskGroup

    def add(self, selection: Selection, last_seen: Pod) -> None:
        """Ask for a pod, unless that is about to happen."""
        key = (selection, last_seen.uid)
        if key not in self._waiting:
            self._waiting[key] = last_seen
            self._queue.put_nowait(key)

    def discard(self, selection: Selection, uid: str) -> None:
        """Do not ask: the pod is in that selection again."""
        self._waiting.pop((selection, uid), None)

    async def run(self) -> NoReturn:
        """Ask until cancelled."""
        async with asyncio.TaskGroup() as self._group:
            for _ in range(_AT_ONCE):
                self._group.create_task(self._work())
        raise AssertionError("its tasks do not end")

    async def _work(self) -> NoReturn:
        backoff = Backoff(CONNECTION_STEPS)
        while True:
            key = await self._queue.get()
            selection, uid = key
            if (last_seen := self._waiting.get(key)) is None:
                continue
            try:
                live = await self._ask(last_seen)
            except (Unreachable, ApiError) as error:
                self._counts["absence_unanswered"] += 1
                _log.debug("pod_not_asked_for", pod_uid=uid, error=str(error))
                await self._sleep(backoff.next_seconds())
                self._queue.put_nowait(key)
                continue
            except PodError as error:
                _log.warning("pod_cannot_be_read", pod_uid=uid, error=str(error))
                self._group.create_task(self._ask_again_later(key))
                continue
            backoff.reset()
            if self._waiting.pop(key, None) is not None:
                self._listener.pod_absent(selection, Absence(last_seen, live))

    async def _ask(self, last_seen: Pod) -> Pod | None:
        self._counts["absence_check"] += 1
        try:
            return await self._reader.read(last_seen.namespace, last_seen.name)
        except Forbidden as error:
            # A namespace that is being deleted takes our rights with it, before its last pods.
            if last_seen.deleting:
                return None
            raise PodError(str(error)) from None

    async def _ask_again_later(self, key: _Key) -> None:
        """Put a pod off: what is wrong will not change soon."""
        await self._sleep(_LATER_SECONDS)
        self._queue.put_nowait(key)
