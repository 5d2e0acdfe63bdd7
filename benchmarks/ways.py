"""How a round of a transfer's rows goes, whatever the way that its bytes take."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from benchmarks.dealer import Dealer
from benchmarks.memcpy import Memcpy
from benchmarks.results import MEMCPY, Results
from benchmarks.turns import Side, in_turns
from benchmarks.worker import Prompts


class Way(Protocol):
    """One kind of transfer, by one client."""

    nbytes: int
    """What a store, and what a retrieve, moves."""

    def check(self, dealer: Dealer) -> None:
        """Store and retrieve once, and compare the bytes; touches all memory."""

    def transfer(self, dealer: Dealer, prompts: Prompts) -> Mapping[str, float]:
        """Store a new prompt, retrieve it and clear; return seconds by key of a row."""


class RefusedTransfer(Exception):
    """A server does not serve this; the text says how it said so."""


def measure_way(
    results: Results,
    keys: Sequence[str],
    sides: Sequence[Side],
    way: Way,
    repeats: int,
    seed: int,
) -> None:
    """Measure a way's rows, with a plain copy of as many bytes in each round.

    The first of `keys` that a row of GB/s beside memcpy has says that there is to be such a copy.
    """
    serving = [side for side in sides if _serves(results, keys, side, way)]
    prompts = Prompts(seed)
    beside = [key for key in keys if results.row(key).beside_memcpy]
    with _memcpy(way.nbytes if beside else 0) as memcpy:
        for side in in_turns([*serving, None], results.rounds):
            if side is not None:
                _measure_side(results, side, way, prompts, repeats)
            elif beside:
                rate = memcpy.rate(2 * repeats)
                for key in beside:
                    results.add(key, MEMCPY, rate)


def _serves(results: Results, keys: Sequence[str], side: Side, way: Way) -> bool:
    server, dealer = side
    try:
        way.check(dealer)
    except RefusedTransfer as error:
        for key in keys:
            results.cannot(key, server.name, str(error))
        return False
    return True


def _measure_side(results: Results, side: Side, way: Way, prompts: Prompts, repeats: int) -> None:
    server, dealer = side
    samples = [way.transfer(dealer, prompts) for _ in range(repeats)]
    for key in samples[0]:
        seconds = statistics.median(sample[key] for sample in samples)
        in_ms = results.row(key).unit == "ms"
        results.add(key, server.name, seconds * 1000 if in_ms else way.nbytes / seconds / 1e9)


@contextlib.contextmanager
def _memcpy(nbytes: int) -> Iterator[Memcpy]:
    memcpy = Memcpy(nbytes or 1)
    try:
        yield memcpy
    finally:
        memcpy.close()
