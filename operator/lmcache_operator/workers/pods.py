"""The worker pods of all servers: read from the API server, followed, and looked up.

JSON as it comes, in pages, of which a slim record of each pod is kept: a typed list of 2,000 pods
costs 170 MiB, this way 36.
"""

from __future__ import annotations

import asyncio
import copy
import random
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from http import HTTPStatus
from typing import NoReturn, Protocol, TypeVar

import aiohttp
import msgspec
import structlog
from aiohttp.http_exceptions import HttpProcessingError
from kubernetes.aio import client
from msgspec import Struct

from lmcache_operator import clock
from lmcache_operator.cluster import KINDS, PAGE, REQUEST_SECONDS
from lmcache_operator.errors import ApiError, NotFound, PodError, Unreachable
from lmcache_operator.workers.absences import AbsenceChecks, AbsenceListener
from lmcache_operator.workers.pacing import Sleep
from lmcache_operator.workers.pod import Pod, read_pod
from lmcache_operator.workers.pod_set import PodSet
from lmcache_operator.workers.selection import Selection
from lmcache_operator.workers.selection_watch import (
    Listing,
    PodEvent,
    PodSource,
    SelectionListener,
    SelectionWatch,
)

SILENCE_SECONDS = 90.0
"""Without a word for this long a watch is given up; a bookmark comes every 60 s."""

_CONNECT_SECONDS = 5.0

_log = structlog.get_logger(__name__)

_T = TypeVar("_T")

# What aiohttp raises when there is no answer, or none that is HTTP.
_NO_ANSWER = (aiohttp.ClientError, HttpProcessingError, OSError, TimeoutError)


class _Metadata(Struct, rename="camel"):
    resource_version: str = ""
    next_page: str = msgspec.field(default="", name="continue")


class _Page(Struct):
    metadata: _Metadata
    items: list[msgspec.Raw] | None = None


class _Versioned(Struct):
    metadata: _Metadata


class _WatchEvent(Struct):
    type: str
    object: msgspec.Raw


class _Status(Struct):
    """What a refusal looks like."""

    code: int = HTTPStatus.INTERNAL_SERVER_ERROR
    reason: str = ""
    message: str = ""


_pages = msgspec.json.Decoder(_Page)
_versions = msgspec.json.Decoder(_Versioned)
_events = msgspec.json.Decoder(_WatchEvent)
_statuses = msgspec.json.Decoder(_Status)


class KubernetesPods:
    """Implements `PodSource` with the API server. Thread: the loop.

    Its connections are its own: every watch holds one, and other requests must not wait for those.

    Args:
        api_client: whose credentials to use.
        page: pods in a page of a list.
    """

    def __init__(self, api_client: client.ApiClient, page: int = PAGE) -> None:
        settings = copy.copy(api_client.configuration)
        settings.connection_pool_maxsize = 0  # as many as there are selections
        self._client = client.ApiClient(settings)
        self._page = page
        self.unreadable = 0
        """Pods that were left out since they could not be read."""

    async def list(self, selection: Selection) -> Listing:
        """List all pods of a selection."""
        query = {"labelSelector": selection.label_selector, "limit": str(self._page)}
        pods: list[Pod] = []
        while True:
            page = _decode(_pages, await self._get(_path(selection.namespace), query))
            read = (self._read(bytes(item)) for item in page.items or ())
            pods += [pod for pod in read if pod is not None]
            if not page.metadata.next_page:
                return Listing(pods, page.metadata.resource_version)
            query["continue"] = page.metadata.next_page

    async def watch(
        self, selection: Selection, version: str, seconds: int
    ) -> AsyncGenerator[PodEvent, None]:
        """Give what happened after a version."""
        query = {
            "watch": "1",
            "labelSelector": selection.label_selector,
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(seconds),
        }
        limit = aiohttp.ClientTimeout(sock_connect=_CONNECT_SECONDS, sock_read=SILENCE_SECONDS)
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                response = await self._send(_path(selection.namespace), query, limit)
            try:
                if response.status >= HTTPStatus.BAD_REQUEST:
                    raise _refusal(response.status, await response.read())
                yield PodEvent(version)
                while line := await response.content.readline():
                    yield self._event(line)
            finally:
                _abandon(response)
        except _NO_ANSWER as error:
            words = str(error) or type(error).__name__
            raise Unreachable(f"watch of pods in {selection.namespace}: {words}") from None

    async def read(self, namespace: str, name: str) -> Pod | None:
        """Read one pod, None if there is none of that name."""
        try:
            return read_pod(await self._get(_path(namespace, name), {}))
        except NotFound:
            return None

    async def close(self) -> None:
        """End all connections."""
        await self._client.close()  # type: ignore[no-untyped-call]

    def _event(self, line: bytes) -> PodEvent:
        event = _decode(_events, line)
        if event.type == "ERROR":
            status = _decode(_statuses, event.object)
            raise ApiError.of(status.code, status.reason, status.message)
        version = _decode(_versions, event.object).metadata.resource_version
        if event.type == "BOOKMARK":
            return PodEvent(version)
        return PodEvent(version, self._read(bytes(event.object)), event.type == "DELETED")

    def _read(self, document: bytes) -> Pod | None:
        try:
            return read_pod(document)
        except PodError as error:
            self.unreadable += 1
            _log.warning("pod_unreadable", error=str(error))
            return None

    async def _get(self, path: str, query: dict[str, str]) -> bytes:
        limit = aiohttp.ClientTimeout(total=REQUEST_SECONDS, sock_connect=_CONNECT_SECONDS)
        try:
            async with await self._send(path, query, limit) as response:
                body = await response.read()
        except _NO_ANSWER as error:
            words = str(error) or f"no answer within {REQUEST_SECONDS:.0f} s"
            raise Unreachable(f"GET {path}: {words}") from None
        if response.status >= HTTPStatus.BAD_REQUEST:
            raise _refusal(response.status, body)
        return body

    async def _send(
        self, path: str, query: dict[str, str], limit: aiohttp.ClientTimeout
    ) -> aiohttp.ClientResponse:
        prepared = await self._client.param_serialize(
            "GET",
            path,
            query_params=list(query.items()),
            header_params={"Accept": "application/json"},
            auth_settings=["BearerToken"],
        )
        answer = await self._client.call_api(*prepared, _request_timeout=limit)
        return answer.response  # type: ignore[no-any-return]


