"""The worker's client: which reply belongs to which call, and what counts as a refusal."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import pytest
from msgspec.msgpack import decode, encode

from lmcache_worker.client import HOST_EVENT, WorkerClient
from lmcache_worker.wire import BadReply, BlockAllocation, CacheKey, NoReply, RequestRefused

KEY = CacheKey("demo/model", 1, 0, range(600), 0, 512, "r1")

Answer = Callable[[list[bytes]], list[list[bytes]]]


class FakeServer:
    """A connection that answers at once with what `answer` makes of each request."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.requests: list[list[bytes]] = []
        self.closed = 0
        self._replies: deque[list[bytes]] = deque()

    def send(self, frames: Sequence[bytes]) -> None:
        """Keep the request and queue its answers."""
        self.requests.append(list(frames))
        self._replies.extend(self.answer(list(frames)))

    def receive(self, timeout_seconds: float) -> list[bytes] | None:
        """Return the next answer; None at once where there is none."""
        assert timeout_seconds >= 0
        return self._replies.popleft() if self._replies else None

    def close(self) -> None:
        """Count."""
        self.closed += 1


def with_value(*values: object) -> Answer:
    """Answer every request with the next value, then with the last one again."""
    left = deque(values)

    def answer(frames: list[bytes]) -> list[list[bytes]]:
        value = left.popleft() if len(left) > 1 else left[0]
        return [[*frames[:2], encode(value)]]

    return answer


def silence(frames: list[bytes]) -> list[list[bytes]]:
    """Answer nothing."""
    del frames
    return []


def acknowledge(frames: list[bytes]) -> list[list[bytes]]:
    """Answer without a document."""
    return [frames[:2]]


def refuse(frames: list[bytes]) -> list[list[bytes]]:
    """Refuse by a mismatched operation."""
    return [[frames[0], encode("refused: not today")]]


def client_of(answer: Answer, timeout_seconds: float = 0.0) -> tuple[WorkerClient, FakeServer]:
    """Make a client that talks to a fake server."""
    server = FakeServer(answer)
    return WorkerClient("fake", timeout_seconds, connection=server), server


def sent_payload(server: FakeServer, index: int = -1) -> list[object]:
    """Decode the payload frames of one request."""
    return [decode(frame) for frame in server.requests[index][2:]]


@pytest.mark.parametrize(
    ("call", "value"),
    [
        (lambda client: client.get_chunk_size(), 256),
        (lambda client: client.get_experimental(), ["kv_event_stream"]),
        (lambda client: client.noop(), "OK"),
        (lambda client: client.ping(7), False),
        (lambda client: client.query_prefetch_status("r1"), 2),
        (lambda client: client.query_prefetch_status("r1"), None),
        (lambda client: list(client.store(KEY, 7, [[1, 2]])), [b"", True]),
        (lambda client: list(client.retrieve(KEY, 7, [[1, 2]])), [b"", False]),
    ],
)
def test_call_returns_the_value_of_its_reply(
    call: Callable[[WorkerClient], object], value: object
) -> None:
    """Each method hands on what the server answered."""
    client, _ = client_of(with_value(value))
    with client:
        assert call(client) == value


@pytest.mark.parametrize(
    ("call", "value"),
    [
        (lambda client: client.get_chunk_size(), True),
        (lambda client: client.get_experimental(), [1]),
        (lambda client: client.noop(), b"OK"),
        (lambda client: client.ping(7), 1),
        (lambda client: client.query_prefetch_status("r1"), 2.0),
        (lambda client: client.store(KEY, 7, [[1, 2]]), ["", True]),
        (lambda client: client.store(KEY, 7, [[1, 2]]), [b"", 1]),
        (lambda client: client.retrieve(KEY, 7, [[1, 2]]), None),
    ],
)
def test_reply_of_the_wrong_type_is_told(
    call: Callable[[WorkerClient], object], value: object
) -> None:
    """A server that breaks the protocol is found out where it happens."""
    client, _ = client_of(with_value(value))
    with client, pytest.raises(BadReply, match="expected"):
        call(client)


def test_requests_without_result_wait_for_their_acknowledgement() -> None:
    """Each of them is sent with its documented payload, and returns once it is answered."""
    client, server = client_of(acknowledge)
    with client:
        client.register_kv_cache(7, [], "demo/model", layout_hints={"kv_layout": "HND"})
        client.lookup(KEY)
        client.free_lookup_locks(KEY, tp_size=2)
        client.end_session("r1")
        client.clear(force=True)
        client.report_block_allocation(4711, "demo/model", [BlockAllocation("r1", [1], [2])])
        client.unregister(7)
    assert [decode(frames[1]) for frames in server.requests] == [1, 8, 12, 13, 20, 23, 2]
    assert sent_payload(server, 0) == [7, [], "demo/model", 1, "vllm", {"kv_layout": "HND"}, []]
    assert sent_payload(server, 2)[1] == 2
    assert sent_payload(server, 4) == [True]
    assert sent_payload(server, 5)[2] == [
        {"req_id": "r1", "new_block_ids": [1], "new_token_ids": [2]}
    ]


def test_key_travels_as_a_map_with_all_fields() -> None:
    """Tokens may be any sequence; they are not copied into a dict first."""
    client, server = client_of(with_value((b"", True)))
    with client:
        client.store(KEY, 7, [(1, 2)])
    key, *rest = sent_payload(server)
    assert rest == [7, [[1, 2]], HOST_EVENT]
    assert key == {
        "model_name": "demo/model",
        "world_size": 1,
        "worker_id": 0,
        "token_ids": list(range(600)),
        "start": 0,
        "end": 512,
        "request_id": "r1",
        "cache_salt": "",
        "request_configs": None,
        "num_kv_readers": 1,
    }


