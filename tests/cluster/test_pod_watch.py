"""Worker pods are followed as the API server has them, through everything that happens to them."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from lmcache_operator.workers.evidence import is_proven_ended
from lmcache_operator.workers.selection import Selection
from tests.cluster.api import Api
from tests.cluster.control_plane import ControlPlane
from tests.cluster.story_pods import ENGINE, StoryPod
from tests.cluster.watched_pods import WatchedPods
from tests.fakes.pods import LOST
from tests.polling import poll_until

LABELS = {"lmcache-kube.dev/server": "kv"}
SELECTOR = "lmcache-kube.dev/server=kv"


def make(api: Api, namespace: str, name: str, *, runs: bool = True, **labels: str) -> StoryPod:
    """Create a worker pod that runs, or one that nothing is reported of."""
    pod = StoryPod(
        api, namespace, name, node="n1", addresses=["10.1.0.1"], labels={**LABELS, **labels}
    )
    if runs:
        pod.run()
    return pod


@pytest.fixture
def watched(control_plane: ControlPlane, namespace: str) -> Generator[WatchedPods]:
    """The workers of this test's namespace, watched."""
    with WatchedPods(control_plane.kubeconfig, [Selection(namespace, SELECTOR)]) as watched:
        poll_until(watched.is_current, "the first list")
        yield watched


def test_pods_come_and_change(api: Api, namespace: str, watched: WatchedPods) -> None:
    """Whatever matters of a status is there moments later; other pods are not seen."""
    StoryPod(api, namespace, "other", node="n1", addresses=["10.1.0.9"], labels={"app": "x"})
    pod = make(api, namespace, "w")
    poll_until(lambda: (p := watched.pod(pod.uid)) and p.addresses, "its address")
    found = watched.pod(pod.uid)
    assert found is not None
    assert (found.node, found.phase, found.addresses) == (
        "n1",
        "Running",
        frozenset({"10.1.0.1"}),
    )
    assert found.containers[ENGINE].running_since is not None
    assert watched.uids() == {pod.uid}


def test_everything_is_listed_in_pages(
    api: Api, namespace: str, control_plane: ControlPlane
) -> None:
    """A list of more pods than a page has is complete."""
    uids = {make(api, namespace, f"w{n}", runs=False).uid for n in range(7)}
    selection = Selection(namespace, SELECTOR)
    with WatchedPods(control_plane.kubeconfig, [selection], page=3) as watched:
        poll_until(watched.is_current, "the list")
        assert watched.uids() == uids


def test_a_forced_deletion(api: Api, namespace: str, watched: WatchedPods) -> None:
    """The pod was seen running, and now there is none of its name."""
    pod = make(api, namespace, "w")
    poll_until(lambda: (p := watched.pod(pod.uid)) and p.phase == "Running")
    pod.delete(grace_seconds=0)
    (absence,) = poll_until(lambda: watched.told_absent(pod.uid), "its absence")
    assert absence.live is None
    assert absence.last_seen.containers[ENGINE].running_since is not None
    assert watched.uids() == set()


def test_a_graceful_deletion(api: Api, namespace: str, watched: WatchedPods) -> None:
    """A mark at once, the end when the kubelet reports it, and only then the pod goes."""
    pod = make(api, namespace, "w")
    pod.delete()
    poll_until(lambda: (p := watched.pod(pod.uid)) and p.deleting, "the mark")
    assert not watched.missing
    pod.end(phase="Failed")
    poll_until(lambda: (p := watched.pod(pod.uid)) and is_proven_ended(p), "the end")
    pod.delete(grace_seconds=0)
    (absence,) = poll_until(lambda: watched.told_absent(pod.uid), "its absence")
    assert is_proven_ended(absence.last_seen)


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
def test_a_finished_pod_goes_at_once(
    phase: str, api: Api, namespace: str, watched: WatchedPods
) -> None:
    """Its deletion has no mark; what is last seen of it is its end."""
    pod = make(api, namespace, "w")
    pod.end(phase=phase)
    pod.delete()
    (absence,) = poll_until(lambda: watched.told_absent(pod.uid), "its absence")
    assert is_proven_ended(absence.last_seen)


