"""A watch of worker pods on a loop of its own, so that a test can do things to what it watches."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from lmcache_operator.cluster import Cluster
from lmcache_operator.workers.absences import Absence
from lmcache_operator.workers.pod import Pod
from lmcache_operator.workers.pods import KubernetesPods, PodWatch
from lmcache_operator.workers.selection import Selection
from tests.polling import PATIENCE_SECONDS

_CLOSING_SECONDS = 0.2  # TLS connections end some turns of the loop after they are closed

_T = TypeVar("_T")


class LoopThread:
    """Runs a coroutine until it is left. Entered: it has begun."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="test-loop")
        self._begun = threading.Event()
        self._task: asyncio.Task[None] | None = None

    async def main(self, begun: Callable[[], None]) -> None:
        """Call `begun`, then go on until cancelled."""
        raise NotImplementedError

    def do(self, action: Callable[[], _T]) -> _T:
        """Call something on the loop, and return what it returns."""

        async def act() -> _T:
            return action()

        return asyncio.run_coroutine_threadsafe(act(), self._loop).result(PATIENCE_SECONDS)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            self._task = self._loop.create_task(self.main(self._begun.set))
            with suppress(asyncio.CancelledError):
                runner.run(_outcome(self._task))
            runner.run(asyncio.sleep(_CLOSING_SECONDS))

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._begun.wait(PATIENCE_SECONDS), "it does not begin"
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._task is not None
        died = self._task.done()
        self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join(PATIENCE_SECONDS)
        assert not died, "it ended by itself; the log says why"


class WatchedPods(LoopThread):
    """What a watch of some selections tells."""

    def __init__(
        self, kubeconfig: Path, selections: Collection[Selection], *, page: int = 500
    ) -> None:
        super().__init__()
        self.changes: list[Pod] = []
        self.missing: list[Pod] = []
        self.absences: list[Absence] = []
        self._kubeconfig = kubeconfig
        self._selections = selections
        self._page = page
        self._watch: PodWatch | None = None

    @property
    def watch(self) -> PodWatch:
        """The watch itself; on the loop only."""
        assert self._watch is not None
        return self._watch

    def counts(self, name: str) -> int:
        """Return one of the watch's counts."""
        return self.watch.counts[name]

    def is_settled(self) -> bool:
        """Tell whether all selections are listed, or refused."""
        return self.do(lambda: self.watch.is_settled(self._selections))

    def is_current(self) -> bool:
        """Tell whether all selections are listed and watched."""
        return self.do(lambda: all(map(self.watch.is_current, self._selections)))

    def uids(self) -> set[str]:
        """Return the uids of the pods that are known."""
        return self.do(
            lambda: {pod.uid for each in self._selections for pod in self.watch.pods(each) or ()}
        )

    def pod(self, uid: str) -> Pod | None:
        """Return one pod as it is known."""

        def find() -> Pod | None:
            known = (self.watch.pods(each) for each in self._selections)
            return next((pod for pods in known if pods and (pod := pods.get(uid))), None)

        return self.do(find)

    def told_absent(self, uid: str) -> list[Absence]:
        """Return what was told of the absence of one pod."""
        return [each for each in self.absences if each.last_seen.uid == uid]

    def pods_changed(
        self, selection: Selection, changed: Sequence[Pod], missing: Sequence[Pod]
    ) -> None:
        """Keep what is told; ask for every missing pod."""
        self.changes += changed
        self.missing += missing
        for pod in missing:
            self.watch.check_absence(selection, pod)

    def pod_absent(self, selection: Selection, absence: Absence) -> None:
        """Keep what is told."""
        del selection
        self.absences.append(absence)

    async def main(self, begun: Callable[[], None]) -> None:
        """Watch until cancelled."""
        async with await Cluster.connect(str(self._kubeconfig)) as cluster:
            source = KubernetesPods(cluster.client, page=self._page)
            self._watch = PodWatch(source, self)
            self._watch.select(self._selections)
            begun()
            await self._watch.run()


async def _outcome(task: asyncio.Task[None]) -> None:
    await task
