"""Who may open a stream: real tokens of real objects, judged by a real API server."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable, Generator
from http import HTTPStatus

import pytest

from lmcache_operator.agents.authenticator import Refusal
from lmcache_operator.agents.registry import ServerRef
from lmcache_operator.api.crd import PLURAL
from tests.cluster.agent_tokens import AgentObjects, AgentPod
from tests.cluster.control_plane import ControlPlane
from tests.cluster.operator_link import Link, answer_to, greet, run_linked, until
from tests.polling import poll_until

OPEN = HTTPStatus.SWITCHING_PROTOCOLS
REFUSED = HTTPStatus.UNAUTHORIZED


@pytest.fixture
def objects(control_plane: ControlPlane, kind: str, namespace: str) -> Generator[AgentObjects]:
    """Return a way to make agents in a namespace of this test's own."""
    assert kind, "our kind is served"
    with AgentObjects(control_plane, namespace) as found:
        yield found


@pytest.fixture
def server(objects: AgentObjects) -> ServerRef:
    """Return a server without agents."""
    return objects.server("kv")


def test_an_agent_is_let_in(control_plane: ControlPlane, objects: AgentObjects) -> None:
    """By the token that a kubelet gives it; server, node and pod are what the API server says."""
    server = objects.server("kv")
    pod = objects.agent(server)

    async def story(link: Link) -> None:
        async with link.dial(objects.agent_token(pod)) as stream:
            await greet(stream, "boot-1")
            await until(lambda: link.session_of(pod.uid), "its session")
            session = link.session_of(pod.uid)
            assert session is not None
            assert (session.server, session.node) == (server, pod.node)
            assert (session.pod_name, session.pod_uid) == (pod.name, pod.uid)
            assert session.boot_id == "boot-1"
            await until(lambda: session.complete, "its full list")
        await until(lambda: not link.registry.sessions(), "its end")
        assert link.listener.told[-1] == ("disconnected", "boot-1")
        assert not link.server.refusals.counts

    run_linked(control_plane, objects.namespace, story)


def _no_token(_objects: AgentObjects, _pod: AgentPod) -> str | None:
    return None


def _other_audience(objects: AgentObjects, pod: AgentPod) -> str:
    return objects.token(pod, audience="somebody-else")


def _for_the_api_server(objects: AgentObjects, pod: AgentPod) -> str:
    return objects.token(pod, audience="")


def _audience_forged(objects: AgentObjects, pod: AgentPod) -> str:
    """Return a token whose claims were edited: its signature is not of these."""
    head, claims, signature = objects.token(pod, audience="somebody-else").split(".")
    said = json.loads(base64.urlsafe_b64decode(claims + "=" * (-len(claims) % 4)))
    said["aud"] = ["lmcache-kube-operator"]
    forged = base64.urlsafe_b64encode(json.dumps(said).encode()).decode().rstrip("=")
    return f"{head}.{forged}.{signature}"


def _other_account(objects: AgentObjects, pod: AgentPod) -> str:
    """Return the token of a pod on that node with the namespace's default account."""
    mine = objects.pod(pod.server, pod.node, account="default")
    return objects.token(mine, account="default")


def _unbound(objects: AgentObjects, _pod: AgentPod) -> str:
    return objects.token(None)


def _not_owned(objects: AgentObjects, pod: AgentPod) -> str:
    """Return the token of a pod that somebody made with the agents' account."""
    return objects.agent_token(objects.pod(pod.server, pod.node))


def _owned_by_another_set(objects: AgentObjects, _pod: AgentPod) -> str:
    """Return the token of another server's agent that runs with this server's account."""
    other = objects.server("other")
    return objects.token(objects.agent(other, account="kv"), account="kv")


def _on_no_node(objects: AgentObjects, pod: AgentPod) -> str:
    """Return the token of an agent that is not scheduled yet."""
    waiting = objects.pod(pod.server, "", owners=[objects.owner(pod.server)])
    return objects.agent_token(waiting)


def _expired(objects: AgentObjects, pod: AgentPod) -> str:
    return objects.token_until(pod, time.time() - 120)  # the API server allows for a minute


def _long_expired(objects: AgentObjects, pod: AgentPod) -> str:
    return objects.token_until(pod, time.time() - 3600)


