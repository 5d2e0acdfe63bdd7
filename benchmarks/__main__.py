"""This agent and `lmcache server` 0.5.6 side by side: `make bench`.

    python -m benchmarks [--quick] [--rounds N] [--only ROW ...] [--output FILE]

`--only hints` measures something else, and alone: how soon a dead worker's memory is back, by what
told of its death, through a real API server and the operator.

Nothing here passes or fails by time: figures are reported as they are.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from pathlib import Path

from benchmarks import hints
from benchmarks.results import Results
from benchmarks.sections import ROWS, measure
from benchmarks.servers import ROOT, stock_program


def main() -> int:
    """Measure, print the table, write the JSON file."""
    arguments = _arguments()
    if arguments.only == [hints.KEY]:
        return _measure_hints(arguments.output, quick=arguments.quick)
    if not stock_program().exists():
        print(
            f"{stock_program()} is missing: `make bench` makes it, or set LMCACHE_STOCK_BIN to the"
            " `lmcache` of an environment with lmcache 0.5.6",
            file=sys.stderr,
        )
        return 2
    results = Results(
        rows=ROWS,
        rounds=arguments.rounds or (3 if arguments.quick else 5),
        quick=arguments.quick,
        only=tuple(arguments.only or ()),
    )
    measure(results)
    results.write(
        arguments.output, {**_machine(), "rounds": results.rounds, "quick": results.quick}
    )
    print(results.table())
    return 0


def _measure_hints(output: Path, *, quick: bool) -> int:
    triggers = hints.measure_hints(quick=quick)
    path = output.with_name(f"{output.stem}-{hints.KEY}.json")
    hints.write(triggers, path, {**_machine(), "quick": quick})
    print(hints.table(triggers))
    return 0


def _machine() -> dict[str, object]:
    return {"machine": platform.machine(), "cpus": os.cpu_count(), "kernel": platform.release()}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="3 short rounds, for a first look")
    parser.add_argument("--rounds", type=int, help="rounds per row (5; 3 with --quick)")
    parser.add_argument("--only", action="append", metavar="ROW", help="rows whose key starts so")
    parser.add_argument("--output", type=Path, default=ROOT / "build/bench.json")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
