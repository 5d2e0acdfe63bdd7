"""Who is at the other end of each open link, and whether that peer may have one more.

Connections take descriptors, of which there are only so many: libzmq aborts when its Unix listener
finds none left, and nobody else is let in. So there are no more than leave room for the rest of the
agent, and no peer has more than half of them: a worker can come back whatever others do.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

from lmcache_nodeagent.events import ConnectionTurnedAway
from lmcache_nodeagent.liveness.evidence import UNKNOWN_PEER
from lmcache_nodeagent.transport.peers import caller_of, turn_away

if TYPE_CHECKING:
    from lmcache_nodeagent.events import Publish
    from lmcache_nodeagent.liveness.evidence import Peer


_TURNED_AWAY_AT_ONCE = 64
"""Whoever is turned away may come again at once: messages are read, and others let in, between.
With the time between two calls (20 ms) this bounds what it costs: 3,200 a second."""


class Callers:
    """By descriptor of the open link. Thread: zmq-router, all of it.

    Links that are turned away are still open for a moment; they count for nobody.
    """

    def __init__(self, max_links: int, publish: Publish) -> None:
        self.max_links = max_links
        self._publish = publish
        self._callers: dict[int, Peer] = {}
        self._links: Counter[str] = Counter()  # by peer; never 0
        self._unwelcome: dict[int, ConnectionTurnedAway] = {}  # to be turned away, in order
        self._turned_away: set[int] = set()  # and not gone yet

    @property
    def _max_links_of_a_peer(self) -> int:
        return (self.max_links + 1) // 2

    def called(self, descriptor: int, slot: str) -> None:
        """Note who was accepted, at a slot if at one."""
        self.gone(descriptor)
        caller = caller_of(descriptor)
        if slot:  # one container's, whose processes may have no number here
            caller = replace(caller, identity=f"slot:{slot}")
        reason = self._reason_against(caller)
        if reason:
            self._unwelcome[descriptor] = ConnectionTurnedAway(reason, caller.text)
            return
        self._callers[descriptor] = caller
        self._links[caller.identity] += 1

    def _reason_against(self, caller: Peer) -> str:
        if len(self._callers) >= self.max_links:
            return "all"
        theirs = self._links[caller.identity] if caller.identity else 0
        return "peer" if theirs >= self._max_links_of_a_peer else ""

    @property
    def has_unwelcome(self) -> bool:
        """Tell whether `turn_away` has more to do."""
        return bool(self._unwelcome)

    def turn_away(self) -> None:
        """End some of the connections that are too many."""
        for descriptor in tuple(islice(self._unwelcome, _TURNED_AWAY_AT_ONCE)):
            self._publish(self._unwelcome.pop(descriptor))
            self._turned_away.add(descriptor)
            turn_away(descriptor)

    def gone(self, descriptor: int) -> str | None:
        """Forget a link that has ended; return its caller's name, None if it was turned away."""
        if descriptor in self._turned_away:
            self._turned_away.remove(descriptor)
            return None
        if self._unwelcome.pop(descriptor, None) is not None:
            return None
        caller = self._callers.pop(descriptor, None)
        if caller is None:
            return UNKNOWN_PEER.text
        self._links[caller.identity] -= 1
        if not self._links[caller.identity]:
            del self._links[caller.identity]
        return caller.text