def test_a_pod_that_no_node_has_goes_at_once(
    api: Api, namespace: str, watched: WatchedPods
) -> None:
    """It is missing like any other."""
    path = f"/api/v1/namespaces/{namespace}/pods"
    spec = {"containers": [{"name": "engine", "image": "none"}]}
    body = {"metadata": {"name": "w", "labels": LABELS}, "spec": spec}
    uid = api.request("POST", path, body).body["metadata"]["uid"]
    poll_until(lambda: watched.pod(uid))
    assert api.request("DELETE", f"{path}/w").ok
    poll_until(lambda: watched.told_absent(uid), "its absence")


def test_a_label_is_edited(api: Api, namespace: str, watched: WatchedPods) -> None:
    """The pod leaves the selection and runs on; when the label is back, so is the pod."""
    pod = make(api, namespace, "w")
    poll_until(lambda: (p := watched.pod(pod.uid)) and p.phase == "Running")
    pod.relabel(**dict.fromkeys(LABELS))
    (absence,) = poll_until(lambda: watched.told_absent(pod.uid), "that it left")
    assert absence.live is not None
    assert (absence.live.uid, absence.live.is_terminal) == (pod.uid, False)
    pod.relabel(**LABELS)
    poll_until(lambda: watched.pod(pod.uid), "that it is back")


def test_another_pod_of_the_same_name(api: Api, namespace: str, watched: WatchedPods) -> None:
    """The old one is absent whatever the new one does."""
    old = make(api, namespace, "w")
    poll_until(lambda: watched.pod(old.uid))
    old.delete(grace_seconds=0)
    new = make(api, namespace, "w")
    poll_until(lambda: watched.told_absent(old.uid), "the old one's absence")
    poll_until(lambda: (p := watched.pod(new.uid)) and p.phase == "Running")
    assert watched.told_absent(new.uid) == []


def test_statuses_that_prove_nothing(api: Api, namespace: str, watched: WatchedPods) -> None:
    """Evicted without a word on its containers; containers lost; not ready."""
    evicted = StoryPod(api, namespace, "evicted", node="n1", addresses=["10.1.0.2"], labels=LABELS)
    evicted.write(phase="Failed", reason="Evicted")
    lost = make(api, namespace, "lost")
    lost.replace_states({ENGINE: LOST}, phase="Failed")
    unready = make(api, namespace, "unready")
    unready.write(ready=False)
    uids = [evicted.uid, lost.uid]
    poll_until(lambda: all((p := watched.pod(uid)) and p.is_terminal for uid in uids), "their end")
    assert not any(is_proven_ended(p) for uid in uids if (p := watched.pod(uid)))
    assert not watched.missing


def test_a_namespace_is_deleted(api: Api, namespace: str, control_plane: ControlPlane) -> None:
    """Its pods go like others, and the watch of another namespace goes on."""
    doomed = f"{namespace}-doomed"
    assert api.request("POST", "/api/v1/namespaces", {"metadata": {"name": doomed}}).ok
    pod = make(api, doomed, "w")
    selections = [Selection(namespace, SELECTOR), Selection(doomed, SELECTOR)]
    with WatchedPods(control_plane.kubeconfig, selections) as watched:
        poll_until(watched.is_current, "the lists")
        assert api.request("DELETE", f"/api/v1/namespaces/{doomed}").ok
        poll_until(lambda: (p := watched.pod(pod.uid)) and p.deleting, "the mark")
        pod.delete(grace_seconds=0)
        (absence,) = poll_until(lambda: watched.told_absent(pod.uid), "its absence")
        assert absence.live is None
        poll_until(lambda: not api.request("GET", f"/api/v1/namespaces/{doomed}").ok, "its end")
        other = make(api, namespace, "w")
        poll_until(lambda: watched.pod(other.uid), "the other namespace's pod")
        assert watched.is_settled()


def test_selections_are_exchanged_while_it_runs(
    api: Api, namespace: str, watched: WatchedPods
) -> None:
    """A selection that nobody wants is forgotten without a word."""
    pod = make(api, namespace, "w", role="decode")
    poll_until(lambda: watched.pod(pod.uid))
    narrow = Selection(namespace, f"{SELECTOR},role in (decode)")
    watched.do(lambda: watched.watch.select([narrow]))
    poll_until(lambda: watched.do(lambda: watched.watch.is_current(narrow)), "the other one")
    assert watched.do(watched.watch.tracked) == 1
    assert not watched.missing


