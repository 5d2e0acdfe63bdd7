"""Events become records, one format for all, and no peer can flood them."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from lmcache_nodeagent import events
from lmcache_nodeagent.events import Event
from lmcache_nodeagent.ids import MAX_INSTANCE_ID, InstanceId
from lmcache_nodeagent.observability.logs import (
    REPEAT_SECONDS,
    LogFormat,
    LogSubscriber,
    configure_logging,
    event_name,
)

ID = InstanceId(MAX_INSTANCE_ID)


class Clock:
    """Time that the test sets."""

    seconds = 1000.0

    def __call__(self) -> float:
        """Return it."""
        return self.seconds


class Terminal(io.StringIO):
    """A stream that says it is one."""

    def isatty(self) -> bool:
        """Say so."""
        return True


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    """Logging is set up per process; put back what the test replaced."""
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    yield
    root.handlers, root.level = handlers, level
    structlog.reset_defaults()


@pytest.fixture
def clock() -> Clock:
    """Start at an arbitrary time."""
    return Clock()


@pytest.fixture
def log(clock: Clock) -> LogSubscriber:
    """Subscribe with a clock that stands still."""
    return LogSubscriber(clock)


def malformed(peer: str = "10.0.0.1:4000", reason: str = "too_few_frames") -> Event:
    """Return a fault that a peer can repeat at will."""
    return events.MalformedMessage(reason=reason, peer=peer, detail="1 frame")


def written(*told: Event, log: LogSubscriber, level: str = "debug") -> list[dict[str, object]]:
    """Tell `log` and return the JSON records."""
    stream = io.StringIO()
    configure_logging(level, "json", stream)
    for event in told:
        log(event)
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_an_event_is_its_class_in_snake_case_and_its_fields(log: LogSubscriber) -> None:
    """Ids are decimal strings, because 63 bits break in JavaScript and jq."""
    (record,) = written(
        events.InstanceReaped(
            instance_id=ID,
            model="m",
            reason="connection_closed",
            evidence=("close",),
            silent_seconds=10.5,
            mapped_bytes=4096,
        ),
        log=log,
    )
    timestamp = record.pop("timestamp")
    assert isinstance(timestamp, str)
    assert timestamp.endswith("Z")
    assert record == {
        "event": "instance_reaped",
        "level": "warning",
        "logger": "lmcache_nodeagent.events",
        "instance_id": str(MAX_INSTANCE_ID),
        "model": "m",
        "reason": "connection_closed",
        "evidence": ["close"],
        "silent_seconds": 10.5,
        "mapped_bytes": 4096,
    }


def test_a_line_starts_with_when_and_what(log: LogSubscriber) -> None:
    """So that raw logs can be read too."""
    (record,) = written(malformed(), log=log)
    assert list(record)[:3] == ["timestamp", "level", "event"]


@pytest.mark.parametrize(
    ("event", "level"),
    [
        (events.UnknownInstanceTold(ID, "p"), "info"),
        (events.LookedUp("m", 1, 1), "debug"),
        (events.ReleaseStuck(ID, 30.0, 1), "warning"),
        (events.ReleaseFailed(ID, "OSError"), "error"),
    ],
)
def test_state_changes_are_info_requests_debug(
    log: LogSubscriber, event: Event, level: str
) -> None:
    """What needs attention is louder."""
    (record,) = written(event, log=log)
    assert record["level"] == level


def test_levels_below_the_chosen_one_are_not_written(log: LogSubscriber) -> None:
    """Requests cost next to nothing at info."""
    assert written(events.LookedUp("m", 1, 1), log=log, level="info") == []


def test_a_repeated_fault_of_one_peer_is_written_once_per_period(
    log: LogSubscriber, clock: Clock
) -> None:
    """A new connection, and so a new port, changes nothing; the next record has the count."""
    first = written(malformed(), malformed(peer="10.0.0.1:4001"), malformed(), log=log)
    clock.seconds += REPEAT_SECONDS - 1
    still = written(malformed(), log=log)
    clock.seconds += 1
    later = written(malformed(), malformed(), log=log)
    assert [len(records) for records in (first, still, later)] == [1, 0, 1]
    assert "suppressed" not in first[0]
    assert later[0]["suppressed"] == 3


@pytest.mark.parametrize(
    "other",
    [
        malformed(peer="10.0.0.2:4000"),
        malformed(peer="[fe80::1]:4000"),
        malformed(peer="unix:pid:7"),
        malformed(reason="oversize"),
        events.RequestRefused("store", "too_few_frames", "10.0.0.1:4000", ""),
        events.StrangerRefused(ID, "store", "10.0.0.1:4000", "10.0.0.2:1"),
        events.ReplyDropped("store", "peer_not_reading", "10.0.0.1:4000"),
        events.RequestFailed("store", "ValueError", "10.0.0.1:4000", ""),
    ],
)
def test_other_peers_and_other_faults_are_written_still(log: LogSubscriber, other: Event) -> None:
    """One loud peer hides nobody else."""
    assert len(written(malformed(), other, other, log=log)) == 2


def test_state_changes_are_never_suppressed(log: LogSubscriber) -> None:
    """Two registrations are two facts."""
    event = events.InstanceUnregistered(ID, "m", "p")
    assert len(written(event, event, log=log)) == 2


def test_memory_of_faults_is_bounded(log: LogSubscriber) -> None:
    """Many peers make it forget the longest unheard, not grow."""
    for number in range(3000):
        log(malformed(peer=f"peer-{number}"))
    assert len(log._repeats._seen) <= 1024


def test_records_of_the_standard_library_take_the_same_way() -> None:
    """Libraries log in the same format, tracebacks and extra keys included."""
    stream = io.StringIO()
    configure_logging("info", "json", stream)
    error = ValueError("bad")
    logging.getLogger("waitress").error("failed %d", 1, exc_info=error, extra={"port": 80})
    record = json.loads(stream.getvalue())
    assert (record["event"], record["level"], record["logger"], record["port"]) == (
        "failed 1",
        "error",
        "waitress",
        80,
    )
    assert "ValueError: bad" in record["exception"]


@pytest.mark.parametrize(
    ("stream", "log_format", "is_json"),
    [
        (io.StringIO(), "auto", True),
        (Terminal(), "auto", False),
        (Terminal(), "json", True),
        (io.StringIO(), "console", False),
    ],
)
def test_a_terminal_gets_text_for_people(
    stream: io.StringIO, log_format: LogFormat, *, is_json: bool
) -> None:
    """Unless the format is chosen; colours only on a terminal."""
    configure_logging("info", log_format, stream)
    structlog.get_logger("x").info("started", port=1)
    text = stream.getvalue()
    assert text.startswith("{") is is_json
    assert ("\x1b[" in text) is (isinstance(stream, Terminal) and not is_json)
    assert "started" in text


def test_names_are_snake_case() -> None:
    """Every word of the class name."""
    assert event_name(events.InstanceWouldBeReaped) == "instance_would_be_reaped"
