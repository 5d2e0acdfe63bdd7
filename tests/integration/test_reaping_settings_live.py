"""Reaping settings that are edited while an agent runs: no restart, no lost cache."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.agent_process import AgentProcess
from tests.fakes.link_operator import LinkOperator
from tests.fakes.mounted_folder import MountedFolder
from tests.fakes.stub_agent import StubAgent
from tests.fakes.worker_process import Worker
from tests.polling import PATIENCE_SECONDS, poll_until

FILE = "reaping.json"


class Settings:
    """The file, as a ConfigMap is mounted."""

    def __init__(self, directory: Path) -> None:
        self._folder = MountedFolder(directory / "reaping")

    @property
    def flag(self) -> str:
        """What names it."""
        return f"--reaping-settings={self._folder.path / FILE}"

    def put(self, content: Mapping[str, object] | str) -> None:
        """Edit it."""
        text = content if isinstance(content, str) else json.dumps(content)
        self._folder.put({FILE: text})

    def remove(self) -> None:
        """Take it away."""
        self._folder.put({})


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """No file yet."""
    return Settings(tmp_path)


def in_force(agent: AgentProcess) -> dict[str, Any]:
    """What `/status` shows."""
    found: dict[str, Any] = agent.status()["worker_liveness"]
    return found


def health(agent: AgentProcess) -> tuple[int, str]:
    """Return status and reason of `/healthz`."""
    url = f"http://127.0.0.1:{agent.http_port}/healthz"
    try:
        with urllib.request.urlopen(url, timeout=PATIENCE_SECONDS) as reply:
            return int(reply.status), json.load(reply)["reason"]
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)["reason"]


def test_a_file_that_is_there_at_the_start_is_in_force_from_the_start(settings: Settings) -> None:
    """Nobody is judged by the flags for a moment."""
    settings.put({"worker-reap-timeout-seconds": 300, "hints": "disabled"})
    with AgentProcess(settings.flag, "--worker-reap-timeout-seconds=30") as agent:
        shown = in_force(agent)
        assert (shown["reap_timeout_seconds"], shown["hints"]) == (300, "disabled")
        assert shown["settings_problem"] == ""
        (changed,) = agent.log_records("reaping_settings_changed")
        assert "worker-reap-timeout-seconds: 30 -> 300" in changed["changed"]


def test_an_edit_changes_the_window_that_runs(settings: Settings) -> None:
    """A dead worker does not wait for the window that held when it died."""
    settings.put({"close-confirm-seconds": 100, "hint-confirm-seconds": 100})
    with AgentProcess(settings.flag) as agent, Worker(agent.url, 8) as served:
        served.register()
        assert served.store(1)
        with Worker(agent.url, 7) as dying:
            dying.register()
        poll_until(lambda: agent.instances()[7]["window"] == "close")
        assert agent.instances()[7]["deadline_seconds"] > 60
        edited_at = time.monotonic()
        settings.put({"close-confirm-seconds": 3, "hint-confirm-seconds": 100})
        assert agent.wait_reaped(7)["reason"] == "connection_closed"
        assert time.monotonic() - edited_at < 60
        assert served.lookup(1) == 2
        assert agent.metric("reaping_settings_changes_total") == 2


def test_a_file_that_goes_leaves_the_flags(settings: Settings) -> None:
    """And one that comes is taken, without a restart."""
    with AgentProcess(settings.flag, "--close-confirm-seconds=7") as agent:
        assert in_force(agent)["close_confirm_seconds"] == 7
        settings.put({"close-confirm-seconds": 5, "reap-mode": "observe"})
        poll_until(lambda: in_force(agent)["close_confirm_seconds"] == 5)
        assert in_force(agent)["enabled"] is False
        settings.remove()
        poll_until(lambda: in_force(agent)["close_confirm_seconds"] == 7)
        assert in_force(agent)["enabled"] is True


def test_a_bad_file_changes_nothing_and_is_reported_everywhere(
    settings: Settings, tmp_path: Path
) -> None:
    """Log, metric, status and link; once."""
    settings.put({"worker-reap-timeout-seconds": 300})
    with LinkOperator(tmp_path) as operator:
        operator.announce()
        with AgentProcess(settings.flag, *operator.flags) as agent:
            stream = operator.stream()
            assert stream.state.settings.worker_reap_timeout_seconds == 300
            settings.put({"worker-reap-timeout-seconds": 20, "close-confirm-seconds": 5})
            poll_until(lambda: stream.state.settings_problem)
            problem = stream.state.settings_problem
            assert "worker-reap-timeout-seconds is 20" in problem
            assert in_force(agent)["settings_problem"] == problem
            assert in_force(agent)["reap_timeout_seconds"] == 300
            assert in_force(agent)["close_confirm_seconds"] == 10
            (refused,) = agent.log_records("reaping_settings_refused")
            assert refused["problem"] == problem
            assert agent.metric("reaping_settings_refused") == 1
            settings.put({"worker-reap-timeout-seconds": 60})
            poll_until(lambda: not stream.state.settings_problem)
            assert stream.state.settings.worker_reap_timeout_seconds == 60
            assert agent.metric("reaping_settings_refused") == 0
            assert agent.metric("reaping_settings_refusals_total") == 1


def test_a_stuck_release_fails_the_health_check_only_if_a_restart_is_asked_for(
    settings: Settings,
) -> None:
    """An edit is enough; the operator hears of it as well."""
    settings.put({"close-confirm-seconds": 3, "hint-confirm-seconds": 3})
    with StubAgent(settings.flag, "--release-deadline-seconds=1") as agent:
        agent.hold("close")
        with Worker(agent.url, 7) as dying:
            dying.register()
        poll_until(lambda: agent.metric("releases_stuck"))
        assert health(agent)[0] == 200
        settings.put({"stuck-release": "restart"})
        poll_until(lambda: health(agent)[0] == 503)
        assert health(agent)[1].startswith("instance 7: its memory is not back after")
        agent.let_go("close")
        poll_until(lambda: health(agent)[0] == 200)


def test_a_stuck_release_is_told_to_the_operator(tmp_path: Path) -> None:
    """As a state, and as something that happened."""
    with LinkOperator(tmp_path) as operator:
        operator.announce()
        flags = ("--release-deadline-seconds=1", "--close-confirm-seconds=3")
        with StubAgent(*operator.flags, *flags) as agent:
            stream = operator.stream()
            agent.hold("close")
            with Worker(agent.url, 7) as dying:
                dying.register()
            entry = stream.entry("stuck_release", 7)
            assert entry.released_bytes == 0
            poll_until(lambda: stream.state.releases_stuck == 1)
            assert stream.entry("reaped", 7).release_seconds is None
            agent.let_go("close")
            poll_until(lambda: stream.state.releases_stuck == 0)
