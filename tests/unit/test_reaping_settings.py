"""Reaping settings that a file changes while the agent runs."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_nodeagent.config import LIVE_OPTIONS, AgentConfig, ConfigError
from lmcache_nodeagent.events import Event, ReapingSettingsChanged, ReapingSettingsRefused
from lmcache_nodeagent.liveness.live_settings import LiveSettings
from lmcache_nodeagent.liveness.windows import LivenessSettings
from tests.fakes.mounted_folder import MountedFolder


class Bench:
    """Live settings over a mounted folder, looked at by hand."""

    def __init__(self, directory: Path, **flags: object) -> None:
        self.folder = MountedFolder(directory / "reaping")
        self.told: list[Event] = []
        self.changes = 0
        path = self.folder.path / "reaping.json"
        config = AgentConfig(l1_size_gb=1, reaping_settings=str(path), **flags)  # type: ignore[arg-type]  # test's own
        self.settings = LiveSettings(config, self.changed, self.told.append)

    def changed(self) -> None:
        """Count."""
        self.changes += 1

    def put(self, content: Mapping[str, object] | str | bytes) -> LivenessSettings:
        """Write the file, look at it, return what is in force."""
        written = content if isinstance(content, (str, bytes)) else json.dumps(content)
        self.folder.put({"reaping.json": written})
        self.settings.check()
        return self.settings()


def test_without_a_file_the_flags_hold(tmp_path: Path) -> None:
    """Whether one is named or not."""
    bench = Bench(tmp_path, worker_reap_timeout_seconds=300.0)
    bench.settings.check()
    assert bench.settings().reap_timeout_seconds == 300.0
    assert (bench.told, bench.changes, bench.settings.problem) == ([], 0, "")
    unnamed = LiveSettings(AgentConfig(l1_size_gb=1), bench.changed, bench.told.append)
    unnamed.check()
    assert unnamed() == LivenessSettings()


def test_a_file_changes_any_of_them_and_says_what(tmp_path: Path) -> None:
    """Names are the flags' without the dashes in front; what is not named stays with the flag."""
    bench = Bench(tmp_path, close_confirm_seconds=12.0)
    found = bench.put(
        {
            "worker-reap-timeout-seconds": 300,
            "reap-mode": "observe",
            "reap-idle-connected": True,
            "hints": "disabled",
            "stuck-release": "restart",
        }
    )
    assert found == LivenessSettings(
        reap_timeout_seconds=300.0,
        close_confirm_seconds=12.0,
        enforce=False,
        reap_idle_connected=True,
        operator_word=False,
        restart_when_stuck=True,
    )
    assert bench.settings.config.worker_reap_timeout_seconds == 300.0
    (changed,) = bench.told
    assert changed == ReapingSettingsChanged(
        (
            "worker-reap-timeout-seconds: 120 -> 300",
            "reap-mode: enforce -> observe",
            "reap-idle-connected: false -> true",
            "hints: enforce -> disabled",
            "stuck-release: alert -> restart",
        )
    )
    assert bench.changes == 1


def test_the_same_again_is_no_change(tmp_path: Path) -> None:
    """Neither the same content, nor other content that means the same."""
    bench = Bench(tmp_path)
    bench.put({"hint-confirm-seconds": 20})
    bench.put({"hint-confirm-seconds": 20})
    bench.put({"hint-confirm-seconds": 20.0, "reap-mode": "enforce"})
    assert (len(bench.told), bench.changes) == (1, 1)


def test_what_is_taken_out_of_the_file_is_the_flags_again(tmp_path: Path) -> None:
    """So is everything once the file is gone."""
    bench = Bench(tmp_path)
    bench.put({"hint-confirm-seconds": 20, "close-confirm-seconds": 5})
    assert bench.put({"close-confirm-seconds": 5}).hint_confirm_seconds == 15.0
    bench.folder.put({})
    bench.settings.check()
    assert bench.settings() == LivenessSettings()


