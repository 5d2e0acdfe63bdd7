"""What one engine-driven worker was told to do in the shared pool and has not confirmed yet."""

from __future__ import annotations

from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING

from lmcache_nodeagent.errors import Overloaded

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lmcache_nodeagent.storage.objects import ObjectKey, Reservation

MAX_PENDING = 256
"""Of each kind. Stock workers have four; one that never confirms must not take all of L1."""

TransferKey = tuple["ObjectKey", ...]
"""The chunks of one transfer: prepare and commit of a worker belong together by them alone."""


@dataclass(slots=True, eq=False)
class PendingWrite:
    """Slots that a worker writes; `awaited` commits have to come before they are all written.

    More than one is awaited where a worker prepared the same chunks again meanwhile: its commits
    cannot be told apart, so only the last of them says that nobody writes any more.
    """

    reservation: Reservation
    started_at: float
    awaited: int = 1


class PendingTransfers:
    """Reservations and pins of one instance. Threads: any."""

    def __init__(self) -> None:
        self._lock = Lock()  # guards: everything below
        self._writes: dict[TransferKey, PendingWrite] = {}
        self._reads: dict[TransferKey, list[float]] = {}  # moments of the prepares

    def prepared_again(self, keys: TransferKey) -> bool:
        """Count a further prepare of chunks that the worker is writing; False if it is not."""
        with self._lock:
            write = self._writes.get(keys)
            if write is None:
                return False
            write.awaited += 1
            return True

    def begin_write(self, keys: TransferKey, reservation: Reservation, now: float) -> bool:
        """Remember a write; False, and counted, if another prepare of the chunks was faster.

        Raises:
            Overloaded: too many writes that were never confirmed.
        """
        with self._lock:
            write = self._writes.get(keys)
            if write is not None:
                write.awaited += 1
                return False
            if len(self._writes) >= MAX_PENDING:
                raise Overloaded(_too_many("stores"))
            self._writes[keys] = PendingWrite(reservation, now)
            return True

    def end_write(self, keys: TransferKey) -> tuple[bool, PendingWrite | None]:
        """Count a commit.

        Returns:
            Whether there is such a write; and the write, if no other commit is awaited.
        """
        with self._lock:
            write = self._writes.get(keys)
            if write is None:
                return False, None
            write.awaited -= 1
            if write.awaited:
                return True, None
            del self._writes[keys]
            return True, write

    def begin_read(self, keys: TransferKey, now: float) -> None:
        """Remember a read, whose chunks the caller has pinned once.

        Raises:
            Overloaded: too many reads that were never confirmed.
        """
        with self._lock:
            if sum(map(len, self._reads.values())) >= MAX_PENDING:
                raise Overloaded(_too_many("retrieves"))
            self._reads.setdefault(keys, []).append(now)

    def end_read(self, keys: TransferKey) -> float | None:
        """Forget a read, which is the caller's to unpin; return when it began. None: unknown."""
        with self._lock:
            moments = self._reads.get(keys)
            if moments is None:
                return None
            started_at = moments.pop(0)
            if not moments:
                del self._reads[keys]
            return started_at

    def reservations(self) -> Sequence[Reservation]:
        """Return what is being written."""
        with self._lock:
            return [write.reservation for write in self._writes.values()]

    def take_all(self) -> tuple[Sequence[Reservation], Sequence[TransferKey]]:
        """Forget everything; it is the caller's to abort and to unpin."""
        with self._lock:
            writes, self._writes = self._writes, {}
            reads, self._reads = self._reads, {}
        return (
            [write.reservation for write in writes.values()],
            [keys for keys, moments in reads.items() for _ in moments],
        )

    def __len__(self) -> int:
        """Count the reads and writes."""
        with self._lock:
            return len(self._writes) + sum(map(len, self._reads.values()))


def _too_many(kind: str) -> str:
    return (
        f"{MAX_PENDING} prepared {kind} of this worker were never committed, which is the most"
        " that is kept; restart the worker"
    )
