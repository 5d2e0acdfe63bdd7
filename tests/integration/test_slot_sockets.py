"""Which slot a message came through: whatever descriptors are reused, and whatever peers claim."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest
import zmq

from lmcache_nodeagent.config import AgentConfig
from lmcache_nodeagent.liveness.slots import NO_SLOT, SlotRun
from lmcache_nodeagent.transport.peers import metadata
from lmcache_nodeagent.transport.slot_sockets import SlotSockets
from lmcache_nodeagent.transport.sockets import BoundSockets, bind_sockets

SLOTS, ROUNDS = 4, 100
RUN = 7
_FORGED = "0/1"


@pytest.fixture
def bound(tmp_path: Path) -> Iterator[BoundSockets]:
    """A bound ROUTER with slots."""
    config = AgentConfig(
        l1_size_gb=1,
        port=0,
        host="127.0.0.1",
        ipc_path=f"{tmp_path}/main.sock",
        device_plugin_resource="kv",
        device_plugin_slots=SLOTS,
        slots_folder=str(tmp_path),
    )
    sockets = bind_sockets(config)
    yield sockets
    sockets.monitor.close()
    sockets.close()


def slots_of(bound: BoundSockets) -> SlotSockets:
    """Those of a ROUTER that has some."""
    assert bound.slots is not None
    return bound.slots


def read(bound: BoundSockets, messages: int) -> list[tuple[bytes, SlotRun]]:
    """Serve handshakes until so many messages have come; return each with its slot."""
    slots, heard = slots_of(bound), list[tuple[bytes, SlotRun]]()
    poller = zmq.Poller()
    for watched in (bound.router, slots.socket):
        poller.register(watched, zmq.POLLIN)
    while len(heard) < messages:
        assert poller.poll(20_000), f"{len(heard)} messages of {messages}"
        slots.answer(lambda name: SlotRun(name, RUN))
        while bound.router.poll(0):
            first, second = bound.router.recv_multipart(copy=False)
            heard.append((second.bytes, slots.slot_run(metadata(first, "User-Id"))))
    return heard


def test_every_message_is_known_by_its_slot(bound: BoundSockets) -> None:
    """Connections that send and leave at once, so that descriptors go round."""

    def come_and_go(slot: str) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        for _ in range(ROUNDS):
            with context.socket(zmq.DEALER) as dealer:
                dealer.setsockopt(zmq.LINGER, 10_000)
                dealer.connect(f"ipc://{slots_of(bound).path(slot)}")
                dealer.send(slot.encode())
        context.term()

    visitors = [Thread(target=come_and_go, args=(str(slot),)) for slot in range(SLOTS)]
    for visitor in visitors:
        visitor.start()
    heard = read(bound, SLOTS * ROUNDS)
    for visitor in visitors:
        visitor.join()
    assert {said.decode(): run for said, run in heard} == {
        str(slot): SlotRun(str(slot), RUN) for slot in range(SLOTS)
    }
    assert all(said.decode() == run.slot for said, run in heard)


def _claims_a_slot(peer: socket.socket) -> None:
    """Speak ZMTP 3.0 with a User-Id of one's own among the metadata (RFC 23)."""
    peer.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32))
    properties = {"Socket-Type": "DEALER", "Identity": "", "User-Id": _FORGED}
    body = b"\x05READY" + b"".join(
        bytes([len(name)]) + name.encode() + len(value).to_bytes(4) + value.encode()
        for name, value in properties.items()
    )
    peer.sendall(b"\x04" + bytes([len(body)]) + body)
    answer = b""
    while b"READY" not in answer:  # as libzmq's own clients wait
        answer += peer.recv(4096)
    peer.sendall(b"\x00\x05claim")


@pytest.mark.parametrize("where", ["tcp", "main", "slot"])
def test_nobody_claims_a_slot(bound: BoundSockets, tmp_path: Path, where: str) -> None:
    """Over TCP and at the agent's own socket there is none, and a slot's is what it is."""
    if where == "tcp":
        peer = socket.create_connection(("127.0.0.1", bound.port))
    else:
        peer = socket.socket(socket.AF_UNIX)
        path = tmp_path / "main.sock" if where == "main" else slots_of(bound).path("2")
        peer.connect(str(path))
    claimant = Thread(target=_claims_a_slot, args=(peer,))
    with peer:
        claimant.start()
        ((said, run),) = read(bound, 1)
        claimant.join()
    assert (said, run) == (b"claim", SlotRun("2", RUN) if where == "slot" else NO_SLOT)


def test_the_secret_is_needed(bound: BoundSockets) -> None:
    """What looks like an answer is none without it."""
    for claimed in ("", "/2/1", "guess/2/1", None):
        assert slots_of(bound).slot_run(claimed) == NO_SLOT


def test_addresses_of_slots(bound: BoundSockets) -> None:
    """As the monitor writes them."""
    slots = slots_of(bound)
    assert slots.slot_of_address(f"ipc://{slots.path('3')}") == "3"
    for other in (f"ipc://{slots.path('9')}", "tcp://127.0.0.1:1", "ipc:///3", ""):
        assert slots.slot_of_address(other) == ""


def test_anybody_may_connect(bound: BoundSockets) -> None:
    """A worker may run as any user."""
    assert slots_of(bound).path("0").stat().st_mode & 0o777 == 0o666
