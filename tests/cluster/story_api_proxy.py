"""A proxy between an operator and the API server, so that a test can cut and falsify its view."""

from __future__ import annotations

import asyncio
import json
import selectors
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp
from aiohttp import web

from tests.cluster.control_plane import ControlPlane
from tests.polling import PATIENCE_SECONDS

_GONE = {
    "kind": "Status",
    "apiVersion": "v1",
    "metadata": {},
    "status": "Failure",
    "message": "too old resource version: 1 (2)",
    "reason": "Expired",
    "code": 410,
}
_NOT_PASSED_ON = {"host", "connection", "transfer-encoding", "content-length", "accept-encoding"}


class Manner(StrEnum):
    """How an API server says that it no longer has the version that a watch begins at."""

    STATUS = "status"
    EVENT = "event"


@dataclass(frozen=True)
class Call:
    """One request of the operator."""

    method: str
    path: str
    is_watch: bool
    at: float


class ApiProxy:
    """Forwards to one control plane, as its administrator. Entered: it serves.

    One thread with a loop of its own; everything public is for the test's thread.
    """

    def __init__(self, control_plane: ControlPlane, folder: Path) -> None:
        self.kubeconfig = folder / "proxied.kubeconfig"
        self._config: dict[str, Any] = json.loads(control_plane.kubeconfig.read_text())
        self._pair = control_plane.authority.issue("proxy", "proxy", hosts=("127.0.0.1",))
        self._selector = selectors.DefaultSelector()
        self._loop = asyncio.SelectorEventLoop(self._selector)
        self._thread = threading.Thread(target=self._run, name="api-proxy")
        self._served = threading.Event()
        self._stop = asyncio.Event()
        self._open = asyncio.Event()
        self._refused: set[bool] = set()  # of requests, by whether they are watches
        self._expires: dict[str, Manner] = {}
        self._handling: set[asyncio.Task[Any]] = set()
        self._watching: set[asyncio.Task[Any]] = set()
        self._frozen: set[asyncio.Task[Any]] = set()
        self._calls: list[Call] = []
        self._session: aiohttp.ClientSession | None = None

    def calls(self, *, since: float = 0.0) -> list[Call]:
        """Return the requests since a monotonic moment."""
        return [call for call in list(self._calls) if call.at >= since]

    def cut(self) -> None:
        """End every connection; new ones are served."""
        self._do(self._cut)

    def refuse(self) -> None:
        """End every connection, and every new one at once, until `serve`."""
        self._do(lambda: self._refuse({True, False}))

    def refuse_watches(self) -> None:
        """End every connection, and new watches at once, until `serve`; the rest is served."""
        self._do(lambda: self._refuse({True}))

    def hold(self) -> None:
        """Pass nothing on, either way, without a word to either side, until `serve`."""
        self._do(self._open.clear)

    def freeze_watches(self) -> None:
        """Pass nothing more on of the watches under way; their connections stay open for good."""
        self._do(lambda: self._frozen.update(self._watching))

    def serve(self) -> None:
        """Serve again."""
        self._do(self._serve_again)

    def expire(self, part_of_path: str, manner: Manner) -> None:
        """End the connections; the next watch of such a path is told that its version is gone."""

        def expire() -> None:
            self._expires[part_of_path] = manner
            self._cut()

        self._do(expire)

    def has_expired(self, part_of_path: str) -> bool:
        """Tell whether a watch has been told so since `expire`."""
        return part_of_path not in self._expires

    def _do(self, action: Callable[[], None]) -> None:
        done = threading.Event()

        def act() -> None:
            action()
            done.set()

        self._loop.call_soon_threadsafe(act)
        assert done.wait(PATIENCE_SECONDS)

    def _cut(self) -> None:
        for task in self._handling:
            task.cancel()

    def _refuse(self, kinds: set[bool]) -> None:
        self._refused = kinds
        self._cut()

    def _serve_again(self) -> None:
        self._refused = set()
        self._open.set()

    def _run(self) -> None:
        """Thread: api-proxy."""
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self._open.set()
        cluster, user = self._config["clusters"][0]["cluster"], self._config["users"][0]["user"]
        upstream = ssl.create_default_context(cafile=cluster["certificate-authority"])
        upstream.load_cert_chain(user["client-certificate"], user["client-key"])
        own = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        own.load_cert_chain(self._pair.certificate, self._pair.key)
        connector = aiohttp.TCPConnector(ssl=upstream, limit=0, force_close=True)
        async with aiohttp.ClientSession(
            cluster["server"], connector=connector, timeout=aiohttp.ClientTimeout(total=None)
        ) as self._session:
            runner = web.ServerRunner(web.Server(self._handle), shutdown_timeout=0.1)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=own)
            await site.start()
            cluster["server"] = f"https://127.0.0.1:{runner.addresses[0][1]}"
            self.kubeconfig.write_text(json.dumps(self._config))
            self._served.set()
            await self._stop.wait()
            self._cut()
            await runner.cleanup()
        await self._all_closed()

    async def _all_closed(self) -> None:
        """TLS connections end some turns of the loop after they are closed.

        What is left once nobody is connected is the pipe that the loop wakes itself by.
        """
        deadline = time.monotonic() + PATIENCE_SECONDS
        while len(self._selector.get_map()) > 1 and time.monotonic() < deadline:  # noqa: ASYNC110  # no event tells
            await asyncio.sleep(0.01)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        task = asyncio.current_task()
        assert task is not None
        is_watch = request.query.get("watch", "") in {"1", "true", "True"}
        self._calls.append(Call(request.method, request.path, is_watch, time.monotonic()))
        self._handling.add(task)
        if is_watch:
            self._watching.add(task)
        try:
            await self._open.wait()
            if is_watch in self._refused:
                raise asyncio.CancelledError  # noqa: TRY301  # as a cut does
            manner = self._expiry(request) if is_watch else None
            return await (self._forward(request) if manner is None else _gone(request, manner))
        except (asyncio.CancelledError, aiohttp.ClientError, ConnectionError):
            if request.transport is not None:
                request.transport.abort()
            raise asyncio.CancelledError from None
        finally:
            self._handling.discard(task)
            self._watching.discard(task)

    def _expiry(self, request: web.BaseRequest) -> Manner | None:
        found = next((part for part in self._expires if part in request.path), None)
        return None if found is None else self._expires.pop(found)

    async def _forward(self, request: web.BaseRequest) -> web.StreamResponse:
        assert self._session is not None
        headers = {k: v for k, v in request.headers.items() if k.lower() not in _NOT_PASSED_ON}
        body = await request.read()
        async with self._session.request(
            request.method, request.path_qs, headers=headers, data=body or None
        ) as answer:
            await self._open.wait()
            content = answer.headers.get("Content-Type", "application/json")
            response = web.StreamResponse(status=answer.status, headers={"Content-Type": content})
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                await self._open.wait()
                if asyncio.current_task() in self._frozen:
                    await self._stop.wait()
                await response.write(chunk)
            await response.write_eof()
            return response

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._served.wait(PATIENCE_SECONDS), "the proxy does not serve"
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(PATIENCE_SECONDS)


async def _gone(request: web.BaseRequest, manner: Manner) -> web.StreamResponse:
    """Say that a version is gone."""
    if manner is Manner.STATUS:
        return web.json_response(_GONE, status=410)
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    await response.prepare(request)
    await response.write(json.dumps({"type": "ERROR", "object": _GONE}).encode() + b"\n")
    await response.write_eof()
    return response
