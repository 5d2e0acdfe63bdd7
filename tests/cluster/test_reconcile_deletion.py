"""What goes with a server, also while no operator runs, and what stays."""

from __future__ import annotations

import uuid
from collections.abc import Generator

import pytest

from tests.cluster.api import Api
from tests.cluster.control_plane import ControlPlane
from tests.cluster.operator_process import OperatorProcess
from tests.cluster.reconcile_world import World

OWNED = (
    ("ServiceAccount", "kv"),
    ("ConfigMap", "kv-reaping"),
    ("ConfigMap", "kv-link"),
    ("ConfigMap", "kv-connection"),
    ("Service", "kv"),
    ("DaemonSet", "kv"),
)
GONE_SECONDS = 90.0  # the garbage collector takes note of new kinds every 30 s


@pytest.fixture
def elsewhere(api: Api) -> Generator[str]:
    """Another namespace, for workers."""
    name = f"workers-{uuid.uuid4().hex[:6]}"
    assert api.request("POST", "/api/v1/namespaces", {"metadata": {"name": name}}).ok
    yield name
    api.request("DELETE", f"/api/v1/namespaces/{name}")


@pytest.fixture
def operator(
    control_plane: ControlPlane, world: World, elsewhere: str
) -> Generator[OperatorProcess]:
    """An operator that serves both namespaces."""
    flag = f"--namespace={elsewhere}"
    with OperatorProcess(control_plane.kubeconfig, world.namespace, flag) as process:
        yield process


def test_everything_goes_while_the_operator_is_stopped(
    operator: OperatorProcess, world: World
) -> None:
    """Owner references suffice: no finalizer waits for anybody."""
    world.add_node()
    world.apply()
    world.wait_pods(1)
    for owned in OWNED:
        world.wait(*owned)
    assert operator.stop() == 0
    world.delete_server()
    for owned in OWNED:
        world.wait_gone(*owned)
    assert world.server().get("code") == 404


def test_another_namespace_is_tidied_up(
    operator: OperatorProcess, world: World, elsewhere: str
) -> None:
    """Where owner references do not reach: at once, or at the next start of an operator."""
    world.apply(workers={"namespaces": [elsewhere]})
    world.wait("ConfigMap", "kv-connection", namespace=elsewhere)
    assert world.get("ConfigMap", "kv-connection") is None
    world.delete_server()
    world.wait_gone("ConfigMap", "kv-connection", namespace=elsewhere)

    world.apply(workers={"namespaces": [elsewhere]})
    world.wait("ConfigMap", "kv-connection", namespace=elsewhere)
    operator.kill()
    world.delete_server()
    operator.start()
    world.wait_gone("ConfigMap", "kv-connection", namespace=elsewhere)


@pytest.mark.usefixtures("operator")
def test_workers_that_move_take_their_connection_along(world: World, elsewhere: str) -> None:
    """The ConfigMap of a namespace that leaves the spec goes; one that is edited comes back."""
    both = [world.namespace, elsewhere]
    world.apply(workers={"namespaces": both})
    world.wait("ConfigMap", "kv-connection")
    before = world.wait("ConfigMap", "kv-connection", namespace=elsewhere)
    world.delete("ConfigMap", "kv-connection", elsewhere)
    world.wait(
        "ConfigMap",
        "kv-connection",
        lambda obj: obj["metadata"]["uid"] != before["metadata"]["uid"],
        namespace=elsewhere,
    )
    world.patch_server({"spec": {"workers": {"namespaces": [world.namespace]}}})
    world.wait_gone("ConfigMap", "kv-connection", namespace=elsewhere)
    world.wait("ConfigMap", "kv-connection")


@pytest.mark.usefixtures("operator")
def test_a_namespace_that_is_not_served(world: World) -> None:
    """Workers there would be out of the operator's sight: a condition says what to do."""
    world.apply(workers={"namespaces": ["default"]})
    condition = world.wait_condition("Ready", "False", "InvalidSpec")
    assert "--namespace=default" in condition["message"]


@pytest.mark.usefixtures("operator")
def test_servers_of_one_name_in_two_namespaces(
    api: Api, kind: str, world: World, elsewhere: str
) -> None:
    """Neither touches the other's; the end of one is not the end of the other."""
    other = World(api, kind, elsewhere)
    world.apply(server={"port": 6001})
    other.apply(server={"port": 6002})
    world.wait("Service", "kv", lambda obj: obj["spec"]["ports"][0]["port"] == 6001)
    other.wait("Service", "kv", lambda obj: obj["spec"]["ports"][0]["port"] == 6002)
    uids = {each: other.wait(*each)["metadata"]["uid"] for each in OWNED}
    world.delete_server()
    for owned in OWNED:
        world.wait_gone(*owned)
    for owned, uid in uids.items():
        assert other.wait(*owned)["metadata"]["uid"] == uid


@pytest.mark.usefixtures("operator")
def test_a_server_that_is_made_again_gets_objects_of_its_own(world: World) -> None:
    """Those of the earlier one go with it, although they have the same names."""
    world.apply()
    before = {owned: world.wait(*owned)["metadata"]["uid"] for owned in OWNED}
    world.delete_server()
    uid = world.apply()["metadata"]["uid"]
    for owned in OWNED:
        world.wait(
            *owned,
            lambda obj: [o["uid"] for o in obj["metadata"]["ownerReferences"]] == [uid],
        )
    assert before
