"""Before a real node is made: can this machine host one, and what if the network fails just then.

What the node itself does is in tests/e2e/kube.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Thread

import pytest

from tests.cluster.programs import run_go
from tests.e2e.kube import machine, namespaces
from tests.e2e.kube.__main__ import one_node_at_a_time
from tests.e2e.kube.image import ImageFailed, fetched
from tests.fakes.netns import needs_root
from tests.polling import PATIENCE_SECONDS, poll_until

_ROOT = Path(__file__).parents[2]
_NOBODY = "65534"
_SCRIPT = _ROOT / "tests" / "e2e" / "kube" / "machine.py"


def can_host(*wrapper: str) -> tuple[int, list[str]]:
    """Ask the script, as the gate does; return its status and what it says."""
    done = subprocess.run(
        [*wrapper, sys.executable, str(_SCRIPT), "--can-host"],
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert not done.stderr
    return done.returncode, done.stdout.splitlines()


def test_another_user_cannot_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is anything tried then."""
    monkeypatch.setattr(os, "geteuid", lambda: int(_NOBODY))
    assert machine.problems()[0] == f"it needs root, and this is user {_NOBODY}"
    with pytest.raises(machine.MachineLacks, match="it needs root"):
        machine.check_machine()


def test_packages_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As apt wants them."""
    monkeypatch.setenv("PATH", str(tmp_path))
    words = " ".join(machine.problems())
    assert "apt-get install --no-install-recommends buildah" in words
    assert "containerd" in machine.missing_packages()


@needs_root
@pytest.mark.parametrize(
    ("capability", "reason"),
    [
        ("sys_admin", "no namespaces of network, mounts and processes can be made"),
        ("net_admin", "`ip link set lo up` fails"),
        ("mknod", "no device can be made and used"),
    ],
)
def test_root_without_a_power_cannot_host(capability: str, reason: str) -> None:
    """As in many a container; which one it is is said, and nothing is left behind."""
    status, said = can_host("setpriv", f"--bounding-set=-{capability}")
    assert status == machine.CANNOT_HOST
    if can_host()[0] == 0:  # else this machine lacks something else, and that comes first
        assert any(line.startswith(reason) for line in said), said
    poll_until(lambda: not list((_ROOT / "build").glob("node-probe-*")), "nothing is left")


@pytest.mark.parametrize(
    "known", ["cpuset cpu io memory hugetlb pids rdma", "cpuset cpu memory pids"]
)
def test_a_node_s_control_groups_have_what_a_kubelet_looks_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, known: str
) -> None:
    """In version 2: of those that the machine has at all."""
    (tmp_path / "cgroup.controllers").write_text(f"{known}\n")
    (tmp_path / "cgroup.subtree_control").touch()
    monkeypatch.setattr(namespaces, "_CGROUPS", tmp_path)
    namespaces._make_cgroups("node")
    enabled = (tmp_path / "cgroup.subtree_control").read_text()
    assert ("+hugetlb" in enabled) is ("hugetlb" in known)
    assert {"+cpu", "+cpuset", "+memory", "+pids"} <= set(enabled.split())
    assert (tmp_path / "node").is_dir()


# The gate


_FAKE = """#!/bin/sh
case "$0 $*" in
  */make*) echo "made $*" ;;
  *--can-host) echo "no links"; exit {status} ;;
esac
"""


@pytest.fixture
def gate(tmp_path: Path) -> Callable[[int], str]:
    """Return what the gate says when the question whether a node can be hosted ends so."""

    def run(status: int) -> str:
        folders = (tmp_path / ".ci", tmp_path / "bin")
        for folder in folders:
            folder.mkdir()
        shutil.copy(_ROOT / ".ci" / "run", folders[0])
        for name in ("make", "python3"):
            (folders[1] / name).write_text(_FAKE.format(status=status))
            (folders[1] / name).chmod(0o755)
        env = {**os.environ, "PATH": f"{folders[1]}{os.pathsep}{os.environ['PATH']}"}
        done = subprocess.run(
            [str(folders[0] / "run")], env=env, capture_output=True, text=True, check=True
        )
        return done.stdout

    return run


def test_the_gate_goes_on_where_no_node_can_be(gate: Callable[[int], str]) -> None:
    """It says so, with the reasons; everything else is run."""
    said = gate(machine.CANNOT_HOST)
    assert "made conformance" in said
    assert "made e2e-kube" not in said
    assert "== make e2e-kube left out, since this machine cannot host a Kubernetes node:" in said
    assert "no links" in said


@pytest.mark.parametrize("status", [0, 1])
def test_the_gate_needs_the_node_to_pass_where_there_can_be_one(
    gate: Callable[[int], str], status: int
) -> None:
    """Also where that question could not be answered."""
    assert "made e2e-kube" in gate(status)


# What is shared, and what comes from elsewhere


def test_a_second_node_waits(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """And says what for."""
    path, entered = tmp_path / "lock", list[str]()

    def second() -> None:
        with one_node_at_a_time(path):
            entered.append("second")

    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        thread = Thread(target=second)
        thread.start()
        said: list[str] = []

        def is_told() -> bool:
            said.append(capfd.readouterr().out)
            return f"{path} is locked" in "".join(said)

        poll_until(is_told)
        assert not entered
    thread.join(PATIENCE_SECONDS)
    assert entered == ["second"]


def test_what_the_network_lost_is_fetched_again() -> None:
    """As often as there are pauses."""
    words = ["Connection reset by peer", "Read timed out."]

    def make() -> None:
        if words:
            raise ImageFailed(words.pop())

    fetched(make, pauses_seconds=(0, 0))
    assert not words


@pytest.mark.parametrize(("words", "tries"), [("connection refused", 3), ("syntax error", 1)])
def test_what_lasts_fails(words: str, tries: int) -> None:
    """A network that stays away in the end, anything else at once."""
    tried: list[str] = []

    def make() -> None:
        tried.append(words)
        raise ImageFailed(words)

    with pytest.raises(ImageFailed, match=words):
        fetched(make, pauses_seconds=(0, 0))
    assert len(tried) == tries


@pytest.mark.parametrize(("succeeds_at", "status", "tries"), [(2, 0, 2), (9, 7, 3)])
def test_a_build_is_tried_again(tmp_path: Path, succeeds_at: int, status: int, tries: int) -> None:
    """Its modules come over the network; the last status is returned."""
    script = f"echo >> tries; test $(wc -l < tries) -ge {succeeds_at} || exit 7"
    command = ["sh", "-c", script]
    assert run_go(command, cwd=tmp_path, env={}, pauses_seconds=(0, 0)) == status
    assert len((tmp_path / "tries").read_text().splitlines()) == tries