BAD: list[tuple[str | bytes, str]] = [
    ("", "no JSON"),
    ("{", "no JSON"),
    (b"\xff", "no JSON"),
    ("[" * 100_000, "no JSON|larger than"),
    ("[1]", "no object"),
    ('{"hints": "enforce", "hints": "disabled"}', "stands twice"),
    ('{"worker-reap-timeout-seconds": NaN}', "NaN is no number"),
    ('{"worker-reap-timeout-seconds": "120"}', "must be a number"),
    ('{"worker-reap-timeout-seconds": true}', "must be a number"),
    ('{"worker-reap-timeout-seconds": null}', "must be a number"),
    ('{"worker-reap-timeout-seconds": 1e999}', "must be a finite number"),
    ('{"worker-reap-timeout-seconds": 1%s}' % ("0" * 400), "must be a number"),
    ('{"reap-idle-connected": 1}', "must be true or false"),
    ('{"reap-mode": 1}', "must be text"),
    ('{"reap-mode": "\\ud800"}', "must be enforce or observe"),
    ('{"reap-mode": "never"}', "must be enforce or observe"),
    ('{"port": 1}', "cannot be set while the agent runs"),
    ('{"worker_reap_timeout_seconds": 60}', "cannot be set while the agent runs"),
    ('{"worker-reap-timeout-seconds": 29}', "must be 0 .off. or 30 or more"),
    ('{"worker-reap-timeout-seconds": 30, "worker-heartbeat-interval-seconds": 11}', "33"),
    ('{"close-confirm-seconds": 16}', "must be hint-confirm-seconds"),
    ('{"hints": "%s"}' % ("x" * 70_000), "larger than"),
]


@pytest.mark.parametrize(("content", "words"), BAD, ids=range(len(BAD)))
def test_a_bad_file_changes_nothing_and_is_reported_once(
    tmp_path: Path, content: str | bytes, words: str
) -> None:
    """All of it is refused, also what would be good by itself."""
    bench = Bench(tmp_path)
    before = bench.put({"hint-confirm-seconds": 20})
    bench.told.clear()
    assert bench.put(content) == before
    bench.settings.check()
    (refused,) = bench.told
    assert isinstance(refused, ReapingSettingsRefused)
    assert refused.problem == bench.settings.problem
    assert re.search(words, refused.problem)
    refused.problem.encode()
    assert bench.changes == 2
    assert bench.put({"hint-confirm-seconds": 20}) == before
    assert bench.settings.problem == ""
    assert bench.changes == 3


def test_the_same_problem_in_other_words_is_not_reported_again(tmp_path: Path) -> None:
    """Somebody is at it."""
    bench = Bench(tmp_path)
    bench.put({"hints": 3})
    bench.put({"hints": 3, "reap-mode": "observe"})
    assert (len(bench.told), bench.changes) == (1, 1)


def test_everything_that_is_wrong_is_said_together(tmp_path: Path) -> None:
    """One edit mends it."""
    bench = Bench(tmp_path)
    bench.put({"port": 1, "hints": 3, "reap-mode": "never", "close-confirm-seconds": 2})
    for word in ("port", "hints is 3", "reap-mode is 'never'", "close-confirm-seconds is 2"):
        assert word in bench.settings.problem


def test_a_file_that_cannot_be_read_is_a_problem_and_no_absence(tmp_path: Path) -> None:
    """A folder in its place, for one."""
    path = tmp_path / "reaping.json"
    path.mkdir()
    told: list[Event] = []
    config = AgentConfig(l1_size_gb=1, reaping_settings=str(path))
    settings = LiveSettings(config, lambda: None, told.append)
    settings.check()
    assert "cannot be read" in settings.problem
    assert len(told) == 1


_numbers = st.sampled_from([0, 1, 2, 3, 10, 15, 29, 30, 31, 120, 3600])
_values = st.fixed_dictionaries(
    {},
    optional={
        option.label: st.booleans()
        if option.kind is bool
        else st.sampled_from(option.choices)
        if option.choices
        else _numbers
        for option in LIVE_OPTIONS
    },
)


@given(_values)
def test_file_and_flags_are_judged_by_the_same_rules(values: dict[str, object]) -> None:
    """What the one takes the other takes, with the same result."""
    fields = {label.replace("-", "_"): value for label, value in values.items()}
    problems: tuple[str, ...] = ()
    meant = AgentConfig(l1_size_gb=1)
    try:
        meant = AgentConfig(l1_size_gb=1, **fields)  # type: ignore[arg-type]  # test's own
    except ConfigError as error:
        problems = error.problems
    base = AgentConfig(l1_size_gb=1, reaping_settings="/nowhere")
    settings = LiveSettings(base, lambda: None, lambda _: None)
    settings.take(json.dumps(values).encode())
    assert settings.problem == "; ".join(problems)
    if not problems:
        for option in LIVE_OPTIONS:
            name = option.field_name
            assert getattr(settings.config, name) == getattr(meant, name)
