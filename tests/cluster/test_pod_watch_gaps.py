"""What happened while nobody watched is noticed once somebody does again."""

from __future__ import annotations

import time
from collections.abc import Generator
from pathlib import Path

import psutil
import pytest
from aiohttp import web

from lmcache_operator.workers.selection import Selection
from tests.cluster.api import Api
from tests.cluster.control_plane import ControlPlane
from tests.cluster.story_api_proxy import ApiProxy, Manner
from tests.cluster.test_pod_watch import SELECTOR, make
from tests.cluster.watched_pods import WatchedPods
from tests.polling import PATIENCE_SECONDS, poll_until


class StaleProxy(ApiProxy):
    """Says for ever that the version of every watch of pods is gone, once it is told to."""

    manner: Manner | None = None

    def _expiry(self, request: web.BaseRequest) -> Manner | None:
        return self.manner if request.path.endswith("/pods") else None


@pytest.fixture
def proxy(control_plane: ControlPlane, tmp_path: Path) -> Generator[StaleProxy]:
    """Between the watch and the API server."""
    with StaleProxy(control_plane, tmp_path) as proxy:
        yield proxy


@pytest.fixture
def watched(proxy: StaleProxy, namespace: str) -> Generator[WatchedPods]:
    """The workers of this test's namespace, watched through the proxy."""
    with WatchedPods(proxy.kubeconfig, [Selection(namespace, SELECTOR)]) as watched:
        poll_until(watched.is_current, "the first list")
        yield watched


def lists(proxy: ApiProxy, *, since: float = 0.0) -> int:
    """Count the lists of pods that reached the proxy."""
    calls = proxy.calls(since=since)
    return sum(call.path.endswith("/pods") and not call.is_watch for call in calls)


@pytest.mark.parametrize("manner", Manner)
def test_history_is_gone(
    manner: Manner, api: Api, namespace: str, proxy: StaleProxy, watched: WatchedPods
) -> None:
    """One more list; what it lacks is asked for, and a name that is in use again is no excuse."""
    deleted, replaced, kept = (make(api, namespace, name) for name in ("p1", "p2", "p3"))
    known = {deleted.uid, replaced.uid, kept.uid}
    poll_until(lambda: watched.uids() == known)
    listed = lists(proxy)

    proxy.refuse()
    deleted.delete(grace_seconds=0)
    replaced.delete(grace_seconds=0)
    successor = make(api, namespace, "p2")
    proxy.manner = manner
    proxy.serve()
    poll_until(lambda: watched.counts("history_gone"), "that history is gone")
    proxy.manner = None

    poll_until(lambda: watched.uids() == {kept.uid, successor.uid}, "the list")
    (first,) = poll_until(lambda: watched.told_absent(deleted.uid))
    (second,) = poll_until(lambda: watched.told_absent(replaced.uid))
    assert first.live is None
    assert second.live is not None
    assert second.live.uid == successor.uid
    assert len(watched.absences) == 2
    assert lists(proxy) - listed <= 2


@pytest.mark.parametrize("manner", Manner)
def test_history_that_is_always_gone_makes_no_hot_loop(
    manner: Manner, proxy: StaleProxy, watched: WatchedPods
) -> None:
    """Lists come further and further apart: fewer than five in any minute."""
    since = time.monotonic()
    proxy.manner = manner
    proxy.cut()
    poll_until(lambda: watched.counts("history_gone") >= 3, "the third time")
    assert lists(proxy, since=since) <= 3
    assert sum(call.is_watch for call in proxy.calls(since=since)) <= 4


@pytest.mark.parametrize("silent", [False, True], ids=["refused", "held"])
def test_a_cut_shorter_than_history(
    silent: bool,  # noqa: FBT001  # a parameter of the test
    api: Api,
    namespace: str,
    proxy: StaleProxy,
    watched: WatchedPods,
) -> None:
    """The watch goes on where it was, without a list, and tells the deletion."""
    pod = make(api, namespace, "w")
    poll_until(lambda: watched.pod(pod.uid))
    listed = lists(proxy)
    if silent:
        proxy.hold()
    else:
        proxy.refuse()
        poll_until(lambda: not watched.is_current(), "that it is cut")
    pod.delete(grace_seconds=0)
    proxy.serve()
    poll_until(lambda: watched.told_absent(pod.uid), "the deletion")
    poll_until(watched.is_current)
    assert lists(proxy) == listed


def test_a_pod_is_not_given_up_while_nobody_can_say(
    api: Api, namespace: str, proxy: StaleProxy, watched: WatchedPods
) -> None:
    """The list said it is missing, and the question what became of it has no answer yet."""
    pod = make(api, namespace, "w")
    seen = poll_until(lambda: watched.pod(pod.uid))
    proxy.refuse()
    selection = Selection(namespace, SELECTOR)
    watched.do(lambda: watched.watch.check_absence(selection, seen))
    poll_until(lambda: watched.counts("absence_unanswered") >= 2, "that it asks again")
    assert not watched.absences
    proxy.serve()
    (absence,) = poll_until(lambda: watched.told_absent(pod.uid), "the answer")
    assert absence.live is not None
    assert absence.live.uid == pod.uid


@pytest.fixture
def own_plane(control_plane: ControlPlane, tmp_path: Path) -> Generator[ControlPlane]:
    """A control plane of this test's own."""
    with ControlPlane(tmp_path / "plane", control_plane.programs) as plane:
        yield plane


def test_the_api_server_starts_anew(own_plane: ControlPlane) -> None:
    """Watchers are cut, refused, and maybe told that history is gone; nothing is lost by that."""
    namespace = "default"
    pod, kept = (make(own_plane.api, namespace, name) for name in ("w", "kept"))
    with WatchedPods(own_plane.kubeconfig, [Selection(namespace, SELECTOR)]) as watched:
        poll_until(lambda: watched.uids() == {pod.uid, kept.uid})
        server = own_plane._processes["kube-apiserver"]
        program, *flags = psutil.Process(server.pid).cmdline()
        server.kill()
        server.wait(PATIENCE_SECONDS)
        own_plane.start_program("kube-apiserver", program, *flags)
        poll_until(lambda: _answers(own_plane.api), "the API server")
        pod.delete(grace_seconds=0)
        poll_until(lambda: watched.told_absent(pod.uid), "its absence")
        poll_until(watched.is_current)
        assert watched.uids() == {kept.uid}
        assert watched.counts("list") <= 3


def _answers(api: Api) -> bool:
    try:
        return api.request("GET", "/readyz").ok
    except OSError:
        return False
