"""From frames to a module: what is served, refused, stamped and counted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from msgspec.msgpack import decode, encode

from lmcache_nodeagent.errors import LayoutError, TransferOverdue
from lmcache_nodeagent.events import (
    Event,
    MalformedMessage,
    RequestFailed,
    RequestRefused,
    StrangerRefused,
)
from lmcache_nodeagent.ids import InstanceId
from lmcache_nodeagent.liveness.entry import Speaker
from lmcache_nodeagent.liveness.evidence import Connection
from lmcache_nodeagent.liveness.targets import UNTOUCHED, Touched
from lmcache_nodeagent.modules.calls import STREAMING, Call, Pending
from lmcache_nodeagent.protocol.operations import OPERATIONS, Pool
from lmcache_nodeagent.transport.dispatch import Dispatcher
from lmcache_nodeagent.transport.lost_commits import LostCommits
from lmcache_nodeagent.transport.requests import Reply, Request
from lmcache_nodeagent.transport.waiting_bytes import Waiting, WaitingBytes
from tests.fakes.liveness_parts import FakeClock, close, connection
from tests.fixtures.wire.requests import INSTANCE_ID, frames

UID = b"\x05"
MIB = 1 << 20
NOT_TRANSFERRED = [b"", False]


@dataclass
class HeldPool:
    """Keeps requests until they are run by hand."""

    accepts: bool = True
    requests: list[Request] = field(default_factory=list)

    def submit(self, request: Request) -> bool:
        """Keep it."""
        if self.accepts:
            self.requests.append(request)
        return self.accepts

    def work(self) -> None:
        """Nothing."""

    def stop(self) -> None:
        """Nothing."""

    def depth(self) -> int:
        """Count."""
        return len(self.requests)


class Bench:
    """A dispatcher with pools by hand. `handlers` and `touched` may be changed at any time."""

    def __init__(self) -> None:
        self.link = connection()
        self.replies: list[Reply] = []
        self.facts: list[Event] = []
        self.heard: list[tuple[InstanceId, bool]] = []
        self.touched = Touched(Speaker.RIGHTFUL, bound_peer="10.0.0.1")
        self.calls: list[tuple[object, ...]] = []
        self.handlers: dict[str, Callable[..., object]] = {
            "ping": self.handler(answer=True),
            "noop": self.handler(answer="OK"),
            "store": self.handler(answer=(b"", True)),
            "retrieve": self.handler(answer=(b"", True)),
            "lookup": self.handler(answer=None),
            "register_kv_cache": self.handler(answer=None),
            "unregister_kv_cache": self.handler(answer=None),
        }
        self.pools = {pool: HeldPool() for pool in (Pool.SYNC, Pool.NORMAL, Pool.AFFINITY)}
        self.controls: list[tuple[bytes, bytes]] = []
        self.waiting = Waiting(
            WaitingBytes(4 * MIB, MIB, "wait"), WaitingBytes(4 * MIB, MIB, "read")
        )
        self.dispatcher = Dispatcher(
            self.handlers,
            self.pools,
            self.hear,
            self.replies.append,
            self.facts.append,
            lambda _, uid, word: self.controls.append((uid, word)),
            LostCommits(self.replies.append, FakeClock()),
            waiting=self.waiting,
        )

    def handler(self, answer: object) -> Callable[..., object]:
        """A handler that notes its calls."""

        def serve(call: Call, *payload: object) -> object:
            self.calls.append((call, *payload))
            return answer

        return serve

    def hear(self, instance_id: InstanceId, link: Connection, *, ping: bool) -> Touched:
        """Note the sign of life."""
        assert link is self.link
        self.heard.append((instance_id, ping))
        return self.touched

    def send(self, name: str | int, *payload: bytes, uid: bytes = UID) -> None:
        """Send one request."""
        self.dispatcher.receive(self.link, [uid, encode(name), *payload])

    def run_pools(self) -> None:
        """Run what the pools hold."""
        for pool in self.pools.values():
            while pool.requests:
                self.dispatcher.run(pool.requests.pop(0))

    def answers(self) -> list[object]:
        """What the replies say: the document, or the reason of a refusal."""
        return [
            decode(reply.operation_frame if reply.document is None else reply.document)
            for reply in self.replies
        ]

    def told(self) -> list[type[Event]]:
        """The kinds of facts."""
        return [type(fact) for fact in self.facts]


# Framing


@pytest.mark.parametrize(
    "message", [[], [UID], [b"", encode("noop")], [b"\xa1x", encode("noop")], [b"GET /", b"x"]]
)
def test_what_has_no_usable_uid_is_counted_and_not_answered(message: list[bytes]) -> None:
    """Nobody could pair a reply."""
    bench = Bench()
    bench.dispatcher.receive(bench.link, message)
    assert bench.replies == []
    assert bench.told() == [MalformedMessage]


@pytest.mark.parametrize("operation", [b"\xc1", b"\xc0", encode(11), encode(999), encode("nope")])
def test_an_unknown_operation_is_answered_with_the_reason(operation: bytes) -> None:
    """At once, and counted; no handler runs."""
    bench = Bench()
    bench.dispatcher.receive(bench.link, [UID, operation])
    (reply,) = bench.replies
    assert (reply.uid, reply.document) == (UID, None)
    assert str(decode(reply.operation_frame)).startswith("refused: ")
    assert bench.told() == [MalformedMessage]
    assert bench.calls == []


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_wrong_number_of_frames_is_no_sign_of_life(name: str) -> None:
    """It is refused with the frames the operation wants, or in-band; nothing is refreshed."""
    bench = Bench()
    bench.send(name, *frames(name), b"\xc0")
    assert len(bench.replies) == 1
    assert (bench.heard, bench.calls, bench.told()) == ([], [], [RequestRefused])
    assert bench.link.spoke_for == frozenset()


@pytest.mark.parametrize("frame", [encode(-1), encode(2**63), encode(1.0), b"\xc3", b"\xc1"])
def test_an_instance_id_outside_its_domain_is_refused(frame: bytes) -> None:
    """And touches nobody."""
    bench = Bench()
    bench.send("ping", frame)
    assert bench.answers() == [False]
    assert bench.heard == []


def test_operations_are_served_by_number_and_by_name() -> None:
    """The frame that came is echoed."""
    bench = Bench()
    bench.send(24)
    bench.send("noop")
    assert [reply.operation_frame for reply in bench.replies] == [encode(24), encode("noop")]


def test_an_operation_without_a_module_is_refused() -> None:
    """With what to change where that is known."""
    bench = Bench()
    bench.send("p2p_unlock_objects", *frames("p2p_unlock_objects"))
    bench.send("register_kv_cache_engine_driven_context", encode({"instance_id": 7}))
    assert "not served by this agent" in str(bench.answers()[0])
    assert "mp_transfer_mode" in str(bench.answers()[1])
    assert bench.heard == [(7, False)], "it is a sign of life all the same"


# Signs of life


@pytest.mark.parametrize("name", OPERATIONS)
def test_signs_of_life_are_taken_as_they_are_read(name: str) -> None:
    """Not when a pool gets to them; only by the operations that are one."""
    bench = Bench()
    bench.send(name, *frames(name))
    operation = OPERATIONS[name]
    expected = [(INSTANCE_ID, name == "ping")] if operation.life_sign else []
    assert bench.heard == expected


def test_the_life_signs_of_the_wire() -> None:
    """1, 6, 7, 14, 16-19, 22, 25 and 27."""
    ids = {entry.wire_id for entry in OPERATIONS.values() if entry.life_sign}
    assert ids == {1, 6, 7, 14, 16, 17, 18, 19, 22, 25, 27}


def test_what_a_connection_says_is_remembered() -> None:
    """It tells a worker come back from somebody else."""
    bench = Bench()
    bench.send("noop")
    assert (bench.link.spoke_for, bench.link.asked_lookups) == (frozenset(), False)
    bench.send("unregister_kv_cache", encode(3))
    bench.send("ping", encode(4))
    assert bench.link.spoke_for == {InstanceId(3), InstanceId(4)}
    assert _asked_lookups(bench.link) is False
    bench.send("ping", encode(None))
    assert _asked_lookups(bench.link) is True
    for number in range(100, 200):
        bench.send("ping", encode(number))
    assert len(bench.link.spoke_for) == 64


def _asked_lookups(link: Connection) -> bool:
    return link.asked_lookups


def test_look_ups_are_remembered_too() -> None:
    """Workers make none."""
    bench = Bench()
    bench.send("lookup", *frames("lookup"))
    assert bench.link.asked_lookups


def test_a_nil_ping_refreshes_nobody() -> None:
    """Schedulers and probers send it."""
    bench = Bench()
    bench.send("ping", encode(None))
    assert (bench.heard, bench.answers()) == ([], [True])


# Strangers


def test_a_strangers_requests_are_refused_in_band() -> None:
    """And told with both peers; no handler runs."""
    bench = Bench()
    bench.touched = Touched(Speaker.STRANGER, bound_peer="10.0.0.9")
    bench.send("store", *frames("store"))
    bench.run_pools()
    assert bench.answers() == [NOT_TRANSFERRED]
    assert bench.facts[0] == StrangerRefused(
        InstanceId(INSTANCE_ID), "store", "10.0.0.1", "10.0.0.9"
    )
    assert bench.calls == []


def test_a_strangers_ping_is_answered_by_the_module() -> None:
    """True, as its own: it refreshes nothing."""
    bench = Bench()
    bench.touched = Touched(Speaker.STRANGER)
    bench.send("ping", encode(7))
    assert bench.answers() == [True]
    ((call, number),) = bench.calls
    assert isinstance(call, Call)
    assert (call.touched.speaker, number) == (Speaker.STRANGER, 7)


def test_an_unknown_instance_is_the_modules_business() -> None:
    """It may be about to register."""
    bench = Bench()
    bench.touched = UNTOUCHED
    bench.send("register_kv_cache", *frames("register_kv_cache"))
    bench.run_pools()
    assert len(bench.calls) == 1


# Pools


@pytest.mark.parametrize("name", ["register_kv_cache", "lookup", "store"])
def test_requests_go_to_the_pool_of_their_operation(name: str) -> None:
    """And are answered when it has run them."""
    bench = Bench()
    bench.send(name, *frames(name))
    assert [pool for pool, held in bench.pools.items() if held.requests] == [OPERATIONS[name].pool]
    assert bench.replies == []
    bench.run_pools()
    assert len(bench.replies) == len(bench.calls) == 1


@pytest.mark.parametrize("reason", ["full", "closing"])
def test_what_no_pool_takes_is_refused_at_once(reason: str) -> None:
    """Pings and small questions are answered to the end."""
    bench = Bench()
    if reason == "closing":
        bench.dispatcher.close()
    else:
        bench.pools[Pool.AFFINITY].accepts = bench.pools[Pool.NORMAL].accepts = False
    bench.send("store", *frames("store"))
    bench.send("lookup", *frames("lookup"))
    bench.send("ping", encode(7))
    answers = bench.answers()
    assert (answers[0], answers[2]) == (NOT_TRANSFERRED, True)
    assert "try again later" in str(answers[1])
    assert [fact.reason for fact in bench.facts if isinstance(fact, RequestRefused)] == [
        "overloaded",
        "overloaded",
    ]
    bench.dispatcher.give_up()
    assert len(bench.replies) == 3


def test_a_transfer_of_a_connection_that_closed_is_not_begun() -> None:
    """Its blocks may belong to nobody, or to somebody else, by now. Other requests are."""
    bench = Bench()
    bench.send("store", *frames("store"))
    bench.send("unregister_kv_cache", encode(7))
    close(bench.link, 1.0)
    bench.run_pools()
    assert len(bench.calls) == 1
    assert NOT_TRANSFERRED in bench.answers()


# Bytes that wait


def _large(size: int = MIB) -> list[bytes]:
    """A store with a frame of this size; it is decoded by nobody until it runs."""
    key, number, _, handle = frames("store")
    return [key, number, bytes(size), handle]


def test_large_requests_wait_up_to_a_bound_and_are_refused_beyond_it() -> None:
    """At once, in-band; small ones go on, and so do large ones when the first have run."""
    bench = Bench()
    for _ in range(3):
        bench.send("store", *_large(MIB * 3 // 4))
    assert bench.answers() == [NOT_TRANSFERRED]
    assert [fact.reason for fact in bench.facts if isinstance(fact, RequestRefused)] == [
        "too_much_waiting"
    ]
    bench.send("store", *frames("store"))
    assert len(bench.pools[Pool.AFFINITY].requests) == 3
    bench.run_pools()
    assert bench.waiting.requests.held_bytes() == 0
    bench.send("store", *_large())
    assert len(bench.pools[Pool.AFFINITY].requests) == 1


def test_what_no_pool_takes_takes_up_nothing() -> None:
    """Nor does a transfer that waited for a registration and finds no room."""
    bench = Bench()
    bench.pools[Pool.AFFINITY].accepts = False
    bench.send("store", *_large())
    assert bench.waiting.requests.held_bytes() == 0
    bench.send("register_kv_cache", *frames("register_kv_cache"))
    bench.send("store", *_large())
    assert bench.waiting.requests.held_bytes() > MIB
    bench.run_pools()
    assert bench.waiting.requests.held_bytes() == 0


@pytest.mark.parametrize("begun", [False, True])
def test_a_transfer_past_its_deadline_takes_up_what_it_still_uses(begun: bool) -> None:  # noqa: FBT001  # a case
    """One that waits is dropped; one that runs has its memory until it returns."""
    bench = Bench()
    bench.send("store", *_large())
    (request,) = bench.pools[Pool.AFFINITY].requests
    request.begun = begun
    bench.dispatcher.overdue(request, 60.0)
    assert (bench.waiting.requests.held_bytes() > 0) is begun
    bench.dispatcher.run(request)
    assert bench.waiting.requests.held_bytes() == 0
    assert bench.answers() == [NOT_TRANSFERRED]


def test_frames_may_lie_in_memory_of_the_socket() -> None:
    """They are decoded from there, whichever they are."""
    bench = Bench()
    made = [memoryview(frame) for frame in frames("store")]
    bench.dispatcher.receive(bench.link, [UID, encode("store"), *made])
    bench.run_pools()
    assert bench.answers() == [[b"", True]]
    bench.dispatcher.receive(bench.link, [UID, b"", memoryview(bytearray(100))])
    assert bench.controls == []
    assert bench.told()[-1] is MalformedMessage


# Handlers


def test_a_handler_gets_who_asks_and_the_decoded_payload() -> None:
    """In the wire's order."""
    bench = Bench()
    bench.send("ping", encode(7))
    assert bench.calls == [(Call(bench.link, bench.touched), 7)]


