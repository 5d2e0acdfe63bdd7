"""Keeps the link's certificates in one Secret, and the running server on the newest of them.

Level-based: each pass compares the Secret with what should be, writes once if they differ, and has
the TLS context show what is stored. Only the holder of the Lease runs it. Private keys live in the
Secret and in memory; they are never on a disk and never in a log.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import os
import ssl
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol
from urllib.parse import urlsplit

import structlog

from lmcache_operator.certs.material import (
    SERVER,
    Damaged,
    KeyPair,
    Lifetimes,
    Material,
    due_step,
    read,
    write,
)
from lmcache_operator.clock import Now, wall
from lmcache_operator.errors import ApiError, Conflict, Forbidden, Unreachable
from lmcache_operator.names import MANAGED_BY, MANAGED_BY_LABEL

SECRET = "lmcache-operator-link"  # noqa: S105  # its name

_CHECK_SECONDS = 60.0
_RETRY_SECONDS = 2.0
_MOST_STEPS = 5  # one pass: an authority, its certificate, and what else may have become due

log = structlog.get_logger(__name__)


class SecretObjects(Protocol):
    """What is needed of the API server; `Cluster` has it."""

    async def get(self, kind: str, namespace: str | None, name: str) -> dict[str, Any] | None:
        """Return an object, or None if there is none."""

    async def create(self, obj: dict[str, Any]) -> bool:
        """Create an object; False if one of that name exists already."""

    async def replace(self, obj: dict[str, Any]) -> dict[str, Any]:
        """Replace an object at the version in it; `Conflict` if it changed meanwhile."""


def link_hosts(url: str, operator_namespace: str) -> tuple[str, ...]:
    """Return what the server certificate is for: the host that agents are told, and the Service."""
    service = "lmcache-operator"
    within = f"{service}.{operator_namespace}"
    names = [service, within, f"{within}.svc", f"{within}.svc.cluster.local"]
    told = urlsplit(url).hostname
    return tuple(dict.fromkeys([*([told] if told else []), *names]))


class LinkTrust:
    """The operator's own authority and server certificate.

    Attributes:
        context: for the server's end of TLS; the same object shows renewed certificates.
        ready: set once there is a certificate.
        counts: of what was made, by event.
    """

    def __init__(
        self,
        objects: SecretObjects,
        *,
        namespace: str,
        hosts: Sequence[str],
        lifetimes: Lifetimes | None = None,
        now: Now = wall,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self.context = _context()
        self.ready = asyncio.Event()
        self.counts: Counter[str] = Counter()
        self._objects = objects
        self._namespace = namespace
        self._hosts = tuple(hosts)
        self._lifetimes = lifetimes or Lifetimes()
        self._now = now
        self._sleep = sleep
        self._material: Material | None = None
        self._listeners: list[Callable[[], None]] = []

    def ca_bundle(self) -> str:
        """Return what agents must trust, as PEM; empty before `ready`."""
        return self._material.bundle if self._material else ""

    def on_change(self, listener: Callable[[], None]) -> None:
        """Have `listener` called, on the loop, whenever `ca_bundle()` has changed."""
        self._listeners.append(listener)

    def server_expires_at(self) -> float | None:
        """Return when the certificate shown ends, in seconds since 1970."""
        if self._material is None or self._material.server is None:
            return None
        return self._material.server.certificate.not_valid_after_utc.timestamp()

    async def run(self) -> None:
        """Look at the Secret again and again; without an answer the certificates stay in use."""
        trouble = ""
        while True:
            try:
                await self.refresh()
            except (Unreachable, ApiError) as error:
                if str(error) != trouble:
                    log.warning("link_secret_not_checked", secret=self._place, error=str(error))
                trouble = str(error)
                await self._sleep(_RETRY_SECONDS)
            else:
                trouble = ""
                await self._sleep(_CHECK_SECONDS)

    async def refresh(self) -> None:
        """Do one pass.

        Raises:
            Unreachable: no answer.
            ApiError: it may not read or write its Secret, or somebody else keeps writing it.
        """
        stored = await self._objects.get("Secret", self._namespace, SECRET)
        found = self._read(stored)
        wanted, events = self._wanted(found)
        if wanted is not found:
            await self._write(stored, wanted)
        self._use(wanted)
        for event in events:
            self._count(event, wanted)

    @property
    def _place(self) -> str:
        return f"{self._namespace}/{SECRET}"

    def _read(self, stored: dict[str, Any] | None) -> Material | None:
        """Return what is stored; what is unusable of it is said, and made again."""
        encoded = (stored or {}).get("data") or {}
        if not encoded:
            if self._material is not None:
                log.warning("link_secret_emptied", secret=self._place)
            return None
        try:
            texts = {name: base64.b64decode(text) for name, text in encoded.items()}
            material, problem = read(texts)
            if material.server is not None:
                _load(_context(), material.server)
        except (Damaged, binascii.Error, ssl.SSLError) as error:
            material, problem = None, str(error)
        if problem:
            self.counts["link_secret_damaged"] += 1
            log.warning("link_secret_damaged", secret=self._place, problem=problem)
        return material

    def _wanted(self, found: Material | None) -> tuple[Material, list[str]]:
        """Return what should be stored, the very `found` if that is it, and what was done."""
        material, events = found, []
        if material is None and self._material is not None:
            material = self._material  # agents trust it: it is written again
            events.append("link_secret_restored")
        for _ in range(_MOST_STEPS):
            step = due_step(material, self._hosts, self._lifetimes, self._now())
            if step is None:
                break
            material = step.material
            events.append(step.event)
        assert material is not None, "without any, making one is due"
        return material, events

    async def _write(self, stored: dict[str, Any] | None, material: Material) -> None:
        secret = {
            **(stored or {"metadata": self._metadata()}),
            "apiVersion": "v1",
            "kind": "Secret",
            "data": {
                name: base64.b64encode(text.encode()).decode()
                for name, text in write(material).items()
            },
        }
        if stored is not None:
            await self._objects.replace(secret)
        elif not await self._created(secret):
            raise Conflict(409, "AlreadyExists", f"somebody else has just made {self._place}")

    async def _created(self, secret: dict[str, Any]) -> bool:
        try:
            return await self._objects.create(secret)
        except Forbidden as error:
            fix = f"make the Secret {self._place} without data, it is filled then"
            raise Forbidden(error.status, error.reason, f"{error.message}: {fix}") from None

    def _metadata(self) -> dict[str, Any]:
        labels = {MANAGED_BY_LABEL: MANAGED_BY}
        return {"namespace": self._namespace, "name": SECRET, "labels": labels}

    def _use(self, material: Material) -> None:
        """Show the stored certificate, and tell of a changed bundle."""
        bundle = self.ca_bundle()
        if material.server is not None and (
            self._material is None or self._material.server != material.server
        ):
            _load(self.context, material.server)
        self._material = material
        self.ready.set()
        if material.bundle != bundle:
            for listener in self._listeners:
                listener()

    def _count(self, event: str, material: Material) -> None:
        self.counts[event] += 1
        ends = material.authority.certificate.not_valid_after_utc
        shown = material.server.certificate.not_valid_after_utc if material.server else None
        log.info(
            event,
            secret=self._place,
            authority_until=ends.isoformat(),
            certificate_until=shown.isoformat() if shown else None,
        )


def _context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # An agent reads in one thread what it writes in another. OpenSSL loses its request, one time in
    # a hundred, if it is written while a session ticket is read. Nobody resumes sessions here.
    context.num_tickets = 0
    return context


def _load(context: ssl.SSLContext, pair: KeyPair) -> None:
    """Have new handshakes show a certificate; ssl reads files only, so it is given memory as one.

    Raises:
        ssl.SSLError: the two do not belong together; the earlier pair stays in use.
    """
    descriptor = os.memfd_create(SERVER, os.MFD_CLOEXEC)
    try:
        os.write(descriptor, f"{pair.certificate_text}{pair.key_text}".encode())
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)
