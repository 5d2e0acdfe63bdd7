"""The journal: numbered, bounded, kept until acknowledged; and who was reaped a while ago."""

from __future__ import annotations

from typing import cast, get_args

from lmcache_nodeagent.ids import InstanceId
from lmcache_nodeagent.liveness.journal import (
    Journal,
    JournalEntry,
    Kind,
    Numbered,
    Subject,
    stuck_release,
)
from lmcache_nodeagent.liveness.reaped_lately import HEARD_WITHIN_SECONDS, ReapedLately
from lmcache_nodeagent.liveness.testimony import PodRun, Registered
from tests.fakes.liveness_parts import connection, entry

POD = PodRun("default", "engine-0", "uid-1", "engine", "containerd://1")
SEVEN = InstanceId(7)


def happened(
    number: int = 7, kind: Kind = "reaped", release_seconds: float | None = 0.25
) -> JournalEntry:
    """Something that happened to instance `number`."""
    return JournalEntry(
        kind=kind,
        subject=Subject(InstanceId(number), "demo/model", Registered(3, 5.0, POD)),
        reason="heartbeat_timeout",
        evidence=("silent for 120.0 s",),
        silent_seconds=120.00049,
        happened_at=1_767_225_600.0,
        release_seconds=release_seconds,
        released_bytes=4096,
        latency_seconds=release_seconds,
        trigger="pod_gone",
    )


def reaps(journal: Journal) -> list[dict[str, object]]:
    """What people are shown."""
    return cast("list[dict[str, object]]", journal.since(0)["reaps"])


def test_the_journal_numbers_entries_from_one() -> None:
    """A reader asks for what came after the number it has; ids are text."""
    journal = Journal("boot")
    assert journal.since(0) == {
        "boot_id": "boot",
        "next": 0,
        "oldest": 1,
        "missed": 0,
        "reaps": [],
    }
    assert [journal.append(happened()), journal.append(happened(2**63 - 1, "reaped", None))] == [
        1,
        2,
    ]
    assert journal.since(1)["reaps"] == [
        {
            "seq": 2,
            "instance_id": "9223372036854775807",
            "registration": 3,
            "model": "demo/model",
            "mapping": {
                "namespace": "default",
                "name": "engine-0",
                "uid": "uid-1",
                "container": "engine",
                "run": "containerd://1",
                "owner": None,
            },
            "reason": "heartbeat_timeout",
            "trigger": "pod_gone",
            "evidence": ["silent for 120.0 s"],
            "silent_seconds": 120.0,
            "detected_at": "2026-01-01T00:00:00.000+00:00",
            "release_seconds": None,
            "latency_seconds": None,
            "bytes": 4096,
        }
    ]


def test_people_are_shown_the_reaps_alone() -> None:
    """Other kinds have numbers of the same row."""
    journal = Journal("boot")
    for kind in get_args(Kind):
        journal.append(happened(kind=kind))
    assert [reap["seq"] for reap in reaps(journal)] == [1]
    assert journal.since(0)["next"] == len(get_args(Kind))


def test_an_instance_that_is_mapped_nowhere_shows_no_pod() -> None:
    """None, so that readers need not look for keys."""
    journal = Journal("boot")
    entry_of = happened()
    subject = Subject(SEVEN, "demo/model", Registered(1))
    journal.append(
        JournalEntry(
            kind="reaped",
            subject=subject,
            reason=entry_of.reason,
            evidence=(),
            silent_seconds=0.0,
            happened_at=0.0,
        )
    )
    (shown,) = reaps(journal)
    assert shown["mapping"] is None


def test_the_journal_says_how_many_a_reader_missed() -> None:
    """It is bounded; a number of another boot misses nothing."""
    journal = Journal("boot", length=2)
    for number in range(1, 6):
        journal.append(happened(number))
    late = journal.since(1)
    assert (late["oldest"], late["missed"], late["next"]) == (4, 2, 5)
    assert journal.since(3)["missed"] == 0
    assert journal.since(99)["missed"] == 0


# The operator's side


