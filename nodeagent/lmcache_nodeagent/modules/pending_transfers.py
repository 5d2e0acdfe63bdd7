"""What one engine-driven worker was told to do in the shared pool and has not confirmed yet."""

from __future__ import annotations

from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING

from lmcache_nodeagent.errors import Overloaded

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lmcache_nodeagent.storage.objects import ObjectKey, Reservation

MAX_PENDING = 256
"""Of each kind. Stock workers have four; one that never confirms must not take all of L1."""

MAX_AWAITED = 4096
"""Stores that were told no and are remembered all the same."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """What prepare and commit of a worker have in common: the request, and its chunks.

    LMCache 0.5.6 goes by the chunks alone. Stock workers send the same key twice, and two of their
    threads may well store the same chunks for two requests at the same time.
    """

    request_id: str
    keys: tuple[ObjectKey, ...]


@dataclass(slots=True, eq=False)
class PendingWrite:
    """Slots that a worker writes; `awaited` commits have to come before they are all written.

    More than one is awaited where a worker prepared the same again meanwhile: its commits cannot
    be told apart, so only the last of them says that nobody writes any more. For the same reason
    a prepare that got no slots is remembered: its commit comes, too.
    """

    reservation: Reservation | None
    started_at: float
    awaited: int = 1


class PendingTransfers:
    """Reservations and pins of one instance. Threads: any."""

    def __init__(self) -> None:
        self._lock = Lock()  # guards: everything below
        self._writes: dict[Transfer, PendingWrite] = {}
        self._reads: dict[Transfer, list[float]] = {}  # moments of the prepares

    def prepared_again(self, transfer: Transfer) -> bool:
        """Count a further prepare of what the worker is writing; False if it is not."""
        with self._lock:
            write = self._writes.get(transfer)
            if write is None:
                return False
            write.awaited += 1
            return True

    def begin_write(self, transfer: Transfer, reservation: Reservation | None, now: float) -> bool:
        """Remember a write, or with None that there is nowhere to write.

        Returns:
            False where another prepare was faster: it is counted, the reservation is not needed.

        Raises:
            Overloaded: too many writes that were never confirmed; it is counted all the same.
        """
        with self._lock:
            write = self._writes.get(transfer)
            if write is not None:
                write.awaited += 1
                return False
            if len(self._writes) >= MAX_AWAITED:
                raise Overloaded(_too_many("stores"))
            writing = sum(
                bool(w.reservation and w.reservation.slots) for w in self._writes.values()
            )
            too_many = writing >= MAX_PENDING and reservation is not None
            self._writes[transfer] = PendingWrite(None if too_many else reservation, now)
            if too_many:
                raise Overloaded(_too_many("stores"))
            return True

    def end_write(self, transfer: Transfer) -> tuple[bool, PendingWrite | None]:
        """Count a commit.

        Returns:
            Whether there is such a write; and the write, if no other commit is awaited.
        """
        with self._lock:
            write = self._writes.get(transfer)
            if write is None:
                return False, None
            write.awaited -= 1
            if write.awaited:
                return True, None
            del self._writes[transfer]
            return True, write

    def begin_read(self, transfer: Transfer, now: float) -> None:
        """Remember a read, whose chunks the caller has pinned once.

        Raises:
            Overloaded: too many reads that were never confirmed.
        """
        with self._lock:
            if sum(map(len, self._reads.values())) >= MAX_PENDING:
                raise Overloaded(_too_many("retrieves"))
            self._reads.setdefault(transfer, []).append(now)

    def end_read(self, transfer: Transfer) -> float | None:
        """Forget a read, which is the caller's to unpin; return when it began. None: unknown."""
        with self._lock:
            moments = self._reads.get(transfer)
            if moments is None:
                return None
            started_at = moments.pop(0)
            if not moments:
                del self._reads[transfer]
            return started_at

    def reservations(self) -> Sequence[Reservation]:
        """Return what is being written."""
        with self._lock:
            return _reservations(self._writes)

    def take_all(self) -> tuple[Sequence[Reservation], Sequence[Transfer]]:
        """Forget everything; it is the caller's to abort and to unpin."""
        with self._lock:
            writes, self._writes = self._writes, {}
            reads, self._reads = self._reads, {}
        return (
            _reservations(writes),
            [transfer for transfer, moments in reads.items() for _ in moments],
        )

    @property
    def has_any(self) -> bool:
        """Tell whether something is open, at a glance: for those who hold another lock."""
        return bool(self._writes or self._reads)

    def __len__(self) -> int:
        """Count the reads and writes."""
        with self._lock:
            return len(self._writes) + sum(map(len, self._reads.values()))


def _reservations(writes: Mapping[Transfer, PendingWrite]) -> list[Reservation]:
    found = (write.reservation for write in writes.values())
    return [reservation for reservation in found if reservation is not None]


def _too_many(kind: str) -> str:
    return (
        f"{MAX_PENDING} prepared {kind} of this worker were never committed, which is the most"
        " that is kept; restart the worker"
    )
