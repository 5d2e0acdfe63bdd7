"""What the operator says of itself is explained where people operate it, and nothing else is."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast, get_args

import pytest

from lmcache_nodeagent.operator_link.messages import EntryKind
from lmcache_operator import metric_sources
from lmcache_operator.agents.authenticator import Refusal
from lmcache_operator.agents.registry import ServerRef, StreamEnd
from lmcache_operator.config import OperatorConfig
from lmcache_operator.events.wording import reason_of
from lmcache_operator.metrics import CountSource, GaugeSource, Metrics
from lmcache_operator.resources.config_maps import build_connections
from lmcache_operator.spec import read_spec
from lmcache_operator.workers.evidence import Trigger
from lmcache_operator.workers.mapping import Unmapped

ROOT = Path(__file__).parents[2]
OPERATIONS = (ROOT / "docs/operations.md").read_text()
REFUSED = (ROOT / "docs/runbooks/agents-refused.md").read_text()
HINTS = (ROOT / "docs/runbooks/hints-not-flowing.md").read_text()

_LOG_CALLS = {"debug", "info", "warning", "error", "exception", "critical"}
_SNAKE = re.compile(r"[a-z]+(_[a-z]+)+")
_PASCAL = re.compile(r"([A-Z][a-z]+)+")
_NOT_HERE: Any = None  # a part that is asked nothing when only its metrics' names are


def _trees() -> Iterator[ast.Module]:
    for path in sorted((ROOT / "operator").rglob("*.py")):
        yield ast.parse(path.read_text())


def _calls(*names: str) -> Iterator[ast.Call]:
    """Yield every call of a function or method of one of these names."""
    for tree in _trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                called = node.func
                name = called.attr if isinstance(called, ast.Attribute) else ""
                name = called.id if isinstance(called, ast.Name) else name
                if name in names:
                    yield node


def _texts(nodes: Iterator[ast.Call], pattern: re.Pattern[str]) -> set[str]:
    """Return the literal arguments of calls that look like names of some form."""
    return {
        argument.value
        for node in nodes
        for argument in node.args
        if isinstance(argument, ast.Constant)
        and isinstance(argument.value, str)
        and pattern.fullmatch(argument.value)
    }


def _chosen_events() -> set[str]:
    """Return the names between which an expression chooses before it is logged."""
    found: set[str] = set()
    for tree in _trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.IfExp):
                target, choice = node.targets[0], node.value
                if isinstance(target, ast.Name) and target.id == "event":
                    parts = (choice.body, choice.orelse)
                    found |= {str(p.value) for p in parts if isinstance(p, ast.Constant)}
    return found


def _reasons() -> set[str]:
    answers = {"True", "False", "Unknown"}
    return _texts(_calls("Verdict", "Trouble", "_Complaint"), _PASCAL) - answers


def _log_events() -> set[str]:
    logged = _texts(_calls(*_LOG_CALLS), _SNAKE) | _chosen_events()
    return logged | _texts(_calls("Step"), _SNAKE) | {"link_secret_restored"}


def _metrics() -> set[str]:
    sources: list[CountSource | GaugeSource] = [
        *metric_sources.lease_gauges(_NOT_HERE),
        *metric_sources.link_counts(_NOT_HERE, _NOT_HERE),
        *metric_sources.flow_counts(cast("Any", _Flow)),
        *metric_sources.flow_gauges(_NOT_HERE, _NOT_HERE, cast("Any", _Trust)),
    ]
    page = Metrics().exposition()[0].decode()
    own = set(re.findall(r"^# TYPE lmcache_kube_operator_(\w+) counter", page, re.MULTILINE))
    return own | {
        f"{source.name}_total"
        if isinstance(source, CountSource) and not source.is_now
        else source.name
        for source in sources
    }


class _Flow:
    unmapped = None


class _Trust:
    server_expires_at = None


def _section(heading: str) -> str:
    return OPERATIONS.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]


def _first_cells(section: str, column: int = 1) -> set[str]:
    """Return what stands in backticks in one column of the tables of a section."""
    rows = [row.split("|") for row in section.splitlines() if row.startswith("| ")]
    return {name for row in rows[1:] for name in re.findall(r"`([^`{]+)[^`]*`", row[column])}


def test_every_reason_of_a_condition_is_explained_and_exists() -> None:
    """In the table of conditions; so is the Event of that reason."""
    assert _first_cells(_section("Status and conditions"), 2) == _reasons() | {
        "Ready",
        "HintsDisabled",
    }


def test_every_event_about_a_worker_is_explained_and_exists() -> None:
    """In the table of Events."""
    named = {reason_of(kind) for kind in get_args(EntryKind)}
    assert _first_cells(_section("Events")) == named


def test_every_log_event_of_the_operator_is_explained_and_exists() -> None:
    """In the table of log events."""
    assert _first_cells(_section("Log events of the operator")) == _log_events()


def test_every_metric_of_the_operator_is_explained_and_exists() -> None:
    """In the table of metrics."""
    assert _first_cells(_section("Metrics of the operator")) == _metrics()


@pytest.mark.parametrize("end", list(StreamEnd))
def test_every_end_of_a_stream_is_explained(end: StreamEnd) -> None:
    """Beside the metric that counts them."""
    assert f"`{end}`" in _section("Metrics of the operator")


@pytest.mark.parametrize("trigger", list(Trigger))
def test_every_trigger_is_explained(trigger: Trigger) -> None:
    """Beside the metric that counts them."""
    assert f"`evidence_{trigger}`" in _section("Metrics of the operator")


@pytest.mark.parametrize("reason", list(Unmapped))
def test_every_reason_without_a_pod_is_explained(reason: Unmapped) -> None:
    """In the runbook about hints."""
    assert f"`{reason}`" in HINTS


@pytest.mark.parametrize("reason", list(Refusal))
def test_every_refusal_of_an_agent_is_explained(reason: Refusal) -> None:
    """In the runbook about it."""
    assert f"`{reason}`" in REFUSED


def test_every_key_of_the_connection_is_explained_and_exists() -> None:
    """In the table of what workers take."""
    stored = {"cache": {"size": "1Gi"}, "transport": {"unixSocket": "HostPath"}}
    (made,) = build_connections(ServerRef("serving", "kv", "uid"), read_spec(stored))
    assert _first_cells(_section("Workers")) == set(made["data"])


def test_flags_that_are_named_exist() -> None:
    """Those of the operator, in the table of the ones to think about."""
    flags = {f"--{name.replace('_', '-')}" for name in OperatorConfig.__dataclass_fields__}
    section = _section("Install")
    named = {flag.split("=")[0].split(" ")[0] for flag in re.findall(r"`(--[^`]+)`", section)}
    assert named - flags - {"--help"} == set()
