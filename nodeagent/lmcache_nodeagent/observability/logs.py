"""Logs: one format for everything, and the subscriber that writes events.

Records go to standard error, as JSON lines or, on a terminal, for people. Records of the standard
library's `logging` (waitress, for one) pass through the same formatter.
"""

from __future__ import annotations

import dataclasses
import logging
import re
import sys
from collections import OrderedDict
from collections.abc import Hashable
from typing import Literal, TextIO

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from lmcache_nodeagent import events
from lmcache_nodeagent.clock import Now
from lmcache_nodeagent.events import Event
from lmcache_nodeagent.ids import render_instance_id

LogFormat = Literal["auto", "json", "console"]

REPEAT_SECONDS = 60.0
"""A fault that one peer can repeat at will is logged once in this time."""

_REMEMBERED_FAULTS = 1024  # (peer, reason) pairs; the longest unheard is forgotten first

_LEADING_KEYS = ("timestamp", "level", "event")
_WITH_PORT = re.compile(r"^((?:\w+://)?(?:\[[^\]]*\]|[0-9.]+)):\d+$")

_LEVELS: dict[type[Event], int] = {
    events.ContextReplaced: logging.WARNING,
    events.InstanceReaped: logging.WARNING,
    events.InstanceWouldBeReaped: logging.WARNING,
    events.ReleaseStuck: logging.WARNING,
    events.ReleaseFailed: logging.ERROR,
    events.SilenceBrakeApplied: logging.WARNING,
    events.HeartbeatMismatch: logging.WARNING,
    events.FalseReap: logging.WARNING,
    events.ReapingSettingsRefused: logging.ERROR,
    events.PodResourcesUnread: logging.WARNING,
    events.SharedMemoryExceeded: logging.WARNING,
    events.OperatorLinkDown: logging.WARNING,
    events.OperatorLinkFailed: logging.DEBUG,
    events.StrangerRefused: logging.WARNING,
    events.RequestRefused: logging.WARNING,
    events.RequestFailed: logging.ERROR,
    events.MalformedMessage: logging.WARNING,
    events.ConnectionTurnedAway: logging.WARNING,
    events.ReplyDropped: logging.WARNING,
    events.MessagesTooSmall: logging.WARNING,
    events.Stored: logging.DEBUG,
    events.Retrieved: logging.DEBUG,
    events.LookedUp: logging.DEBUG,
    events.HitCutShort: logging.DEBUG,
    events.UnheldRelease: logging.DEBUG,
    events.KvEventStreamEnded: logging.DEBUG,
}
"""State changes are info, unless they stand here; requests and repeats are debug."""


def configure_logging(
    level: str, log_format: LogFormat = "auto", stream: TextIO = sys.stderr
) -> None:
    """Set up structlog and `logging` for this process, replacing what was set up before.

    Threads: `main`, before any other is started.
    """
    for_people = log_format == "console" or (log_format == "auto" and stream.isatty())
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.ExtraAdder()],
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                *_renderers(for_people=for_people, colors=stream.isatty()),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,  # loggers of modules that are imported earlier follow
    )


class LogSubscriber:
    """Writes each event as one record: its class in snake case, its fields as keys.

    What a peer can cause at will is written once per (peer without its port, reason) and
    `REPEAT_SECONDS`; the next such record says how many were suppressed. Threads: `events`.
    """

    def __init__(self, now: Now, repeat_seconds: float = REPEAT_SECONDS) -> None:
        self._now = now
        self._repeats = _RepeatFilter(repeat_seconds)
        self._log: structlog.stdlib.BoundLogger = structlog.get_logger("lmcache_nodeagent.events")

    def __call__(self, event: Event) -> None:
        """Write the event, unless it repeats what was just written."""
        level = _LEVELS.get(type(event), logging.INFO)
        if not logging.getLogger("lmcache_nodeagent.events").isEnabledFor(level):
            return
        fields = _fields(event)
        if (fault := _fault(event)) is not None:
            suppressed = self._repeats.admit(fault, self._now())
            if suppressed is None:
                return
            if suppressed:
                fields["suppressed"] = suppressed
        self._log.log(level, event_name(type(event)), **fields)


class _RepeatFilter:
    """Lets one of a kind through per period and counts the others, in bounded memory."""

    def __init__(self, period_seconds: float) -> None:
        self._period_seconds = period_seconds
        self._seen: OrderedDict[Hashable, tuple[float, int]] = OrderedDict()

    def admit(self, fault: Hashable, now: float) -> int | None:
        """Return how many were suppressed before this one, or `None` to suppress it too."""
        written_at, suppressed = self._seen.get(fault, (None, 0))
        if written_at is not None and now - written_at < self._period_seconds:
            self._seen[fault] = (written_at, suppressed + 1)
            return None
        self._seen[fault] = (now, 0)
        self._seen.move_to_end(fault)
        if len(self._seen) > _REMEMBERED_FAULTS:
            self._seen.popitem(last=False)
        return suppressed


def event_name(kind: type[Event]) -> str:
    """Return the log name of a class of events: `instance_reaped` for `InstanceReaped`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower()


def _fields(event: Event) -> dict[str, object]:
    values = {field.name: getattr(event, field.name) for field in dataclasses.fields(event)}
    if "instance_id" in values:
        values["instance_id"] = render_instance_id(values["instance_id"])
    return values


def _fault(event: Event) -> Hashable | None:  # one for each kind
    """Return what makes two events the same fault, for those that a peer can repeat at will."""
    match event:
        case (
            events.MalformedMessage()
            | events.ConnectionTurnedAway()
            | events.RequestRefused()
            | events.ReplyDropped()
        ):
            return type(event), _address(event.peer), event.reason
        case events.StrangerRefused():
            return type(event), _address(event.peer)
        case events.OperatorLinkLost():
            return type(event), event.reason
        case events.EvidenceTaken():
            return type(event), event.instance_id, event.trigger, event.outcome
        case events.RequestFailed():
            return type(event), _address(event.peer), event.operation, event.error
        case _:
            return None


def _address(peer: str) -> str:
    """Strip the port off an IP address: it is new for each connection."""
    return _WITH_PORT.sub(r"\1", peer)


def _renderers(*, for_people: bool, colors: bool) -> list[Processor]:
    if for_people:
        plain = structlog.dev.plain_traceback
        return [structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=plain)]
    return [
        structlog.processors.format_exc_info,
        _lead_with_the_event,
        structlog.processors.JSONRenderer(),
    ]


def _lead_with_the_event(_: WrappedLogger, __: str, record: EventDict) -> EventDict:
    """Order the keys so that a line reads from when and what to the details."""
    leading = {key: record.pop(key) for key in _LEADING_KEYS if key in record}
    return {**leading, **record}
