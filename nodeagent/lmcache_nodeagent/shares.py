"""How many of something there are, in all and by peer, where one peer may have half."""

from __future__ import annotations

from collections import Counter


class Shares:
    """Threads: one at a time; whoever has it holds a lock over it."""

    def __init__(self, most: int) -> None:
        """All peers together may have `most`."""
        self.most = most
        self.in_all = 0
        self._of_peers: Counter[str] = Counter()  # never 0

    def words(self, peer: str) -> str:
        """Say how many there are, and may be."""
        return (
            f"{self._of_peers[peer]} of this peer, at most {self.most // 2}; {self.in_all} in all,"
            f" at most {self.most}; end some, or let them end sooner (--session-ttl-seconds)"
        )

    def has_room(self, peer: str, number: int) -> bool:
        """Tell whether a peer may have so many more."""
        theirs = self._of_peers[peer] + number
        return self.in_all + number <= self.most and theirs <= self.most // 2

    def add(self, peer: str, number: int) -> None:
        """Note that a peer has so many more, or fewer."""
        self.in_all += number
        self._of_peers[peer] += number
        if not self._of_peers[peer]:
            del self._of_peers[peer]
