"""Clients that send whatever a test wants: any frames, any bytes, in any order.

`RawDealer` speaks ZMTP through libzmq and leaves the frames to the test. `RawConnection` is a plain
TCP socket for what libzmq would never send. `SteadyPinger` is the well-behaved neighbour of both.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Self

import psutil
import zmq
from msgspec import msgpack
from prometheus_client.parser import text_string_to_metric_families

from lmcache_nodeagent.protocol.operations import OPERATIONS
from tests.polling import BUSY_SECONDS, PATIENCE_SECONDS, poll_until

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + b"\0" + bytes(31)
"""ZMTP 3.0, NULL mechanism, as the connecting side (https://rfc.zeromq.org/spec/23)."""

GREETING_SPLIT = 11
"""Bytes of the greeting up to the revision: half a greeting."""

OLDEST_GREETING = b"\x01\x00"
"""ZMTP 1.0 has none but the first frame, the peer's identity, here anonymous."""

IN_BAND_NO: dict[str, object] = {
    "store": [b"", False],
    "retrieve": [b"", False],
    "store_q": [b"", False],
    "cb_retrieve_pre_computed": [b"", False],
    "query_prefetch_status": 0,
    "wait_prefetch_status": 0,
    "prepare_store": {"context": {}},
    "commit_store": False,
    "prepare_retrieve": {"success": False, "data": b"", "context": {}},
    "commit_retrieve": True,
    "ping": False,
}
"""How these operations say no, so that stock clients go on; all others refuse with a reason."""

ROUTING_PROBE = [b"\xcf" + b"\xff" * 8, b"\xa0"]
"""What the agent sends to learn whether a connection is still there; it answers no request."""

_LONG_FRAME = 0x02
_COMMAND_FRAME = 0x04
_SHORT_FRAME_BYTES = 255

_REST_SECONDS = 0.1


class Frames(list[bytes]):
    """One reply: uid, operation and at most one document."""

    @property
    def uid(self) -> object:
        """The decoded uid."""
        return msgpack.decode(self[0])

    @property
    def operation(self) -> object:
        """The decoded operation frame."""
        return msgpack.decode(self[1])

    @property
    def value(self) -> object:
        """The decoded document, None if there is none."""
        return msgpack.decode(self[2]) if len(self) > 2 else None

    @property
    def refusal(self) -> str | None:
        """The reason of a refusal by a mismatched operation; None for any other reply."""
        operation = self.operation
        refused = isinstance(operation, str) and operation.startswith("refused: ")
        return str(operation) if refused else None


class RawDealer:
    """A DEALER whose messages are the test's. Not thread-safe."""

    def __init__(self, url: str, options: Mapping[int, int | bytes] | None = None) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        for option, value in {zmq.LINGER: 0, zmq.IPV6: 1, **(options or {})}.items():
            self._socket.setsockopt(option, value)
        self._socket.connect(url)
        self._next_uid = 0

    def send(self, *frames: bytes) -> None:
        """Send one message."""
        self._socket.send_multipart(frames)

    def request(self, operation: int | str, *payload: bytes) -> int:
        """Send a request with the next uid; payload frames are encoded already."""
        uid, self._next_uid = self._next_uid, self._next_uid + 1
        self.send(msgpack.encode(uid), msgpack.encode(operation), *payload)
        return uid

    def skip_uids(self, first: int) -> None:
        """Number requests from here on."""
        self._next_uid = first

    def receive(self, timeout_seconds: float) -> Frames | None:
        """Return the next reply, None after the time-out. Probes are no replies."""
        deadline = time.monotonic() + timeout_seconds
        while self._socket.poll(max(0, round((deadline - time.monotonic()) * 1000))):
            frames = self._socket.recv_multipart()
            if frames != ROUTING_PROBE:
                return Frames(frames)
        return None

    def replies(self, count: int, timeout_seconds: float = PATIENCE_SECONDS) -> list[Frames]:
        """Return the next `count` replies, or fewer if the time is over."""
        deadline = time.monotonic() + timeout_seconds
        found: list[Frames] = []
        while len(found) < count:
            reply = self.receive(max(0.0, deadline - time.monotonic()))
            if reply is None:
                break
            found.append(reply)
        return found

    def call(self, operation: int | str, *payload: object) -> Frames:
        """Send a request and return its reply; fail if there is none, or another's."""
        uid = self.request(operation, *(msgpack.encode(part) for part in payload))
        return self.reply_to(uid)

    def reply_to(self, uid: int) -> Frames:
        """Return the next reply, which must be this request's; 2 s are promised."""
        reply = self.receive(2 + BUSY_SECONDS)
        assert reply is not None, f"no reply to request {uid}"
        assert reply.uid == uid, f"reply to {reply.uid!r} instead of {uid}"
        return reply

    def silent(self) -> bool:
        """Tell that nothing else was sent to this client: a ping's reply comes right next."""
        uid = self.request("ping", b"\xc0")
        return self.reply_to(uid).value is True

    def close(self) -> None:
        """Disconnect."""
        self._socket.close()
        self._context.term()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class RawConnection:
    """A TCP connection to the message port, for bytes of any kind."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_SECONDS)

    def send(self, data: bytes) -> bool:
        """Send bytes; False if the agent has closed the connection."""
        try:
            self.socket.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            return False
        return True

    def shake_hands(self) -> None:
        """Do the ZMTP 3.0 handshake of a DEALER by hand."""
        self.send(GREETING)
        self._read(len(GREETING))
        ready = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
        self.send(bytes([_COMMAND_FRAME, len(ready)]) + ready)
        flags, size = self._read(2)
        assert flags == _COMMAND_FRAME
        self._read(size)

    def send_frames(self, *frames: bytes) -> bool:
        """Send one message after the handshake."""
        last = len(frames) - 1
        return self.send(b"".join(frame(body, n < last) for n, body in enumerate(frames)))

    def read_until(self, end: bytes) -> bytes:
        """Read until these bytes have come."""
        data = b""
        while end not in data:
            data += self._read(1)
        return data

    def wait_closed(self) -> bool:
        """Wait for the agent to close the connection, reading what it sends until then."""
        self.socket.settimeout(PATIENCE_SECONDS)
        try:
            while self.socket.recv(65536):
                pass
        except ConnectionResetError:
            return True
        except TimeoutError:
            return False
        return True

    def _read(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            part = self.socket.recv(count - len(data))
            assert part, "the agent closed the connection"
            data += part
        return data

    def close(self) -> None:
        """Disconnect."""
        self.socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def frame(body: bytes, more: bool) -> bytes:  # noqa: FBT001  # the flag of the wire
    """Frame bytes as ZMTP 3 does."""
    if len(body) > _SHORT_FRAME_BYTES:
        return frame_header(len(body), more=more) + body
    return bytes([int(more), len(body)]) + body


def frame_header(announced_bytes: int, *, more: bool = False) -> bytes:
    """Return the header of a long frame, whatever follows it."""
    return bytes([_LONG_FRAME | more]) + struct.pack(">Q", announced_bytes)


class SteadyPinger:
    """A good client that pings all the time on its own thread.

    Leaving it fails if half the pings took a second, if one took longer than a busy machine makes
    it, or if one was not answered true.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="steady-pinger")
        self.seconds: list[float] = []
        self._wrong: list[object] = []

    def _run(self) -> None:
        with RawDealer(self._url) as dealer:
            while not self._stop.wait(0.01):
                started = time.monotonic()
                uid = dealer.request("ping", b"\xc0")
                reply = dealer.receive(PATIENCE_SECONDS)
                self.seconds.append(time.monotonic() - started)
                if reply is None or reply.uid != uid or reply.value is not True:
                    self._wrong.append(reply)

    def __enter__(self) -> Self:
        self._thread.start()
        # Enough of them for the agent to know the connection, and so to hold all it will hold.
        poll_until(lambda: len(self.seconds) > 30, "the first pings are answered")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        before = len(self.seconds)
        poll_until(lambda: len(self.seconds) > before + 1, "pings go on to the end")
        self._stop.set()
        self._thread.join(PATIENCE_SECONDS)
        if kind is None:
            assert not self._wrong
            assert median(self.seconds) < 1
            assert max(self.seconds) < BUSY_SECONDS


