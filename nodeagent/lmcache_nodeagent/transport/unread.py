"""Large replies that libzmq still holds: what they take up is given back once it lets them go."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import zmq

    from lmcache_nodeagent.ids import RoutingId
    from lmcache_nodeagent.transport.waiting_bytes import Hold


class UnreadReplies:
    """By connection, in the order sent: libzmq lets them go in that order. Thread: zmq-router.

    It does so when it has written a reply to the peer's socket, or when the connection ends.
    """

    def __init__(self) -> None:
        self._sent: dict[RoutingId, deque[tuple[zmq.MessageTracker, Hold]]] = {}

    def sent(self, tracker: zmq.MessageTracker, hold: Hold) -> None:
        """Note a reply that was handed to libzmq."""
        self._sent.setdefault(hold.who, deque()).append((tracker, hold))

    def tidy(self) -> None:
        """Give back what libzmq has let go."""
        for who, sent in tuple(self._sent.items()):
            while sent and sent[0][0].done:
                sent.popleft()[1].give_back()
            if not sent:
                del self._sent[who]
