"""How much memory clients may take up by what waits: requests they sent, replies they do not read.

Counts of messages do not bound it: one message may have `--max-message-bytes`. What is beyond a
bound is answered no at once, as for a full queue; nobody's connection is closed for it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING

from lmcache_nodeagent.config_messages import MESSAGES_OF_ONE
from lmcache_nodeagent.errors import TooMuchWaiting

if TYPE_CHECKING:
    from lmcache_nodeagent.config import AgentConfig
    from lmcache_nodeagent.ids import RoutingId

COUNTED_BYTES = 16 << 10
"""Less is not counted, so that small requests pass whatever others send: queues bound those."""

_SHARE_OF_THE_MEMORY = 4


@dataclass(frozen=True, slots=True)
class Waiting:
    """What waits for threads or is with them, and what waits for clients to read it."""

    requests: WaitingBytes
    unread_replies: WaitingBytes

    @classmethod
    def for_config(cls, config: AgentConfig, free_bytes: int) -> Waiting:
        """Bound both, by a share of the memory that is free unless the configuration says more."""
        most = config.max_message_bytes
        total = config.max_waiting_bytes
        if total is None:
            total = max(MESSAGES_OF_ONE * most, free_bytes // _SHARE_OF_THE_MEMORY)
        return cls(
            WaitingBytes(total, most, "wait for replies before more, or raise --max-waiting-bytes"),
            WaitingBytes(total, most, "read the replies, or raise --max-waiting-bytes"),
        )


class Hold:
    """Bytes that are taken up until `give_back`; only its first call counts. Threads: any."""

    __slots__ = ("_waiting", "nbytes", "who")

    def __init__(self, waiting: WaitingBytes, who: RoutingId, nbytes: int) -> None:
        self._waiting = waiting
        self.who = who
        self.nbytes = nbytes

    def give_back(self) -> None:
        """Say that the bytes are gone."""
        self._waiting.gone(self)


class WaitingBytes:
    """Bytes of one kind that wait, in all and by connection. Threads: any."""

    def __init__(self, total_bytes: int, max_message_bytes: int, fix: str) -> None:
        """`fix` tells those who are refused what to do."""
        self._total_bytes = total_bytes
        self._of_one_bytes = min(
            MESSAGES_OF_ONE * max_message_bytes, max(max_message_bytes, total_bytes // 2)
        )
        self._fix = fix
        self._lock = Lock()  # guards: everything below
        self._holds: set[Hold] = set()
        self._by_connection: Counter[RoutingId] = Counter()  # never 0
        self._held_bytes = 0

    def take(self, who: RoutingId, nbytes: int) -> Hold | None:
        """Take bytes up for a connection; None for so few that they are not counted.

        Raises:
            TooMuchWaiting: one connection, or all together, would have more than they may.
        """
        if nbytes < COUNTED_BYTES:
            return None
        with self._lock:
            theirs, in_all = self._by_connection.get(who, 0), self._held_bytes
            room = min(self._of_one_bytes - theirs, self._total_bytes - in_all)
            if nbytes <= room:
                hold = Hold(self, who, nbytes)
                self._holds.add(hold)
                self._by_connection[who] += nbytes
                self._held_bytes += nbytes
                return hold
        raise TooMuchWaiting(
            f"{nbytes} bytes more, where {theirs} of at most {self._of_one_bytes} wait for this"
            f" connection, {in_all} of at most {self._total_bytes} for all; {self._fix}"
        )

    def gone(self, hold: Hold) -> None:
        """Take a hold out of the books, once."""
        with self._lock:
            if hold not in self._holds:
                return
            self._holds.remove(hold)
            self._held_bytes -= hold.nbytes
            self._by_connection[hold.who] -= hold.nbytes
            if not self._by_connection[hold.who]:
                del self._by_connection[hold.who]

    def held_bytes(self) -> int:
        """Count the bytes that are taken up now."""
        with self._lock:
            return self._held_bytes
