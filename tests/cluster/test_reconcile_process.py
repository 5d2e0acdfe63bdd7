"""The process itself: who acts, health, stops, and what it says when it cannot work."""

from __future__ import annotations

from collections.abc import Generator
from http import HTTPStatus

import pytest

from tests.cluster.control_plane import ControlPlane
from tests.cluster.operator_process import OperatorProcess
from tests.polling import poll_until


@pytest.fixture
def operator(control_plane: ControlPlane, kind: str, namespace: str) -> Generator[OperatorProcess]:
    """A running operator of this test's namespace."""
    assert kind
    with OperatorProcess(control_plane.kubeconfig, namespace) as process:
        yield process


def test_it_serves_health_and_stops(operator: OperatorProcess) -> None:
    """It is ready once it holds the Lease; SIGTERM ends it in order."""
    assert operator.get("/healthz")[0] == HTTPStatus.OK
    poll_until(lambda: operator.get("/readyz")[0] == HTTPStatus.OK, 10, "ready")
    assert operator.get("/metrics")[1].startswith("# HELP")
    assert operator.stop() == 0
    assert operator.records("operator_stopped")
    assert operator.records("lease_released")