class Footprint:
    """What the agent's process holds, against what it held when it was idle.

    That is taken when nothing has come or gone for a moment: what an earlier client had is closed
    a little after that client.
    """

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        poll_until(self._rests, "the number of descriptors stays the same")
        self.descriptors = self._process.num_fds()
        self.threads = self._process.num_threads()
        self.resident_bytes = self._process.memory_info().rss

    def descriptors_return(self) -> None:
        """Wait until no more descriptors are open than at the start."""
        poll_until(
            lambda: self._process.num_fds() <= self.descriptors,
            lambda: f"{self._process.num_fds()} descriptors return to {self.descriptors}",
        )

    def _rests(self) -> bool:
        before = self._process.num_fds()
        time.sleep(_REST_SECONDS)
        return bool(self._process.num_fds() == before)

    @property
    def descriptors_now(self) -> int:
        """Open descriptors."""
        return int(self._process.num_fds())

    def growth_stays_below(self, limit_bytes: int) -> None:
        """Wait until resident memory is less than `limit_bytes` above the start's.

        What the last messages held is freed after their replies are sent.
        """
        poll_until(
            lambda: self._growth_bytes() < limit_bytes,
            f"memory is less than {limit_bytes} bytes above the {self.resident_bytes} at the start",
        )

    def _growth_bytes(self) -> int:
        return int(self._process.memory_info().rss) - self.resident_bytes

    def assert_threads_live(self) -> None:
        """Fail if a thread ended."""
        assert self._process.num_threads() >= self.threads


def regions_of(pid: int) -> list[Path]:
    """Return the shared-memory files of ours that a process holds open."""
    held = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed while we look, in busy agents
            held.append(entry.stat())
    return [
        path
        for path in Path("/dev/shm").glob("lmcache-kube.l1.*")
        if any(os.path.samestat(path.stat(), one) for one in held)
    ]


def says_no(operation: str, reply: Frames) -> bool:
    """Tell whether a reply is this operation's no: its own form, or a refusal with a reason."""
    if operation not in IN_BAND_NO:
        return reply.refusal is not None and len(reply) == 2  # uid and reason
    wanted = IN_BAND_NO[operation]
    named = reply.operation in {operation, OPERATIONS[operation].wire_id}
    return named and reply.value == wanted and type(reply.value) is type(wanted)


def encoded(*values: object) -> list[bytes]:
    """Encode each value as a frame of its own."""
    return [msgpack.encode(value) for value in values]


def counted(http_port: int, name: str, **labels: str) -> float:
    """Sum the samples of a metric of the agent that have these labels."""
    url = f"http://127.0.0.1:{http_port}/metrics"
    with urllib.request.urlopen(url, timeout=PATIENCE_SECONDS) as reply:
        families = text_string_to_metric_families(reply.read().decode())
    return sum(
        sample.value
        for family in families
        for sample in family.samples
        if sample.name == f"lmcache_kube_{name}" and labels.items() <= sample.labels.items()
    )
