"""Health and metrics over HTTP, answered from the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from http import HTTPStatus

import structlog
from aiohttp import web

from lmcache_operator.config import OperatorConfig, listen_host

log = structlog.get_logger(__name__)

_NO_STORE = {"Cache-Control": "no-store"}


class HttpServer:
    """Answers `/healthz` (the loop turns), `/readyz` (this operator acts) and `/metrics`.

    Only the holder of the Lease is ready: agents are then sent to nobody else.
    """

    def __init__(
        self,
        config: OperatorConfig,
        *,
        unready: Callable[[], str],
        metrics: Callable[[], tuple[bytes, str]],
    ) -> None:
        """Prepare.

        Args:
            config: where to listen.
            unready: why this operator does not act, empty if it does.
            metrics: the exposition and its content type.
        """
        self._config = config
        self._unready = unready
        self._metrics = metrics
        self.port = 0

    async def run(self) -> None:
        """Serve until cancelled; `port` is the bound one from the moment it listens."""
        app = web.Application()
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/metrics", self._metrics_page)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        try:
            host = listen_host(self._config.http_host)
            site = web.TCPSite(runner, host, self._config.http_port)
            await site.start()
            self.port = int(runner.addresses[0][1])
            log.info("http_listening", port=self.port)
            await asyncio.Event().wait()
        finally:
            await runner.cleanup()

    async def _healthz(self, _: web.Request) -> web.Response:
        return web.Response(text="ok\n", headers=_NO_STORE)

    async def _readyz(self, _: web.Request) -> web.Response:
        if reason := self._unready():
            status = HTTPStatus.SERVICE_UNAVAILABLE
            return web.Response(text=f"{reason}\n", status=status, headers=_NO_STORE)
        return web.Response(text="ok\n", headers=_NO_STORE)

    async def _metrics_page(self, _: web.Request) -> web.Response:
        body, content_type = self._metrics()
        return web.Response(body=body, headers={**_NO_STORE, "Content-Type": content_type})
