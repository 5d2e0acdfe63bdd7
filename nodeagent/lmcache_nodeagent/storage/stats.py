"""What L1 holds and what has become of its objects, in figures."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class L1Stats:
    """A consistent snapshot. Bytes are what the slots take, pages included.

    `used_bytes` is the sum of resident, staging and detached bytes. Totals never fall.

    Attributes:
        pinned_bytes: Resident objects that somebody has pinned, and all detached ones.
        staging_bytes: Reservations that nobody has settled yet.
        detached_bytes: Cleared by force while pinned: invisible, freed with the last pin.
        evicted_total: Objects that gave way to others.
        refused_total: Reservations that did not fit.
        taken_over_total: Keys that passed from an expired reservation to a new one.
        discarded_total: Slots that were committed too late to become visible.
        excess_unpins_total: Unpins without a pin: a fault of the caller's bookkeeping.
    """

    capacity_bytes: int
    used_bytes: int
    pinned_bytes: int
    staging_bytes: int
    detached_bytes: int
    objects: int
    pinned_objects: int
    open_reservations: int
    evicted_total: int
    refused_total: int
    taken_over_total: int
    discarded_total: int
    excess_unpins_total: int


@dataclass(slots=True)
class L1Totals:
    """The running totals of `L1Stats`; the store counts them under its lock."""

    evicted: int = 0
    refused: int = 0
    taken_over: int = 0
    discarded: int = 0
    excess_unpins: int = 0
