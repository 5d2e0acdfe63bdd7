"""The message port meets scanners, probes and half-built peers: nobody else notices."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from datetime import datetime
from itertools import pairwise

import pytest

from tests.fakes.agent_process import FAST_WINDOWS, AgentProcess
from tests.fakes.raw_client import (
    GREETING,
    GREETING_SPLIT,
    OLDEST_GREETING,
    Footprint,
    RawConnection,
    RawDealer,
    SteadyPinger,
    counted,
    frame,
    frame_header,
)
from tests.polling import poll_until

HANDSHAKE_SECONDS = 10.0
LOG_PERIOD_SECONDS = 60.0
MIB = 1 << 20

STRAY_BYTES = {
    "nothing": b"",
    "short HTTP request": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "HTTP request": b"GET /metrics HTTP/1.1\r\nHost: agent:5555\r\n"
    b"User-Agent: a-client/1.1\r\nAccept: */*\r\nAccept-Encoding: gzip\r\n\r\n",
    "HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0",
    "TLS hello": bytes.fromhex("16030100a5010000a10303") + bytes(range(160)),
    "SSH banner": b"SSH-2.0-OpenSSH_9.9\r\n",
    "zeros": bytes(1000),
    "ones": b"\xff" * 1000,
    "random bytes": os.urandom(MIB),
    "half a greeting": GREETING[:GREETING_SPLIT],
    "greeting with another mechanism": GREETING.replace(b"NULL\0", b"PLAIN"),
    "greeting and random bytes": GREETING + os.urandom(4096),
    "greeting and a frame of 2^62 bytes": GREETING + frame_header(1 << 62),
    "oldest framing, short frames": OLDEST_GREETING + b"\x02\x00\x16" * 20 + b"\x01\x00" * 20,
    "oldest framing, endless frame": OLDEST_GREETING + b"\xff" + b"\xff" * 8 + b"\x00",
}


@pytest.fixture(scope="module")
def agent() -> Iterator[AgentProcess]:
    """Run one agent for the whole file: what one fault leaves must not help the next."""
    with AgentProcess(*FAST_WINDOWS) as process:
        process.status()
        yield process


def _malformed(agent: AgentProcess) -> float:
    return counted(agent.http_port, "malformed_messages_total")


@pytest.mark.parametrize("data", STRAY_BYTES.values(), ids=STRAY_BYTES)
def test_stray_bytes_are_counted_and_disturb_nobody(agent: AgentProcess, data: bytes) -> None:
    """Whatever speaks on the port: counted once the peer has left, nothing of it stays."""
    with SteadyPinger(agent.url):
        footprint, before = Footprint(agent.pid), _malformed(agent)
        with RawConnection(agent.port) as stranger:
            stranger.send(data)
        poll_until(lambda: _malformed(agent) > before, "it is counted")
        footprint.descriptors_return()
        footprint.assert_threads_live()


def test_a_thousand_probes_that_connect_and_close_leave_nothing(agent: AgentProcess) -> None:
    """Each is counted; pings of a good client go on meanwhile."""
    with SteadyPinger(agent.url):
        footprint, before = Footprint(agent.pid), _malformed(agent)
        for _ in range(1000):
            RawConnection(agent.port).close()
        poll_until(lambda: _malformed(agent) >= before + 1000, "all are counted")
        footprint.descriptors_return()
        footprint.growth_stays_below(10 * MIB)


@pytest.mark.slow
def test_half_greetings_are_given_up_after_the_handshake_time(agent: AgentProcess) -> None:
    """200 peers that greet half and wait: their descriptors come back, a client is served."""
    with SteadyPinger(agent.url):
        footprint, started = Footprint(agent.pid), time.monotonic()
        waiting = [RawConnection(agent.port) for _ in range(200)]
        for peer in waiting:
            peer.send(GREETING[:GREETING_SPLIT])
        poll_until(lambda: footprint.descriptors_now >= footprint.descriptors + 200)
        footprint.descriptors_return()
        assert time.monotonic() - started > HANDSHAKE_SECONDS / 2  # slow peers get their time
        assert all(peer.wait_closed() for peer in waiting)
        for peer in waiting:
            peer.close()


@pytest.mark.parametrize("announced", [257 * MIB, 300 * MIB, 1 << 40, (1 << 63) - 1])
def test_a_frame_beyond_the_size_limit_ends_its_connection(
    agent: AgentProcess, announced: int
) -> None:
    """At its header, before memory is spent, also for a peer that was served before."""
    with SteadyPinger(agent.url), RawConnection(agent.port) as peer:
        footprint = Footprint(agent.pid)
        before = counted(agent.http_port, "malformed_messages_total", reason="zmtp")
        peer.shake_hands()
        for _ in range(2):  # with its second reply the agent knows for sure whose link this is
            peer.send_frames(b"\x00", b"\x16", b"\xc0")
            peer.read_until(frame(b"\x16", more=True) + frame(b"\xc3", more=False))
        peer.send(frame_header(announced))
        assert peer.wait_closed()
        poll_until(
            lambda: counted(agent.http_port, "malformed_messages_total", reason="zmtp") > before,
            "the end by our side is counted",
        )
        footprint.growth_stays_below(10 * MIB)


def test_a_message_of_300_mib_is_never_taken_in(agent: AgentProcess) -> None:
    """Sent by a client that means it: memory of the agent stays where it was."""
    with SteadyPinger(agent.url), RawDealer(agent.url) as dealer:
        footprint, before = Footprint(agent.pid), _malformed(agent)
        dealer.request("commit_store", b"\xc0", b"\x05", bytes(300 * MIB))
        poll_until(lambda: _malformed(agent) > before, "it is counted")
        footprint.growth_stays_below(50 * MIB)


def test_a_flood_of_one_fault_is_counted_in_full_and_logged_once(agent: AgentProcess) -> None:
    """Per peer, without its port, and reason; a minute later the count of the others is told."""
    before = _malformed(agent)
    with RawDealer(agent.url) as dealer:
        for number in range(500):
            dealer.send(b"only one frame %d" % number)
        assert dealer.silent()
    poll_until(lambda: _malformed(agent) >= before + 500, "all are counted")
    written: dict[tuple[str, str], list[float]] = {}
    for record in agent.log_records("malformed_message"):
        fault = record["peer"].partition(":")[0], record["reason"]
        at = datetime.fromisoformat(record["timestamp"]).timestamp()
        written.setdefault(fault, []).append(at)
    assert ("127.0.0.1", "framing") in written
    assert ("127.0.0.1", "no_message") in written
    for moments in written.values():
        pauses = [later - earlier for earlier, later in pairwise(moments)]
        assert all(pause >= LOG_PERIOD_SECONDS - 1 for pause in pauses)


def test_connections_of_the_oldest_framing_are_forgotten_when_they_close(
    agent: AgentProcess,
) -> None:
    """Libzmq tells no descriptor for them, so no event names them; they must not pile up."""
    with RawConnection(agent.port) as oldest:
        oldest.send(OLDEST_GREETING + b"\x02\x00\x16")
        poll_until(lambda: agent.status()["connections"] == 1)
    poll_until(lambda: agent.status()["connections"] == 0)


def test_the_oldest_framing_is_served_like_any_other(agent: AgentProcess) -> None:
    """Its frames are messages too: a well-formed request is answered, and the router goes on."""
    with RawConnection(agent.port) as oldest:
        oldest.send(OLDEST_GREETING + b"\x02\x01\x00" + b"\x02\x01\x16" + b"\x02\x00\xc0")
        oldest.read_until(b"\x02\x00\xc3")
    assert agent.get("/healthz")["healthy"] is True