def test_a_payload_that_does_not_decode_is_refused_by_the_pool() -> None:
    """Naming the field; big frames are never decoded on the router thread."""
    bench = Bench()
    payload = frames("lookup")
    payload[0] = encode({"model_name": "m"})
    bench.send("lookup", *payload)
    assert bench.replies == []
    bench.run_pools()
    assert "lookup: key" in str(bench.answers()[0])
    assert bench.calls == []


@pytest.mark.parametrize(
    ("error", "kind"), [(LayoutError("shape"), RequestRefused), (ValueError("x"), RequestFailed)]
)
def test_a_handler_that_raises_is_one_requests_fault(error: Exception, kind: type[Event]) -> None:
    """The caller's or ours: answered once, told once."""
    bench = Bench()

    def fail(*_: object) -> object:
        raise error

    bench.handlers["store"] = fail
    bench.send("store", *frames("store"))
    bench.run_pools()
    assert bench.answers() == [NOT_TRANSFERRED]
    assert bench.told() == [kind]


def test_a_fault_on_the_router_thread_ends_one_request_alone() -> None:
    """Whatever the holders of instance state do."""
    bench = Bench()
    bench.dispatcher._hear = lambda *_, **__: 1 / 0  # type: ignore[assignment]
    bench.send("ping", encode(7))
    assert (bench.answers(), bench.told()) == ([False], [RequestFailed])


