"""What the kernel tells about the other end of a connection.

libzmq keeps the descriptors. A duplicate of one stays readable after libzmq has closed its own,
and tells then who ended the connection, and why.
"""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import os
import select
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass

import zmq

from lmcache_nodeagent.liveness.evidence import UNKNOWN_PEER, CloseKind, Peer

_SO_PEERPIDFD = 77
"""include/uapi/asm-generic/socket.h, Linux 6.5; Python has no name for it yet."""

_TCP_ESTABLISHED = 1
_TCP_CLOSE = 7
_UNACKNOWLEDGED_OFFSET = 8 + 4 * 4
_LAST_ACK_RECEIVED_OFFSET = 8 + 12 * 4
"""struct tcp_info, include/uapi/linux/tcp.h: 8 bytes of flags, then u32s; the 5th and the 13th."""

_U64 = struct.Struct("<Q")
_BYTES_ACKNOWLEDGED_OFFSET = 8 + 24 * 4 + 2 * 8
"""The same struct, Linux 4.1: after 24 u32s and two u64s."""

_BYTES_RECEIVED_OFFSET = _BYTES_ACKNOWLEDGED_OFFSET + 8
"""The u64 after that one."""

_TCP_INFO_BYTES = 136
_ZMTP_GREETING_BYTES = 64
"""ZMTP 3.x, section 3.1: each side sends this much before anything else."""

_DEALER_HANDSHAKE_BYTES = 107
"""The greeting, and a READY command that names the socket's type and an empty identity (3.1, 3.4),
as counted."""

_RESET_ON_CLOSE = struct.pack("ii", 1, 0)
_PEER_CREDENTIALS = struct.Struct("3i")


def metadata(frame: zmq.Frame, name: int | str) -> int | str | None:
    """Read a frame's metadata; a peer that speaks the oldest ZMTP framing has none."""
    try:
        return frame.get(name)
    except (zmq.ZMQError, UnicodeDecodeError):
        return None


