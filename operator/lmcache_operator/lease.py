"""Only one operator acts: the holder of a Lease of the API server.

The holder renews; who finds a Lease unchanged for as long as it promises to last takes it. "For as
long" is measured by the finder's own monotonic clock from the moment at which it saw the last
change: the moments written into the Lease are for people, and clocks of two machines are never
compared. A holder that cannot renew stops holding well before anybody else may take the Lease.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

import structlog

from lmcache_operator.clock import Now, kube_micro_time, monotonic, wall
from lmcache_operator.errors import ApiError, Conflict, LeaseLost, Unreachable

_JITTER = 0.2  # of the pause between two tries, so that candidates do not march in step
_RELEASE_SECONDS = 3.0
_LONGEST_PROMISE_SECONDS = 60.0  # whatever a Lease says, a dead holder is replaced after this

log = structlog.get_logger(__name__)


class LeaseObjects(Protocol):
    """What is needed of the API server; `Cluster` has it."""

    async def get(self, kind: str, namespace: str | None, name: str) -> dict[str, Any] | None:
        """Return an object, or None if there is none."""

    async def create(self, obj: dict[str, Any]) -> bool:
        """Create an object; False if one of that name exists already."""

    async def replace(self, obj: dict[str, Any]) -> dict[str, Any]:
        """Replace an object at the version in it; `Conflict` if it changed meanwhile."""


@dataclass(frozen=True)
class LeaseTimes:
    """How long a Lease lasts, in seconds.

    Attributes:
        duration_seconds: others may take it after this time without a renewal.
        deadline_seconds: the holder stops holding after this time without a renewal; what lies
            between the two is the time it has to stop acting.
        retry_seconds: between two tries to renew or to take it.
    """

    duration_seconds: float = 15.0
    deadline_seconds: float = 10.0
    retry_seconds: float = 2.0

    def __post_init__(self) -> None:
        if not 0 < self.retry_seconds * (1 + _JITTER) < self.deadline_seconds:
            raise ValueError(
                f"retry_seconds {self.retry_seconds:g} must leave time for a second try within "
                f"deadline_seconds {self.deadline_seconds:g}: lower it"
            )
        if self.deadline_seconds >= self.duration_seconds:
            raise ValueError(
                f"deadline_seconds {self.deadline_seconds:g} must be below duration_seconds "
                f"{self.duration_seconds:g}: the holder must have stopped before another starts"
            )


class Lease:
    """One candidate for the Lease, and its holder once `held` is set.

    `run()` ends only by `LeaseLost`. At a clean stop: cancel it, stop acting, then `release()`.
    """

    def __init__(
        self,
        cluster: LeaseObjects,
        *,
        namespace: str,
        name: str,
        identity: str,
        times: LeaseTimes | None = None,
        now: Now = monotonic,
        wall_now: Now = wall,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self.held = asyncio.Event()
        self._cluster = cluster
        self._namespace = namespace
        self._name = name
        self._identity = identity
        self._times = times or LeaseTimes()
        self._now = now
        self._wall_now = wall_now
        self._sleep = sleep
        self._renewed_at: float | None = None  # when the last successful request was sent
        self._seen: dict[str, Any] = {}
        self._seen_at = 0.0
        self._trouble = ""

    def is_held(self) -> bool:
        """Tell whether this process may act, at this moment.

        Unlike `held` it also notices that the whole process stood still for too long, before
        anything else has run.
        """
        return self._renewed_at is not None and self._seconds_left() > 0

    async def run(self) -> None:
        """Take the Lease when it is free, then keep it.

        Raises:
            LeaseLost: it was held and is not any more; the process must end.
        """
        while not await self._tried():
            await self._pause()
        self.held.set()
        log.info("lease_acquired", lease=self._name, identity=self._identity)
        await self._keep()

    async def release(self) -> None:
        """Let others take the Lease at once, if it is held. Everything that acts has stopped."""
        if not self.is_held():
            return
        self._renewed_at = None
        self.held.clear()
        try:
            async with asyncio.timeout(_RELEASE_SECONDS):
                stored = await self._read()
                if stored is None or _holder(stored) != self._identity:
                    return
                spec = {"holderIdentity": "", "leaseDurationSeconds": 1}
                await self._cluster.replace({**stored, "spec": {**stored["spec"], **spec}})
        except (Unreachable, ApiError, TimeoutError) as error:
            log.warning("lease_not_released", lease=self._name, error=str(error))
        else:
            log.info("lease_released", lease=self._name, identity=self._identity)

    async def _keep(self) -> None:
        while True:
            await self._pause()
            self._check_held()  # late, maybe: the process may have stood still
            await self._tried()
            self._check_held()

    def _check_held(self) -> None:
        if not self.is_held():
            why = self._trouble or "this process stood still"
            raise self._lost(f"was not renewed for {self._times.deadline_seconds:g} s ({why})")

    def _lost(self, how: str) -> LeaseLost:
        self.held.clear()
        self._renewed_at = None
        return LeaseLost(
            f"the Lease {self._namespace}/{self._name} {how}: another operator may act, "
            "so this one ends"
        )

    async def _tried(self) -> bool:
        """Try once to take or renew the Lease; trouble is logged when it changes."""
        seconds = self._seconds_left()
        try:
            async with asyncio.timeout(seconds):
                taken = await self._try()
        except (Unreachable, ApiError) as error:
            taken, trouble = False, str(error)
        except TimeoutError:
            taken, trouble = False, f"no answer within {seconds:.1f} s"
        else:
            trouble = ""
        if trouble and trouble != self._trouble:
            event = "lease_not_renewed" if self.is_held() else "lease_not_acquired"
            log.warning(event, lease=self._name, error=trouble)
        self._trouble = trouble
        return taken

    async def _try(self) -> bool:
        asked_at = self._now()
        stored = await self._read()
        if stored is None:
            taken = await self._cluster.create(self._claim(None))
        elif not self._may_take(stored):
            return False
        else:
            taken = await self._replaced(stored)
        if taken:
            self._renewed_at = asked_at
        return taken

    async def _read(self) -> dict[str, Any] | None:
        return await self._cluster.get("Lease", self._namespace, self._name)

    async def _replaced(self, stored: dict[str, Any]) -> bool:
        try:
            await self._cluster.replace(self._claim(stored))
        except Conflict:
            return False  # somebody was faster; the next try sees who
        return True

    def _may_take(self, stored: dict[str, Any]) -> bool:
        spec, now = stored.get("spec") or {}, self._now()
        holder = _holder(stored)
        if holder in {"", self._identity}:
            return True
        if self._renewed_at is not None:
            raise self._lost(f"is held by {holder}")
        if spec != self._seen:
            if holder != self._seen.get("holderIdentity"):
                log.info("lease_waiting", lease=self._name, holder=holder)
            self._seen, self._seen_at = spec, now
        return now >= self._seen_at + self._promised(spec)

    def _promised(self, spec: dict[str, Any]) -> float:
        """Return how long the holder said that it holds: it may be of another release."""
        promised = spec.get("leaseDurationSeconds")
        if isinstance(promised, int) and promised > 0:
            return min(float(promised), _LONGEST_PROMISE_SECONDS)
        return self._times.duration_seconds

    def _claim(self, stored: dict[str, Any] | None) -> dict[str, Any]:
        moment = kube_micro_time(self._wall_now())
        earlier = (stored or {}).get("spec") or {}
        spec = {
            **earlier,
            "holderIdentity": self._identity,
            "leaseDurationSeconds": math.ceil(self._times.duration_seconds),
            "renewTime": moment,
        }
        if earlier.get("holderIdentity") != self._identity:
            spec["acquireTime"] = moment
            spec["leaseTransitions"] = earlier.get("leaseTransitions", 0) + bool(stored)
        metadata = (stored or {}).get("metadata") or {
            "namespace": self._namespace,
            "name": self._name,
        }
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": metadata,
            "spec": spec,
        }

    def _seconds_left(self) -> float:
        """Return how long a try may take: a holder must not wait beyond its time."""
        if self._renewed_at is None:
            return self._times.deadline_seconds
        return max(self._renewed_at + self._times.deadline_seconds - self._now(), 0)

    async def _pause(self) -> None:
        share = 1 + _JITTER * random.random()  # noqa: S311  # no secret
        await self._sleep(self._times.retry_seconds * share)


def _holder(stored: dict[str, Any]) -> str:
    return (stored.get("spec") or {}).get("holderIdentity") or ""
