"""What is remembered of an instance, of connections, of lateness and of reaps."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_nodeagent.ids import InstanceId
from lmcache_nodeagent.liveness.entry import LivenessEntry, Speaker
from lmcache_nodeagent.liveness.evidence import CloseKind, ConnectionLedger, all_closed
from lmcache_nodeagent.liveness.stalls import Stalls
from lmcache_nodeagent.liveness.targets import InstanceLivenessTarget, ReapableEntry
from lmcache_nodeagent.liveness.testimony import NOTHING_CANCELLED, Cancelled, Hint
from tests.fakes.liveness_parts import close, connection, entry

# Signs of life


def test_a_sign_of_life_refreshes_but_only_a_ping_latches() -> None:
    """Traffic says that a worker lives, not that it runs a heartbeat."""
    link = connection()
    idle = entry(link, pinged=False)
    assert idle.seen(link, 5.0) is NOTHING_CANCELLED
    assert (idle.last_seen, idle.has_liveness_signal) == (5.0, False)
    idle.pinged(6.0)
    assert idle.has_liveness_signal


def test_a_sign_of_life_from_before_is_no_step_back() -> None:
    """Threads may come in the wrong order."""
    link = connection()
    fresh = entry(link, at=10.0)
    fresh.seen(link, 9.0)
    assert fresh.last_seen == 10.0


def test_a_sign_of_life_clears_hints_and_says_so() -> None:
    """What was hinted at is not so."""
    link = connection()
    hinted = entry(link)
    hinted.hints.append(hint := Hint("pod_gone", 1.0))
    hinted.would_reap_reported = True
    assert hinted.seen(link, 5.0) == Cancelled("hint", (hint,), 5.0)
    assert (hinted.hints, hinted.would_reap_reported) == ([], False)


def test_a_worker_that_came_back_cancels_the_close_window() -> None:
    """The new connection takes the place of the closed one."""
    old, new = connection(serial=1), connection(serial=2)
    back = entry(old)
    close(old, 3.0)
    assert back.seen(new, 5.0) == Cancelled("close", (), 5.0)
    assert back.connections == [new]
    assert back.seen(new, 6.0) is NOTHING_CANCELLED


def test_a_message_read_after_its_connection_closed_was_sent_before() -> None:
    """It proves life up to the close, and cancels nothing."""
    link = connection()
    dead = entry(link)
    close(link, 3.0)
    assert dead.seen(link, 8.0) is NOTHING_CANCELLED
    assert dead.last_seen == 3.0
    dead.last_seen = 4.0
    dead.seen(link, 8.0)
    assert dead.last_seen == 4.0


# Ping intervals


def test_the_longest_of_the_last_three_intervals_counts() -> None:
    """One late ping widens the window for a while, not for ever."""
    slow = entry()
    assert slow.observed_interval_seconds == 0
    seen = []
    for at in (60.0, 70.0, 80.0, 90.0):
        slow.pinged(at)
        seen.append(slow.observed_interval_seconds)
    assert seen == [60.0, 60.0, 60.0, 10.0]


def test_pings_read_in_one_go_are_no_interval() -> None:
    """After an outage the queued ones come at once; they are no rhythm."""
    burst = entry()
    burst.pinged(0.499)
    assert burst.ping_intervals == []
    burst.pinged(1.0)
    assert burst.ping_intervals == [0.501]


def test_a_new_context_of_an_instance_keeps_its_rhythm() -> None:
    """A recovery sends fresh handles; the worker's heartbeat is the same as before."""
    before, after = entry(), entry(pinged=False, at=70.0)
    before.pinged(60.0)
    after.inherit(before)
    assert after.has_liveness_signal
    after.pinged(130.0)
    assert after.ping_intervals == [60.0, 70.0]
    assert before.ping_intervals == [60.0]


# Who may speak


def test_a_bound_connection_speaks() -> None:
    """Whatever else is known."""
    link = connection()
    assert entry(link).speaker(link) is Speaker.RIGHTFUL


def test_another_connection_of_the_same_peer_speaks() -> None:
    """A worker reconnects from the same address."""
    mine = entry(connection("10.0.0.1"))
    assert mine.speaker(connection("10.0.0.1")) is Speaker.RIGHTFUL
    assert mine.speaker(connection("10.0.0.2")) is Speaker.STRANGER