def tcp_peer(address: str) -> Peer:
    """Name a TCP peer by its address; `::ffff:10.0.0.1` is 10.0.0.1."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return UNKNOWN_PEER
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    text = str(mapped or parsed)
    return Peer(identity=f"ip:{text}", text=text)


@functools.cache
def _pidfds_have_inodes() -> bool:
    """Before pidfs (Linux 6.9) pidfds share the one inode of all anonymous files, as eventfds."""
    pidfd, anonymous = os.pidfd_open(os.getpid()), os.eventfd(0)
    try:
        return not os.path.samestat(os.fstat(pidfd), os.fstat(anonymous))
    finally:
        os.close(pidfd)
        os.close(anonymous)


@dataclass(slots=True, eq=False)
class PeerSocket:
    """A duplicate of a connection's descriptor. Thread: zmq-router.

    `pidfd` is of the process at the other end of a Unix socket, None over TCP, where the kernel is
    older than 6.5, or where the process was gone already.
    """

    socket: socket.socket
    pidfd: int | None = None
    ended_by_us: bool = False

    @classmethod
    def duplicate(cls, descriptor: int) -> PeerSocket | None:
        """Duplicate libzmq's descriptor; None if it is closed by now, or something else's."""
        try:
            copied = os.dup(descriptor)
        except OSError:
            return None
        try:
            copy = socket.socket(fileno=copied)
        except OSError:  # libzmq closed it, and another thread's file has the number now
            os.close(copied)
            return None
        peer = cls(copy)
        peer.look_for_process()
        return peer

    def look_for_process(self) -> None:
        """Open the pidfd, if there is one to be had."""
        if self.socket.family == socket.AF_UNIX:
            with contextlib.suppress(OSError):
                self.pidfd = self.socket.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)

    def peer(self) -> Peer | None:
        """Name the peer: the process over a Unix socket, address and port over TCP."""
        try:
            if self.socket.family == socket.AF_UNIX:
                return self._process()
            host, port = self.socket.getpeername()[:2]
        except OSError:
            return None
        named = tcp_peer(host)
        separator = f"[{named.text}]" if ":" in named.text else named.text
        return Peer(identity=named.identity, text=f"{separator}:{port}")

    def _process(self) -> Peer:
        """Name the process by its pidfd's inode, unique over the life of the kernel (Linux 6.9).

        Older kernels give all pidfds one inode; there its number, as we see it, has to do.
        """
        option = self.socket.getsockopt(
            socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size
        )
        pid = _PEER_CREDENTIALS.unpack(option)[0]
        identity = ""
        if self.pidfd is not None and _pidfds_have_inodes():
            identity = f"process:{os.fstat(self.pidfd).st_ino}"
        elif pid:
            identity = f"pid:{pid}"
        return Peer(identity=identity, text=f"unix socket, pid {pid}", local=True)

    def close_kind(self, keepalive_silence_seconds: float) -> CloseKind:
        """Tell who ended the connection, after libzmq said that it ended.

        The duplicate of a connection that the peer closed or reset is in CLOSE_WAIT or CLOSE; one
        that we closed is still ESTABLISHED. TCP's own time-outs end in CLOSE as well, with no
        acknowledgement for longer than a living peer's keepalive answers would leave.
        """
        if self.ended_by_us:
            return CloseKind.OURSELVES
        if self.socket.family == socket.AF_UNIX:
            return CloseKind.PEER if self._unix_peer_left() else CloseKind.OURSELVES
        try:
            info = self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        except OSError:
            return CloseKind.PEER
        if info[0] == _TCP_ESTABLISHED:
            return CloseKind.OURSELVES
        (milliseconds,) = struct.unpack_from("<I", info, _LAST_ACK_RECEIVED_OFFSET)
        if info[0] == _TCP_CLOSE and milliseconds / 1000 >= keepalive_silence_seconds:
            return CloseKind.TIMED_OUT
        return CloseKind.PEER

    def shook_hands(self) -> bool:
        """Tell whether the peer has taken our whole ZMTP greeting.

        libzmq sends the first ten bytes of it to anybody, and the rest only to who answers in
        kind. What cannot be told (a Unix socket) counts as yes.
        """
        if self.socket.family == socket.AF_UNIX:
            return True
        try:
            info = self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
            (taken,) = _U64.unpack_from(info, _BYTES_ACKNOWLEDGED_OFFSET)
        except (OSError, struct.error):
            return True
        return int(taken) >= _ZMTP_GREETING_BYTES

    def end(self) -> None:
        """End the connection; libzmq reads the end, and closes its descriptor.

        So does the kernel's word about it: from now on it is a close by ourselves.
        """
        self.ended_by_us = True
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def give_up_if_silent(self, seconds: float) -> None:
        """End a TCP connection whose data was not acknowledged for so long, as ourselves.

        Keepalive does this for idle connections only: while data waits for its acknowledgement, TCP
        sends that again for a quarter of an hour. A peer that lives but does not read has nothing
        unacknowledged: its window is closed, and TCP asks it ever more seldom. TCP_USER_TIMEOUT
        would end that connection as well.
        """
        if self.socket.family == socket.AF_UNIX:
            return
        with contextlib.suppress(OSError):  # it has ended by itself
            info = self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
            (unacknowledged,) = struct.unpack_from("<I", info, _UNACKNOWLEDGED_OFFSET)
            (milliseconds,) = struct.unpack_from("<I", info, _LAST_ACK_RECEIVED_OFFSET)
            waits = info[0] == _TCP_ESTABLISHED and unacknowledged > 0
            if waits and milliseconds / 1000 >= seconds:
                self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
                self.socket.shutdown(socket.SHUT_RD)  # libzmq reads the end, and closes

    def _unix_peer_left(self) -> bool:
        """Reading a Unix socket whose peer has closed gives the end or an error, never 'later'."""
        try:
            while self.socket.recv(65536, socket.MSG_DONTWAIT):
                pass
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def close(self) -> None:
        """Close the duplicate and the pidfd."""
        self.socket.close()
        self.close_pidfd()

    def close_pidfd(self) -> None:
        """Close the pidfd alone."""
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None


def has_exited(pidfd: int) -> bool:
    """Tell whether a process is gone."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def has_sent_a_message(descriptor: int) -> bool:
    """Tell whether the peer at a link has sent more than a DEALER's handshake; False if unknown."""
    copy = PeerSocket.duplicate(descriptor)
    if copy is None:
        return False
    try:
        info = copy.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        (received,) = _U64.unpack_from(info, _BYTES_RECEIVED_OFFSET)
    except (OSError, struct.error):
        return False
    finally:
        copy.close()
    return int(received) > _DEALER_HANDSHAKE_BYTES


@contextlib.contextmanager
def _borrowed(descriptor: int) -> Iterator[PeerSocket | None]:
    """Use libzmq's own descriptor for a moment: there may be none left to duplicate it.

    None if it is closed by now, or something else's.
    """
    try:
        own = socket.socket(fileno=descriptor)
    except OSError:
        yield None
        return
    try:
        yield PeerSocket(own)
    finally:
        own.detach()


def caller_of(descriptor: int) -> Peer:
    """Tell who is at the other end of a link that was just accepted; it may be gone by now."""
    with _borrowed(descriptor) as link:
        if link is None:
            return UNKNOWN_PEER
        link.look_for_process()
        peer = link.peer()
        link.close_pidfd()
    return peer or UNKNOWN_PEER


def turn_away(descriptor: int) -> None:
    """End a connection that is one too many: libzmq aborts when a Unix listener has no descriptor.

    Should the number be another's by now, that one has to connect again.
    """
    with _borrowed(descriptor) as link:
        if link is not None:
            link.end()