def _garbage(_objects: AgentObjects, _pod: AgentPod) -> str:
    return "garbage"


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (_no_token, Refusal.NO_TOKEN),
        (_garbage, Refusal.NOT_A_TOKEN),
        (_other_audience, Refusal.OTHER_AUDIENCE),
        (_for_the_api_server, Refusal.OTHER_AUDIENCE),
        (_audience_forged, Refusal.TOKEN_REFUSED),
        (_other_account, Refusal.NO_SERVER),
        (_unbound, Refusal.NOT_BOUND),
        (_not_owned, Refusal.OTHER_POD),
        (_owned_by_another_set, Refusal.OTHER_POD),
        (_on_no_node, Refusal.OTHER_NODE),
        (_expired, Refusal.TOKEN_REFUSED),
        (_long_expired, Refusal.EXPIRED),
    ],
)
def test_who_is_refused(
    control_plane: ControlPlane,
    objects: AgentObjects,
    server: ServerRef,
    make: Callable[[AgentObjects, AgentPod], str | None],
    reason: Refusal,
) -> None:
    """With its reason, counted; nobody is told of a stream. A proper agent is let in beside it."""
    pod = objects.agent(server)
    token, good = make(objects, pod), objects.agent_token(pod)

    async def story(link: Link) -> None:
        assert await answer_to(link, token) == REFUSED
        assert await answer_to(link, token) == REFUSED
        assert link.server.refusals.counts == {reason: 2}
        assert not link.listener.told
        assert await answer_to(link, good) == OPEN

    run_linked(control_plane, objects.namespace, story)


def test_what_is_gone_lets_nobody_in(
    control_plane: ControlPlane, objects: AgentObjects, server: ServerRef
) -> None:
    """A deleted pod, one of its name on another node, a deleted server: each by its own reason."""
    pod, other = objects.agent(server), objects.agent(server)
    token, other_token = objects.agent_token(pod), objects.agent_token(other)

    async def gone(link: Link) -> None:
        assert await answer_to(link, token) == OPEN
        objects.delete("pods", pod.name)
        assert await answer_to(link, token) == REFUSED  # though its token is remembered
        objects.pod(server, other.node, name=pod.name, owners=[objects.owner(server)])
        assert await answer_to(link, token) == REFUSED
        assert link.server.refusals.counts == {Refusal.NO_POD: 2}

    async def server_gone(link: Link) -> None:
        assert await answer_to(link, other_token) == REFUSED
        assert link.server.refusals.counts == {Refusal.NO_SERVER: 1}

    async def invalidated(link: Link) -> None:
        poll_until(lambda: objects.review_fails(token), "it is invalidated")
        assert await answer_to(link, token) == REFUSED
        assert link.server.refusals.counts == {Refusal.TOKEN_REFUSED: 1}

    run_linked(control_plane, objects.namespace, gone)
    objects.delete(PLURAL, server.name)
    run_linked(control_plane, objects.namespace, server_gone)
    run_linked(control_plane, objects.namespace, invalidated)


def test_the_agent_of_one_server_is_not_that_of_another(
    control_plane: ControlPlane, objects: AgentObjects, server: ServerRef
) -> None:
    """Whatever it says, its stream belongs to the server of its token."""
    others = objects.server("other")
    pods = [objects.agent(server), objects.agent(others)]

    async def story(link: Link) -> None:
        tokens = list(map(objects.agent_token, pods))
        async with link.dial(tokens[0]) as first, link.dial(tokens[1]) as second:
            await greet(first)
            await greet(second)
            await until(lambda: len(link.registry.sessions()) == 2, "both sessions")
            for pod, owner in zip(pods, (server, others), strict=True):
                (session,) = link.registry.sessions(owner)
                assert (session.pod_uid, session.node) == (pod.uid, pod.node)

    run_linked(control_plane, objects.namespace, story)


@pytest.mark.parametrize("subprotocol", [None, "v0.link.lmcache-kube.dev", "mqtt"])
def test_another_version_of_the_link(
    control_plane: ControlPlane, objects: AgentObjects, server: ServerRef, subprotocol: str | None
) -> None:
    """It is refused before its token is looked at, and told what is spoken here."""
    token = objects.agent_token(objects.agent(server))

    async def story(link: Link) -> None:
        assert await answer_to(link, token, subprotocol) == HTTPStatus.BAD_REQUEST
        assert link.server.refusals.counts == {"other_subprotocol": 1}

    run_linked(control_plane, objects.namespace, story)


def test_an_operator_that_does_not_act(
    control_plane: ControlPlane, objects: AgentObjects, server: ServerRef
) -> None:
    """It sends agents away to come again, whoever they are, until it acts."""
    token = objects.agent_token(objects.agent(server))

    async def story(link: Link) -> None:
        link.ready = False
        assert await answer_to(link, token) == HTTPStatus.SERVICE_UNAVAILABLE
        assert await answer_to(link, None) == HTTPStatus.SERVICE_UNAVAILABLE
        link.ready = True
        assert await answer_to(link, token) == OPEN

    run_linked(control_plane, objects.namespace, story)


def test_no_word_of_the_api_server(
    control_plane: ControlPlane, objects: AgentObjects, server: ServerRef
) -> None:
    """That is no refusal of the agent: it is to come again."""
    token = objects.agent_token(objects.agent(server))

    async def story(link: Link) -> None:
        async with link.without_an_api_server():
            assert await answer_to(link, token) == HTTPStatus.SERVICE_UNAVAILABLE
        assert link.server.refusals.counts == {"no_word_of_the_api_server": 1}
        assert await answer_to(link, token) == OPEN

    run_linked(control_plane, objects.namespace, story)
