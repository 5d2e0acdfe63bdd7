"""LMCache-driven transfers over `cpu_shm`: the server copies. All layouts."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from benchmarks.dealer import Dealer, Frames
from benchmarks.layouts import CHUNKS, LAYOUTS, MANY_CHUNKS
from benchmarks.models import BLOCK_TOKENS, BLOCKS_PER_CHUNK, LARGE, MEDIUM, SMALL, Model
from benchmarks.results import Results, Row
from benchmarks.turns import FORCE, Side
from benchmarks.ways import RefusedTransfer, measure_way
from benchmarks.worker import Prompts, Worker

_INSTANCE_ID = 102
_FIRST_BLOCK = 2
"""Block 0 is the engine's null block; blocks of 32 tokens begin at even ones."""

_REGISTRATION_SECONDS = 10.0
"""Upstream does not answer a registration that it refuses."""


class Case(NamedTuple):
    """One store row and one retrieve row."""

    suffix: str
    title: str
    model: Model
    chunks: int
    scattered: bool = False

    @property
    def keys(self) -> tuple[str, str]:
        """Keys of the rows."""
        return f"store-{self.suffix}", f"retrieve-{self.suffix}"


CASES = (
    Case("small", "1 KiB per token, 16 chunks", SMALL, 16),
    Case("medium", "12 KiB per token, 32 chunks", MEDIUM, 32),
    Case("medium-scattered", "12 KiB per token, blocks scattered", MEDIUM, 32, scattered=True),
    Case("large", "128 KiB per token, 8 chunks", LARGE, 8),
    Case("scattered", "128 KiB per token, blocks scattered", LARGE, 8, scattered=True),
    *(
        Case(suffix, title, model, MANY_CHUNKS if suffix == "compressed" else CHUNKS)
        for suffix, (title, model) in LAYOUTS.items()
    ),
)

_LEAST_BESIDE_MEMCPY = 2 << 20
"""Bytes of an object from which on the copy counts and not the request."""


def _rows() -> Iterator[Row]:
    for case in CASES:
        for key in case.keys:
            yield Row(
                key,
                f"{key.partition('-')[0]}, {case.title}",
                "GB/s",
                higher_is_better=True,
                beside_memcpy=case.model.chunk_bytes >= _LEAST_BESIDE_MEMCPY,
            )


ROWS = tuple(_rows())


def measure_transfers(results: Results, sides: Sequence[Side]) -> None:
    """Measure every case that is wanted; cases of one model share its worker."""
    for number, case in enumerate(CASES):
        if not results.wants(*case.keys):
            continue
        with _registered(results, case, sides) as (worker, serving):
            way = _Copied(worker, case)
            repeats = 10 if case.model is SMALL else 2
            measure_way(results, case.keys, serving, way, repeats, seed=1000 + number)


@contextmanager
def _registered(
    results: Results, case: Case, sides: Sequence[Side]
) -> Iterator[tuple[Worker, Sequence[Side]]]:
    """Make the worker and register it wherever it is taken."""
    worker = Worker(case.model, _INSTANCE_ID)
    serving = []
    try:
        for server, dealer in sides:
            try:
                worker.register(dealer, _REGISTRATION_SECONDS)
            except TimeoutError:
                for key in case.keys:
                    results.cannot(key, server.name, "does not answer the registration")
            else:
                serving.append((server, dealer))
        yield worker, serving
        for _, dealer in serving:
            worker.unregister(dealer)
    finally:
        worker.close()


class _Copied:
    """A `Way`: one store, one retrieve."""

    def __init__(self, worker: Worker, case: Case) -> None:
        self._worker = worker
        self._keys = case.keys
        self._source, self._target = _blocks(case)
        self.nbytes = case.chunks * case.model.chunk_bytes

    def check(self, dealer: Dealer) -> None:
        self._worker.blank(self._target)
        self.transfer(dealer, Prompts(seed=99 + len(self._source)))
        if not self._worker.same(self._source, self._target):
            raise RefusedTransfer("what comes back is not what was stored")

    def transfer(self, dealer: Dealer, prompts: Prompts) -> Mapping[str, float]:
        worker = self._worker
        tokens = prompts.tokens(len(self._source) * BLOCK_TOKENS)
        storing_id, request_id = prompts.request_id(), prompts.request_id()
        to_store = worker.store(dealer, tokens, storing_id, self._source)
        to_retrieve = worker.retrieve(dealer, tokens, request_id, self._target)
        store_seconds = _seconds(dealer, to_store)
        worker.wait_visible(dealer, tokens, request_id)
        retrieve_seconds = _seconds(dealer, to_retrieve)
        for ended in (storing_id, request_id):
            dealer.call("end_session", ended)
        dealer.call("clear", FORCE)
        return dict(zip(self._keys, (store_seconds, retrieve_seconds), strict=True))


def _blocks(case: Case) -> tuple[Sequence[int], Sequence[int]]:
    """Choose blocks to store from and others to retrieve into."""
    order = np.arange(_FIRST_BLOCK, case.model.blocks)
    if case.scattered:
        order = np.random.default_rng(7).permutation(order)
    count = case.chunks * BLOCKS_PER_CHUNK
    return order[:count].tolist(), order[-count:].tolist()


def _seconds(dealer: Dealer, frames: Frames) -> float:
    begin = time.perf_counter()
    reply = dealer.exchange(frames)
    seconds = time.perf_counter() - begin
    if not reply[-1].endswith(b"\xc3"):  # msgpack true
        raise RefusedTransfer("answers a transfer with false")
    return seconds
