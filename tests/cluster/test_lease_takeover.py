"""Candidates for one Lease as processes: one is killed, one is frozen, one has a wrong clock."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.api import Api
from tests.cluster.control_plane import ControlPlane
from tests.polling import PATIENCE_SECONDS, poll_until
from tests.process_log import ProcessLog

DURATION_SECONDS = 5
DEADLINE_SECONDS = 4
RETRY_SECONDS = 0.5

REPOSITORY = Path(__file__).parents[2]


class Candidate:
    """One process."""

    def __init__(self, kubeconfig: Path, namespace: str, identity: str, skew: float) -> None:
        times = (DURATION_SECONDS, DEADLINE_SECONDS, RETRY_SECONDS)
        flags = {"kubeconfig": kubeconfig, "namespace": namespace, "identity": identity}
        self._said = ProcessLog()
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.cluster.lease_candidate",
                *(f"--{name}={value}" for name, value in flags.items()),
                f"--skew={skew}",
                "--times",
                *map(str, times),
            ],
            stdout=self._said.fileno(),
            stderr=subprocess.DEVNULL,
            cwd=REPOSITORY,
        )

    def said(self) -> list[dict[str, Any]]:
        """Return what it has said so far."""
        return self._said.records()

    def holds(self) -> bool:
        """Tell whether it believes that it holds the Lease."""
        said = self.said()
        return bool(said) and bool(said[-1]["held"])

    def wait_holds(self) -> float:
        """Wait until it does; return how long that took."""
        began = time.monotonic()
        poll_until(self.holds, "it holds the Lease")
        return time.monotonic() - began

    def close(self) -> None:
        """End it."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._said.close()


Start = Callable[..., Candidate]


@pytest.fixture
def start(control_plane: ControlPlane, namespace: str) -> Generator[Start]:
    """Return how to start a candidate: identity, and how far its clock is off."""
    started: list[Candidate] = []

    def begin(identity: str, skew: float = 0.0) -> Candidate:
        started.append(Candidate(control_plane.kubeconfig, namespace, identity, skew))
        return started[-1]

    yield begin
    for candidate in started:
        candidate.close()


@pytest.fixture
def lease(api: Api, namespace: str) -> Callable[[], dict[str, Any]]:
    """Return how to read the spec of the Lease."""
    path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/candidates"

    def read() -> dict[str, Any]:
        spec: dict[str, Any] = api.request("GET", path).body.get("spec") or {}
        return spec

    return read


Read = Callable[[], dict[str, Any]]


@pytest.mark.parametrize("skew", [120.0, -120.0])
def test_the_holder_is_killed(start: Start, lease: Read, skew: float) -> None:
    """Another takes over, whatever its clock says, and not while the holder renews."""
    holder = start("holder")
    holder.wait_holds()
    other = start("other", skew)
    first = lease()
    # The holder renews; the other looks on for longer than the Lease lasts.
    began = time.monotonic()
    poll_until(lambda: time.monotonic() > began + DURATION_SECONDS + 1 and lease() != first)
    assert not other.said()
    assert lease()["holderIdentity"] == "holder"
    holder.process.kill()
    took = other.wait_holds()
    print(f"taken {took:.1f} s after SIGKILL; it lasts {DURATION_SECONDS} s")  # noqa: T201
    assert took >= DURATION_SECONDS - DEADLINE_SECONDS - RETRY_SECONDS  # never at once
    assert lease()["holderIdentity"] == "other"
    assert lease()["leaseTransitions"] == 1


def test_the_holder_is_frozen(start: Start, lease: Read) -> None:
    """Another takes over; thawed, the first knows at once that it holds nothing, and ends."""
    holder = start("holder")
    holder.wait_holds()
    other = start("other")
    os.kill(holder.process.pid, signal.SIGSTOP)
    other.wait_holds()
    os.kill(holder.process.pid, signal.SIGCONT)
    assert holder.process.wait(PATIENCE_SECONDS) == 1
    assert "another operator may act" in holder.said()[-1]["error"]
    assert lease()["holderIdentity"] == "other"
    assert other.holds()


def test_the_holder_stops(start: Start, lease: Read) -> None:
    """It releases the Lease: the next need not wait until it has run out."""
    holder = start("holder")
    holder.wait_holds()
    other = start("other")
    holder.process.terminate()
    assert holder.process.wait(PATIENCE_SECONDS) == 0
    assert lease()["holderIdentity"] in {"", "other"}
    other.wait_holds()
    assert lease()["leaseTransitions"] >= 1


def test_five_start_together(start: Start, lease: Read) -> None:
    """One of them holds it; as it dies, one other does."""
    candidates = [start(name) for name in "abcde"]
    for left in (4, 3):
        poll_until(lambda: any(each.holds() for each in candidates), "a holder")
        (holder,) = [each for each in candidates if each.holds()]
        assert lease()["holderIdentity"] in "abcde"
        holder.process.kill()
        candidates.remove(holder)
        assert len(candidates) == left