def test_what_does_not_travel_is_a_programming_error() -> None:
    """Nothing is sent for a value that has no msgpack form."""
    client, server = client_of(silence)
    with client, pytest.raises(TypeError, match="object does not travel"):
        client.send("noop", object())
    assert server.requests == []


def test_uids_count_up_and_are_never_reset() -> None:
    """A server tells a returning client from a new one by its uids."""
    client, server = client_of(with_value("OK"))
    with client:
        client.noop()
        client.noop()
    assert [decode(frames[0]) for frames in server.requests] == [0, 1]


def test_refusal_raises_with_the_servers_reason() -> None:
    """A reply for another operation is a no, and its operation frame says why."""
    client, _ = client_of(refuse)
    with client, pytest.raises(RequestRefused, match="refused: not today") as refused:
        client.register_kv_cache(7, [], "demo/model")
    assert refused.value.operation == "register_kv_cache"
    assert refused.value.reason == "refused: not today"


@pytest.mark.parametrize("echo", ["noop", 24])
def test_either_spelling_of_the_operation_is_the_right_one(echo: object) -> None:
    """A server may echo the name of an operation that was sent by number."""
    client, _ = client_of(lambda frames: [[frames[0], encode(echo), encode("OK")]])
    with client:
        assert client.noop() == "OK"


def test_nil_operation_is_a_refusal_of_a_named_operation() -> None:
    """An operation without a number is not answered by nothing."""
    client, _ = client_of(lambda frames: [[frames[0], encode(None)]])
    with client, pytest.raises(RequestRefused, match="None"):
        client.call("cb_reorder_plan")


def test_no_reply_in_time() -> None:
    """A call gives up after its time-out and names what it waited for."""
    client, _ = client_of(silence)
    with client, pytest.raises(NoReply, match=r"no reply to ping within 0\.0 s from fake"):
        client.ping(None)


def test_reply_after_the_time_out_is_ignored() -> None:
    """It is not taken for the answer to a later call."""
    late: list[list[bytes]] = []

    def answer(frames: list[bytes]) -> list[list[bytes]]:
        replies = [*late, [*frames[:2], encode("OK")]] if late else []
        late.append([*frames[:2], encode("late")])
        return replies

    client, _ = client_of(answer)
    with client:
        with pytest.raises(NoReply):
            client.noop()
        assert client.noop() == "OK"


@pytest.mark.parametrize(
    "noise",
    [
        [encode(2**63 + 5), encode("are you there")],
        [encode(999), encode(24), encode("OK")],
        [encode(0)],
        [],
        [b"\xc1", encode(24), encode("OK")],
        [encode("0"), encode(24), encode("OK")],
        [encode(0), encode(24), encode("OK"), encode("more")],
    ],
)
def test_messages_that_answer_nothing_are_ignored(noise: list[bytes]) -> None:
    """So are probes, which carry a uid that was never sent."""
    client, _ = client_of(lambda frames: [noise, [*frames[:2], encode("OK")]])
    with client:
        assert client.noop() == "OK"


@pytest.mark.parametrize("frame", [b"", b"\xc1", b"\x01\x01", b"\xc6\xff", b"\x81\x90\x01"])
def test_undecodable_reply_is_told(frame: bytes) -> None:
    """Garbage in place of a document ends the call, not the process."""
    client, _ = client_of(lambda frames: [[*frames[:2], frame]])
    with client, pytest.raises(BadReply, match="is not msgpack"):
        client.noop()


def test_replies_are_paired_by_uid_in_any_order() -> None:
    """Several requests may be in flight; each receive gets its own reply."""
    held: list[list[bytes]] = []

    def answer(frames: list[bytes]) -> list[list[bytes]]:
        held.append([*frames[:2], encode(f"reply {decode(frames[0])}")])
        return held[::-1] if len(held) == 3 else []

    client, _ = client_of(answer)
    with client:
        first, second, third = client.send("noop"), client.send("noop"), client.send("noop")
        assert client.receive(second).result() == "reply 1"
        assert client.receive(first).result() == "reply 0"
        assert client.receive(third).result() == "reply 2"


def test_receive_takes_whichever_reply_comes() -> None:
    """Without a uid the next reply is returned, also one that arrived while another was awaited."""
    client, server = client_of(silence)
    with client:
        first = client.send("noop")
        server.answer = lambda frames: [[encode(first), *acknowledge(frames)[0][1:]], frames[:2]]
        second = client.send("noop")
        assert client.receive(second).uid == second
        assert client.receive().uid == first
        with pytest.raises(NoReply, match="any request"):
            client.receive()


def test_hit_chunks_polls_until_the_lookup_is_done() -> None:
    """A status of None means: still looking."""
    client, server = client_of(with_value(None, None, None, 2), timeout_seconds=10.0)
    with client:
        assert client.hit_chunks(KEY) == 2
    assert [decode(frames[1]) for frames in server.requests] == [8, 9, 9, 9]


def test_hit_chunks_gives_up() -> None:
    """A lookup that never ends is no reply."""
    client, _ = client_of(with_value(None))
    with client, pytest.raises(NoReply, match="lookup of r1 still runs"):
        client.hit_chunks(KEY)


def test_closed_client_says_so() -> None:
    """A client works inside its context only, and closing twice is fine."""
    client, server = client_of(with_value("OK"))
    with client:
        client.noop()
    client.close()
    assert server.closed == 1
    with pytest.raises(RuntimeError, match="not connected"):
        client.noop()
