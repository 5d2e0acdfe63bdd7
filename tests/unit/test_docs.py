"""The documentation keeps up with the code: events and metrics are explained, no link is dead."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

import lmcache_nodeagent.app as agent_app
import lmcache_operator.app as operator_app
from lmcache_nodeagent.events import Event
from lmcache_nodeagent.liveness.policy import Reason, State, Window
from lmcache_nodeagent.modules.management import ManagementModule
from lmcache_nodeagent.observability.logs import event_name
from lmcache_nodeagent.observability.metric_catalog import COUNTED, SAMPLED
from lmcache_nodeagent.protocol.operations import OPERATIONS
from tests.fakes.module_bench import ModuleBench

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
AGENT = (ROOT / "docs/agent.md").read_text()
LIVENESS = (ROOT / "docs/liveness.md").read_text()
COMPARED = (ROOT / "docs/compared-with-upstream.md").read_text()
ARCHITECTURE = (ROOT / "docs/architecture.md").read_text()

_CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"][
    "contracts"
]

METRICS = [*(metric.name for metric in SAMPLED), *(metric.name for metric in COUNTED)]

_LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
_APPLIED = re.compile(r"kubectl apply [^|\n]*?(?:-f|-k) ([a-z][\w./-]*)")
_MADE_THERE = {"server.yaml"}  # an example's own file


@pytest.mark.parametrize("event", sorted(map(event_name, Event.__subclasses__())))
def test_every_log_event_says_what_to_do(event: str) -> None:
    """Each has a row in the table of the agent's page."""
    assert f"`{event}`" in AGENT


@pytest.mark.parametrize("metric", METRICS)
def test_every_metric_says_what_is_wrong(metric: str) -> None:
    """Each is in the table of the agent's page."""
    assert re.search(rf"[`/ ]{metric}[`{{]", AGENT)


@pytest.mark.parametrize("name", [member.value for kind in (Reason, State) for member in kind])
def test_every_reason_and_state_is_explained(name: str) -> None:
    """Each is on the page about liveness."""
    assert f"`{name}`" in LIVENESS


def test_every_window_is_explained() -> None:
    """By the words of the table of windows."""
    words = {window.value.replace("_", " ") for window in Window} - {"none"}
    assert {word for word in words if f"| {word}" not in LIVENESS} == set()


@pytest.mark.parametrize("app", [agent_app, operator_app], ids=lambda app: str(app.__name__))
def test_threads_and_tasks_are_those_that_are_made(app: ModuleType) -> None:
    """The table where they are made and the one on the page about architecture name the same."""
    made = _named_rows(app.__doc__ or "")
    assert made
    tables = re.findall(r"^\|.+\n\|-.+\n((?:\|.+\n)+)", ARCHITECTURE, re.MULTILINE)
    assert made in [_named_rows(table) for table in tables]


@pytest.mark.parametrize("contract", ["agent-layers", "operator-layers"])
def test_layers_are_those_that_are_checked(contract: str) -> None:
    """In the order of the import contract."""
    (layers,) = (each["layers"] for each in _CONTRACTS if each["id"] == contract)
    shown = [re.sub(r"[()]", "", layer) for layer in layers if layer != "(__main__)"]
    block = ARCHITECTURE.split("```\nagent ")[1].split("```")[0].splitlines()
    column = 0 if contract == "agent-layers" else block[0].index("operator") + len("agent ")
    found = [re.split(r" {2,}", line[column:])[0] for line in block[1:]]
    assert [layer for layer in found if layer] == shown


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    """Every relative link names a file of the repository, and a heading of it if it names one."""
    dead = []
    for name, heading in _LINK.findall(page.read_text()):
        target = page.parent / name if name else page
        if not target.exists() or (heading and heading not in _anchors(target)):
            dead.append(f"{name}#{heading}")
    assert dead == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_is_applied_is_there(page: Path) -> None:
    """Every file or folder that a page has people apply."""
    named = set(_APPLIED.findall(page.read_text())) - _MADE_THERE
    assert {name for name in named if not (ROOT / name).exists()} == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_targets_of_make_exist(page: Path) -> None:
    """Every `make` that a page has people type."""
    targets = set(re.findall(r"^([a-z0-9-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE))
    text = page.read_text()
    typed = re.findall(r"`make ([a-z0-9-]+)", text) + re.findall(
        r"^    make (\S+)", text, re.MULTILINE
    )
    assert set(typed) - targets == set()


def test_every_operation_is_compared_with_upstream() -> None:
    """The table has each by name and number, and says of none that it is served which is not."""
    bench = ModuleBench()
    management = object.__new__(ManagementModule)
    modules = (bench.lookups, bench.transfer, bench.engine_driven, bench.kv_events, management)
    served = {name for module in modules for name in module.handlers()}
    rows = re.findall(r"^\| `(\w+)` \| (\d+|-) \| (served|refused) \|", COMPARED, re.MULTILINE)
    assert {(name, number, word) for name, number, word in rows} == {
        (name, str(known.wire_id or "-"), "served" if name in served else "refused")
        for name, known in OPERATIONS.items()
    }


def test_every_weakness_is_compared_and_its_tests_exist() -> None:
    """All 26, in order, each with tests that are where the page says."""
    rows = re.findall(r"^\| (\d+) \|.*\| ([^|]+) \|$", COMPARED, re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, 27))
    missing = []
    for _, cell in rows:
        named = re.findall(r"`([\w/]+\.py)::(\w+)`", cell)
        assert named, cell
        for file, test in named:
            path = ROOT / "tests" / file
            text = path.read_text() if path.exists() else ""
            if not re.search(rf"^ *(def|class) {test}\(", text, re.MULTILINE):
                missing.append(f"{file}::{test}")
    assert missing == []


def test_the_readme_stays_short() -> None:
    """A page and a bit: what it is, a picture, a quick start, links."""
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def _named_rows(table: str) -> list[str]:
    """Return the first name of each row of a table."""
    return re.findall(r"^\| `([^`]+)`", table, re.MULTILINE)


def _anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    plain = (re.sub(r"[^\w\- ]", "", found.lower()) for found in _HEADING.findall(page.read_text()))
    return {words.strip().replace(" ", "-") for words in plain}
