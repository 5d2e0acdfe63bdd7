"""A request is answered once, in the shape its caller understands."""

from __future__ import annotations

import pytest

from lmcache_nodeagent.errors import MalformedRequest
from lmcache_nodeagent.events import Event, ReplyDropped, RequestFailed, RequestRefused
from lmcache_nodeagent.protocol.codec import mismatched_operation
from lmcache_nodeagent.protocol.messages import PrepareRetrieveReply, SlotContext
from lmcache_nodeagent.protocol.operations import OPERATIONS
from lmcache_nodeagent.protocol.optional_messages import KvEvent, KvEventBatch
from lmcache_nodeagent.transport.requests import Reply, Request
from lmcache_nodeagent.transport.waiting_bytes import WaitingBytes
from tests.fakes.liveness_parts import connection


class Caller:
    """One request, and everything that is said about it."""

    def __init__(self, name: str) -> None:
        self.replies: list[Reply] = []
        self.facts: list[Event] = []
        self.link = connection()
        self.unread = WaitingBytes(4 << 20, 1 << 20, "read them")
        self.request = Request(
            self.link,
            OPERATIONS[name],
            b"\x07",
            b"echo",
            (),
            self.replies.append,
            self.facts.append,
            unread=self.unread,
        )


def test_an_answer_echoes_uid_and_operation() -> None:
    """Byte for byte as they came; None has no document."""
    caller = Caller("get_chunk_size")
    caller.request.answer(256)
    assert caller.replies == [
        Reply(caller.link, "get_chunk_size", b"\x07", b"echo", b"\xcd\x01\x00")
    ]
    silent = Caller("lookup")
    silent.request.answer(None)
    assert silent.replies[0].document is None
    assert caller.facts == silent.facts == []


def test_a_refusal_is_in_band_where_clients_want_that() -> None:
    """An exception would escape into the engine's step."""
    caller = Caller("store")
    caller.request.refuse(MalformedRequest("end 17"))
    assert caller.replies == [Reply(caller.link, "store", b"\x07", b"echo", b"\x92\xc4\x00\xc2")]
    assert caller.facts == [RequestRefused("store", "malformed", "10.0.0.1", "end 17")]


def test_a_refusal_of_others_carries_the_reason() -> None:
    """In a frame that is no echo, so that the client's call ends at once."""
    caller = Caller("register_kv_cache")
    caller.request.refuse(MalformedRequest("no tensors"))
    assert caller.replies == [
        Reply(caller.link, "register_kv_cache", b"\x07", mismatched_operation("no tensors"), None)
    ]


@pytest.mark.parametrize("name", ["store", "lookup"])
def test_a_failure_of_ours_is_a_no_without_details(name: str) -> None:
    """They are in the log."""
    caller = Caller(name)
    caller.request.fail(KeyError("secret"), "Traceback: secret")
    assert caller.facts == [RequestFailed(name, "KeyError", "10.0.0.1", "Traceback: secret")]
    assert b"secret" not in caller.replies[0].operation_frame


def test_an_answer_that_cannot_be_encoded_is_a_failure_of_ours() -> None:
    """The client could not decode it either."""
    caller = Caller("store")
    caller.request.answer("yes")
    assert caller.replies[0].document == b"\x92\xc4\x00\xc2"
    (failed,) = caller.facts
    assert isinstance(failed, RequestFailed)


def test_the_first_answer_counts() -> None:
    """And what is not sent is not told either."""
    caller = Caller("store")
    caller.request.answer((b"", True))
    caller.request.answer((b"", False))
    caller.request.refuse(MalformedRequest("late"))
    caller.request.fail(KeyError(), "late")
    assert [reply.document for reply in caller.replies] == [b"\x92\xc4\x00\xc3"]
    assert caller.facts == []


def _chunks(nbytes: int) -> PrepareRetrieveReply:
    return PrepareRetrieveReply(success=True, data=bytes(nbytes), context=SlotContext())


def test_a_large_answer_takes_up_room_until_it_is_sent() -> None:
    """Whoever sends it gives that back; a small one takes up none."""
    caller = Caller("prepare_retrieve")
    caller.request.answer(_chunks(1 << 20))
    (reply,) = caller.replies
    assert reply.hold is not None
    assert caller.unread.held_bytes() == len(reply.document or b"") > 1 << 20
    reply.hold.give_back()
    assert caller.unread.held_bytes() == 0
    small = Caller("prepare_retrieve")
    small.request.answer(_chunks(1000))
    assert small.replies[0].hold is None


def test_a_client_that_does_not_read_is_told_no() -> None:
    """In a few bytes, once what it has not read is as much as one may have."""
    caller = Caller("prepare_retrieve")
    caller.unread.take(caller.link.routing_id, 2 << 20)
    caller.request.answer(_chunks(1 << 20))
    (reply,) = caller.replies
    assert (reply.document, reply.hold) == (caller.request.operation.negative, None)
    (refused,) = caller.facts
    assert isinstance(refused, RequestRefused)
    assert refused.reason == "too_much_waiting"
    assert "read them" in refused.detail


def test_an_answer_that_comes_too_late_takes_up_nothing() -> None:
    """It is not sent."""
    caller = Caller("prepare_retrieve")
    caller.request.refuse(MalformedRequest("its deadline"))
    caller.request.answer(_chunks(1 << 20))
    assert len(caller.replies) == 1
    assert caller.unread.held_bytes() == 0


def test_a_stream_that_is_not_read_loses_documents() -> None:
    """Counted as what does not fit a peer's queue; cursors tell the client."""
    caller = Caller("subscribe_kv_events")
    event = KvEvent(
        seq=1,
        kind="stored",
        medium="CPU",
        model_name="demo/model",
        block_hashes=[bytes(32)] * 1000,
        parent_block_hash=None,
        token_ids=[],
    )
    batch = KvEventBatch(enabled=True, incarnation=1, next_cursor=2, lost=False, events=[event])
    caller.request.send(batch)
    assert caller.replies[0].hold is not None
    caller.unread.take(caller.link.routing_id, (2 << 20) - caller.unread.held_bytes())
    caller.request.send(batch)
    assert len(caller.replies) == 1
    assert caller.facts == [ReplyDropped("subscribe_kv_events", "peer_not_reading", "10.0.0.1")]