def test_what_is_not_acknowledged_is_said_again() -> None:
    """Beyond what has been said over the present stream."""
    journal = Journal("boot")
    for number in (1, 2, 3):
        journal.append(happened(number))
    assert [each.seq for each in journal.unacknowledged()] == [1, 2, 3]
    assert [each.seq for each in journal.unacknowledged(after=2)] == [3]
    assert journal.acknowledge(2)
    assert (journal.waiting, [each.seq for each in journal.unacknowledged()]) == (1, [3])
    assert journal.acknowledge(1)
    assert journal.waiting == 1
    assert journal.acknowledge(3)
    assert journal.unacknowledged() == ()


def test_nobody_acknowledges_what_has_not_happened() -> None:
    """It would be lost when it does."""
    journal = Journal("boot")
    journal.append(happened())
    assert not journal.acknowledge(2)
    assert not journal.acknowledge(-1)
    assert journal.waiting == 1


def test_entries_that_gave_way_unread_are_counted_and_told() -> None:
    """The first that is left says how many there were before it."""
    journal = Journal("boot", length=2)
    journal.append(happened(1))
    journal.acknowledge(1)
    for number in range(2, 6):
        journal.append(happened(number))
    first, second = journal.unacknowledged()
    assert first == Numbered(4, first.entry, missed=2)
    assert second == Numbered(5, second.entry)
    assert (journal.missed, journal.waiting) == (2, 4)


def test_a_listener_is_told_of_each_entry() -> None:
    """The link says it at once."""
    journal, told = Journal("boot"), list[int]()
    journal.tell(lambda: told.append(1))
    journal.append(happened())
    assert told == [1]


def test_a_stuck_release_in_words() -> None:
    """Whatever it was for."""
    stuck = stuck_release(entry(number=7), 31.4, 5.0)
    assert (stuck.kind, stuck.subject.instance_id, stuck.released_bytes) == ("stuck_release", 7, 0)
    assert stuck.evidence == ("memory not back after 31 s", "0 transfer(s) in flight")


# Who was reaped a while ago


def test_a_reaped_instance_that_is_heard_again_was_reaped_falsely_once() -> None:
    """By the peer it had; then it is forgotten."""
    lately = ReapedLately()
    gone = entry(connection("10.0.0.1"), number=7, at=90.0)
    lately.add(gone, "heartbeat_timeout", 210.0)
    assert lately.heard(InstanceId(8), connection("10.0.0.1"), 211.0) is None
    assert lately.heard(SEVEN, connection("10.0.0.2"), 211.0) is None
    heard = lately.heard(SEVEN, connection("10.0.0.1"), 212.0)
    assert heard is not None
    assert (heard.reason, heard.last_seen, heard.reaped_at) == ("heartbeat_timeout", 90.0, 210.0)
    assert lately.heard(SEVEN, connection("10.0.0.1"), 213.0) is None


def test_a_peer_that_nothing_is_known_of_is_known_by_its_connection() -> None:
    """Peers without a name equal nobody."""
    lately, link = ReapedLately(), connection("")
    lately.add(entry(link, number=7), "pod_hint", 0.0)
    assert lately.heard(SEVEN, connection(""), 1.0) is None
    assert lately.heard(SEVEN, link, 1.0) is not None


def test_an_id_that_registered_anew_or_was_gone_long_says_nothing() -> None:
    """It is another worker, as far as anybody can tell."""
    lately, link = ReapedLately(), connection("10.0.0.1")
    lately.add(entry(link, number=7), "pod_hint", 0.0)
    lately.registered(SEVEN)
    assert lately.heard(SEVEN, link, 1.0) is None
    lately.add(entry(link, number=7), "pod_hint", 0.0)
    assert lately.heard(SEVEN, link, HEARD_WITHIN_SECONDS + 1) is None


def test_the_memory_of_reaps_is_bounded() -> None:
    """The oldest is forgotten."""
    lately, link = ReapedLately(ids_kept=2), connection("10.0.0.1")
    for number in (1, 2, 1, 3):
        lately.add(entry(link, number=number), "pod_hint", 0.0)
    assert lately.heard(InstanceId(2), link, 1.0) is None
    assert lately.heard(InstanceId(1), link, 1.0) is not None
