"""What streams of agents survive, and what ends one of them and no other."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Generator
from contextlib import suppress
from http import HTTPStatus

import pytest
from structlog.testing import capture_logs
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed
from websockets.frames import CloseCode

from lmcache_nodeagent.operator_link.messages import (
    MAX_FRAME_BYTES,
    Ack,
    Hello,
    Instances,
    Mapping,
    PodRun,
    decode_from_operator,
    encode,
)
from lmcache_operator.agents.authenticator import Overloaded
from lmcache_operator.agents.registry import AgentSession, StreamEnd
from lmcache_operator.agents.server import LinkSettings
from tests.cluster.agent_tokens import AgentObjects, AgentPod
from tests.cluster.control_plane import ControlPlane
from tests.cluster.operator_link import (
    Link,
    SilentAgent,
    answer_to,
    greet,
    run_linked,
    running_link,
    say,
    until,
)
from tests.polling import PATIENCE_SECONDS

HELLO = encode(Hello(boot_id="b1", release="test"))
PATIENT = 3_600.0


def settings(**seconds: float) -> LinkSettings:
    """Listen on a free port; nothing ends a stream but what a test is about."""
    patient = {"ping_interval_seconds": PATIENT, "send_seconds": PATIENT, "hello_seconds": PATIENT}
    return LinkSettings("127.0.0.1", 0, **{**patient, **seconds})


@pytest.fixture
def objects(control_plane: ControlPlane, kind: str, namespace: str) -> Generator[AgentObjects]:
    """Return a way to make agents in a namespace of this test's own."""
    assert kind, "our kind is served"
    with AgentObjects(control_plane, namespace) as found:
        yield found


@pytest.fixture
def pods(objects: AgentObjects) -> list[AgentPod]:
    """Return two agents of one server."""
    server = objects.server("kv")
    return [objects.agent(server), objects.agent(server)]


async def session_of(link: Link, pod: AgentPod) -> AgentSession:
    """Wait for the session of an agent."""
    await until(lambda: link.session_of(pod.uid), "a session")
    session = link.session_of(pod.uid)
    assert session is not None
    return session


async def closed(stream: ClientConnection) -> tuple[int | None, str | None]:
    """Read until the stream is closed; return code and reason."""
    with suppress(ConnectionClosed):
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                await stream.recv()
    return stream.close_code, stream.close_reason


async def is_served(link: Link, stream: ClientConnection, pod: AgentPod) -> bool:
    """Tell whether an agent's stream carries messages both ways."""
    session = await session_of(link, pod)
    told = len(link.listener.told)
    await say(stream, Instances(complete=True))
    await until(lambda: ("instances", session.boot_id) in link.listener.told[told:], "its word")
    session.send(Ack(boot_id=session.boot_id, seq=1))
    return decode_from_operator(await stream.recv()) == Ack(boot_id=session.boot_id, seq=1)


def test_messages_arrive_whole_and_in_order(
    control_plane: ControlPlane, objects: AgentObjects, pods: list[AgentPod]
) -> None:
    """A thousand at once, sent without waiting."""
    run = PodRun(namespace="n", name="w", uid="u", container="c", run="containerd://1")
    sent = [Mapping(instance_id=each, registration=1, pod=run) for each in range(1000)]

    async def story(link: Link) -> None:
        async with link.dial(objects.agent_token(pods[0])) as stream:
            await greet(stream)
            session = await session_of(link, pods[0])
            for message in sent:
                session.send(message)
            assert [decode_from_operator(await stream.recv()) for _ in sent] == sent

    run_linked(control_plane, objects.namespace, story, settings())


