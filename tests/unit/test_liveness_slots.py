"""Slots of the device plugin: what the kubelet said, whose death that proves, who may speak."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_nodeagent.liveness.entry import LivenessEntry, Speaker
from lmcache_nodeagent.liveness.evidence import (
    CloseKind,
    Connection,
    ConnectionLedger,
    Surroundings,
)
from lmcache_nodeagent.liveness.policy import Reason, State, Verdict, Window, judge
from lmcache_nodeagent.liveness.slots import NO_SLOT, SlotBook, SlotOwner, SlotRun, SlotWord
from lmcache_nodeagent.liveness.stalls import Stalls
from lmcache_nodeagent.liveness.targets import InstanceLivenessTarget
from lmcache_nodeagent.liveness.windows import LivenessSettings
from tests.fakes.judged import CONFIRM, SETTINGS, T, candidate, gone
from tests.fakes.liveness_parts import FakeClock, close, connection, entry

KUBELET, NEXT_KUBELET = "socket 1", "socket 2"
ENGINE = SlotOwner("team", "engine-0", "engine")
OTHER = SlotOwner("team", "engine-1", "engine")


def at_slot(run: int = 1, slot: str = "3", serial: int = 1, process: str = "1") -> Connection:
    """An open connection of a container at a slot."""
    made = connection(process, serial=serial, local=True)
    made.slot = SlotRun(slot, run)
    if made.link is not None:
        made.link.slot = slot
    return made


def judged(
    of: LivenessEntry,
    now: float,
    word: SlotWord | None,
    settings: LivenessSettings = SETTINGS,
    *,
    describe: bool = True,
) -> Verdict:
    """Judge an entry by what the kubelet said about its slot."""
    around = Surroundings(slots={"3": word} if word else {})
    return judge(of, now, settings, around, Stalls(), describe=describe)


@pytest.fixture
def now() -> FakeClock:
    """The time."""
    return FakeClock(100.0)


@pytest.fixture
def book(now: FakeClock) -> SlotBook:
    """Two slots, the first of which a container was started at, and is listed."""
    made = SlotBook(("3", "4"), now)
    made.begin_run("3")
    now.advance(1)
    assert made.listed({"3": ENGINE}, now(), KUBELET)
    return made


# What the kubelet said


def test_a_start_ends_all_runs_before(book: SlotBook, now: FakeClock) -> None:
    """Of that slot, and of no other."""
    before = book.current("3")
    now.advance(5)
    assert book.begin_run("3") == SlotRun("3", 2) == book.current("3")
    assert book.is_over(before)
    assert not book.is_over(book.current("3"))
    assert not book.is_over(book.current("4"))
    assert not book.is_over(NO_SLOT)
    assert book.words()["3"] == SlotWord(2, 106.0, None)


def test_a_run_keeps_its_pod(book: SlotBook, now: FakeClock) -> None:
    """Also when the next one is another pod's."""
    now.advance(1)
    book.allocated("3")
    run = book.begin_run("3")
    assert book.owner(run) is None
    assert book.listed({"3": OTHER}, now(), KUBELET)
    assert (book.owner(SlotRun("3", 1)), book.owner(run)) == (ENGINE, OTHER)
    assert book.owner(NO_SLOT) is None


def test_pods_of_long_ago_are_forgotten(book: SlotBook, now: FakeClock) -> None:
    """Only the last few runs have instances that are still being released."""
    for _ in range(10):
        book.begin_run("3")
        book.listed({"3": ENGINE}, now(), KUBELET)
    assert book.owner(SlotRun("3", 1)) is None
    assert book.owner(SlotRun("3", 11)) == ENGINE


def test_a_slot_that_is_no_longer_listed_was_given_up(book: SlotBook, now: FakeClock) -> None:
    """Since the first list that lacks it; listed again, it was a mistake."""
    assert book.listed_count() == 1
    now.advance(10)
    assert book.listed({}, now(), KUBELET)
    assert not book.listed({}, now(), KUBELET)
    assert book.words()["3"].given_up_at == 111.0
    assert book.listed_count() == 0
    assert book.listed({"3": ENGINE}, now(), KUBELET)
    assert book.words()["3"].given_up_at is None
    assert not book.listed({"3": ENGINE}, now(), KUBELET)


