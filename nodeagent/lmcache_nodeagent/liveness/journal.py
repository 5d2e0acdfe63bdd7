"""The reaps of this agent's life, numbered, for people and for the operator."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING

from lmcache_nodeagent.ids import render_instance_id

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lmcache_nodeagent.ids import InstanceId

JOURNAL_LENGTH = 1024


@dataclass(frozen=True, slots=True)
class Reap:
    """One reap. `detected_at` is ISO 8601; `release_seconds` is None if the release is stuck."""

    instance_id: InstanceId
    model: str
    reason: str
    evidence: tuple[str, ...]
    silent_seconds: float
    detected_at: str
    release_seconds: float | None
    released_bytes: int


class ReapJournal:
    """The last reaps, numbered from 1. A reader that sees `oldest` > `since` + 1 missed some."""

    def __init__(self, boot_id: str, length: int = JOURNAL_LENGTH) -> None:
        self._boot_id = boot_id
        self._lock = Lock()  # guards: _entries, _last
        self._entries: deque[tuple[int, Reap]] = deque(maxlen=length)
        self._last = 0

    def append(self, reap: Reap) -> int:
        """Add a reap and return its number. Threads: any."""
        with self._lock:
            self._last += 1
            self._entries.append((self._last, reap))
            return self._last

    def since(self, number: int) -> Mapping[str, object]:
        """Return the reaps after `number` as `/v1/reaps` shows them.

        `missed` counts reaps after `number` that are no longer kept.
        """
        with self._lock:
            entries, last = tuple(self._entries), self._last
        oldest = entries[0][0] if entries else last + 1
        return {
            "boot_id": self._boot_id,
            "next": last,
            "oldest": oldest,
            "missed": max(0, oldest - 1 - number) if number <= last else 0,
            "reaps": [_rendered(seq, reap) for seq, reap in entries if seq > number],
        }


def _rendered(seq: int, reap: Reap) -> Mapping[str, object]:
    return {
        "seq": seq,
        "instance_id": render_instance_id(reap.instance_id),
        "model": reap.model,
        "reason": reap.reason,
        "evidence": list(reap.evidence),
        "silent_seconds": round(reap.silent_seconds, 3),
        "detected_at": reap.detected_at,
        "release_seconds": None if reap.release_seconds is None else round(reap.release_seconds, 6),
        "bytes": reap.released_bytes,
    }