def test_a_late_answer_is_sent_when_it_settles() -> None:
    """No pool thread waits for it."""
    bench = Bench()
    late = Pending()
    bench.handlers["unregister_kv_cache"] = lambda *_: late
    bench.send("unregister_kv_cache", encode(7))
    bench.run_pools()
    assert bench.replies == []
    late.settle(None)
    assert len(bench.replies) == 1
    bench.dispatcher.give_up()
    assert len(bench.replies) == 1


def test_what_is_unanswered_at_the_stop_is_refused() -> None:
    """Queued, or late; a reply that comes after all is dropped."""
    bench = Bench()
    late = Pending()
    bench.handlers["unregister_kv_cache"] = lambda *_: late
    bench.send("unregister_kv_cache", encode(7), uid=b"\x01")
    bench.run_pools()
    bench.send("store", *frames("store"), uid=b"\x02")
    bench.dispatcher.close()
    bench.dispatcher.give_up()
    assert [reply.uid for reply in bench.replies] == [b"\x01", b"\x02"]
    late.settle(None)
    bench.run_pools()
    assert len(bench.replies) == 2


def test_a_transfer_goes_behind_the_registrations_of_its_connection() -> None:
    """It need not wait for their replies, and overtaking one it would use the memory before."""
    bench = Bench()
    bench.send("register_kv_cache", *frames("register_kv_cache"))
    bench.send("store", *frames("store"))
    bench.send("retrieve", *frames("retrieve"))
    sync, affinity = bench.pools[Pool.SYNC], bench.pools[Pool.AFFINITY]
    assert [r.operation.name for r in sync.requests] == ["register_kv_cache", "store", "retrieve"]
    bench.dispatcher.run(sync.requests.pop(0))
    bench.dispatcher.run(sync.requests.pop(0))
    assert [r.operation.name for r in affinity.requests] == ["store"]
    bench.send("store", *frames("store"))
    assert [r.operation.name for r in sync.requests] == ["retrieve", "store"], "order is kept"
    while sync.requests:
        bench.dispatcher.run(sync.requests.pop(0))
    bench.send("store", *frames("store"))
    assert [r.operation.name for r in affinity.requests] == ["store", "retrieve", "store", "store"]
    bench.run_pools()
    assert len(bench.replies) == 5


