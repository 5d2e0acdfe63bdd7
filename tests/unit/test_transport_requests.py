"""A request is answered once, in the shape its caller understands."""

from __future__ import annotations

import pytest

from lmcache_nodeagent.errors import MalformedRequest
from lmcache_nodeagent.events import Event, RequestFailed, RequestRefused
from lmcache_nodeagent.protocol.codec import mismatched_operation
from lmcache_nodeagent.protocol.operations import OPERATIONS
from lmcache_nodeagent.transport.requests import Reply, Request
from tests.fakes.liveness_parts import connection


class Caller:
    """One request, and everything that is said about it."""

    def __init__(self, name: str) -> None:
        self.replies: list[Reply] = []
        self.facts: list[Event] = []
        self.link = connection()
        self.request = Request(
            self.link,
            OPERATIONS[name],
            b"\x07",
            b"echo",
            (),
            self.replies.append,
            self.facts.append,
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