def test_a_slot_that_is_listed_for_another_pod_was_given_up(book: SlotBook, now: FakeClock) -> None:
    """The container of that one has not been started, or we were told."""
    assert book.listed({"3": OTHER}, now(), KUBELET)
    assert book.words()["3"].given_up_at == 101.0
    assert not book.listed({"3": OTHER}, now(), KUBELET)
    assert book.owner(SlotRun("3", 1)) == ENGINE


def test_a_slot_that_is_given_to_a_container_was_given_up(book: SlotBook, now: FakeClock) -> None:
    """Whatever lists say from then on: the next pod may have the same name."""
    book.allocated("3")
    book.allocated("3")
    now.advance(1)
    assert not book.listed({"3": ENGINE}, now(), KUBELET)
    assert book.words()["3"].given_up_at == 101.0


def test_a_kubelet_that_has_just_started_proves_nothing(book: SlotBook, now: FakeClock) -> None:
    """It does not know its pods yet; once it has listed one, it does."""
    assert not book.listed({}, now(), NEXT_KUBELET)
    assert book.words()["3"].given_up_at is None
    assert not book.listed({"3": ENGINE}, now(), NEXT_KUBELET)
    assert book.listed({}, now(), NEXT_KUBELET)


def test_a_kubelet_that_has_just_started_and_names_another_pod(
    book: SlotBook, now: FakeClock
) -> None:
    """That one it does know."""
    assert book.listed({"3": OTHER}, now(), NEXT_KUBELET)
    assert book.words()["3"].given_up_at == 101.0


def test_a_list_that_was_asked_for_before_says_nothing_about_after(
    book: SlotBook, now: FakeClock
) -> None:
    """The kubelet may take its time to answer."""
    asked_at = now()
    now.advance(1)
    book.begin_run("3")
    assert not book.listed({"3": ENGINE}, asked_at, KUBELET)
    assert book.owner(book.current("3")) is None


def test_slots_that_nobody_has(book: SlotBook, now: FakeClock) -> None:
    """Given up, or on no list for long; not one that is about to be used."""
    book.listed({"3": ENGINE}, now(), KUBELET)
    assert book.left(60) == []
    now.advance(60)
    book.listed({}, now(), KUBELET)
    assert book.left(60) == ["3", "4"]
    book.allocated("3")
    now.advance(60)
    book.listed({}, now(), KUBELET)
    assert book.left(60) == ["4"]


def test_the_slot_that_was_free_longest_comes_first(book: SlotBook, now: FakeClock) -> None:
    """A pod that was deleted by force may still run at the one before."""
    assert book.by_least_use(["3", "4"]) == ["4", "3"]
    now.advance(1)
    book.begin_run("4")
    assert book.by_least_use(["3", "4"]) == ["3", "4"]
    assert book.names == ("3", "4")


def test_the_books_of_connections_show_what_was_said(book: SlotBook) -> None:
    """To whoever judges."""
    assert ConnectionLedger(book.words).surroundings().slots == book.words()
    assert ConnectionLedger().accepted(5, 1.0, "3").slot == "3"


# Whose death that proves


@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("engine", ["vllm", "other"])
def test_the_next_run_is_proof(engine: str, *, closed: bool) -> None:
    """Whatever is open, whatever was heard, and whichever engine it is."""
    registrant = at_slot()
    worker = entry(registrant, at=99.0, engine=engine)
    if closed:
        close(registrant, 99.5)
    verdict = judged(worker, 100.0, SlotWord(2, 99.8))
    assert verdict.reason is Reason.SLOT_RESTARTED
    assert verdict.since == (99.5 if closed else 99.8)
    assert "slot 3: the kubelet began to start the next run 0.2 s ago" in verdict.evidence


