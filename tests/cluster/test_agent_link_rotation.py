"""Certificates are renewed and replaced under streams that go on."""

from __future__ import annotations

import asyncio
import ssl
import time

import pytest
from websockets.asyncio.client import ClientConnection

from lmcache_nodeagent.operator_link.messages import Ack, decode_from_operator
from lmcache_operator.certs.material import Lifetimes
from lmcache_operator.certs.trust import SECRET
from tests.cluster.agent_tokens import AgentObjects
from tests.cluster.control_plane import ControlPlane
from tests.cluster.operator_link import Link, greet, running_link, until

DAY = 86_400.0
ANNOUNCED_SECONDS = 1_800.0  # less than certificates are dated back: all are valid at this moment
LIVES = Lifetimes(
    authority_seconds=91 * DAY, server_seconds=90 * DAY, announcement_seconds=ANNOUNCED_SECONDS
)


def shown(stream: ClientConnection) -> bytes:
    """Return the certificate that the server has shown."""
    tls = stream.transport.get_extra_info("ssl_object")
    found: bytes = tls.getpeercert(binary_form=True)
    return found


async def carries(link: Link, stream: ClientConnection) -> bool:
    """Tell whether a stream still carries messages."""
    for session in link.registry.sessions():
        session.send(Ack(boot_id="b1", seq=1))
    return decode_from_operator(await stream.recv()) == Ack(boot_id="b1", seq=1)


def test_an_authority_is_replaced_under_a_stream(
    control_plane: ControlPlane, kind: str, namespace: str
) -> None:
    """Two months in a moment: a new certificate, a new authority announced, then vouching.

    The stream of the first day stays up. Who read the bundle of the day before connects, until the
    announcement is over; who read the announcement connects afterwards.
    """
    assert kind, "our kind is served"
    began = time.time() - 61.5 * DAY
    moment = [began]

    async def pass_time(link: Link, to: float) -> str:
        moment[0] = to
        await link.trust.refresh()
        return link.trust.ca_bundle()

    async def dial(link: Link, token: str, bundle: str) -> bytes:
        async with link.dial(token, bundle=bundle) as stream:
            return shown(stream)

    async def story(objects: AgentObjects) -> None:
        server = objects.server("kv")
        lasting, coming = (objects.agent_token(objects.agent(server)) for _ in range(2))
        async with running_link(
            control_plane.kubeconfig, namespace, lifetimes=LIVES, now=lambda: moment[0]
        ) as link:
            first = link.trust.ca_bundle()
            async with link.dial(lasting, bundle=first) as stream:
                await greet(stream)
                await until(link.registry.sessions, "its session")
                certificates = [shown(stream)]

                both = await pass_time(link, began + 61.5 * DAY)
                assert both.endswith(first)
                assert both != first
                certificates += [await dial(link, coming, first), await dial(link, coming, both)]
                assert await carries(link, stream)

                assert await pass_time(link, moment[0] + ANNOUNCED_SECONDS + 60) == both
                certificates.append(await dial(link, coming, both))
                with pytest.raises(ssl.SSLCertVerificationError):
                    await dial(link, coming, first)
                assert await carries(link, stream)

                newest = await pass_time(link, moment[0] + ANNOUNCED_SECONDS)
                assert both == newest + first
                certificates.append(await dial(link, coming, newest))
                assert await carries(link, stream)
            numbers = [
                sorted(set(certificates), key=certificates.index).index(c) for c in certificates
            ]
            assert numbers == [0, 1, 1, 2, 2]

    with AgentObjects(control_plane, namespace) as objects:
        asyncio.run(story(objects))


def test_the_next_operator_shows_the_same(
    control_plane: ControlPlane, kind: str, namespace: str
) -> None:
    """What one has stored the next one uses; damaged, it is made anew and agents must learn it."""
    assert kind, "our kind is served"
    path = f"/api/v1/namespaces/{namespace}/secrets/{SECRET}"
    bundles = []

    async def note_bundle() -> None:
        async with running_link(control_plane.kubeconfig, namespace) as link:
            bundles.append(link.trust.ca_bundle())
            await link.trust.refresh()
            assert link.trust.ca_bundle() == bundles[-1]

    for _ in range(2):
        asyncio.run(note_bundle())
    assert bundles[0] == bundles[1]
    merge = "application/merge-patch+json"
    damage = {"data": {"ca.key": "bm90IGEga2V5"}}
    assert control_plane.api.request("PATCH", path, damage, content_type=merge).ok
    for _ in range(2):
        asyncio.run(note_bundle())
    assert bundles[2] == bundles[3] != bundles[0]
