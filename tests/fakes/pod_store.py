"""An API server as far as pods go: lists, history with gaps, and times without an answer."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from dataclasses import dataclass

from lmcache_operator.errors import ApiError, Unreachable
from lmcache_operator.workers.pod import Pod, read_pod
from lmcache_operator.workers.selection import Selection
from lmcache_operator.workers.selection_watch import Listing, PodEvent
from tests.fakes.pods import Json


@dataclass(frozen=True)
class _Step:
    version: int
    before: Json | None
    after: Json | None


class PodStore:
    """Implements `PodSource`. Documents are as `tests.fakes.pods.pod` makes them, with labels."""

    def __init__(self) -> None:
        self.reachable = True
        self.refusal: ApiError | None = None
        self.lists = 0
        self.watches = 0
        self.reads = 0
        self._objects: dict[tuple[str, str], Json] = {}
        self._history: list[_Step] = []
        self._version = 1
        self._oldest = 0
        self._news = asyncio.Event()
        self._streams = 0  # a watch of an earlier number is cut

    def put(self, document: Json) -> None:
        """Create or change a pod."""
        metadata = document["metadata"]
        place = (metadata["namespace"], metadata["name"])
        self._step(place, copy.deepcopy(document))

    def change(self, namespace: str, name: str, edit: Callable[[Json], None]) -> bool:
        """Change a pod in place; False if there is none."""
        found = self._objects.get((namespace, name))
        if found is None:
            return False
        edited = copy.deepcopy(found)
        edit(edited)
        self._step((namespace, name), edited)
        return True

    def delete(self, namespace: str, name: str) -> None:
        """Remove a pod."""
        if (namespace, name) in self._objects:
            self._step((namespace, name), None)

    def get(self, namespace: str, name: str) -> Json | None:
        """Return a pod."""
        return self._objects.get((namespace, name))

    def cut(self) -> None:
        """End all watches as a broken connection does."""
        self._streams += 1
        self._wake()

    def expire(self) -> None:
        """Forget history, and end all watches."""
        self._oldest = self._version
        self.cut()

    async def list(self, selection: Selection) -> Listing:
        """List all pods of a selection."""
        self.lists += 1
        await self._answer()
        found = [
            read_pod(document) for document in self._objects.values() if _has(selection, document)
        ]
        return Listing(found, str(self._version))

    async def watch(
        self, selection: Selection, version: str, seconds: int
    ) -> AsyncGenerator[PodEvent, None]:
        """Give what happened after a version."""
        self.watches += 1
        await self._answer()
        if int(version) < self._oldest:
            raise ApiError.of(410, "Expired", f"too old resource version: {version}")
        yield PodEvent(version)
        stream, told = self._streams, int(version)
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while True:
                    if stream != self._streams:
                        raise Unreachable("the connection was cut")
                    news = [step for step in self._history if step.version > told]
                    for step in news:
                        told = step.version
                        if (event := _event(selection, step)) is not None:
                            yield event
                    if not news:
                        await self._news.wait()

    async def read(self, namespace: str, name: str) -> Pod | None:
        """Read one pod, None if there is none of that name."""
        self.reads += 1
        await self._answer()
        found = self._objects.get((namespace, name))
        return read_pod(found) if found is not None else None

    async def close(self) -> None:
        """Hold nothing."""

    async def _answer(self) -> None:
        await asyncio.sleep(0)
        if not self.reachable:
            raise Unreachable("nobody answers")
        if self.refusal is not None:
            raise self.refusal

    def _step(self, place: tuple[str, str], after: Json | None) -> None:
        self._version += 1
        before = self._objects.pop(place, None)
        if after is not None:
            self._objects[place] = after
        if before is not None and after is not None and _uid(before) != _uid(after):
            self._history.append(_Step(self._version, before, None))
            self._version += 1
            before = None
        self._history.append(_Step(self._version, before, after))
        self._wake()

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


def _uid(document: Json) -> str:
    return str(document["metadata"]["uid"])


def _has(selection: Selection, document: Json | None) -> bool:
    if document is None or document["metadata"]["namespace"] != selection.namespace:
        return False
    key, _, value = selection.label_selector.partition("=")
    return bool(document["metadata"].get("labels", {}).get(key) == value)


def _event(selection: Selection, step: _Step) -> PodEvent | None:
    version = str(step.version)
    if step.after is not None and _has(selection, step.after):
        return PodEvent(version, read_pod(step.after))
    if step.before is not None and _has(selection, step.before):
        return PodEvent(version, read_pod(step.before), deleted=True)
    return None
