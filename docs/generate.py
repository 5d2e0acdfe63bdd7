"""Write the references that derive from the code; with `--check`, only compare.

`make generate` and `make verify` run it.
"""

from __future__ import annotations

import difflib
import itertools
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from lmcache_nodeagent.config import OPTIONS
from lmcache_nodeagent.config_flags import Group, Option, value_text
from lmcache_nodeagent.config_upstream import REFUSED_FLAGS
from lmcache_nodeagent.observability.metric_catalog import (
    COUNTED,
    PREFIX,
    SAMPLED,
    Counted,
    Sampled,
)

_FOLDER = Path(__file__).parent
_NOTICE = "<!-- Written by `make generate`; change the code instead. -->"

_CONFIGURATION = f"""\
{_NOTICE}

# Configuration of the node agent

Each setting is a flag of `lmcache-nodeagent` and an environment variable. A flag wins over its
variable, a variable over the default. Broken rules are reported together, each with the value, the
limit and a fix. Names and defaults that `lmcache server` 0.5.6 has too are kept.
"""

_RELATIONS = """
## Relations

Unless `--worker-reap-timeout-seconds` is 0, which reaps nobody:

- `--worker-registration-grace-seconds` ≥ `--worker-reap-timeout-seconds`
- `--worker-reap-timeout-seconds` ≥ 3 times `--worker-heartbeat-interval-seconds`
- `--worker-reap-timeout-seconds` ≥ `--hint-confirm-seconds` ≥ `--close-confirm-seconds`

`--port` and `--http-port` differ, or are 0.
"""

_METRICS = f"""\
{_NOTICE}

# Metrics of the node agent

Served as text at `/metrics` on `--http-port`, beside the usual `process_*` metrics.
No label carries an instance id, a request id or a peer.
"""


def main(arguments: Sequence[str]) -> int:
    """Write or check every reference; return the exit status."""
    check_only = "--check" in arguments
    stale = 0
    for name, text in {"configuration.md": configuration(), "metrics.md": metrics()}.items():
        path = _FOLDER / name
        written = path.read_text() if path.exists() else ""
        if check_only and text != written:
            stale += 1
            lines = difflib.unified_diff(
                written.splitlines(), text.splitlines(), f"docs/{name}", "generated", lineterm=""
            )
            print("\n".join(lines), file=sys.stderr)
        elif not check_only:
            path.write_text(text)
    if stale:
        print("out of date: run `make generate` and commit the result", file=sys.stderr)
    return 1 if stale else 0


def configuration() -> str:
    """Return the reference of all settings."""
    parts = [_CONFIGURATION]
    for group in Group:
        rows = (_option_row(option) for option in OPTIONS if option.flag.group is group)
        table = _table(["flag and variable", "default", "allowed", "meaning"], rows)
        parts.append(f"\n## {group}\n\n{table}")
    foreign = _table(["flags", "what to do"], _foreign_rows())
    parts += [_RELATIONS, f"\n## Flags of `lmcache server` that are refused\n\n{foreign}"]
    return "".join(parts)


def metrics() -> str:
    """Return the reference of all metrics."""
    catalog: tuple[Sampled | Counted, ...] = (*SAMPLED, *COUNTED)
    rows = [
        [f"`{PREFIX}{metric.name}`", metric.kind, ", ".join(metric.labels), metric.about]
        for metric in catalog
    ]
    return f"{_METRICS}\n{_table(['metric', 'type', 'labels', 'meaning'], rows)}"


def _option_row(option: Option) -> list[str]:
    default = "" if option.default is None else value_text(option.default)
    allowed = option.bounds_words() or ("true or false" if option.kind is bool else "any text")
    unit = f" {option.flag.unit}" if option.flag.unit else ""
    names = f"`{option.flag_name}`<br>`{option.env_name}`"
    return [names, "required" if option.required else default, allowed + unit, option.flag.about]


def _foreign_rows() -> Iterator[list[str]]:
    """One row per advice, with all the flags that it is given for."""
    for advice, flags in itertools.groupby(REFUSED_FLAGS, lambda flag: flag.advice):
        names = []
        for flag in flags:
            same_here = "".join(f" (`{value}` is accepted)" for value in flag.same_here)
            names.append(f"`{flag.name}`{same_here}")
        yield ["<br>".join(names), advice]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(_lines(head, rows)) + "\n"


def _lines(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
