"""Write the references and the CRD, which derive from the code; with `--check`, only compare.

`make generate` and `make verify` run it.
"""

from __future__ import annotations

import difflib
import itertools
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

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
from lmcache_operator.api.crd import GROUP, KIND, PLURAL, VERSION, definition, root_schema

_ROOT = Path(__file__).parents[1]
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


_CRD = f"""\
{_NOTICE}

# {KIND}

`apiVersion: {GROUP}/{VERSION}`, `kind: {KIND}`, short name `lmcs`, namespaced.
`kubectl explain lmcs.spec` says the same. Only `spec.cache.size` is required. Durations are whole
seconds. A rule that a spec breaks is answered with the figure given, the figure needed and a fix.
"""

_YAML_WIDTH = 100


def main(arguments: Sequence[str]) -> int:
    """Write or check every file; return the exit status."""
    check_only = "--check" in arguments
    stale = 0
    files = {
        "docs/configuration.md": configuration(),
        "docs/metrics.md": metrics(),
        "docs/crd.md": crd_reference(),
        f"crds/{PLURAL}.{GROUP}.yaml": crd_manifest(),
    }
    for name, text in files.items():
        path = _ROOT / name
        written = path.read_text() if path.exists() else ""
        if check_only and text != written:
            stale += 1
            lines = difflib.unified_diff(
                written.splitlines(), text.splitlines(), name, "generated", lineterm=""
            )
            print("\n".join(lines), file=sys.stderr)
        elif not check_only:
            path.parent.mkdir(exist_ok=True)
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


def crd_manifest() -> str:
    """Return the CustomResourceDefinition as a file to apply."""
    head = "# Written by `make generate`; change lmcache_operator/api instead.\n"
    return head + yaml.safe_dump(
        definition(), sort_keys=False, width=_YAML_WIDTH, allow_unicode=True
    )


def crd_reference() -> str:
    """Return the reference of every field of the API, objects before what is in them."""
    root = root_schema()["properties"]
    parts = [_CRD]
    for name, schema in (("spec", root["spec"]), ("status", root["status"])):
        for path, found in _objects(name, schema):
            fields = found["properties"].items()
            rows = [_field_row(path, field, part, found) for field, part in fields]
            parts.append(f"\n## {path}\n\n{found['description']}\n\n")
            parts.append(_table(["field", "type", "meaning"], rows))
            if sentences := [_sentence(rule) for rule in found.get("x-kubernetes-validations", ())]:
                parts.append("\nRules:\n\n" + "".join(f"- {each}\n" for each in sentences))
    return "".join(parts)


def _objects(path: str, schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a schema with properties and all those below it, each with its path."""
    if "properties" not in schema:
        return
    yield path, schema
    for name, part in schema["properties"].items():
        yield from _objects(f"{path}.{name}", part)
        yield from _objects(f"{path}.{name}[]", part.get("items", {}))


def _field_row(path: str, name: str, schema: dict[str, Any], parent: dict[str, Any]) -> list[str]:
    kind = schema.get("type", "integer or string")
    words = [schema["description"]]
    anchor = f"#{path}.{name}".lower().replace(".", "").replace("[]", "")
    if "properties" in schema:
        kind = f"[object]({anchor})"
    elif kind == "array" and "properties" in schema["items"]:
        kind = f"list of [objects]({anchor})"
    elif kind == "array":
        kind = f"list of {schema['items']['type']}s"
    elif "additionalProperties" in schema:
        kind = "map of strings"
    elif "enum" in schema:
        kind = " or ".join(f"`{value}`" for value in schema["enum"])
    if "properties" not in schema:  # an object's rules stand in its own section
        rules = schema.get("x-kubernetes-validations", ())
        words += [f"Rule: {_sentence(rule)}." for rule in rules]
    required = ", required" if name in parent.get("required", ()) else ""
    return [f"`{name}`", kind + required, " ".join(words)]


def _sentence(rule: dict[str, Any]) -> str:
    return str(rule["message"])


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
        yield f"| {' | '.join(cell.replace('<name>', '&lt;name&gt;') for cell in row)} |"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