def test_a_transfer_that_finds_its_queue_full_after_the_registration_is_refused() -> None:
    """Once, and in-band."""
    bench = Bench()
    bench.send("register_kv_cache", *frames("register_kv_cache"))
    bench.send("store", *frames("store"))
    bench.pools[Pool.AFFINITY].accepts = False
    bench.run_pools()
    assert bench.answers()[-1] == NOT_TRANSFERRED


def test_what_is_remembered_of_registrations_is_bounded() -> None:
    """Connections come and go; the last registration of each is no reason to grow."""
    bench = Bench()
    for _ in range(1100):
        bench.link = connection()
        bench.send("unregister_kv_cache", *frames("unregister_kv_cache"))
        bench.run_pools()
    assert len(bench.dispatcher._in_order) <= 1024


def test_a_word_about_a_stream_is_no_request() -> None:
    """It has an empty frame where requests name their operation; with more frames it is broken."""
    bench = Bench()
    bench.dispatcher.receive(bench.link, [UID, b"", b"ack"])
    assert (bench.controls, bench.replies, bench.facts) == ([(UID, b"ack")], [], [])
    bench.dispatcher.receive(bench.link, [UID, b"", b"ack", b""])
    assert (len(bench.controls), bench.told()) == (1, [MalformedMessage])


def test_a_stream_is_not_answered_by_its_handler() -> None:
    """Nor does it wait for a thread; what it sends goes out as its client asks for it."""
    bench = Bench()

    def subscribe(call: Call, *_: object) -> object:
        assert call.stream is not None
        call.stream.end()
        return STREAMING

    bench.handlers["subscribe_kv_events"] = subscribe
    bench.send("subscribe_kv_events", *frames("subscribe_kv_events"))
    (reply,) = bench.replies
    assert (reply.uid, reply.document) == (UID, None)
    assert decode(reply.operation_frame) == "subscribe_kv_events"


def test_a_transfer_is_answered_at_its_deadline_and_cancelled() -> None:
    """Once: what its copy says later is heard by nobody."""
    bench = Bench()
    bench.send("store", *frames("store"))
    (request,) = bench.pools[Pool.AFFINITY].requests
    bench.dispatcher.overdue(request, 61.0)
    with pytest.raises(TransferOverdue):
        request.cancellation.check()
    bench.run_pools()
    assert (bench.answers(), bench.told()) == ([NOT_TRANSFERRED], [RequestFailed])
