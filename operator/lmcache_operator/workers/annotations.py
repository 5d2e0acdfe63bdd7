"""Keeps the one annotation that worker pods carry of us: the ids of the instances in them.

It is a merge patch of that annotation alone, guarded by the pod's uid. Nobody depends on it, so
what is refused is left for some minutes, and nothing waits for it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from http import HTTPStatus
from typing import NoReturn, Protocol

import structlog

from lmcache_operator.clock import Now
from lmcache_operator.cluster import KubeObject
from lmcache_operator.errors import ApiError, Forbidden, Unreachable
from lmcache_operator.names import INSTANCE_IDS_ANNOTATION
from lmcache_operator.workers.pacing import CONNECTION_STEPS, Backoff, Sleep
from lmcache_operator.workers.pod import Pod

LONGEST_VALUE = 1024
"""Characters, the count of what is left out included: some fifty ids."""

REFUSED_SECONDS = 300.0
"""Time before a refused patch, or any in a namespace where we may not patch, is tried again."""

_SETTLING_SECONDS = 5.0  # until the watch shows what we wrote
_AT_ONCE = 4

_log = structlog.get_logger(__name__)


def annotation_value(instance_ids: Collection[int]) -> str | None:
    """Write ids as the annotation has them: 7,12,40; None for none.

    If they do not fit, the last part says how many are left out: 7,12,...+38.
    """
    ids = [str(each) for each in sorted(instance_ids)]
    text = ",".join(ids)
    if len(text) <= LONGEST_VALUE:
        return text or None
    kept: list[str] = []
    room = LONGEST_VALUE - len(f"...+{len(ids)}")
    for each in ids:
        room -= len(each) + 1
        if room < 0:
            break
        kept.append(each)
    return ",".join([*kept, f"...+{len(ids) - len(kept)}"])


class PodPatcher(Protocol):
    """The part of `Cluster` that is needed here."""

    async def merge_patch(
        self, kind: str, namespace: str | None, name: str, patch: KubeObject, *, uid: str = ""
    ) -> KubeObject | None:
        """Patch an object, with `uid` only that one; None if it is not there."""


@dataclass(frozen=True, slots=True)
class _Wish:
    namespace: str
    name: str
    uid: str
    value: str | None


class Annotator:
    """Writes wishes, the latest for each pod. Thread: the loop.

    Args:
        now: monotonic seconds.
    """

    def __init__(self, patcher: PodPatcher, *, now: Now, sleep: Sleep = asyncio.sleep) -> None:
        self.counts: Counter[str] = Counter()
        """Patches since the start: `written`, `gone`, `refused`, `forbidden`, `retry`."""
        self._patcher = patcher
        self._now = now
        self._sleep = sleep
        self._wishes: dict[str, _Wish] = {}
        # A pod's patches all go through one queue: two at once might be stored the other way round.
        self._queues: list[asyncio.Queue[str]] = [asyncio.Queue() for _ in range(_AT_ONCE)]
        self._rests: dict[str, tuple[str | None, float]] = {}  # uid: what was tried, until when
        self._forbidden: dict[str, float] = {}  # namespace: until when

    def want(self, pod: Pod, value: str | None) -> None:
        """Have a pod's annotation written, or removed; if it is not so already."""
        if pod.instance_ids == value or pod.deleting:
            self._wishes.pop(pod.uid, None)
            return
        if self._rested(pod, value):
            return
        if pod.uid not in self._wishes:
            self._queue_of(pod.uid).put_nowait(pod.uid)
        self._wishes[pod.uid] = _Wish(pod.namespace, pod.name, pod.uid, value)

    def forget(self, uid: str) -> None:
        """Drop everything about a pod that is gone."""
        self._wishes.pop(uid, None)
        self._rests.pop(uid, None)

    def forget_expired(self) -> None:
        """Drop what no longer keeps anything from being tried; now and then."""
        now = self._now()
        self._rests = {uid: rest for uid, rest in self._rests.items() if now < rest[1]}
        self._forbidden = {name: end for name, end in self._forbidden.items() if now < end}

    async def run(self) -> NoReturn:
        """Write until cancelled."""
        async with asyncio.TaskGroup() as group:
            for queue in self._queues:
                group.create_task(self._work(queue))
        raise AssertionError("its tasks do not end")

    def _rested(self, pod: Pod, value: str | None) -> bool:
        tried, until = self._rests.get(pod.uid, (None, 0.0))
        if tried == value and self._now() < until:
            return True
        return self._now() < self._forbidden.get(pod.namespace, 0.0)

    def _queue_of(self, uid: str) -> asyncio.Queue[str]:
        return self._queues[hash(uid) % _AT_ONCE]

    async def _work(self, queue: asyncio.Queue[str]) -> NoReturn:
        backoff = Backoff(CONNECTION_STEPS)
        while True:
            wish = self._wishes.pop(await queue.get(), None)
            if wish is None or self._now() < self._forbidden.get(wish.namespace, 0.0):
                continue
            try:
                await self._write(wish)
            except Unreachable:
                self.counts["retry"] += 1
                await self._sleep(backoff.next_seconds())
                if self._wishes.setdefault(wish.uid, wish) is wish:
                    queue.put_nowait(wish.uid)
                continue
            backoff.reset()

    async def _write(self, wish: _Wish) -> None:
        self._rests[wish.uid] = (wish.value, self._now() + _SETTLING_SECONDS)
        patch = {"metadata": {"annotations": {INSTANCE_IDS_ANNOTATION: wish.value}}}
        try:
            found = await self._patcher.merge_patch(
                "Pod", wish.namespace, wish.name, patch, uid=wish.uid
            )
        except Forbidden as error:
            self.counts["forbidden"] += 1
            self._forbidden[wish.namespace] = self._now() + REFUSED_SECONDS
            _log.warning("pods_not_annotated", namespace=wish.namespace, error=str(error))
        except ApiError as error:
            if (
                error.status == HTTPStatus.TOO_MANY_REQUESTS
                or error.status >= HTTPStatus.INTERNAL_SERVER_ERROR
            ):
                raise Unreachable(str(error)) from None
            self.counts["refused"] += 1
            self._rests[wish.uid] = (wish.value, self._now() + REFUSED_SECONDS)
            where = f"{wish.namespace}/{wish.name}"
            _log.warning("pod_not_annotated", pod=where, error=str(error))
        else:
            self.counts["written" if found is not None else "gone"] += 1
