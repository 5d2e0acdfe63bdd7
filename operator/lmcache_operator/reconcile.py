"""When a pass over which server is made, and what becomes of one that fails."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import NoReturn

import structlog

from lmcache_operator.agents.registry import ServerRef
from lmcache_operator.api.crd import KIND
from lmcache_operator.api.root import Spec
from lmcache_operator.clock import Now, Sleep, monotonic
from lmcache_operator.cluster import Cluster, KubeObject
from lmcache_operator.config import OperatorConfig
from lmcache_operator.errors import (
    ApiError,
    KindMissing,
    NotFound,
    OperatorError,
    SpecError,
    Unreachable,
)
from lmcache_operator.names import KIND_MISSING
from lmcache_operator.server_pass import Memory, ServerPass, reference
from lmcache_operator.spec import read_spec
from lmcache_operator.work_queue import WorkQueue

Key = tuple[str, str]
"""Namespace and name of a server."""

ServersListener = Callable[[Mapping[ServerRef, Spec]], None]
"""Told of all servers with a spec that can be served; must return at once."""

_AT_ONCE = 4  # passes; each waits for the API server most of its time
_GATHER_SECONDS = 0.2  # several events of one change make one pass
_BETWEEN_PASSES_SECONDS = 1.0
_FIND_SECONDS = 60.0
_FIRST_RETRY_SECONDS = 1.0
_LONGEST_RETRY_SECONDS = 30.0

log = structlog.get_logger(__name__)


class Reconciler:
    """Makes passes over servers whenever something about one of them may have changed."""

    def __init__(
        self,
        cluster: Cluster,
        config: OperatorConfig,
        server_pass: ServerPass,
        servers_changed: ServersListener,
        *,
        counted: Callable[[str], None],
        now: Now = monotonic,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        """Prepare.

        Args:
            cluster: the API server.
            config: which namespaces are served.
            server_pass: what a pass does.
            servers_changed: told when servers come, go or change.
            counted: told the outcome of each pass.
            now: monotonic seconds.
            sleep: lets so many of them pass.
        """
        self._cluster = cluster
        self._config = config
        self._pass = server_pass
        self._servers_changed = servers_changed
        self._counted = counted
        self._now = now
        self._sleep = sleep
        self._queue: WorkQueue[Key] = WorkQueue(now, sleep)
        self._memories: dict[Key, Memory] = {}
        self._passed_at: dict[Key, float] = {}
        self._retries: dict[Key, float] = {}
        self._told: dict[ServerRef, Spec] | None = None
        self._trouble: dict[Key, str] = {}

    def notice(self, namespace: str, name: str, version: str = "") -> None:
        """Have a pass made soon.

        Args:
            namespace: of the server.
            name: of the server.
            version: of the object that changed, if it was a change: one that our own pass has left
                or seen is no news.
        """
        key = (namespace, name)
        if version and key in self._memories and version in self._memories[key].versions:
            return
        gap = self._passed_at.get(key, float("-inf")) + _BETWEEN_PASSES_SECONDS - self._now()
        self._queue.add(key, max(_GATHER_SECONDS, gap))

    def workers_changed(self, server: ServerRef) -> None:
        """Have the status of a server looked at."""
        self.notice(server.namespace, server.name)

    def notice_all(self) -> None:
        """Have a pass made over every known server."""
        for key in self._memories:
            self.notice(*key)

    async def load(self) -> None:
        """Read all servers, so that all are known before anything is said about one.

        Raises:
            KindMissing: the API server does not know our kind.
            Unreachable: no answer.
            ApiError: we may not.
        """
        for server, stored in await self._servers():
            memory = Memory(server=server)
            try:
                memory.spec = read_spec(stored)
            except SpecError:
                memory.spec = None  # the pass will say so
            self._memories[server.namespace, server.name] = memory
            self.notice(server.namespace, server.name)
        self._tell()

    async def run(self) -> NoReturn:
        """Make passes until cancelled.

        Raises:
            KindMissing: the API server does not know our kind any more.
        """
        async with asyncio.TaskGroup() as group:
            for number in range(_AT_ONCE):
                group.create_task(self._work(), name=f"reconcile-{number}")
            group.create_task(self._find_unnoticed(), name="reconcile-find")
        raise AssertionError("only cancelling ends it")

    async def _find_unnoticed(self) -> NoReturn:
        """Look for servers that no watch has told of: kopf never starts one that it cannot find."""
        while True:
            await self._sleep(_FIND_SECONDS)
            try:
                for server, _ in await self._servers():
                    if (server.namespace, server.name) not in self._memories:
                        log.warning("server_found_unnoticed", name=server.name)
                        self.notice(server.namespace, server.name)
            except (Unreachable, ApiError) as error:
                log.warning("servers_not_listed", error=str(error))

    async def _servers(self) -> list[tuple[ServerRef, Mapping[str, object]]]:
        """List all servers with their stored specs.

        Raises:
            KindMissing: the API server does not know our kind.
            Unreachable: no answer.
            ApiError: we may not.
        """
        found: list[KubeObject] = []
        try:
            for namespace in self._config.namespace or (None,):
                found += await self._cluster.list(KIND, namespace)
        except NotFound:
            raise KindMissing(KIND_MISSING) from None
        return [(reference(obj), obj["spec"]) for obj in found]

    async def _work(self) -> NoReturn:
        while True:
            key = await self._queue.take()
            try:
                await self._attend(key)
            finally:
                self._queue.done(key)

    async def _attend(self, key: Key) -> None:
        """Make one pass; what goes wrong in it concerns this server alone."""
        memory = self._memories.setdefault(key, Memory())
        again_seconds, outcome, trouble = await self._outcome(key, memory)
        self._passed_at[key] = self._now()
        self._counted(outcome)
        if trouble and trouble != self._trouble.get(key):
            log.warning("server_not_served", namespace=key[0], name=key[1], error=trouble)
        self._trouble[key] = trouble
        if again_seconds is None:
            for known in (self._memories, self._passed_at, self._retries, self._trouble):
                known.pop(key, None)
        else:
            self._queue.add(key, again_seconds)
        self._tell()

    async def _outcome(self, key: Key, memory: Memory) -> tuple[float | None, str, str]:
        """Make a pass; return when to make the next, how it went, and what went wrong."""
        try:
            again_seconds = await self._pass.run(*key, memory)
        except OperatorError as error:
            outcome = "unreachable" if isinstance(error, Unreachable) else "refused"
            return self._retry_seconds(key), outcome, str(error)
        except Exception:
            log.exception("server_pass_crashed", namespace=key[0], name=key[1])
            return self._retry_seconds(key), "crashed", ""
        self._retries.pop(key, None)
        return again_seconds, "done", ""

    def _retry_seconds(self, key: Key) -> float:
        before = self._retries.get(key, 0.0)
        wait = self._retries[key] = min(
            max(2 * before, _FIRST_RETRY_SECONDS), _LONGEST_RETRY_SECONDS
        )
        return wait

    def _tell(self) -> None:
        known = self._memories.values()
        servers = {m.server: m.spec for m in known if m.server is not None and m.spec is not None}
        if servers != self._told:
            self._told = servers
            self._servers_changed(servers)
