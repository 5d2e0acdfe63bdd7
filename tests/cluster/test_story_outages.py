"""What happens while somebody is away is made good once everybody is back."""

from __future__ import annotations

import time
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.cluster.control_plane import ControlPlane
from tests.cluster.story import PROOF_ONLY, SMALLEST, Story
from tests.cluster.story_api_proxy import ApiProxy, Manner
from tests.cluster.story_events import on
from tests.polling import poll_until


@pytest.fixture
def proxy(control_plane: ControlPlane, tmp_path: Path) -> Generator[ApiProxy]:
    """What stands between the operator and the API server."""
    with ApiProxy(control_plane, tmp_path) as proxy:
        yield proxy


@pytest.fixture
def proxied(
    control_plane: ControlPlane, kind: str, namespace: str, tmp_path: Path, proxy: ApiProxy
) -> Generator[Story]:
    """A story whose operator goes through the proxy; everybody else does not."""
    assert kind
    with Story(control_plane, namespace, tmp_path, kubeconfig=proxy.kubeconfig) as story:
        yield story


@pytest.mark.parametrize("manner", [None, *Manner], ids=["cut", "410 status", "410 event"])
def test_a_gap_in_the_watch_is_closed(
    manner: Manner | None, proxied: Story, proxy: ApiProxy
) -> None:
    """A pod that ended, one deleted, one replaced under its name, and an edit; case 43."""
    story = proxied.begin(PROOF_ONLY)
    ended = story.engine("ended", 1)
    deleted = story.engine("deleted", 2)
    replaced = story.engine("replaced", 3)
    story.engine("lives", 4)

    proxy.refuse_watches()
    for number in (1, 2, 3):
        story.workers[number].kill()
    ended.end_container()
    for pod in (deleted, replaced):
        pod.delete(grace_seconds=0)
    heir = story.pod("replaced")
    story.worker(heir, 5).wait_registered()
    story.edit(reaping={**PROOF_ONLY, "reapTimeoutSeconds": 700})
    if manner is not None:
        proxy.expire("/pods", manner)
    proxy.serve()
    back = time.monotonic()

    story.wait_released(1)
    story.wait_annotated(heir, 5)
    poll_until(lambda: story.is_hinted(2, 3), "both are hinted")
    assert manner is None or proxy.has_expired("/pods")
    assert not story.is_hinted(4)
    assert not story.is_hinted(5)
    poll_until(lambda: settings_follow(story, 700), "the edit is applied")
    story.assert_live(4, 5)
    lists = [
        call
        for call in proxy.calls(since=back)
        if call.path.endswith("/pods") and call.method == "GET" and not call.is_watch
    ]
    assert len(lists) <= 5  # no hot loop


def settings_follow(story: Story, seconds: int) -> bool:
    """Tell whether the agent uses this timeout, its mounts brought up to date."""
    story.node.mount()
    liveness = story.agent.status()["worker_liveness"]
    return bool(liveness["reap_timeout_seconds"] == seconds)


@pytest.mark.slow
def test_watches_that_fell_silent_without_a_word_are_given_up(
    proxied: Story, proxy: ApiProxy
) -> None:
    """As behind a firewall that forgot the connection; nobody is told of anything for 90 s."""
    story = proxied.begin(PROOF_ONLY)
    pod = story.engine("w", 1)
    story.engine("lives", 2)
    proxy.freeze_watches()
    story.workers[1].kill()
    pod.end_container()
    story.wait_released(1)
    story.assert_live(2)
    story.wait_annotated(pod)


@pytest.mark.slow
def test_without_an_api_server_agents_go_on_alone(proxied: Story, proxy: ApiProxy) -> None:
    """The operator ends, is started again, and catches up without a burst; case 56, third run."""
    story = proxied.begin(SMALLEST)
    for number in range(1, 6):
        story.engine(f"w{number}", number)
    proxy.refuse()
    assert story.operator.wait_ended() == 1  # its Lease runs out
    assert story.operator.records("operator_failed")
    story.workers[1].kill()
    story.wait_released(1)  # on the agent's own evidence
    story.operator.launch()  # as Kubernetes does; it waits for the API server
    story.assert_live_for(3, 2, 3, 4, 5)
    proxy.serve()
    story.operator.wait_for_record("operator_acts")
    story.wait_linked()
    assert len(on(story.wait_events("WorkerReaped", 2), "Pod", "w1")) == 1
    story.assert_live_for(6, 2, 3, 4, 5)
    assert story.events("ReapCancelled") == []


