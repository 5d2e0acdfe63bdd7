"""Engine-driven transfers: what is asked for, and the rows. `engine_worker.py` has the client."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence

from benchmarks.dealer import Dealer
from benchmarks.engine_worker import Asked, PickleWorker, PoolWorker
from benchmarks.models import LARGE, SMALL
from benchmarks.results import Results, Row
from benchmarks.servers import running
from benchmarks.turns import BOTH, Side
from benchmarks.ways import measure_way
from benchmarks.worker import Prompts

_L1_GIB = 1.0
_FLAGS = ("--supported-transfer-mode=auto",)
_VERBS = ("store", "retrieve")

_SIZES = {
    "small": (SMALL, 16, 10, "16 chunks of 256 KiB"),
    "large": (LARGE, 4, 3, "4 chunks of 32 MiB"),
}
"""Model, chunks, repeats, title."""

_PICKLE_ROWS = tuple(
    Row(f"{verb}-pickle-{size}", f"{verb}, pickle, {title}", "GB/s", higher_is_better=True)
    for size, (*_, title) in _SIZES.items()
    for verb in _VERBS
)
_POOL_ROWS = (
    *(
        Row(f"{verb}-pool-asked", f"{verb}, pool, 16 chunks: the two requests alone", "ms")
        for verb in _VERBS
    ),
    *(
        Row(
            f"{verb}-pool-large",
            f"{verb}, pool, 4 chunks of 32 MiB, with the client's copy",
            "GB/s",
            higher_is_better=True,
            beside_memcpy=True,
        )
        for verb in _VERBS
    ),
)
ROWS = (*_PICKLE_ROWS, *_POOL_ROWS)


def measure_engine_driven(results: Results) -> None:
    """Start a pair of servers for each mode; what they offer at a registration decides it."""
    if results.wants(*(row.key for row in _PICKLE_ROWS)):
        with _sides(()) as sides:
            for size in _SIZES:
                _measure_pickle(results, sides, size)
    if results.wants(*(row.key for row in _POOL_ROWS)):
        with _sides((f"--shm-name=bench-{os.getpid()}",)) as sides:
            _measure_pool(results, sides, "pool-asked", "small")
            _measure_pool(results, sides, "pool-large", "large")


@contextlib.contextmanager
def _sides(flags: Sequence[str]) -> Iterator[Sequence[Side]]:
    with running(BOTH, _L1_GIB, (*_FLAGS, *flags)) as servers, contextlib.ExitStack() as stack:
        yield [(server, stack.enter_context(Dealer(server.url))) for server in servers]


def _measure_pickle(results: Results, sides: Sequence[Side], size: str) -> None:
    keys = [f"{verb}-pickle-{size}" for verb in _VERBS]
    if not results.wants(*keys):
        return
    model, chunks, repeats, _ = _SIZES[size]
    workers = {id(dealer): PickleWorker(dealer, model, chunks) for _, dealer in sides}
    way = _Way(workers, keys)
    measure_way(results, keys, sides, way, repeats, seed=2000 + chunks)


def _measure_pool(results: Results, sides: Sequence[Side], suffix: str, size: str) -> None:
    keys = [f"{verb}-{suffix}" for verb in _VERBS]
    if not results.wants(*keys):
        return
    model, chunks, repeats, _ = _SIZES[size]
    with contextlib.ExitStack() as stack:
        workers = {
            id(dealer): stack.enter_context(PoolWorker(dealer, model, chunks))
            for _, dealer in sides
        }
        way = _Way(workers, keys, with_copy=suffix != "pool-asked")
        measure_way(results, keys, sides, way, repeats, seed=3000 + chunks)


class _Way:
    """A `Way`: one worker for each server."""

    def __init__(
        self,
        workers: Mapping[int, PickleWorker | PoolWorker],
        keys: Sequence[str],
        *,
        with_copy: bool = True,
    ) -> None:
        self._workers = workers
        self._keys = keys
        self._with_copy = with_copy
        self.nbytes = next(iter(workers.values())).nbytes

    def check(self, dealer: Dealer) -> None:
        self._workers[id(dealer)].check(Prompts(seed=98))

    def transfer(self, dealer: Dealer, prompts: Prompts) -> Mapping[str, float]:
        store, retrieve = self._workers[id(dealer)].transfer(prompts)
        return dict(zip(self._keys, map(self._seconds, (store, retrieve)), strict=True))

    def _seconds(self, asked: Asked) -> float:
        return asked.seconds + (asked.copy_seconds if self._with_copy else 0)
