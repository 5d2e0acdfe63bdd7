"""Answers to stores that were too large to be read.

libzmq ends a connection at a frame beyond `--max-message-bytes` and shows nothing of the message.
Its size is known before, from the prepare, but stock workers without a pool send whatever a prepare
says, and then wait for their request time-out (300 s). They count their requests by one, over all
connections: once the worker is back, the first number that is missing is that store's. See ADR 30.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmcache_nodeagent.liveness.entry import Speaker
from lmcache_nodeagent.liveness.evidence import CloseKind
from lmcache_nodeagent.protocol.codec import head_frames, read_uid
from lmcache_nodeagent.protocol.operations import OPERATIONS
from lmcache_nodeagent.transport.requests import Reply

if TYPE_CHECKING:
    from collections.abc import Callable

    from lmcache_nodeagent.clock import Now
    from lmcache_nodeagent.ids import InstanceId
    from lmcache_nodeagent.liveness.evidence import Connection
    from lmcache_nodeagent.transport.requests import Request

_COMMIT = OPERATIONS["commit_store"]

_LATEST_SECONDS = 300.0
"""After a prepare: stock clients wait no longer for its commit."""


@dataclass(frozen=True, slots=True)
class _Expected:
    """A connection that is about to be broken."""

    connection: Connection
    since: float


class LostCommits:
    """Says no to commits that broke their connection, as soon as their worker speaks again."""

    def __init__(self, send: Callable[[Reply], None], now: Now) -> None:
        self._send = send
        self._now = now
        self._expected: dict[InstanceId, _Expected] = {}  # each operation is atomic: no lock

    def expect(self, instance_id: InstanceId, connection: Connection) -> None:
        """Note a store that will not be read. Threads: transfer-<n>."""
        now = self._now()
        self._expected[instance_id] = _Expected(connection, now)
        for other, expected in tuple(self._expected.items()):
            if now - expected.since > _LATEST_SECONDS:
                self._expected.pop(other, None)

    def heard(self, instance_id: InstanceId, request: Request) -> None:
        """Answer what was lost, if its worker speaks on a new connection. Thread: zmq-router."""
        expected = self._expected.get(instance_id)
        if expected is None:
            return
        broken, connection = expected.connection, request.connection
        if broken.is_open or request.touched.speaker is Speaker.STRANGER:
            return
        self._expected.pop(instance_id, None)
        in_time = self._now() - expected.since <= _LATEST_SECONDS
        # Who closed a connection that was too new to be proven is not known.
        by_us = broken.link is None or broken.close_kind is CloseKind.OURSELVES
        lost = read_uid(broken.last_uid) + 1
        if in_time and by_us and lost < read_uid(request.uid):
            frames = head_frames(_COMMIT, lost)
            self._send(Reply(connection, _COMMIT.name, *frames, _COMMIT.negative))