def test_peers_that_nothing_is_known_of_equal_nobody() -> None:
    """Not even each other."""
    assert entry(connection("")).speaker(connection("")) is Speaker.STRANGER


def test_anybody_speaks_once_every_bound_connection_is_closed() -> None:
    """The worker may come back from another address; nobody else claims the id."""
    first, second = connection("10.0.0.1"), connection("10.0.0.1")
    mine = entry(first)
    mine.bind(second)
    close(first, 1.0)
    assert mine.speaker(connection("10.0.0.2")) is Speaker.STRANGER
    close(second, 2.0)
    assert mine.speaker(connection("10.0.0.2")) is Speaker.RIGHTFUL


def test_an_owner_that_was_replaced_has_no_say_while_the_new_one_is_open() -> None:
    """Not even from the same address: two containers behind one."""
    old, new = connection(), connection()
    mine = entry(new)
    mine.superseded = [old]
    assert mine.speaker(old) is Speaker.STRANGER
    close(new, 1.0)
    assert mine.speaker(old) is Speaker.RIGHTFUL


def test_only_the_registrant_says_goodbye_while_it_is_open() -> None:
    """An earlier owner's late goodbye must not take the context of the present one."""
    registrant, sibling, stranger = (connection(a) for a in ("10.0.0.1", "10.0.0.1", "10.0.0.2"))
    mine = entry(registrant)
    assert mine.may_unregister(registrant)
    assert not mine.may_unregister(sibling)
    close(registrant, 1.0)
    assert mine.may_unregister(sibling)
    mine.bind(sibling)
    assert not mine.may_unregister(stranger)


def test_binding_forgets_the_closed_ones() -> None:
    """An open one before stays: both must close before the instance counts as closed."""
    closed, open_one, new = connection(), connection(), connection()
    mine = entry(closed)
    mine.bind(open_one)
    close(closed, 1.0)
    mine.bind(new)
    assert mine.connections == [open_one, new]
    mine.bind(open_one)
    assert mine.last_connection is open_one
    mine.bind(open_one)
    assert mine.connections == [new, open_one]


def test_connections_that_are_given_stay() -> None:
    """The registrant is only bound where nobody is."""
    link, other = connection(), connection()
    made = LivenessEntry(InstanceId(1), "vllm", 0.0, 0.0, link, connections=[other])
    assert made.connections == [other]


def test_no_connection_at_all_is_not_closed() -> None:
    """Closed is said of what was open."""
    assert not all_closed([])


# The ledger


def test_links_are_numbered_in_the_order_of_accept() -> None:
    """Descriptors are reused, serials never."""
    ledger = ConnectionLedger()
    first = ledger.accepted(9, 1.0)
    assert ledger.link_closed(9, 2.0, may_have_been_a_worker=True) is first
    second = ledger.accepted(9, 3.0)
    assert (first.serial, second.serial) == (1, 2)
    assert ledger.open_link(9) is second
    assert first.closed_at == 2.0
    around = ledger.surroundings()
    assert (around.links, around.gone) == ((second,), (first,))


def test_a_link_that_was_never_accepted_has_no_end() -> None:
    """The monitor may have been started between the two."""
    assert ConnectionLedger().link_closed(9, 1.0, may_have_been_a_worker=True) is None


def test_probes_of_the_port_are_forgotten() -> None:
    """A port scan must not delay anything."""
    ledger = ConnectionLedger()
    ledger.accepted(9, 1.0)
    ledger.link_closed(9, 2.0, may_have_been_a_worker=False)
    assert ledger.surroundings().gone == ()


def test_new_processes_that_come_and_go_push_nothing_out() -> None:
    """They are nobody come back; a worker that tried in vain restarts the window all the same."""
    ledger = ConnectionLedger()
    tried = ledger.accepted(9, 1.0)
    ledger.link_closed(9, 2.0, may_have_been_a_worker=True)
    for _ in range(1_000):
        ledger.accepted(9, 3.0).connection = connection("10.0.0.2", first_uid=0)
        ledger.link_closed(9, 4.0, may_have_been_a_worker=True)
    assert ledger.surroundings().gone == (tried,)
    again = ledger.accepted(9, 5.0)
    again.connection = connection("10.0.0.2", first_uid=7)
    ledger.link_closed(9, 6.0, may_have_been_a_worker=True)
    assert ledger.surroundings().gone == (tried, again)