def test_the_same_run_is_not_touched() -> None:
    """Nor one at a slot about which nothing is known, or at none."""
    for word in (SlotWord(1, 99.0), None):
        assert judged(entry(at_slot(), at=99.0), 100.0, word).reason is None
    assert judged(entry(at=99.0), 100.0, SlotWord(2, 99.0)).reason is None


@pytest.mark.parametrize("engine", ["vllm", "other"])
def test_a_slot_taken_back_is_proof_once_its_connection_is_closed(engine: str) -> None:
    """By the other end; from the later of the two."""
    registrant = at_slot()
    close(registrant, 99.0)
    verdict = judged(entry(registrant, at=98.0, engine=engine), 100.0, SlotWord(1, 9.0, 99.5))
    assert (verdict.reason, verdict.since) == (Reason.SLOT_RELEASED, 99.5)
    assert "slot 3: its pod has not had it for 0.5 s" in verdict.evidence


def test_a_slot_taken_back_is_proof_once_the_process_is_gone() -> None:
    """Though a child of it holds the connection."""
    registrant = at_slot()
    registrant.process_gone = True
    verdict = judged(entry(registrant, at=98.0), 100.0, SlotWord(1, 9.0, 99.5))
    assert (verdict.reason, verdict.since) == (Reason.SLOT_RELEASED, 99.5)


def test_a_connection_that_we_closed_agrees_with_nothing() -> None:
    """The worker may be about to come back."""
    registrant = at_slot()
    close(registrant, 99.0, CloseKind.OURSELVES)
    assert judged(entry(registrant, at=98.0), 100.0, SlotWord(1, 9.0, 99.5)).reason is None


def test_a_worker_that_may_have_come_back_is_waited_for() -> None:
    """Through its own slot: connections elsewhere are not it."""
    registrant = at_slot()
    close(registrant, 99.0)
    back, elsewhere = candidate(5), candidate(6)
    back.slot = "3"
    word = {"3": SlotWord(1, 9.0, 99.5)}
    worker = entry(registrant, at=98.0)
    held = judge(worker, 100.0, SETTINGS, Surroundings((back,), slots=word), Stalls())
    assert (held.reason, held.held_by) == (None, "1 candidate connection(s)")
    alone = judge(worker, 100.0, SETTINGS, Surroundings((elsewhere,), slots=word), Stalls())
    assert alone.reason is Reason.SLOT_RELEASED


def test_a_slot_is_no_way_back_for_others() -> None:
    """A worker that came over TCP does not come back through one."""
    registrant = connection(serial=1)
    close(registrant, 0.0)
    back = gone(50.0, 5)
    back.slot = "3"
    worker = entry(registrant)
    verdict = judge(worker, 1.0, SETTINGS, Surroundings(gone=(back,)), Stalls())
    assert (verdict.window, verdict.deadline) == (Window.CLOSE, SETTINGS.close_confirm_seconds)


def test_a_slot_taken_back_is_a_hint_while_a_process_lives_behind_it() -> None:
    """It shortens the window of a worker that pings, and names itself."""
    worker = entry(at_slot(), at=98.0)
    verdict = judged(worker, 100.0, SlotWord(1, 9.0, 99.5))
    assert (verdict.state, verdict.window, verdict.deadline) == (
        State.SUSPECT,
        Window.HINT,
        99.5 + CONFIRM,
    )
    ended = judged(worker, 99.5 + CONFIRM, SlotWord(1, 9.0, 99.5))
    assert (ended.reason, ended.trigger) == (Reason.POD_HINT, "slot_released")


def test_a_sign_of_life_refutes_that_hint() -> None:
    """A pod deleted by force runs on for its grace period."""
    verdict = judged(entry(at_slot(), at=99.6), 100.0, SlotWord(1, 9.0, 99.5))
    assert (verdict.state, verdict.window) == (State.ACTIVE, Window.HEARTBEAT_TIMEOUT)


def test_that_hint_does_not_need_the_operator() -> None:
    """It is not its word."""
    settings = LivenessSettings(operator_word=False)
    verdict = judged(entry(at_slot(), at=98.0), 100.0, SlotWord(1, 9.0, 99.5), settings)
    assert verdict.window is Window.HINT


