"""What holds of every verdict, whatever is known."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from lmcache_nodeagent.liveness.entry import LivenessEntry
from lmcache_nodeagent.liveness.evidence import CloseKind, Surroundings
from lmcache_nodeagent.liveness.policy import judge
from lmcache_nodeagent.liveness.stalls import Stalls
from lmcache_nodeagent.liveness.testimony import Hint
from lmcache_nodeagent.liveness.windows import LivenessSettings
from tests.fakes.judged import (
    candidate,
    gone,
)
from tests.fakes.liveness_parts import close, connection, entry

seconds = st.floats(0, 500, allow_nan=False).map(lambda value: round(value, 1))
kinds = st.sampled_from(CloseKind)


@st.composite
def entries(draw: st.DrawFn) -> LivenessEntry:
    """Any entry."""
    link = connection(serial=draw(st.sampled_from([0, 3])))
    made = entry(link, at=draw(seconds), pinged=draw(st.booleans()))
    made.ping_intervals = draw(st.lists(st.sampled_from([1.0, 10.0, 60.0, 4000.0]), max_size=3))
    if draw(st.booleans()):
        close(link, draw(seconds), draw(kinds))
    return made


arounds = st.builds(
    Surroundings,
    links=st.lists(st.integers(1, 5).map(candidate), max_size=2).map(tuple),
    gone=st.lists(st.builds(gone, seconds, st.integers(1, 5)), max_size=2).map(tuple),
    peer_closes=st.lists(
        st.tuples(st.sampled_from(["ip:10.0.0.1", "ip:10.0.0.2"]), seconds), max_size=2
    ).map(tuple),
    router_stall_ended_at=st.none() | seconds,
)
stall_lists = st.lists(st.tuples(seconds, seconds), max_size=3)
hints = st.builds(Hint, st.just("pod_gone"), seconds)
all_settings = st.builds(
    LivenessSettings,
    reap_timeout_seconds=st.sampled_from([0.0, 30.0, 120.0]),
    reap_idle_connected=st.booleans(),
)


@given(entries(), arounds, stall_lists, hints, all_settings)
def test_a_hint_never_lengthens_a_window(
    made: LivenessEntry,
    around: Surroundings,
    intervals: list[tuple[float, float]],
    hint: Hint,
    settings: LivenessSettings,
) -> None:
    """Whatever else is known, the deadline with a hint is at most the one without."""
    stalls = Stalls()
    for start, end in intervals:
        stalls.record(start, end)
    without = judge(made, 0.0, settings, around, stalls).deadline
    made.hints.append(hint)
    with_hint = judge(made, 0.0, settings, around, stalls).deadline
    assert (math.inf if with_hint is None else with_hint) <= (
        math.inf if without is None else without
    )


@given(entries(), arounds, all_settings, seconds, st.floats(1.1, 1000))
def test_a_stall_never_brings_a_deadline_forward(
    made: LivenessEntry,
    around: Surroundings,
    settings: LivenessSettings,
    start: float,
    length: float,
) -> None:
    """Nothing is reaped because the agent was late."""
    stalls = Stalls()
    before = judge(made, 0.0, settings, around, stalls).deadline
    stalls.record(start, start + length)
    after = judge(made, 0.0, settings, around, stalls).deadline
    assert (before is None) is (after is None)
    if before is not None and after is not None:
        assert after >= before


@given(entries(), arounds, all_settings, seconds, seconds)
def test_a_verdict_stands(
    made: LivenessEntry,
    around: Surroundings,
    settings: LivenessSettings,
    now: float,
    later: float,
) -> None:
    """Time alone condemns at the deadline, neither before nor only for a while."""
    judged = judge(made, now, settings, around, Stalls())
    again = judge(made, now + later, settings, around, Stalls())
    assert again.deadline == judged.deadline
    if judged.deadline is not None:
        assert (judged.reason is not None) is (now >= judged.deadline)
        assert (again.reason is not None) is (now + later >= judged.deadline)
