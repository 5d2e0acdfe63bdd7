"""How much may wait for one connection and for all, in bytes."""

from __future__ import annotations

import pytest

from lmcache_nodeagent.config import AgentConfig
from lmcache_nodeagent.errors import TooMuchWaiting
from lmcache_nodeagent.ids import RoutingId
from lmcache_nodeagent.transport.waiting_bytes import COUNTED_BYTES, Hold, Waiting, WaitingBytes

MIB = 1 << 20
A, B, C = RoutingId(b"a"), RoutingId(b"b"), RoutingId(b"c")


def bounded(total: int = 8 * MIB, largest: int = 2 * MIB) -> WaitingBytes:
    """Room for two largest messages of each of two connections."""
    return WaitingBytes(total, largest, "wait")


def take(waiting: WaitingBytes, who: RoutingId, nbytes: int) -> Hold:
    """Take what is counted."""
    hold = waiting.take(who, nbytes)
    assert hold is not None
    return hold


def test_one_connection_gets_two_largest_messages() -> None:
    """However they are cut; what it has beyond that is refused, others are not."""
    waiting = bounded()
    holds = [take(waiting, A, MIB) for _ in range(4)]
    with pytest.raises(TooMuchWaiting, match=r"4194304 of at most 4194304 wait for this .*; wait"):
        waiting.take(A, COUNTED_BYTES)
    take(waiting, B, 4 * MIB)
    holds[0].give_back()
    take(waiting, A, MIB)


def test_all_together_get_no_more_than_the_whole() -> None:
    """Whoever comes first."""
    waiting = bounded()
    take(waiting, A, 4 * MIB)
    last = take(waiting, B, 4 * MIB)
    with pytest.raises(TooMuchWaiting, match="8388608 of at most 8388608 for all"):
        waiting.take(C, COUNTED_BYTES)
    last.give_back()
    take(waiting, C, 4 * MIB)


def test_small_ones_are_never_refused() -> None:
    """Nor counted: queues bound their number."""
    waiting = bounded()
    take(waiting, A, 4 * MIB)
    assert [waiting.take(A, COUNTED_BYTES - 1) for _ in range(1000)] == [None] * 1000
    assert waiting.held_bytes() == 4 * MIB


def test_one_connection_gets_at_most_half_of_a_small_whole() -> None:
    """But one message of the largest size, so that each can be sent."""
    waiting = bounded(total=4 * MIB)
    take(waiting, A, 2 * MIB)
    with pytest.raises(TooMuchWaiting):
        waiting.take(A, COUNTED_BYTES)
    take(waiting, B, 2 * MIB)


def test_what_is_given_back_twice_counts_once() -> None:
    """A transfer that is given up and one that ends may meet."""
    waiting = bounded()
    first, second = take(waiting, A, MIB), take(waiting, A, MIB)
    first.give_back()
    first.give_back()
    assert waiting.held_bytes() == MIB
    second.give_back()
    assert waiting.held_bytes() == 0


@pytest.mark.parametrize(
    ("free", "given", "whole"),
    [(64 * MIB, None, 16 * MIB), (MIB, None, 8 * MIB), (64 * MIB, 10 * MIB, 10 * MIB)],
    ids=["a quarter of what is free", "two messages at least", "as configured"],
)
def test_the_whole_follows_from_the_memory(free: int, given: int | None, whole: int) -> None:
    """Unless it is configured; requests and replies have as much each."""
    config = AgentConfig(l1_size_gb=1.0, max_message_bytes=4 * MIB, max_waiting_bytes=given)
    made = Waiting.for_config(config, free)
    for waiting in (made.requests, made.unread_replies):
        for number in range(whole // MIB):
            take(waiting, RoutingId(bytes([number])), MIB)
        with pytest.raises(TooMuchWaiting):
            waiting.take(C, COUNTED_BYTES)
        assert waiting.held_bytes() == whole
