"""Keeps one selection of pods up to date: a list, then a watch from its version on.

Kubernetes keeps some minutes of history. Whoever was away for longer, and every watcher after a
restart of the API server, is told `410 Gone` and has to list again; what was deleted meanwhile is
then known only by its absence. So a list is compared with what was known, and the same is done
every few minutes in any case.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from http import HTTPStatus
from typing import NoReturn, Protocol

import structlog

from lmcache_operator.clock import Now
from lmcache_operator.errors import ApiError, Unreachable
from lmcache_operator.workers.pacing import (
    CONNECTION_STEPS,
    REFUSAL_STEPS,
    Backoff,
    ListPace,
    Sleep,
)
from lmcache_operator.workers.pod import Pod
from lmcache_operator.workers.pod_set import PodSet
from lmcache_operator.workers.selection import Selection

RESYNC_SECONDS = 300.0

_RESYNC_SPREAD = 0.2  # so that the selections of many namespaces are not listed all at once
_LIVED_SECONDS = 1.0  # a watch that ends sooner counts as a failure
_REFUSALS_BEFORE_LIST = 3

# What will not change by itself, unlike an overload or an expired token.
_REFUSED = {HTTPStatus.FORBIDDEN, HTTPStatus.NOT_FOUND, HTTPStatus.BAD_REQUEST}

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Listing:
    """A complete list, and the version of the cluster that it is of."""

    pods: Sequence[Pod]
    version: str


@dataclass(frozen=True, slots=True)
class PodEvent:
    """One step of history; without a pod it only moves the version on."""

    version: str
    pod: Pod | None = None
    deleted: bool = False


class PodSource(Protocol):
    """The API server, as far as pods are read. Each method raises `Unreachable` and `ApiError`."""

    async def list(self, selection: Selection) -> Listing:
        """List all pods of a selection."""

    def watch(
        self, selection: Selection, version: str, seconds: int
    ) -> AsyncGenerator[PodEvent, None]:
        """Give what happened after a version, for some time; first an event without a pod.

        Raises:
            ApiError: also with status 410, before or between the events.
        """

    async def read(self, namespace: str, name: str) -> Pod | None:
        """Read one pod, None if there is none of that name.

        Raises:
            PodError: what there is cannot be read.
        """

    async def close(self) -> None:
        """End all connections; nothing is asked for after this."""


class SelectionListener(Protocol):
    """Is told of every change, after the selection's pods have it. Must return at once."""

    def pods_changed(
        self, selection: Selection, changed: Sequence[Pod], missing: Sequence[Pod]
    ) -> None:
        """Tell which pods are new or changed, and which are no longer in the selection.

        It is also called without any when `is_current` or `is_refused` changes.
        """


class SelectionWatch:
    """One selection. Thread: the loop.

    Args:
        now: monotonic seconds.
        spread: a random number from 0 to 1.
        counts: of what happened, by name; shared with others.
    """

    def __init__(
        self,
        selection: Selection,
        source: PodSource,
        listener: SelectionListener,
        *,
        now: Now,
        spread: Callable[[], float],
        counts: Counter[str],
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self.selection = selection
        self.pods = PodSet()
        self._source = source
        self._listener = listener
        self._now = now
        self._spread = spread
        self._counts = counts
        self._sleep = sleep
        self._pace = ListPace()
        self._cuts = Backoff(CONNECTION_STEPS)
        self._refusals = Backoff(REFUSAL_STEPS)
        self._refusals_running = 0
        self._version: str | None = None
        self._list_due = 0.0
        self._watched_since = 0.0
        self._current = False
        self._refused = False
        self._trouble = ""

    @property
    def is_current(self) -> bool:
        """Whether `pods` is complete, and followed by a watch as far as one can tell."""
        return self._current

    @property
    def is_refused(self) -> bool:
        """Whether the API server will not say which pods there are; nothing is known of them."""
        return self._refused

    async def run(self) -> NoReturn:
        """Follow the selection until cancelled."""
        while True:
            try:
                if self._version is None:
                    await self._list()
                else:
                    await self._follow(self._version)
            except Unreachable as error:
                self._counts["cut"] += 1
                await self._pause("unreachable", str(error), self._cuts)
            except ApiError as error:
                await self._handle_refusal(error)

    async def _list(self) -> None:
        await self._sleep(self._pace.wait_seconds(self._now()))
        began = self._now()
        self._counts["list"] += 1
        try:
            listing = await self._source.list(self.selection)
        except ApiError:
            self._pace.listed(began)
            raise
        self._pace.listed(began)
        self._version = listing.version
        self._list_due = self._now() + RESYNC_SECONDS * (1 - _RESYNC_SPREAD * self._spread())
        changed, missing = self.pods.replace(listing.pods)
        self._refused = False
        self._recovered()
        self._listener.pods_changed(self.selection, changed, missing)

    async def _follow(self, version: str) -> None:
        began = self._watched_since = self._now()
        seconds = max(1, math.ceil(self._list_due - began))
        async with aclosing(self._source.watch(self.selection, version, seconds)) as events:
            async for event in events:
                self._take(event)
        if self._now() >= self._list_due:
            self._version = None
        elif self._now() - began < _LIVED_SECONDS:
            await self._sleep(self._cuts.next_seconds())

    def _take(self, event: PodEvent) -> None:
        self._version = event.version
        pod = event.pod
        if not self._current:
            self._recovered()
            self._listener.pods_changed(self.selection, (), ())
        if pod is not None or self._now() - self._watched_since >= _LIVED_SECONDS:
            self._cuts.reset()
        if pod is None:
            return
        if event.deleted:
            if self.pods.remove(pod.uid) is not None:
                self._listener.pods_changed(self.selection, (), (pod,))
        elif self.pods.put(pod):
            self._listener.pods_changed(self.selection, (pod,), ())

    async def _handle_refusal(self, error: ApiError) -> None:
        if error.status == HTTPStatus.GONE:
            self._counts["history_gone"] += 1
            self._version = None
            self._current = False
            return
        self._counts["refused"] += 1
        lasting = error.status in _REFUSED
        if lasting and self._version is None:
            self._refused = True
            self.pods = PodSet()  # what was known says nothing any more, not even by its absence
        self._refusals_running += 1
        if self._refusals_running >= _REFUSALS_BEFORE_LIST:
            self._version = None  # whatever is wrong with it: a restored etcd has other versions
        await self._pause("refused", str(error), self._refusals if lasting else self._cuts)

    async def _pause(self, trouble: str, words: str, backoff: Backoff) -> None:
        """Wait before the next try; what is wrong is logged once."""
        self._current = False
        if trouble != self._trouble:
            self._trouble = trouble
            _log.warning("pods_not_followed", **self._words(), trouble=trouble, error=words)
        self._listener.pods_changed(self.selection, (), ())
        await self._sleep(backoff.next_seconds())

    def _recovered(self) -> None:
        self._current = True
        self._refusals.reset()
        self._refusals_running = 0
        if self._trouble:
            self._trouble = ""
            _log.info("pods_followed", **self._words(), pods=len(self.pods))

    def _words(self) -> dict[str, str]:
        return {
            "namespace": self.selection.namespace,
            "selector": self.selection.label_selector,
        }
