"""Events reach every subscriber in order, and publishing never waits."""

from __future__ import annotations

import logging

import pytest
import structlog

from lmcache_nodeagent.events import Event, LookedUp
from lmcache_nodeagent.observability.bus import EventBus

ONE = LookedUp(model="m", requested_chunks=1, hit_chunks=0)
TWO = LookedUp(model="m", requested_chunks=2, hit_chunks=0)


def test_every_subscriber_is_told_in_order() -> None:
    """What was published before the stop is told before `run` returns."""
    first: list[Event] = []
    second: list[Event] = []
    bus = EventBus([first.append, second.append])
    bus.publish(ONE)
    bus.publish(TWO)
    bus.stop()
    bus.run()
    assert first == second == [ONE, TWO]


def test_a_full_bus_drops_and_counts() -> None:
    """Core code is never held up by whoever observes it."""
    seen: list[Event] = []
    bus = EventBus([seen.append], capacity=1)
    bus.publish(ONE)
    bus.publish(TWO)
    bus.publish(TWO)
    bus.stop()  # its wake-up does not fit either; `run` notices all the same
    bus.run()
    assert (seen, bus.dropped) == ([ONE], 2)


def test_what_does_not_fit_still_reaches_the_one_who_counts() -> None:
    """A flood of bad messages must not hide how many there were."""
    counted: list[Event] = []
    bus = EventBus([counted.append], capacity=1, when_full=counted.append)
    for event in (ONE, TWO, TWO):
        bus.publish(event)
    assert counted == [TWO, TWO]
    bus.stop()
    bus.run()
    assert counted == [TWO, TWO, ONE]


def test_a_subscriber_that_raises_is_logged_and_counted_and_the_others_are_told() -> None:
    """One broken observer takes neither the others nor the bus down."""
    seen: list[Event] = []

    def broken(_: Event) -> None:
        raise RuntimeError("no disk")

    bus = EventBus([broken, seen.append])
    bus.publish(ONE)
    bus.publish(TWO)
    bus.stop()
    with structlog.testing.capture_logs() as records:
        bus.run()
    assert (seen, bus.failures) == ([ONE, TWO], 2)
    assert [record["event"] for record in records] == ["event_subscriber_failed"] * 2
    assert records[0]["published"] == "LookedUp"
    assert records[0]["log_level"] == logging.getLevelName(logging.ERROR).lower()


@pytest.mark.parametrize("capacity", [1, 10])
def test_stopping_an_idle_bus_ends_it(capacity: int) -> None:
    """Whether or not it was started already."""
    bus = EventBus([], capacity=capacity)
    bus.stop()
    bus.run()
    assert (bus.dropped, bus.failures) == (0, 0)
