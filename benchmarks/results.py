"""What was measured: samples by row and server, and the table that shows them."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.servers import AGENT, STOCK

MEMCPY = "memcpy"
"""Under this name a row has the samples of a plain copy of as many bytes."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. `key` is what `--only` takes (a prefix is enough).

    `beside_memcpy`: it has its share of what a plain copy reaches.
    """

    key: str
    title: str
    unit: str
    higher_is_better: bool = False
    beside_memcpy: bool = False


@dataclass(slots=True)
class Results:
    """All samples. `only` and `rounds` say what to measure."""

    rows: Sequence[Row]
    rounds: int
    quick: bool
    only: Sequence[str] = ()
    samples: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    impossible: dict[tuple[str, str], str] = field(default_factory=dict)
    started_at: float = field(default_factory=time.monotonic)

    def wants(self, *keys: str) -> bool:
        """Tell whether any of these rows is to be measured."""
        return any(
            key.startswith(tuple(self.only)) if self.only else True
            for key in keys
            for row in self.rows
            if row.key == key
        )

    def row(self, key: str) -> Row:
        """Return the row of a key."""
        return next(row for row in self.rows if row.key == key)

    def add(self, key: str, server: str, *values: float) -> None:
        """Take samples, and show them on standard error."""
        self.samples.setdefault((key, server), []).extend(values)
        seconds = time.monotonic() - self.started_at
        shown = ", ".join(f"{value:.4g}" for value in values)
        print(f"[{seconds:5.0f} s] {key:<25} {server:<8} {shown}", file=sys.stderr, flush=True)

    def cannot(self, key: str, server: str, why: str) -> None:
        """Note that a server does not offer what a row measures."""
        self.impossible[key, server] = why

    def median(self, key: str, server: str) -> float | None:
        """Return the median, None without samples."""
        samples = self.samples.get((key, server))
        return statistics.median(samples) if samples else None

    def ratio(self, row: Row) -> float | None:
        """Return how many times better the agent is; below 1 it is worse."""
        agent, stock = self.median(row.key, AGENT), self.median(row.key, STOCK)
        if not agent or not stock:
            return None
        return agent / stock if row.higher_is_better else stock / agent

    def share(self, row: Row) -> float | None:
        """Return how much of a plain copy's rate the agent reaches."""
        agent, memcpy = self.median(row.key, AGENT), self.median(row.key, MEMCPY)
        return agent / memcpy if agent and memcpy else None

    def table(self) -> str:
        """Return the table as Markdown."""
        lines = ["| measured | unit | agent | lmcache | agent is better by | memcpy | of memcpy |"]
        lines.append("|---|---|---:|---:|---:|---:|---:|")
        for row in self.rows:
            if not self.wants(row.key):
                continue
            ratio, share, memcpy = self.ratio(row), self.share(row), self.median(row.key, MEMCPY)
            cells = [row.title, row.unit, self._cell(row, AGENT), self._cell(row, STOCK)]
            cells.append("-" if ratio is None else f"{ratio:.2f} x")
            cells.append("" if memcpy is None else _figure(memcpy))
            cells.append("" if share is None else f"{share:.0%}")
            lines.append(f"| {' | '.join(cells)} |")
        notes = [
            f"- {self.row(key).title}, {server}: {why}"
            for (key, server), why in self.impossible.items()
            if self.wants(key)
        ]
        return "\n".join([*lines, "", *notes])

    def _cell(self, row: Row, server: str) -> str:
        median = self.median(row.key, server)
        if median is None:
            return "see below" if (row.key, server) in self.impossible else "not measured"
        samples = self.samples[row.key, server]
        return f"{_figure(median)} ({_figure(min(samples))}-{_figure(max(samples))})"

    def write(self, path: Path, about: dict[str, object]) -> None:
        """Write everything as JSON."""
        rows = [
            {
                "key": row.key,
                "title": row.title,
                "unit": row.unit,
                "higher_is_better": row.higher_is_better,
                "ratio": self.ratio(row),
                "share_of_memcpy": self.share(row),
                "memcpy": self.samples.get((row.key, MEMCPY), []),
                **{
                    server: {
                        "median": self.median(row.key, server),
                        "samples": self.samples.get((row.key, server), []),
                        "not_offered": self.impossible.get((row.key, server)),
                    }
                    for server in (AGENT, STOCK)
                },
            }
            for row in self.rows
            if self.wants(row.key)
        ]
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({**about, "rows": rows}, indent=2) + "\n")


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
