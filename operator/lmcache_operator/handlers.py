"""Where kopf is: it watches our objects and what we own, and says whose object changed.

kopf writes nothing here. `on.event` handlers need no annotation and no finalizer, its own Events
are off, and `reconcile.py` alone decides what a change means.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import kopf

from lmcache_operator.api.crd import GROUP, PLURAL, VERSION
from lmcache_operator.cluster import Cluster
from lmcache_operator.config import OperatorConfig
from lmcache_operator.errors import KindMissing
from lmcache_operator.names import (
    KIND_MISSING,
    MANAGED_BY,
    MANAGED_BY_LABEL,
    SERVER_NAME_LABEL,
    SERVER_NAMESPACE_LABEL,
)

Noticed = Callable[[str, str, str], None]
"""Told namespace and name of a server that may have changed, and the version of the object that
did, empty if it may have changed unseen; must return at once."""

_OWNED = (
    ("apps", "v1", "daemonsets"),
    ("", "v1", "configmaps"),
    ("", "v1", "services"),
    ("", "v1", "serviceaccounts"),
)
_REQUEST_SECONDS = 10.0
_BACKOFFS = (1, 1, 2, 3, *[5] * 20)


class ServerWatch:
    """Watches `LMCacheServer` objects and everything labelled as theirs."""

    def __init__(self, config: OperatorConfig, cluster: Cluster, noticed: Noticed) -> None:
        self._config = config
        self._cluster = cluster
        self._noticed = noticed

    async def run(self, started: Callable[[], None]) -> None:
        """Watch until cancelled.

        kopf takes over the signals while it sets up, hence `started`, which is called right after.

        Raises:
            KindMissing: the definition of our kind is gone.
        """
        tasks = await kopf.spawn_tasks(
            registry=self._registry(),
            settings=_settings(),
            standalone=True,
            clusterwide=self._config.every_namespace,
            namespaces=self._config.namespace,
        )
        started()
        # Not by `kopf.run_tasks`: that ends every task of the loop that began after kopf, also
        # those that close the agents' streams, and the process would then wait for ever.
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        if not await self._cluster.serves_our_kind():
            raise KindMissing(KIND_MISSING)
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome

    def _registry(self) -> kopf.OperatorRegistry:
        registry = kopf.OperatorRegistry()

        async def log_in(**_: object) -> kopf.ConnectionInfo:
            return await self._credentials()

        async def server_changed(
            event: kopf.RawEvent, name: str, namespace: str | None, **_: object
        ) -> None:
            self._noticed(namespace or "", name, _version(event))

        async def owned_changed(
            event: kopf.RawEvent, labels: Mapping[str, str], **_: object
        ) -> None:
            namespace, name = labels.get(SERVER_NAMESPACE_LABEL), labels.get(SERVER_NAME_LABEL)
            if namespace and name:
                self._noticed(namespace, name, _version(event))

        kopf.on.login(registry=registry)(log_in)
        kopf.on.event(GROUP, VERSION, PLURAL, registry=registry)(server_changed)
        for group, version, plural in _OWNED:
            kopf.on.event(group, version, plural, registry=registry)(owned_changed)
        return registry

    async def _credentials(self) -> kopf.ConnectionInfo:
        """Give kopf what our own client uses: one place that finds credentials."""
        settings = self._cluster.client.configuration
        header: str = await settings.get_api_key_with_prefix("BearerToken") or ""
        return kopf.ConnectionInfo(
            server=settings.host,
            ca_path=settings.ssl_ca_cert,
            insecure=not settings.verify_ssl,
            token=header.removeprefix("bearer ").removeprefix("Bearer ") or None,
            certificate_path=settings.cert_file,
            private_key_path=settings.key_file,
            trust_env=True,
        )


def _version(event: kopf.RawEvent) -> str:
    """Return the version that an event brings.

    The first list and every list after a gap have no type: who is in them may have changed unseen,
    and so may others of the same server that are gone.
    """
    if event["type"] is None:
        return ""
    return str(event["object"]["metadata"].get("resourceVersion", ""))


def _settings() -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.scanning.disabled = True  # no watch of definitions and namespaces
    settings.posting.enabled = False
    settings.networking.request_timeout = _REQUEST_SECONDS
    settings.networking.error_backoffs = _BACKOFFS
    settings.process.ultimate_exiting_timeout = None  # the process ends by itself
    settings.watching.chunk_size = 500
    selector = f"{MANAGED_BY_LABEL}={MANAGED_BY}"
    selectors: Any = settings.watching.label_selectors
    for group, _, plural in _OWNED:
        selectors[f"{group}/{plural}" if group else plural] = selector
    return settings