class PodListener(SelectionListener, AbsenceListener, Protocol):
    """Is told of every change of the worker pods, on the loop. Must return at once."""


class PodWatch:
    """All selections, each with a watch of its own. Thread: the loop."""

    def __init__(
        self,
        source: PodSource,
        listener: PodListener,
        *,
        now: clock.Now = clock.monotonic,
        spread: Callable[[], float] = random.random,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self.counts: Counter[str] = Counter()
        """Lists, cuts and the like since the start, by name."""
        self._source = source
        self._listener = listener
        self._now = now
        self._spread = spread
        self._sleep = sleep
        self._absences = AbsenceChecks(source, listener, self.counts, sleep)
        self._watches: dict[Selection, SelectionWatch] = {}
        self._changed = asyncio.Event()

    def select(self, selections: Collection[Selection]) -> None:
        """Follow exactly these from now on."""
        for gone in self._watches.keys() - set(selections):
            del self._watches[gone]
        for selection in set(selections) - self._watches.keys():
            self._watches[selection] = SelectionWatch(
                selection,
                self._source,
                self,
                now=self._now,
                spread=self._spread,
                counts=self.counts,
                sleep=self._sleep,
            )
        self._changed.set()

    def pods(self, selection: Selection) -> PodSet | None:
        """Return the pods of a selection, as far as they are known."""
        watch = self._watches.get(selection)
        return watch.pods if watch else None

    def is_current(self, selection: Selection) -> bool:
        """Tell whether all pods of a selection are known, as they are now."""
        watch = self._watches.get(selection)
        return watch is not None and watch.is_current

    def is_settled(self, selections: Collection[Selection]) -> bool:
        """Tell whether nothing more can be known: each is current, or will not be told to us."""
        found = [self._watches.get(each) for each in selections]
        return all(watch is not None and (watch.is_current or watch.is_refused) for watch in found)

    def tracked(self) -> int:
        """Count the pods that are kept."""
        return sum(len(watch.pods) for watch in self._watches.values())

    def check_absence(self, selection: Selection, last_seen: Pod) -> None:
        """Ask what became of a pod; the listener's `pod_absent` is told."""
        self._absences.add(selection, last_seen)

    def pods_changed(
        self, selection: Selection, changed: Sequence[Pod], missing: Sequence[Pod]
    ) -> None:
        """Pass on what one watch saw."""
        if selection in self._watches:
            for pod in changed:
                self._absences.discard(selection, pod.uid)
            self._listener.pods_changed(selection, changed, missing)

    async def run(self) -> NoReturn:
        """Follow all selections until cancelled; then end the source's connections."""
        try:
            await self._follow()
        finally:
            await self._source.close()

    async def _follow(self) -> NoReturn:
        running: dict[Selection, tuple[SelectionWatch, asyncio.Task[NoReturn]]] = {}
        async with asyncio.TaskGroup() as group:
            group.create_task(self._absences.run())
            while True:
                self._changed.clear()
                for selection, (watch, task) in list(running.items()):
                    if self._watches.get(selection) is not watch:
                        task.cancel()
                        del running[selection]
                for selection, watch in self._watches.items():
                    if selection not in running:
                        running[selection] = (watch, group.create_task(watch.run()))
                await self._changed.wait()


def _abandon(response: aiohttp.ClientResponse) -> None:
    """End a stream at once; an orderly end of TLS would wait for a server that may be frozen."""
    connection = response.connection
    if connection is not None and connection.transport is not None:
        connection.transport.abort()
    response.close()


def _path(namespace: str, name: str = "") -> str:
    return KINDS["Pod"].path(namespace, name)


def _decode(decoder: msgspec.json.Decoder[_T], text: bytes | msgspec.Raw) -> _T:
    """Read JSON of the API server.

    Raises:
        Unreachable: it is none, as from a proxy or when a connection breaks in the middle.
    """
    try:
        return decoder.decode(text)
    except msgspec.DecodeError as error:
        raise Unreachable(f"what the API server said is no answer: {error}") from None


def _refusal(status: int, body: bytes) -> ApiError:
    try:
        found = _statuses.decode(body)
    except msgspec.DecodeError:
        return ApiError.of(status, HTTPStatus(status).phrase, body.decode(errors="replace")[:500])
    return ApiError.of(status, found.reason, found.message)
