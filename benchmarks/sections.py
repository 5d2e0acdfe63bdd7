"""What is measured, section by section: all rows in the table's order, and which servers run."""

from __future__ import annotations

from contextlib import ExitStack

from benchmarks import engine_driven, messages, releases, starts, transfers
from benchmarks.dealer import Dealer
from benchmarks.results import Results, Row
from benchmarks.servers import running
from benchmarks.turns import BOTH

_USED = Row("memory-used", "resident beside L1, after all LMCache-driven transfers below", "MB")

ROWS = (
    *starts.ROWS,
    _USED,
    *messages.ROWS,
    *transfers.ROWS,
    *engine_driven.ROWS,
    *releases.ROWS,
)


def measure(results: Results) -> None:
    """Measure all rows that are wanted."""
    starts.measure_starts(results)
    _measure_on_one_pair(results)
    engine_driven.measure_engine_driven(results)
    releases.measure_releases(results)


def _measure_on_one_pair(results: Results) -> None:
    """Pings, look-ups and LMCache-driven transfers, on one pair of servers."""
    if not results.wants(*(row.key for row in (_USED, *messages.ROWS, *transfers.ROWS))):
        return
    with running(BOTH, l1_gib=1.5) as servers, ExitStack() as stack:
        sides = [(server, stack.enter_context(Dealer(server.url))) for server in servers]
        messages.measure_pings(results, servers)
        messages.measure_lookups(results, sides)
        transfers.measure_transfers(results, sides)
        for server in servers:
            if results.wants(_USED.key):
                megabytes = server.memory().beside_l1 / starts.MIB
                results.add(_USED.key, server.name, megabytes)