@pytest.mark.parametrize("ending", ["stopped", "killed"])
def test_what_ended_while_the_operator_was_down_is_proof_once_it_is_back(
    ending: str, story: Story
) -> None:
    """Terminated, restarted and finished pods; a deleted one is a hint; case 49."""
    story.begin(PROOF_ONLY)
    terminated, restarted, finished, deleted, leaving, replaced, alive = (
        story.engine(name, number) for number, name in enumerate("abcdefg", 1)
    )
    if ending == "stopped":
        story.operator.stop()
    else:
        story.operator.kill()
    for number in (1, 2, 3, 4, 6):
        story.workers[number].kill()
    terminated.end_container()
    restarted.restart_container()
    finished.end()
    deleted.delete(grace_seconds=0)
    leaving.delete()
    replaced.delete(grace_seconds=0)
    heir = story.pod("f")
    story.worker(heir, 8).wait_registered()
    story.worker(restarted, 9).wait_registered()
    late = story.pod("late")
    story.worker(late, 10).wait_registered()

    story.operator.start()

    story.wait_released(1, 2, 3)
    poll_until(lambda: story.is_hinted(4, 6), "those are hinted")
    story.assert_live(5, 7, 8, 9, 10)
    for pod, number in ((heir, 8), (restarted, 9), (late, 10), (leaving, 5), (alive, 7)):
        story.wait_annotated(pod, number)
        assert not story.is_hinted(number)
    assert len(story.wait_events("WorkerReaped", 6)) == 6


def test_events_are_not_doubled_by_restarts(story: Story) -> None:
    """A reap while nobody listens is told later, and only once, however often they meet."""
    story.begin(SMALLEST)
    pod = story.engine("w", 1)
    story.engine("lives", 2)
    story.operator.stop()
    story.workers[1].kill()
    pod.end_container()
    story.wait_released(1)
    for restart in (story.operator.kill, story.operator.stop, lambda: None):
        story.operator.start()
        story.wait_linked()
        story.wait_events("WorkerReaped", 2)
        restart()
    assert len(story.events("WorkerReaped")) == 2
    assert {event.count for event in story.events("WorkerReaped")} == {1}
    story.wait_status(lambda status: status["reaping"].get("total") == 1, "one reap")


def test_a_cancelled_hint_is_not_told_again_after_a_restart(story: Story) -> None:
    """The operator sees the same absence anew; to the agent it is a repeat."""
    story.begin(SMALLEST)
    owner = story.add_owner("engine")
    story.engine("w", 1, owner=owner).delete(grace_seconds=0)
    story.wait_events("ReapCancelled", 2)
    for _ in range(2):
        story.operator.stop()
        story.operator.start()
        story.wait_linked()
    story.assert_live_for(4, 1)
    assert len(story.events("ReapCancelled")) == 2


def test_an_agent_that_was_down_lists_nobody_and_nobody_is_hurt(story: Story) -> None:
    """Its workers register again; what ended meanwhile was forgotten with the process."""
    story.begin(PROOF_ONLY)
    dying = story.engine("dying", 1)
    lives = story.engine("lives", 2)
    story.node.kill_agent()
    story.workers[1].kill()
    dying.end_container()
    story.node.start_agent()
    story.wait_registered(2)
    story.wait_annotated(lives, 2)
    story.wait_annotated(dying)
    story.wait_linked()
    story.assert_live(2)
    assert story.agent.reaps() == []
    story.workers[2].kill()
    lives.end_container()
    story.wait_released(2)


def test_a_second_server_made_while_the_operator_was_down_gets_its_agents(story: Story) -> None:
    """And workers are told to their own server's agents only."""
    story.begin(PROOF_ONLY)
    story.engine("w", 1)
    story.operator.stop()
    story.apply_named("second", reaping=PROOF_ONLY, nodeSelector={"none": "such"})
    story.operator.start()
    path = f"/apis/apps/v1/namespaces/{story.namespace}/daemonsets"

    def names() -> set[str]:
        return {each["metadata"]["name"] for each in story.api.request("GET", path).body["items"]}

    poll_until(lambda: names() == {"kv", "second"}, "a DaemonSet of its own")
    story.wait_linked()
    story.assert_live(1)
