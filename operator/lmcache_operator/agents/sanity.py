"""Refuses what no agent can mean, where it comes in.

One agent's nonsense then ends its own stream, and not what it would break further on: dates beyond
the calendar, numbers that an object of Kubernetes cannot hold, texts without end.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

from lmcache_nodeagent.operator_link.messages import (
    AgentState,
    InstanceReport,
    JournalEntry,
    LinkError,
    PodRun,
)

MAX_REPORT_CHARACTERS = 4_096
"""All texts of one report together."""

MAX_ENTRY_CHARACTERS = 16_384
"""All texts of one journal entry together; and of what an agent says of itself."""

MAX_WORD_CHARACTERS = 64
"""Reasons, triggers and modes: labels and columns."""

MAX_INSTANCE_ID = 2**63 - 1
MAX_NUMBER = 2**53
"""Of counts, bytes and seconds: beyond it JSON is not exact."""

LATEST_SECONDS = 2**33
"""Moments are of this and the next two centuries."""


_NAME = re.compile(r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?")


def check_report(report: InstanceReport) -> None:
    """Refuse what no agent can say of an instance.

    Raises:
        LinkError: with the value and its limit.
    """
    _check_id(report.instance_id)
    _check_number("registration", report.registration)
    texts = [report.model, report.peer, report.state, report.claimed_pod_uid]
    _check_texts("a report", [*texts, *_texts_of(report.mapping)], MAX_REPORT_CHARACTERS)
    _check_place(report.mapping)


def check_entry(entry: JournalEntry) -> None:
    """Refuse what no agent can have in its journal.

    Raises:
        LinkError: with the value and its limit.
    """
    _check_id(entry.instance_id)
    if not 0 <= entry.happened_at <= LATEST_SECONDS:
        raise LinkError(f"happened_at {entry.happened_at:g} is not from 0 to {LATEST_SECONDS}")
    for name in ("reason", "trigger"):
        _check_word(name, getattr(entry, name))
    counts = ("seq", "registration", "released_bytes", "missed")
    for name in (*counts, "silent_seconds", "release_seconds", "latency_seconds"):
        _check_number(name, getattr(entry, name))
    texts = [entry.model, *entry.evidence, *_texts_of(entry.mapping)]
    _check_texts("a journal entry", texts, MAX_ENTRY_CHARACTERS)
    _check_place(entry.mapping)


def check_state(state: AgentState) -> None:
    """Refuse what no agent can say of itself.

    Raises:
        LinkError: with the value and its limit.
    """
    _check_number("releases_stuck", state.releases_stuck)
    _check_number("mismatched_heartbeats", state.mismatched_heartbeats)
    _check_texts("a state", [state.settings_problem], MAX_ENTRY_CHARACTERS)
    for name, value in msgspec.structs.asdict(state.settings).items():
        if isinstance(value, str):
            _check_word(name, value)
        elif not 0 <= value <= MAX_NUMBER:
            raise LinkError(f"{name} is {value:g}, not from 0 to {MAX_NUMBER}")


def _check_id(instance_id: int) -> None:
    if not 0 <= instance_id <= MAX_INSTANCE_ID:
        raise LinkError(f"instance id {instance_id} is not from 0 to {MAX_INSTANCE_ID}")


def _check_number(name: str, value: float | None) -> None:
    """Refuse numbers of absurd size; below zero a clock may have gone a little."""
    if value is not None and not -MAX_NUMBER <= value <= MAX_NUMBER:
        raise LinkError(f"{name} is beyond {MAX_NUMBER}, which nothing of an agent is")


def _check_word(name: str, value: str) -> None:
    if len(value) > MAX_WORD_CHARACTERS:
        raise LinkError(
            f"{name} has {len(value)} characters, at most {MAX_WORD_CHARACTERS} are taken"
        )


def _check_texts(what: str, texts: Iterable[str], limit: int) -> None:
    size = sum(map(len, texts))
    if size > limit:
        raise LinkError(f"{what} has {size} characters of text, at most {limit} are taken")


def _check_place(where: PodRun | None) -> None:
    """Refuse names that no pod has: they become part of requests to the API server."""
    for name in () if where is None else (where.namespace, where.name):
        if _NAME.fullmatch(name) is None:
            raise LinkError(f"{name[:80]!r} is no name of a pod or namespace: a-z, 0-9, - and .")


def _texts_of(where: PodRun | None) -> list[str]:
    if where is None:
        return []
    owner = where.owner
    owned = [] if owner is None else [owner.api_version, owner.kind, owner.name, owner.uid]
    return [where.namespace, where.name, where.uid, where.container, where.run, *owned]
