"""How soon a server answers, and what it holds in memory before it has done anything."""

from __future__ import annotations

from benchmarks.results import Results, Row
from benchmarks.servers import Server
from benchmarks.turns import BOTH, in_turns

MIB = 2**20

ROWS = (
    Row("ready-0.25", "process start to first answer, L1 0.25 GiB", "s"),
    Row("ready-1", "process start to first answer, L1 1 GiB", "s"),
    Row("memory-ready", "resident beside L1, just started", "MB"),
)


def measure_starts(results: Results) -> None:
    """Start and stop each server once per round."""
    for key, gib in (("ready-0.25", 0.25), ("ready-1", 1.0)):
        keys = (key, "memory-ready") if gib == 1.0 else (key,)
        if not results.wants(*keys):
            continue
        for name in in_turns(BOTH, results.rounds):
            server = Server(name, gib, ())
            try:
                results.add(key, name, server.wait_ready())
                if gib == 1.0:
                    results.add("memory-ready", name, server.memory().beside_l1 / MIB)
            finally:
                server.stop()
