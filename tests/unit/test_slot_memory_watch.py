"""A container that takes more shared memory than it may, after its registration."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from lmcache_nodeagent.device_plugin.folders import SharedMemoryUse, SlotFolders
from lmcache_nodeagent.device_plugin.memory_watch import SharedMemoryWatch
from lmcache_nodeagent.events import Event, SharedMemoryExceeded
from lmcache_nodeagent.liveness.journal import Journal
from lmcache_nodeagent.liveness.slots import SlotBook, SlotOwner
from tests.fakes.liveness_parts import FakeClock, FakeTarget, connection, entry

LIMIT = 1000
WORDS = "1001 bytes in its shared memory, but may have 1000"


class _Folders(SlotFolders):
    """Measures what a test says."""

    def __init__(self) -> None:
        self.used = {"3": 0, "4": 0}
        self.is_replaced = False

    def use_of(self, name: str) -> SharedMemoryUse:
        """Return that."""
        if self.is_replaced:
            raise FileNotFoundError(name)
        return SharedMemoryUse(self.used[name], 1, LIMIT)


@dataclass
class Bench:
    """Two slots; a container runs at the first one."""

    now: FakeClock = field(default_factory=lambda: FakeClock(100.0))
    facts: list[Event] = field(default_factory=list)
    journal: Journal = field(default_factory=lambda: Journal("boot"))
    folders: _Folders = field(default_factory=_Folders)

    def __post_init__(self) -> None:
        """Start it."""
        self.book = SlotBook(("3", "4"), self.now)
        self.target = FakeTarget(self.now)
        self.watch = SharedMemoryWatch(
            self.book, self.folders, [self.target], self.journal, self.facts.append
        )
        self.book.begin_run("3")

    def register(self) -> None:
        """Have an instance registered there."""
        made = connection("1", local=True)
        made.slot = self.book.current("3")
        self.target.add(entry(), entry(made, number=8))


@pytest.fixture
def bench() -> Bench:
    """All within its limit."""
    return Bench()


def test_what_is_within_its_limit_is_not_told(bench: Bench) -> None:
    """Up to the last byte."""
    bench.folders.used["3"] = LIMIT
    bench.watch.look()
    assert bench.facts == []


def test_it_is_told_once_for_each_run(bench: Bench) -> None:
    """However often one looks, and whatever it does meanwhile."""
    bench.book.listed({"3": SlotOwner("team", "engine-0", "engine")}, bench.now(), "kubelet")
    bench.register()
    for used in (LIMIT + 1, LIMIT + 1, 0, LIMIT + 1):
        bench.folders.used["3"] = used
        bench.watch.look()
    assert bench.facts == [SharedMemoryExceeded("3", "team/engine-0", WORDS)]
    (told,) = [numbered.entry for numbered in bench.journal.unacknowledged()]
    assert (told.kind, told.reason) == ("shared_memory_exceeded", "over_limit")
    assert told.subject.instance_id == 8
    assert told.evidence == (f"slot 3 has {WORDS}",)
    bench.book.begin_run("3")
    bench.watch.look()
    assert len(bench.facts) == 2


def test_nobody_may_be_registered_there(bench: Bench) -> None:
    """Then there is nobody's pod to tell it on."""
    bench.folders.used["3"] = LIMIT + 1
    bench.watch.look()
    assert bench.facts == [SharedMemoryExceeded("3", "", WORDS)]
    assert bench.journal.unacknowledged() == ()


def test_a_folder_that_is_replaced_just_now_is_looked_at_later(bench: Bench) -> None:
    """It is empty then anyway."""
    bench.folders.used["3"] = LIMIT + 1
    bench.folders.is_replaced = True
    bench.watch.look()
    assert bench.facts == []
