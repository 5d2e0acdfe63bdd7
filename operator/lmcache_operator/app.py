"""The parts of the operator, their order, and what happens when one of them ends.

One loop, one thread. Each part is a coroutine that runs until it is cancelled:

| part | does | runs |
|---|---|---|
| `http` | `/healthz /readyz /metrics` | always |
| `lease` | takes the Lease, renews it | always |
| `trust` | keeps the certificates of the streams | while the Lease is held |
| `agents` | accepts the agents' streams | while the Lease is held |
| `flow` | follows worker pods, tells agents, posts Events, annotates | while the Lease is held |
| `reconcile` | makes the cluster what the specs say, writes status | while the Lease is held |
| `watch` | kopf: notices changes of our objects and of what they own | while the Lease is held |

If a part ends, the process does: Kubernetes starts a new one, which finds everything it needs in
the cluster. At a stop the acting parts end first, then the Lease is given back.
"""

from __future__ import annotations

import asyncio
import dataclasses
import signal
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import structlog

from lmcache_operator.agents.authenticator import Authenticator
from lmcache_operator.agents.registry import AgentRegistry, ServerRef
from lmcache_operator.agents.server import AgentServer, LinkSettings
from lmcache_operator.certs.trust import LinkTrust, link_hosts
from lmcache_operator.cluster import Cluster
from lmcache_operator.config import RELEASE, OperatorConfig, listen_host
from lmcache_operator.errors import KindMissing, OperatorError, Unreachable
from lmcache_operator.handlers import ServerWatch
from lmcache_operator.http import HttpServer
from lmcache_operator.lease import Lease
from lmcache_operator.metric_sources import flow_counts, flow_gauges, lease_gauges, link_counts
from lmcache_operator.metrics import Metrics
from lmcache_operator.names import KIND_MISSING
from lmcache_operator.reconcile import Reconciler
from lmcache_operator.resources.desired import Surroundings
from lmcache_operator.server_pass import ServerPass
from lmcache_operator.worker_flow import WorkerFlow

EXIT_STOPPED = 0
EXIT_FAILURE = 1

_FIRST_RETRY_SECONDS = 0.5
_LONGEST_RETRY_SECONDS = 10.0
_LINK_SECONDS = 10.0
_KIND_TRIES = 10

log = structlog.get_logger(__name__)


class _PartEnded(Exception):
    """A part ended, with the error that made it end."""

    def __init__(self, part: str, cause: BaseException | None) -> None:
        super().__init__(part)
        self.part = part
        self.cause = cause


