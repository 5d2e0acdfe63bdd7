"""What a duplicate of a connection's descriptor tells about its peer, with real sockets."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmcache_nodeagent.liveness.evidence import CloseKind
from lmcache_nodeagent.transport.peers import PeerSocket
from tests.polling import poll_until

SILENCE_SECONDS = 60.0

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture(params=["tcp", "unix"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """The accepted and the connecting end of one connection."""
    if request.param == "unix":
        accepted, peer = socket.socketpair()
    else:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            peer = socket.create_connection(listener.getsockname())
            accepted, _ = listener.accept()
    with accepted, peer:
        yield accepted, peer


def _copy(end: socket.socket) -> PeerSocket:
    copy = PeerSocket.duplicate(end.fileno())
    assert copy is not None
    return copy


def test_a_descriptor_that_is_closed_or_anything_but_a_socket_is_refused(tmp_path: Path) -> None:
    """By now libzmq may have closed it, and a file may have its number: nothing leaks."""
    before = len(list(Path("/proc/self/fd").iterdir()))
    with (tmp_path / "file").open("w") as file:
        number = file.fileno()
        assert PeerSocket.duplicate(number) is None
    assert PeerSocket.duplicate(number) is None
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_peer_that_closes_is_told_from_a_close_of_our_own(pair: Pair) -> None:
    """After libzmq has closed its descriptor, the duplicate still knows who went first."""
    accepted, peer = pair
    copy = _copy(accepted)
    accepted.close()
    assert copy.close_kind(SILENCE_SECONDS) is CloseKind.OURSELVES
    peer.close()
    poll_until(lambda: copy.close_kind(SILENCE_SECONDS) is CloseKind.PEER)
    copy.close()


def test_a_reset_is_the_peers_doing(pair: Pair) -> None:
    """A process that is killed with unread data resets its connections."""
    accepted, peer = pair
    copy = _copy(accepted)
    accepted.sendall(b"unread")
    peer.close()
    poll_until(lambda: copy.close_kind(SILENCE_SECONDS) is CloseKind.PEER)
    copy.close()


def test_an_end_long_after_the_last_acknowledgement_is_a_time_out() -> None:
    """TCP itself gave the link up: that is silence, and says nothing about the worker."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        peer = socket.create_connection(listener.getsockname())
        accepted, _ = listener.accept()
    copy = _copy(accepted)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    peer.close()  # with a reset, so that our end is in CLOSE as after a time-out
    poll_until(lambda: copy.close_kind(0.0) is CloseKind.TIMED_OUT)
    assert copy.close_kind(SILENCE_SECONDS) is CloseKind.PEER
    accepted.close()
    copy.close()


def test_a_unix_peer_is_its_process() -> None:
    """Both ends are of this process here: one identity, and a pidfd that is not readable."""
    first, second = socket.socketpair()
    with first, second:
        copies = [_copy(first), _copy(second)]
        peers = [copy.peer() for copy in copies]
        assert peers[0] == peers[1]
        assert peers[0] is not None
        assert peers[0].local
        assert str(os.getpid()) in peers[0].text
        pidfd = copies[0].pidfd
        assert pidfd is not None
        assert not select.select([pidfd], [], [], 0)[0]
        for copy in copies:
            copy.give_up_if_silent(0.0)  # nothing to give up: no network is in between
            copy.close()


def test_a_peer_that_has_left_is_not_named() -> None:
    """Its address can no longer be asked for."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        peer = socket.create_connection(listener.getsockname())
        accepted, _ = listener.accept()
    copy = _copy(accepted)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    peer.close()
    poll_until(lambda: copy.peer() is None)
    accepted.close()
    copy.close()


def test_a_connection_that_we_ended_says_nothing_about_the_peer() -> None:
    """Though the kernel shows the same as when the peer had left."""
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        copy = PeerSocket.duplicate(ours.fileno())
        assert copy is not None
        copy.end()
        assert theirs.recv(1) == b""
        assert copy.close_kind(60.0) is CloseKind.OURSELVES
        copy.close()