def test_a_selector_that_the_api_server_refuses(
    namespace: str, control_plane: ControlPlane
) -> None:
    """Nothing is known of it, nothing hangs on it, and it is asked for rarely."""
    selections = [Selection(namespace, "not a selector"), Selection(namespace, SELECTOR)]
    with WatchedPods(control_plane.kubeconfig, selections) as watched:
        poll_until(watched.is_settled, "the refusal")
        assert not watched.is_current()


def may_read_pods(api: Api, namespace: str, user: str) -> None:
    """Give a user the rights on pods that an operator has in one namespace."""
    rbac = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}"
    rule = {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}
    role = {"metadata": {"name": "pods"}, "rules": [rule]}
    assert api.request("POST", f"{rbac}/roles", role).ok
    binding = {
        "metadata": {"name": "pods"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "pods"},
        "subjects": [{"kind": "User", "name": user}],
    }
    assert api.request("POST", f"{rbac}/rolebindings", binding).ok


def test_rights_go_before_the_last_pods_of_a_namespace(
    api: Api, namespace: str, control_plane: ControlPlane
) -> None:
    """A namespace that is deleted takes our rights with it; its pods still count as gone."""
    doomed = f"{namespace}-doomed"
    assert api.request("POST", "/api/v1/namespaces", {"metadata": {"name": doomed}}).ok
    user = f"{namespace}-user"
    for each in (namespace, doomed):
        may_read_pods(api, each, user)
    pod = make(api, doomed, "w")
    selections = [Selection(namespace, SELECTOR), Selection(doomed, SELECTOR)]
    with WatchedPods(control_plane.user_kubeconfig(user, user), selections) as watched:
        poll_until(watched.is_current, "the lists")
        assert api.request("DELETE", f"/api/v1/namespaces/{doomed}").ok
        # Kubernetes before 1.33 deletes what is in a namespace in any order; this one, pods first.
        binding = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{doomed}/rolebindings/pods"
        assert api.request("DELETE", binding).ok
        poll_until(lambda: (p := watched.pod(pod.uid)) and p.deleting, "the mark")
        pod.delete(grace_seconds=0)
        (absence,) = poll_until(lambda: watched.told_absent(pod.uid), "its absence")
        assert absence.live is None
        other = make(api, namespace, "w")
        poll_until(lambda: watched.pod(other.uid), "the other namespace's pod")


def test_a_namespace_that_we_may_not_read(
    api: Api, namespace: str, control_plane: ControlPlane
) -> None:
    """Nothing is known of it, the other one is not held up, and with the right it is read."""
    closed = f"{namespace}-closed"
    assert api.request("POST", "/api/v1/namespaces", {"metadata": {"name": closed}}).ok
    user = f"{namespace}-user"
    may_read_pods(api, namespace, user)
    pod, hidden = make(api, namespace, "w"), make(api, closed, "w")
    selections = [Selection(namespace, SELECTOR), Selection(closed, SELECTOR)]
    with WatchedPods(control_plane.user_kubeconfig(user, user), selections) as watched:
        poll_until(watched.is_settled, "a list and a refusal")
        assert not watched.is_current()
        assert watched.uids() == {pod.uid}
        may_read_pods(api, closed, user)
        poll_until(lambda: watched.uids() == {pod.uid, hidden.uid}, "the hidden one")
    api.request("DELETE", f"/api/v1/namespaces/{closed}")


def test_more_selections_than_a_connection_pool_has(
    api: Api, namespace: str, control_plane: ControlPlane
) -> None:
    """Each watch holds a connection, and lists and questions still get one."""
    selections = [Selection(namespace, f"{SELECTOR},shard={n}") for n in range(110)]
    pod = make(api, namespace, "w", shard="105")
    with WatchedPods(control_plane.kubeconfig, selections) as watched:
        poll_until(watched.is_current, "all lists")
        pod.delete(grace_seconds=0)
        poll_until(lambda: watched.told_absent(pod.uid), "its absence")