class App:
    """One operator process."""

    def __init__(self, config: OperatorConfig) -> None:
        self._config = config
        self._metrics = Metrics()
        self._stop = asyncio.Event()
        self._lease: Lease | None = None

    async def run(self) -> int:
        """Act until a signal or a failure; return the exit status."""
        self._take_signals()
        log.info("operator_starting", release=RELEASE, identity=self._config.identity)
        try:
            async with await Cluster.connect(self._config.kubeconfig) as cluster:
                return await self._run_parts(cluster)
        except OperatorError as error:
            log.critical("operator_failed", error=str(error))
            return EXIT_FAILURE

    async def _run_parts(self, cluster: Cluster) -> int:
        lease = self._lease = Lease(
            cluster,
            namespace=self._config.operator_namespace,
            name=self._config.lease_name,
            identity=self._config.identity,
        )
        self._metrics.read_at_scrape([], lease_gauges(lease))
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._stopped(), name="stop")
                self._start(group, "http", self._http().run())
                group.create_task(self._begin(group, cluster, lease), name="begin")
        except BaseExceptionGroup as group_error:
            ended, others = group_error.split(_PartEnded)
            if ended is None or others is not None:
                raise
            return _report([part for part in ended.exceptions if isinstance(part, _PartEnded)])
        finally:
            await lease.release()
        raise AssertionError("a group of tasks that never end has ended")

    async def _begin(self, group: asyncio.TaskGroup, cluster: Cluster, lease: Lease) -> None:
        try:
            await self._until_answered(lambda: _check_the_kind(cluster))
            self._start(group, "lease", lease.run())
            await lease.held.wait()
            await self._act(group, cluster, lease)
        except OperatorError as error:
            raise _PartEnded("begin", error) from error

    async def _act(self, group: asyncio.TaskGroup, cluster: Cluster, lease: Lease) -> None:
        """Start what only the holder of the Lease does."""
        config, agents = self._config, AgentRegistry()
        hosts = link_hosts(config.told_link_url, config.operator_namespace)
        trust = LinkTrust(cluster, namespace=config.operator_namespace, hosts=hosts)
        link = self._link(cluster, lease, agents, trust)

        def workers_changed(server: ServerRef) -> None:
            reconciler.workers_changed(server)  # which needs the flow to be there first

        flow = WorkerFlow(cluster, agents, workers_changed)
        reconciler = self._reconciler(cluster, agents, flow, trust, link)
        trust.on_change(reconciler.notice_all)
        self._metrics.read_at_scrape(
            [*link_counts(link, trust), *flow_counts(flow)], flow_gauges(flow, agents, trust)
        )
        self._start(group, "trust", trust.run())
        await self._until_answered(reconciler.load)
        self._start(group, "flow", flow.run())
        self._start(group, "agents", _serve_link(link, trust))
        await _wait_a_while(link.listening)
        self._start(group, "reconcile", reconciler.run())
        watch = ServerWatch(config, cluster, reconciler.notice)
        self._start(group, "watch", watch.run(started=self._take_signals))
        log.info("operator_acts", identity=config.identity)

    def _link(
        self, cluster: Cluster, lease: Lease, agents: AgentRegistry, trust: LinkTrust
    ) -> AgentServer:
        config = self._config
        return AgentServer(
            LinkSettings(host=listen_host(config.link_host), port=config.link_port),
            agents,
            Authenticator(cluster, serves=config.serves),
            trust.context,
            is_ready=lease.is_held,
        )

    def _reconciler(
        self,
        cluster: Cluster,
        agents: AgentRegistry,
        flow: WorkerFlow,
        trust: LinkTrust,
        link: AgentServer,
    ) -> Reconciler:
        def surroundings() -> Surroundings:
            bound = dataclasses.replace(self._config, link_port=link.port)
            return Surroundings(
                agent_image=self._config.agent_image,
                link_url=bound.told_link_url,
                link_authorities=trust.ca_bundle(),
            )

        server_pass = ServerPass(
            cluster,
            self._config,
            surroundings,
            agents,
            flow,
            written=self._metrics.count_write,
        )
        return Reconciler(
            cluster,
            self._config,
            server_pass,
            flow.servers_changed,
            counted=self._metrics.count_pass,
        )

    def _start(
        self, group: asyncio.TaskGroup, part: str, running: Coroutine[Any, Any, None]
    ) -> None:
        async def run() -> None:
            try:
                await running
            except Exception as error:
                raise _PartEnded(part, _only(error)) from error
            raise _PartEnded(part, None)

        group.create_task(run(), name=part)

    def _http(self) -> HttpServer:
        return HttpServer(self._config, unready=self._unready, metrics=self._metrics.exposition)

    def _unready(self) -> str:
        if self._lease is not None and self._lease.is_held():
            return ""
        return f"another operator holds the Lease {self._config.lease_name}, or nobody yet"

    async def _stopped(self) -> None:
        await self._stop.wait()
        raise _PartEnded("stop", None)

    def _take_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)

    async def _until_answered(self, ask: Callable[[], Awaitable[None]]) -> None:
        """Ask the API server again until it answers."""
        pause = _FIRST_RETRY_SECONDS
        while True:
            try:
                return await ask()
            except Unreachable as error:
                log.warning("api_server_unreachable", error=str(error))
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_RETRY_SECONDS)


async def _check_the_kind(cluster: Cluster) -> None:
    """See that there is something to work on; it may have been installed this moment.

    Raises:
        KindMissing: the API server does not know our kind.
    """
    for _ in range(_KIND_TRIES):
        if await cluster.serves_our_kind():
            return
        await asyncio.sleep(_FIRST_RETRY_SECONDS)
    raise KindMissing(KIND_MISSING)


async def _serve_link(link: AgentServer, trust: LinkTrust) -> None:
    await trust.ready.wait()
    await link.run()


async def _wait_a_while(listening: asyncio.Event) -> None:
    """Wait for the link; without it agents still start, and judge by what they see themselves."""
    try:
        async with asyncio.timeout(_LINK_SECONDS):
            await listening.wait()
    except TimeoutError:
        log.warning("link_not_listening", seconds=_LINK_SECONDS)


def _only(error: Exception) -> Exception:
    """Return what a part that has parts of its own failed by."""
    while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def _report(ended: list[_PartEnded]) -> int:
    """Say why the process ends: a stop that was asked for, or else the first part that ended."""
    if any(part.part == "stop" for part in ended):
        log.info("operator_stopped")
        return EXIT_STOPPED
    first = ended[0]
    log.critical(
        "operator_failed",
        part=first.part,
        error=str(first.cause or "it ended"),
        exc_info=None if isinstance(first.cause, OperatorError) else first.cause,
    )
    return EXIT_FAILURE