def test_a_newer_stream_replaces_the_older(
    control_plane: ControlPlane, objects: AgentObjects, pods: list[AgentPod]
) -> None:
    """The operator may not have noticed yet that the older one is cut."""

    async def story(link: Link) -> None:
        token = objects.agent_token(pods[0])
        async with link.dial(token) as older, link.dial(token) as newer:
            await greet(older, "old")
            await session_of(link, pods[0])
            await greet(newer, "new")
            assert await closed(older) == (
                CloseCode.POLICY_VIOLATION,
                "the same pod has opened a newer stream",
            )
            assert (await session_of(link, pods[0])).boot_id == "new"
            assert await is_served(link, newer, pods[0])
            ends = [told for told in link.listener.told if told[0].endswith("connected")]
            assert ends == [("connected", "old"), ("disconnected", "old"), ("connected", "new")]
        assert link.server.ended[StreamEnd.REPLACED] == 1

    run_linked(control_plane, objects.namespace, story, settings())


GARBAGE: dict[str, list[str | bytes]] = {
    "nothing": [HELLO, ""],
    "no JSON": [HELLO, "{"],
    "no message": [HELLO, "[]"],
    "unknown message": [HELLO, '{"type":"shutdown"}'],
    "wrong type": [HELLO, '{"type":"instances","changed":7}'],
    "the operator's own": [HELLO, encode(Ack(boot_id="b1", seq=1))],
    "binary": [HELLO, b"\x00\x01"],
    "a second hello": [HELLO, HELLO],
    "no hello": [encode(Instances(complete=True))],
    "too large": [HELLO, "x" * (MAX_FRAME_BYTES + 1)],
    "deep": [HELLO, "[" * 100_000],
}


def test_garbage_ends_its_own_stream(
    control_plane: ControlPlane, objects: AgentObjects, pods: list[AgentPod]
) -> None:
    """With a reason that the agent can log; the other agent's stream goes on, and so does it."""
    good, bad = pods

    async def story(link: Link) -> None:
        async with link.dial(objects.agent_token(good)) as beside:
            await greet(beside, "beside")
            for name, frames in GARBAGE.items():
                async with link.dial(objects.agent_token(bad)) as stream:
                    for frame in frames:
                        await stream.send(frame)
                    code, reason = await closed(stream)
                assert code in {CloseCode.POLICY_VIOLATION, CloseCode.MESSAGE_TOO_BIG}, name
                assert reason, name
                await until(lambda: link.session_of(bad.uid) is None, "its end")
                assert await is_served(link, beside, good)
            assert link.server.ended == {StreamEnd.GARBAGE: len(GARBAGE)}

    run_linked(control_plane, objects.namespace, story, settings())


def test_no_utf_8(control_plane: ControlPlane, objects: AgentObjects, pods: list[AgentPod]) -> None:
    """A text frame that is none."""

    async def story(link: Link) -> None:
        async with link.dial(objects.agent_token(pods[0])) as stream:
            await greet(stream)
            await session_of(link, pods[0])
            await stream.send(b"\xff\xfe", text=True)
            assert (await closed(stream))[0] == CloseCode.INVALID_DATA
        await until(lambda: link.server.ended == {StreamEnd.GARBAGE: 1}, "its cause")

    run_linked(control_plane, objects.namespace, story, settings())


