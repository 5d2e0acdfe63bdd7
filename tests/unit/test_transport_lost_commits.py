"""Stores that were too large to be read are answered once their worker is back."""

from __future__ import annotations

import pytest
from msgspec.msgpack import decode, encode

from lmcache_nodeagent.events import Event
from lmcache_nodeagent.ids import InstanceId
from lmcache_nodeagent.liveness.entry import Speaker
from lmcache_nodeagent.liveness.evidence import CloseKind, Connection
from lmcache_nodeagent.liveness.targets import Touched
from lmcache_nodeagent.protocol.operations import OPERATIONS
from lmcache_nodeagent.transport.lost_commits import LostCommits
from lmcache_nodeagent.transport.requests import Reply, Request
from tests.fakes.liveness_parts import FakeClock, close, connection

WORKER, PREPARE = InstanceId(1 << 40), 300
LOST = PREPARE + 1


class Bench:
    """A worker whose connection breaks, and the one that it comes back on."""

    def __init__(self) -> None:
        self.now = FakeClock(1000.0)
        self.replies: list[Reply] = []
        self.lost = LostCommits(self.replies.append, self.now)
        self.first, self.second = connection(serial=1), connection()
        self.first.last_uid = encode(PREPARE)

    def breaks(self, kind: CloseKind = CloseKind.OURSELVES) -> None:
        """The connection ends."""
        close(self.first, self.now(), kind)

    def speaks(
        self,
        uid: int,
        link: Connection | None = None,
        who: InstanceId = WORKER,
        speaker: Speaker = Speaker.RIGHTFUL,
    ) -> None:
        """The worker pings."""
        ping, facts = OPERATIONS["ping"], list[Event]()
        frames = encode(uid), encode(ping.wire_id), (encode(who),)
        request = Request(link or self.second, ping, *frames, self.replies.append, facts.append)
        request.touched = Touched(speaker)
        self.lost.heard(who, request)


def test_the_first_number_that_is_missing_is_answered_no() -> None:
    """Once, on the connection that the worker came back on."""
    bench = Bench()
    bench.lost.expect(WORKER, bench.first)
    bench.speaks(PREPARE + 1, bench.first)
    bench.breaks()
    bench.speaks(9, who=InstanceId(7))
    assert bench.replies == []
    bench.speaks(LOST + 2)
    bench.speaks(LOST + 3)
    (reply,) = bench.replies
    assert reply.connection is bench.second
    assert reply.document is not None
    said = decode(reply.uid), decode(reply.operation_frame), decode(reply.document)
    assert said == (LOST, OPERATIONS["commit_store"].wire_id, False)


@pytest.mark.parametrize("kind", [CloseKind.PEER, CloseKind.TIMED_OUT])
def test_a_connection_that_broke_otherwise_lost_something_else(kind: CloseKind) -> None:
    """What it was is not known, so nothing is said."""
    bench = Bench()
    bench.lost.expect(WORKER, bench.first)
    bench.breaks(kind)
    bench.speaks(LOST + 1)
    assert bench.replies == []


def test_a_connection_that_was_too_new_to_be_known_is_believed_to_be_broken_by_the_store() -> None:
    """Its end is taken for its peer's until it is proven which one it is."""
    bench = Bench()
    bench.first.link = None
    bench.lost.expect(WORKER, bench.first)
    bench.breaks(CloseKind.PEER)
    bench.speaks(LOST + 1)
    assert len(bench.replies) == 1


def test_where_no_number_is_missing_nothing_is_answered() -> None:
    """The worker gave the store up."""
    bench = Bench()
    bench.lost.expect(WORKER, bench.first)
    bench.breaks()
    bench.speaks(LOST)
    bench.speaks(LOST + 1)
    assert bench.replies == []


def test_a_stranger_is_told_nothing() -> None:
    """Another peer with the worker's id; the worker itself is answered after it."""
    bench = Bench()
    bench.lost.expect(WORKER, bench.first)
    bench.breaks()
    bench.speaks(LOST + 5, connection("10.0.0.9"), speaker=Speaker.STRANGER)
    assert bench.replies == []
    bench.speaks(LOST + 1)
    assert len(bench.replies) == 1


def test_nobody_waits_any_more_after_the_time_out_of_stock_clients() -> None:
    """And what is old is forgotten with the next one."""
    bench = Bench()
    bench.lost.expect(InstanceId(5), bench.first)
    bench.now.advance(200.0)
    bench.lost.expect(WORKER, bench.first)
    bench.now.advance(200.0)
    bench.breaks()
    bench.speaks(LOST + 1, who=InstanceId(5))
    assert bench.replies == []
    bench.lost.expect(InstanceId(6), bench.first)
    bench.speaks(LOST + 1)
    assert len(bench.replies) == 1
    bench.lost.expect(WORKER, bench.first)
    bench.now.advance(301.0)
    bench.lost.expect(InstanceId(6), bench.first)
    bench.speaks(LOST + 1)
    assert len(bench.replies) == 1