def test_that_hint_expires() -> None:
    """What ends later is judged by itself."""
    worker = entry(at_slot(), at=98.0)
    settings = LivenessSettings(reap_timeout_seconds=1000.0)
    assert judged(worker, 190.0, SlotWord(1, 9.0, 99.5), settings).window is not Window.HINT


def test_an_idle_worker_is_held_by_its_open_connection() -> None:
    """As with every hint."""
    worker = entry(at_slot(), at=98.0, pinged=False)
    assert judged(worker, 99.5 + T, SlotWord(1, 9.0, 99.5)).held_by == "open connection"


words = st.builds(
    SlotWord,
    st.integers(0, 3),
    st.floats(0, 500).map(round),
    st.none() | st.floats(0, 500).map(round),
)


@given(words, st.integers(0, 3), st.tuples(st.booleans(), st.booleans()), st.floats(0, 500))
def test_only_the_next_run_condemns_who_is_heard_now(
    word: SlotWord, run: int, knobs: tuple[bool, bool], moment: float
) -> None:
    """A worker behind an open connection, heard this very moment, lives unless that is proven."""
    registrant, (pinged, process_gone) = at_slot(run), knobs
    registrant.process_gone = process_gone
    verdict = judged(entry(registrant, at=moment, pinged=pinged), moment, word, describe=False)
    restarted = run < word.run
    released = process_gone and run == word.run and word.given_up_at is not None
    assert (verdict.reason is not None) is (restarted or released)


@given(
    words,
    st.integers(0, 3),
    st.sampled_from([None, CloseKind.PEER]),
    st.floats(0, 500),
    st.floats(0, 500),
)
def test_the_word_about_one_slot_says_nothing_about_another(
    word: SlotWord, run: int, closed: CloseKind | None, moment: float, later: float
) -> None:
    """Nor about workers at none."""
    for registrant in (at_slot(run, "4"), connection(serial=1)):
        worker = entry(registrant, at=moment)
        if closed is not None:
            close(registrant, moment, closed)
        around = Surroundings(slots={"3": word})
        with_word = judge(worker, moment + later, SETTINGS, around, Stalls())
        assert with_word == judge(worker, moment + later, SETTINGS, Surroundings(), Stalls())


# Who may speak


def test_a_slot_is_one_peer() -> None:
    """Any process of the container speaks for what another one registered, also while it lives."""
    worker = entry(at_slot(process="1"))
    assert worker.speaker(at_slot(process="2")) is Speaker.RIGHTFUL


@pytest.mark.parametrize("closed", [False, True])
def test_nobody_else_speaks_for_it(*, closed: bool) -> None:
    """No other slot, no earlier run, nobody over TCP, also once all its connections are closed."""
    registrant = at_slot(run=2)
    if closed:
        close(registrant, 1.0)
    worker = entry(registrant)
    for other in (at_slot(run=2, slot="4"), at_slot(run=1), connection()):
        assert worker.speaker(other) is Speaker.STRANGER
    assert worker.speaker(at_slot(run=3)) is Speaker.RIGHTFUL  # a process id that comes again


def test_a_slot_speaks_for_nobody_elsewhere() -> None:
    """Though all connections of that one are closed."""
    registrant = connection()
    close(registrant, 1.0)
    assert entry(registrant).speaker(at_slot()) is Speaker.STRANGER


def test_names_of_peers() -> None:
    """All connections of a container are of one pod."""
    assert at_slot(process="1").pod_identity == at_slot(process="2").pod_identity == "slot:3"
    assert connection("10.0.0.1").pod_identity == "ip:10.0.0.1"
    assert (bool(NO_SLOT), SlotRun("3", 1).words) == (False, "slot 3")


def test_a_holder_without_memory_has_nobody_leaving() -> None:
    """By default."""

    class Holder(InstanceLivenessTarget):
        """Holds nothing."""

    assert Holder().leaving_entries() == ()