def test_a_close_is_noted_once_and_counts_as_the_networks_if_it_may_be() -> None:
    """Only ends of workers by their own side; processes on this node have no network."""
    ledger = ConnectionLedger()
    worker, prober, local = connection(), connection("10.0.0.2"), connection("10.0.0.3", local=True)
    worker.spoke_for = local.spoke_for = frozenset({InstanceId(1)})
    for made in (worker, prober, local):
        ledger.connection_closed(made, 5.0, CloseKind.PEER)
    ledger.connection_closed(worker, 9.0, CloseKind.OURSELVES)
    cut = connection("10.0.0.4")
    cut.spoke_for = frozenset({InstanceId(2)})
    ledger.connection_closed(cut, 6.0, CloseKind.TIMED_OUT)
    assert ledger.surroundings().peer_closes == (("ip:10.0.0.1", 5.0),)
    assert (worker.closed_at, worker.close_kind) == (5.0, CloseKind.PEER)


def test_the_ledger_keeps_the_end_of_the_last_stall() -> None:
    """It begins close windows anew."""
    ledger = ConnectionLedger()
    assert ledger.surroundings().router_stall_ended_at is None
    ledger.router_stalled(7.0)
    assert ledger.surroundings().router_stall_ended_at == 7.0


# Lateness

moments = st.floats(0, 100, allow_nan=False)


def test_overlapping_stalls_count_once() -> None:
    """A stopped process stalls scans and router alike."""
    stalls = Stalls()
    stalls.record(10.0, 20.0)
    stalls.record(15.0, 30.0)
    stalls.record(12.0, 18.0)
    stalls.record(40.0, 40.0)
    assert stalls.delay_since(0.0) == 20.0
    assert stalls.delay_since(25.0) == 5.0
    assert stalls.delay_since(30.0) == 0.0
    assert stalls.delay_between(0.0, 15.0) == 5.0
    assert stalls.delay_between(12.0, 100.0) == 18.0
    assert stalls.delay_between(31.0, 100.0) == 0.0
    assert stalls.any_since(29.9)
    assert not stalls.any_since(30.0)


@given(st.lists(st.tuples(moments, moments), max_size=8), moments)
def test_the_delay_is_what_the_stalls_cover(
    intervals: list[tuple[float, float]], start: float
) -> None:
    """In the order in which they end, as they are recorded."""
    stalls = Stalls()
    intervals.sort(key=lambda interval: interval[1])
    for begin, end in intervals:
        stalls.record(begin, end)
    edges = sorted({start, *(moment for interval in intervals for moment in interval)})
    covered = sum(
        right - left
        for left, right in itertools.pairwise(edges)
        if left >= start and any(b <= left and right <= e for b, e in intervals)
    )
    assert stalls.delay_since(start) == pytest.approx(covered)


# The contract of holders


class Nothing(InstanceLivenessTarget):
    """A holder that overrides nothing."""


def test_a_holder_overrides_only_what_applies_to_it() -> None:
    """The defaults know nobody and do nothing."""
    holder = Nothing()
    touched = holder.touch_instance(InstanceId(1), connection(), ping=True)
    assert touched.speaker is Speaker.UNKNOWN_INSTANCE
    assert holder.reap_stale_instances(lambda _: True) == ()
    assert holder.tracked_instance_count() == 0
    holder.visit_entries(lambda _: pytest.fail("nobody is here"))
    assert not holder.visit_entry(InstanceId(1), lambda _: pytest.fail("nobody is here"))
    holder.drop_instance_state(InstanceId(1))


@pytest.mark.parametrize(
    "name", ["model", "world_size", "mode", "nbytes", "handles", "transfers_in_flight"]
)
def test_each_kind_of_entry_says_what_it_holds(name: str) -> None:
    """A kind that forgets to is found at once."""
    bare = ReapableEntry(InstanceId(1), "vllm", 0.0, 0.0, connection())
    with pytest.raises(NotImplementedError):
        getattr(bare, name)
    with pytest.raises(NotImplementedError):
        bare.wait_drained()
    with pytest.raises(NotImplementedError):
        bare.close()