@pytest.mark.parametrize("tls", [True, False])
@pytest.mark.parametrize(
    "junk",
    [b"", b"\x00" * 4096, b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", b"GET /\r\n\r\n", b"A" * 100_000],
    ids=["nothing", "zeros", "no upgrade", "half HTTP", "long"],
)
def test_whoever_else_connects(
    control_plane: ControlPlane,
    objects: AgentObjects,
    pods: list[AgentPod],
    junk: bytes,
    *,
    tls: bool,
) -> None:
    """What is no agent is dropped, writes nothing to the log, and disturbs nobody."""

    async def story(link: Link) -> None:
        async with link.dial(objects.agent_token(pods[0])) as stream:
            await greet(stream)
            await session_of(link, pods[0])
            with capture_logs() as logs:
                reader, writer = await asyncio.open_connection(
                    "localhost", link.server.port, ssl=link.client_tls() if tls else None
                )
                writer.write(junk)
                with suppress(ConnectionError, ssl.SSLError):
                    await writer.drain()
                    await reader.read()
                writer.transport.abort()
            assert [each for each in logs if each["log_level"] in {"error", "critical"}] == []
            assert await is_served(link, stream, pods[0])

    run_linked(control_plane, objects.namespace, story, settings(open_seconds=0.5))


def test_an_agent_that_stands_still_is_let_go(
    control_plane: ControlPlane, objects: AgentObjects, pods: list[AgentPod]
) -> None:
    """It answers no ping; the one beside it does."""

    async def story(link: Link) -> None:
        async with link.dial(objects.agent_token(pods[1])) as beside:
            await greet(beside, "beside")
            silent = await SilentAgent.connect(link, objects.agent_token(pods[0]))
            await session_of(link, pods[0])
            await until(lambda: link.session_of(pods[0].uid) is None, "it is let go")
            assert ("disconnected", "silent") in link.listener.told
            assert await is_served(link, beside, pods[1])
            await until(lambda: link.server.ended == {StreamEnd.AGENT_SILENT: 1}, "its cause")
            silent.close()

    run_linked(
        control_plane,
        objects.namespace,
        story,
        settings(ping_interval_seconds=0.3, ping_timeout_seconds=2, close_seconds=0.3),
    )


def test_an_agent_that_says_nothing_is_let_go(
    control_plane: ControlPlane, objects: AgentObjects, pods: list[AgentPod]
) -> None:
    """It may not hold a stream without having said hello."""

    async def story(link: Link) -> None:
        async with link.dial(objects.agent_token(pods[0])) as stream:
            assert (await closed(stream))[1] == "no hello in 0.2 s"
        assert link.listener.told == []
        assert link.server.ended == {StreamEnd.AGENT_SILENT: 1}

    run_linked(control_plane, objects.namespace, story, settings(hello_seconds=0.2))


def test_an_agent_that_does_not_read_is_let_go(
    control_plane: ControlPlane, objects: AgentObjects, pods: list[AgentPod]
) -> None:
    """What it does not take piles up for a while; nobody waits for it, and it is cut off."""
    word = Mapping(
        instance_id=1, registration=1, pod=PodRun(namespace="n", name="w" * 2000, uid="u")
    )

    async def story(link: Link) -> None:
        async with link.dial(objects.agent_token(pods[1])) as beside:
            await greet(beside, "beside")
            silent = await SilentAgent.connect(link, objects.agent_token(pods[0]))
            session = await session_of(link, pods[0])
            while session.end_cause is None:
                session.send(word)
                await asyncio.sleep(0)
            assert session.end_cause == StreamEnd.TOO_SLOW
            await until(lambda: link.session_of(pods[0].uid) is None, "it is let go")
            assert await is_served(link, beside, pods[1])
            await until(lambda: link.server.ended == {StreamEnd.TOO_SLOW: 1}, "its cause")
            silent.close()

    run_linked(
        control_plane, objects.namespace, story, settings(send_seconds=0.5, close_seconds=0.3)
    )


def test_a_stream_lasts_as_long_as_its_token(
    control_plane: ControlPlane, objects: AgentObjects, pods: list[AgentPod]
) -> None:
    """Then the agent is told to come again; it is looked at anew, and a newer token lets it in."""

    async def story(link: Link) -> None:
        token = objects.token_until(pods[0], time.time() + 2)
        async with link.dial(token) as stream:
            await greet(stream)
            assert await is_served(link, stream, pods[0])
            assert await closed(stream) == (
                CloseCode.SERVICE_RESTART,
                "connect again with a newer token",
            )
        assert link.server.ended == {StreamEnd.TOKEN_EXPIRED: 1}
        async with link.dial(objects.agent_token(pods[0])) as stream:
            await greet(stream)
            assert await is_served(link, stream, pods[0])

    run_linked(control_plane, objects.namespace, story, settings(shortest_stay_seconds=0.1))


def test_a_stop_says_goodbye(
    control_plane: ControlPlane, objects: AgentObjects, pods: list[AgentPod]
) -> None:
    """With 1001, also before hello; agents that do not listen hold up nobody."""
    third = objects.agent(pods[0].server)

    async def open_streams(link: Link) -> list[ClientConnection]:
        stream = await link.dial(objects.agent_token(pods[0]))
        await greet(stream)
        return [stream, await link.dial(objects.agent_token(pods[1]))]

    async def stuff(link: Link) -> SilentAgent:
        silent = await SilentAgent.connect(link, objects.agent_token(third))
        session = await session_of(link, third)
        while session._unsent.qsize() < 100:  # the connection takes no more
            session.send(Mapping(instance_id=1, registration=1))
            await asyncio.sleep(0)
        return silent

    async def story() -> None:
        async with running_link(control_plane.kubeconfig, objects.namespace, settings()) as link:
            streams, silent = await open_streams(link), await stuff(link)
            await session_of(link, pods[0])
            ends = [asyncio.create_task(closed(each)) for each in streams]
            sessions = link.registry.sessions()
        assert [code for code, _ in await asyncio.gather(*ends)] == [CloseCode.GOING_AWAY] * 2
        assert {each.end_cause for each in sessions} == {StreamEnd.STOPPED}
        assert link.registry.sessions() == ()
        silent.close()

    asyncio.run(story())


@pytest.mark.parametrize(
    ("failure", "status", "reason"),
    [
        (Overloaded("2000 agents wait"), HTTPStatus.SERVICE_UNAVAILABLE, "overloaded"),
        (KeyError("uid"), HTTPStatus.INTERNAL_SERVER_ERROR, "failed"),
    ],
)
def test_an_agent_that_cannot_be_judged(
    control_plane: ControlPlane,
    objects: AgentObjects,
    pods: list[AgentPod],
    monkeypatch: pytest.MonkeyPatch,
    failure: Exception,
    status: HTTPStatus,
    reason: str,
) -> None:
    """It is to come again; a fault of ours is in the log, and later agents are judged."""

    async def fails(_authorization: str) -> None:
        raise failure

    async def story(link: Link) -> None:
        token = objects.agent_token(pods[0])
        with monkeypatch.context() as patched, capture_logs() as logs:
            patched.setattr(link.server._authenticator, "authenticate", fails)
            assert await answer_to(link, token) == status
        assert link.server.refusals.counts == {reason: 1}
        assert ("agent_not_judged" in [each["event"] for each in logs]) == (reason == "failed")
        assert await answer_to(link, token) == HTTPStatus.SWITCHING_PROTOCOLS

    run_linked(control_plane, objects.namespace, story, settings())


def test_an_agent_that_leaves_before_hello(
    control_plane: ControlPlane, objects: AgentObjects, pods: list[AgentPod]
) -> None:
    """With a goodbye or without one: nobody is told of it."""

    async def story(link: Link) -> None:
        token = objects.agent_token(pods[0])
        async with link.dial(token):
            pass
        (await SilentAgent.connect(link, token, hello=False)).close()
        await until(lambda: link.server.ended == {StreamEnd.AGENT_LEFT: 2}, "both have left")
        assert link.listener.told == []

    run_linked(control_plane, objects.namespace, story, settings())


def test_a_fault_of_the_operator_ends_one_stream(
    control_plane: ControlPlane,
    objects: AgentObjects,
    pods: list[AgentPod],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether a listener fails on what was said or the server itself: it is logged, and retried."""

    def fails(*_arguments: object) -> None:
        raise KeyError("by order")

    async def story(link: Link) -> None:
        token = objects.agent_token(pods[0])
        async with link.dial(objects.agent_token(pods[1])) as beside:
            await greet(beside, "beside")
            for place, name in ((link.listener, "instances_changed"), (link.registry, "receive")):
                with monkeypatch.context() as patched, capture_logs() as logs:
                    async with link.dial(token) as stream:
                        await say(stream, Hello(boot_id="b1", release="test"))
                        await session_of(link, pods[0])
                        patched.setattr(place, name, fails)
                        # Twice: for the first one the method is looked up already.
                        await say(stream, *[Instances(complete=True)] * 2)
                        assert (await closed(stream))[0] == CloseCode.INTERNAL_ERROR
                assert [each for each in logs if each["log_level"] == "error"]
                assert await is_served(link, beside, pods[1])
        assert link.server.ended[StreamEnd.FAILED] == 2

    run_linked(control_plane, objects.namespace, story, settings())
