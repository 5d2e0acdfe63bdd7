"""A reaper with everything around it by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from threading import Event as Woken

from lmcache_nodeagent.events import (
    Event,
)
from lmcache_nodeagent.liveness.evidence import ConnectionLedger
from lmcache_nodeagent.liveness.journal import Journal, stuck_release
from lmcache_nodeagent.liveness.reaped_lately import ReapedLately
from lmcache_nodeagent.liveness.reaper import Reaper
from lmcache_nodeagent.liveness.release import Releaser
from lmcache_nodeagent.liveness.stalls import Stalls
from lmcache_nodeagent.liveness.windows import LivenessSettings
from tests.fakes.liveness_parts import (
    FakeClock,
    FakeEntry,
    FakeRouter,
    FakeTarget,
    ThreadsByHand,
    connection,
    entry,
)

T = 120.0


@dataclass
class SleepByHand(Woken):
    """Stands for the event the reaper sleeps on: `wait` lets time pass instead."""

    now: FakeClock
    oversleeps: float = 0.0
    slept: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Make the real event's parts."""
        super().__init__()

    def wait(self, timeout: float | None = None) -> bool:
        """Sleep, too long if told."""
        assert timeout is not None
        self.slept.append(timeout)
        self.now.advance(timeout + self.oversleeps)
        return False


class ReaperBench:
    """A reaper with everything around it by hand."""

    def __init__(self, **settings: object) -> None:
        self.now = FakeClock(1000.0)
        self.settings = replace(LivenessSettings(), **settings)  # type: ignore[arg-type]  # test's own
        self.facts: list[Event] = []
        self.target = FakeTarget(self.now)
        self.router = FakeRouter(read_at=1000.0)
        self.ledger = ConnectionLedger()
        self.stalls = Stalls()
        self.journal, self.reaped_lately = Journal("boot"), ReapedLately()
        self.threads = ThreadsByHand()
        self.housekeeping: Callable[[float], None] = lambda _: None
        self.housekeeping_due_at = math.inf
        self.releaser = Releaser(
            self.threads,
            self.facts.append,
            self.now,
            self.target.drop_instance_state,
            30.0,
            lambda: None,
            lambda stuck, seconds: self.journal.append(stuck_release(stuck, seconds, 0.0)),
        )
        self.reaper = Reaper(
            [self.target],
            self.ledger,
            self.stalls,
            lambda: self.settings,
            self.releaser,
            self.journal,
            self.reaped_lately,
            self.facts.append,
            self.now,
            self.keep_house,
        )
        self.reaper.watch(self.router)

    def keep_house(self, now: float) -> float:
        """Do what the test has put there."""
        self.housekeeping(now)
        return self.housekeeping_due_at

    def register(self, number: int, address: str = "", *, at: float = 1000.0) -> FakeEntry:
        """Add an instance that pinged at `at`, on a peer of its own unless told."""
        link = connection(address or f"10.0.0.{number}", serial=number)
        made = entry(link, number=number, at=at)
        self.target.add(made)
        return made

    def told(self, kind: type[Event]) -> list[Event]:
        """What was published of one kind."""
        return [fact for fact in self.facts if isinstance(fact, kind)]

    def journalled(self) -> list[tuple[object, object, object]]:
        """Reason, seconds and bytes of each reap in the journal."""
        reaps = self.journal.since(0)["reaps"]
        assert isinstance(reaps, list)
        return [(reap["reason"], reap["release_seconds"], reap["bytes"]) for reap in reaps]

    def brake(self) -> float | None:
        """Until when silence reaps wait."""
        return self.reaper.brake_until

    def ids(self) -> list[int]:
        """Who is registered."""
        return list(self.target.entries)
