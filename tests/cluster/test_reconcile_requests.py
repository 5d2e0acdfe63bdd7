"""The operator's one way to the API server: guards, pages, refusals and silence."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest

from lmcache_operator import cluster as module
from lmcache_operator.cluster import Cluster, KubeObject
from lmcache_operator.errors import ApiError, Conflict, NotFound, Unreachable
from tests.cluster.control_plane import ControlPlane
from tests.cluster.operator_process import free_port

_T = TypeVar("_T")

Requests = Callable[[Cluster], Awaitable[_T]]


def ask(control_plane: ControlPlane, requests: Requests[_T]) -> _T:
    """Do something with a connection of its own."""

    async def run() -> _T:
        async with await Cluster.connect(str(control_plane.kubeconfig)) as cluster:
            return await requests(cluster)

    return asyncio.run(run())


def config_map(namespace: str, name: str = "a", **data: str) -> KubeObject:
    """Make a small object."""
    metadata = {"namespace": namespace, "name": name}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}


def test_a_uid_guards_against_another_object_of_the_name(
    control_plane: ControlPlane, namespace: str
) -> None:
    """Patched and deleted is the one that was meant, or none."""

    async def requests(cluster: Cluster) -> None:
        stored = await cluster.apply(config_map(namespace))
        place = ("ConfigMap", namespace, "a")
        patch = {"data": {"k": "v"}}
        assert await cluster.merge_patch(*place, patch, uid="another") is None
        assert not await cluster.delete(*place, uid="another")
        patched = await cluster.merge_patch(*place, patch, uid=stored["metadata"]["uid"])
        assert patched is not None
        assert patched["data"] == {"k": "v"}
        assert await cluster.delete(*place, uid=stored["metadata"]["uid"])
        assert not await cluster.delete(*place)
        assert await cluster.merge_patch(*place, patch) is None
        assert await cluster.get(*place) is None
        container = {"name": "engine", "image": "none"}
        metadata = {"namespace": namespace, "name": "w"}
        pod = {"kind": "Pod", "metadata": metadata, "spec": {"containers": [container]}}
        assert await cluster.create(pod)
        note = {"metadata": {"annotations": {"a": "b"}}}
        assert await cluster.merge_patch("Pod", namespace, "w", note, uid="another") is None
        assert await cluster.merge_patch("Pod", namespace, "w", note) is not None

    ask(control_plane, requests)


def test_what_exists_is_not_made_again_and_what_changed_is_not_replaced(
    control_plane: ControlPlane, namespace: str
) -> None:
    """Whoever is second learns it."""

    async def requests(cluster: Cluster) -> None:
        assert await cluster.create(config_map(namespace))
        assert not await cluster.create(config_map(namespace))
        stored = await cluster.get("ConfigMap", namespace, "a")
        assert stored is not None
        await cluster.replace({**stored, "data": {"k": "1"}})
        with pytest.raises(Conflict):
            await cluster.replace({**stored, "data": {"k": "2"}})

    ask(control_plane, requests)


def test_lists_are_read_to_the_end(
    control_plane: ControlPlane, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In pages, with labels and fields that select."""
    monkeypatch.setattr(module, "PAGE", 3)

    async def requests(cluster: Cluster) -> None:
        for number in range(10):
            obj = config_map(namespace, f"c{number}")
            obj["metadata"]["labels"] = {"odd": str(number % 2)}
            await cluster.create(obj)
        found = await cluster.list("ConfigMap", namespace, "odd=1")
        assert len(found) == 5
        one = await cluster.list("ConfigMap", namespace, field_selector="metadata.name=c3")
        assert [obj["metadata"]["name"] for obj in one] == ["c3"]

    ask(control_plane, requests)


def test_the_same_applied_again_is_no_change(control_plane: ControlPlane, namespace: str) -> None:
    """And another manager's fields stay."""

    async def requests(cluster: Cluster) -> None:
        first = await cluster.apply(config_map(namespace, k="v"))
        again = await cluster.apply(config_map(namespace, k="v"))
        assert first["metadata"]["resourceVersion"] == again["metadata"]["resourceVersion"]

    ask(control_plane, requests)


def test_refusals_are_told_apart(control_plane: ControlPlane, namespace: str) -> None:
    """With the API server's word and sentence."""

    async def requests(cluster: Cluster) -> None:
        with pytest.raises(ApiError) as caught:
            await cluster.apply({**config_map(namespace), "noSuchField": 1})
        assert caught.value.status == 500
        assert "noSuchField" in caught.value.message
        with pytest.raises(NotFound):
            await cluster.request("GET", "/api/v1/nothing")
        with pytest.raises(NotFound):
            await cluster.create(config_map("no-such-namespace"))

    ask(control_plane, requests)


def test_a_token_of_nobody(control_plane: ControlPlane) -> None:
    """It is an answer, not an error."""
    result = ask(control_plane, lambda cluster: cluster.token_review("x.y.z", ["someone"]))
    assert not result.authenticated
    assert result.error
    assert not result.claim("anything")


def test_nobody_answers(control_plane: ControlPlane) -> None:
    """Said with the request, whatever the library raises."""

    async def requests(cluster: Cluster) -> None:
        cluster.client.configuration.host = f"https://127.0.0.1:{free_port()}"
        with pytest.raises(Unreachable, match="GET /api/v1/namespaces/x/pods"):
            await cluster.list("Pod", "x")

    ask(control_plane, requests)


def test_without_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """What to do is said."""
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)

    async def connect() -> None:
        await Cluster.connect("/no/such/kubeconfig")

    with pytest.raises(Unreachable, match="KUBECONFIG"):
        asyncio.run(connect())
