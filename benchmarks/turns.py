"""Who is measured when: in every round all are, and the one that goes first changes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from benchmarks.dealer import Dealer
from benchmarks.servers import AGENT, STOCK, Server

BOTH = (AGENT, STOCK)

Side = tuple[Server, Dealer]
"""One of the two, and the client's connection to it."""

FORCE = True
"""For `clear`: what is locked goes as well."""

_T = TypeVar("_T")


def in_turns(sides: Sequence[_T], rounds: int) -> Iterator[_T]:
    """Yield each side once per round; who is first alternates."""
    for number in range(rounds):
        yield from sides if number % 2 == 0 else reversed(sides)
