"""Names of peers, and the times after which TCP gives a silent one up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_nodeagent.liveness.evidence import UNKNOWN_PEER
from lmcache_nodeagent.transport.peers import tcp_peer
from lmcache_nodeagent.transport.sockets import Keepalive


@pytest.mark.parametrize(
    ("address", "text"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("::FFFF:0a00:0001", "10.0.0.1"),
        ("fd00::1", "fd00::1"),
        ("FD00:0:0::0001", "fd00::1"),
        ("fe80::1%eth0", "fe80::1"),
        ("::1", "::1"),
    ],
)
def test_a_tcp_peer_is_its_address_however_it_is_written(address: str, text: str) -> None:
    """A dual-stack socket shows an IPv4 peer as a mapped one: it is the same peer."""
    peer = tcp_peer(address)
    assert (peer.identity, peer.text, peer.local) == (f"ip:{text}", text, False)


@pytest.mark.parametrize("address", ["", "localhost", "10.0.0.256", "10.0.0.1:80"])
def test_what_is_no_address_is_unknown(address: str) -> None:
    """It equals nobody."""
    assert tcp_peer(address) is UNKNOWN_PEER


@pytest.mark.parametrize(
    ("timeout", "idle", "interval"),
    [(0, 60, 1), (30, 15, 2), (120, 60, 8), (3600, 60, 443)],
)
def test_keepalive_figures(timeout: float, idle: int, interval: int) -> None:
    """Idle 60 s, or half of a smaller T; eight probes for the rest."""
    made = Keepalive.for_reap_timeout(timeout)
    assert (made.idle_seconds, made.interval_seconds, made.probes) == (idle, interval, 8)
    assert made.silence_seconds == idle + interval


@given(st.floats(30, 86_400))
def test_keepalive_never_gives_up_before_t(timeout: float) -> None:
    """A link that is cut for less than T is not closed by us; one cut for 2 T is."""
    made = Keepalive.for_reap_timeout(timeout)
    gives_up = made.idle_seconds + made.probes * made.interval_seconds
    assert timeout <= gives_up <= 2 * timeout
    assert made.silence_seconds < gives_up
