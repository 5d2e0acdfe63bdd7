"""Judging one entry by hand: what is open, what closed, what time it is."""

from __future__ import annotations

from lmcache_nodeagent.liveness.entry import LivenessEntry
from lmcache_nodeagent.liveness.evidence import CloseKind, Connection, Link, Surroundings
from lmcache_nodeagent.liveness.policy import Verdict, Window, judge
from lmcache_nodeagent.liveness.stalls import Stalls
from lmcache_nodeagent.liveness.windows import LivenessSettings
from tests.fakes.liveness_parts import close, connection, entry

T, GRACE, CONFIRM, CLOSE = 120.0, 3600.0, 15.0, 10.0
SETTINGS = LivenessSettings()
NEVER = 10_000_000.0


def verdict(
    of: LivenessEntry,
    now: float,
    *links: Link,
    gone: tuple[Link, ...] = (),
    closes: tuple[tuple[str, float], ...] = (),
    stall_ended_at: float | None = None,
    settings: LivenessSettings = SETTINGS,
    stalls: Stalls | None = None,
) -> Verdict:
    """Judge at `now`, with these links open."""
    around = Surroundings(links, gone, closes, stall_ended_at)
    return judge(of, now, settings, around, stalls or Stalls())


def assert_ends(judged: Verdict, window: Window, deadline: float) -> None:
    """A window runs out at `deadline`, and nothing has yet."""
    assert (judged.window, judged.deadline, judged.reason) == (window, deadline, None)


def candidate(serial: int = 2, speaker: Connection | None = None, *, at: float = 1.0) -> Link:
    """An open link accepted after that of the entry's connection (serial 1)."""
    link = Link(serial=serial, descriptor=serial, accepted_at=at, connection=speaker)
    if speaker is not None:
        speaker.link = link
    return link


def gone(at: float, serial: int = 2, speaker: Connection | None = None) -> Link:
    """A link that closed at `at`."""
    link = candidate(serial, speaker)
    link.closed_at = at
    return link


def closed_entry(
    at: float = 0.0,
    kind: CloseKind = CloseKind.PEER,
    *,
    pinged: bool = True,
    engine: str = "vllm",
) -> LivenessEntry:
    """An instance heard last at `at`, when its connection closed."""
    link = connection(serial=1)
    made = entry(link, at=at, pinged=pinged, engine=engine)
    close(link, at, kind)
    return made
