"""Logs: JSON lines on standard error or, on a terminal, lines for people.

Records of libraries (kopf, aiohttp, websockets) pass through the same formatter.
"""

from __future__ import annotations

import logging
import sys
from typing import TextIO

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

_LEADING_KEYS = ("timestamp", "level", "event")

# kopf attaches whole objects to its records.
_UNWANTED_KEYS = ("k8s_ref", "settings", "k8s_skip")

# What libraries say at info is about their own doings; kopf says each failed try at error, too.
_LIBRARY_LEVELS = {
    "aiohttp.access": logging.WARNING,
    "asyncio": logging.WARNING,
    "kopf": logging.WARNING,
    "websockets": logging.WARNING,
}


def configure_logging(level: str, log_format: str = "auto", stream: TextIO = sys.stderr) -> None:
    """Set up structlog and `logging` for this process, replacing what was set up before."""
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
            foreign_pre_chain=[*shared, structlog.stdlib.ExtraAdder(), _drop_unwanted],
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                *_renderers(for_people=for_people, colors=stream.isatty()),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())
    for name, least in _LIBRARY_LEVELS.items():
        logging.getLogger(name).setLevel(max(least, root.level))
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


def _renderers(*, for_people: bool, colors: bool) -> list[Processor]:
    if for_people:
        plain = structlog.dev.plain_traceback
        return [structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=plain)]
    return [
        structlog.processors.format_exc_info,
        _lead_with_the_event,
        structlog.processors.JSONRenderer(default=str),
    ]


def _drop_unwanted(_: WrappedLogger, __: str, record: EventDict) -> EventDict:
    return {key: value for key, value in record.items() if key not in _UNWANTED_KEYS}


def _lead_with_the_event(_: WrappedLogger, __: str, record: EventDict) -> EventDict:
    """Order the keys so that a line reads from when and what to the details."""
    leading = {key: record.pop(key) for key in _LEADING_KEYS if key in record}
    return {**leading, **record}
