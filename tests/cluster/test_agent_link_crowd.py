"""Two hundred agents at once, as after the start of an operator."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import pytest
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed
from websockets.frames import CloseCode

from lmcache_nodeagent.operator_link.messages import Mapping, decode_from_operator
from tests.cluster.agent_tokens import AgentObjects
from tests.cluster.control_plane import ControlPlane
from tests.cluster.operator_link import Link, greet, running_link, until

AGENTS = 200


def test_two_hundred_agents_at_once(
    control_plane: ControlPlane,
    kind: str,
    namespace: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """All are looked at and let in, each is told its own, and all are told of a stop."""
    assert kind, "our kind is served"

    async def join(link: Link, token: str, boot_id: str) -> ClientConnection:
        stream = await link.dial(token)
        await greet(stream, boot_id)
        return stream

    async def story(tokens: Sequence[str]) -> None:
        async with running_link(control_plane.kubeconfig, namespace) as link:
            began = time.monotonic()
            streams = await asyncio.gather(
                *(join(link, token, f"b{each}") for each, token in enumerate(tokens))
            )
            await until(lambda: len(link.registry.sessions()) == AGENTS, "all sessions")
            joined_seconds = time.monotonic() - began
            for session in link.registry.sessions():
                number = int(session.boot_id[1:])
                session.send(Mapping(instance_id=number, registration=1))
            for number, stream in enumerate(streams):
                told = decode_from_operator(await stream.recv())
                assert told == Mapping(instance_id=number, registration=1)
            assert not link.server.refusals.counts
            ends = [asyncio.create_task(_end(stream)) for stream in streams]
            began = time.monotonic()
        stopped_seconds = time.monotonic() - began
        assert await asyncio.gather(*ends) == [CloseCode.GOING_AWAY] * AGENTS
        with capsys.disabled():  # figures, not asserted
            print(f"\n{AGENTS} agents joined in {joined_seconds:.2f} s,", end=" ")  # noqa: T201
            print(f"were told of a stop in {stopped_seconds:.2f} s")  # noqa: T201

    with AgentObjects(control_plane, namespace) as objects:
        server = objects.server("kv")
        pods = [objects.agent(server) for _ in range(AGENTS)]
        asyncio.run(story(list(map(objects.agent_token, pods))))


async def _end(stream: ClientConnection) -> int | None:
    try:
        await stream.recv()
    except ConnectionClosed:
        return stream.close_code
    raise AssertionError("a message that nobody has sent")
