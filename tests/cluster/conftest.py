"""One control plane for a test session, one namespace for a test."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Generator
from pathlib import Path

import pytest

from lmcache_operator.api.crd import GROUP, PLURAL, VERSION, definition
from tests.cluster.api import Api
from tests.cluster.control_plane import ControlPlane
from tests.cluster.operator_process import OperatorProcess
from tests.cluster.programs import ProgramsMissing, find
from tests.cluster.reconcile_world import World
from tests.cluster.story import Story
from tests.polling import poll_until


@pytest.fixture(scope="session")
def control_plane(tmp_path_factory: pytest.TempPathFactory) -> Generator[ControlPlane]:
    """A running control plane. It is built beforehand, since that takes longer than a test may."""
    programs = find()
    if programs is None:
        message = "no programs of a control plane: run `make cluster-programs`, which builds them"
        raise ProgramsMissing(message)
    with ControlPlane(tmp_path_factory.mktemp("control-plane"), programs) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def api(control_plane: ControlPlane) -> Api:
    """The API server, as the administrator."""
    return control_plane.api


@pytest.fixture(scope="session")
def kind(control_plane: ControlPlane, api: Api) -> str:
    """The path of our API, once our kind is served."""
    answer = control_plane.kubectl(
        "apply", "--server-side", "-f", "-", given=json.dumps(definition())
    )
    assert answer.returncode == 0, answer.stderr
    path = f"/apis/{GROUP}/{VERSION}"
    poll_until(lambda: api.request("GET", f"{path}/{PLURAL}").ok, "our kind")
    # What kubectl knows of kinds is published a moment later.
    explain = ("explain", f"{PLURAL}.{GROUP}")
    poll_until(lambda: control_plane.kubectl(*explain).returncode == 0, "its words")
    return path


@pytest.fixture
def namespace(api: Api, request: pytest.FixtureRequest) -> Generator[str]:
    """A namespace of this test's own, with its default ServiceAccount."""
    words = re.sub(r"[^a-z0-9]+", "-", request.node.name.lower())[:40].strip("-")
    name = f"{words}-{uuid.uuid4().hex[:6]}"
    assert api.request("POST", "/api/v1/namespaces", {"metadata": {"name": name}}).ok
    account = f"/api/v1/namespaces/{name}/serviceaccounts/default"
    poll_until(lambda: api.request("GET", account).ok, "a namespace's account")
    yield name
    api.request("DELETE", f"/api/v1/namespaces/{name}")


@pytest.fixture
def servers(kind: str, namespace: str) -> str:
    """The path of this test's LMCacheServers."""
    return f"{kind}/namespaces/{namespace}/{PLURAL}"


@pytest.fixture
def story(
    control_plane: ControlPlane, kind: str, namespace: str, tmp_path: Path
) -> Generator[Story]:
    """The whole chain; a test begins it."""
    assert kind
    with Story(control_plane, namespace, tmp_path) as story:
        yield story


@pytest.fixture
def world(api: Api, kind: str, namespace: str) -> Generator[World]:
    """A namespace of this test's own, in which servers are made and looked at."""
    found = World(api, kind, namespace)
    yield found
    found.close()


@pytest.fixture
def operator(control_plane: ControlPlane, world: World) -> Generator[OperatorProcess]:
    """An operator that serves this test's namespace."""
    with OperatorProcess(control_plane.kubeconfig, world.namespace) as process:
        yield process
