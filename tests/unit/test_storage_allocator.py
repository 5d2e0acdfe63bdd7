"""The byte allocator: first fit, page alignment, all-or-nothing, full coalescing."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lmcache_nodeagent.storage.allocator import ALIGNMENT_BYTES, ByteAllocator, aligned_bytes

PAGE = ALIGNMENT_BYTES
PAGES = 32


@pytest.mark.parametrize(("size", "taken"), [(1, PAGE), (PAGE, PAGE), (PAGE + 1, 2 * PAGE)])
def test_slots_take_whole_pages(size: int, taken: int) -> None:
    """A slot is rounded up to pages, and the next one starts after them."""
    space = ByteAllocator(4 * PAGE)
    assert aligned_bytes(size) == taken
    assert space.allocate(size) == [0]
    assert space.used_bytes == taken
    assert space.allocate(1) == [taken]


def test_a_part_page_at_the_end_is_not_used() -> None:
    """Capacity is whole pages; a region without one is a programming error."""
    assert ByteAllocator(2 * PAGE + 1).capacity_bytes == 2 * PAGE
    with pytest.raises(ValueError, match="hold no slot"):
        ByteAllocator(PAGE - 1)


def test_several_slots_may_come_from_several_extents() -> None:
    """A call for many slots fills holes front to back, each slot in one piece."""
    space = ByteAllocator(8 * PAGE)
    offsets = space.allocate(PAGE, 8)
    assert offsets == [n * PAGE for n in range(8)]
    for page in (1, 3, 4, 6, 7):
        space.free(page * PAGE)
    assert space.allocate(2 * PAGE, 2) == [3 * PAGE, 6 * PAGE]
    assert space.allocate(1, 2) is None
    assert space.allocate(1) == [PAGE]
    assert space.free_bytes == 0


def test_what_does_not_fit_takes_nothing() -> None:
    """All slots or none: a refused call leaves the space as it was."""
    space = ByteAllocator(4 * PAGE)
    assert space.allocate(PAGE, 5) is None
    assert space.allocate(3 * PAGE, 2) is None
    assert space.used_bytes == 0
    assert space.allocate(4 * PAGE) == [0]


@pytest.mark.parametrize(("size", "count"), [(0, 1), (-1, 1), (1, 0)])
def test_nonsense_is_refused(size: int, count: int) -> None:
    """Sizes and counts start at one."""
    with pytest.raises(ValueError, match="cannot allocate"):
        ByteAllocator(PAGE).allocate(size, count)


def test_a_slot_is_freed_once() -> None:
    """Freeing twice, or what was never taken, is an error and changes nothing."""
    space = ByteAllocator(2 * PAGE)
    space.allocate(1)
    space.free(0)
    for offset in (0, PAGE, 17):
        with pytest.raises(ValueError, match=f"no slot starts at offset {offset}"):
            space.free(offset)
    assert space.free_bytes == 2 * PAGE


class AllocatorMachine(RuleBasedStateMachine):
    """Compares the allocator with a map of which page belongs to which slot."""

    def __init__(self) -> None:
        super().__init__()
        self.space = ByteAllocator(PAGES * PAGE)
        self.slots: dict[int, int] = {}  # offset -> pages
        self.pages: list[int | None] = [None] * PAGES  # offset of the slot that has the page

    @rule(size=st.integers(1, 5 * PAGE), count=st.integers(1, 6))
    def allocate(self, size: int, count: int) -> None:
        """The allocator finds room exactly if the page map has it."""
        pages = -(-size // PAGE)
        offsets = self.space.allocate(size, count)
        room = sum(run // pages for run in self.free_runs())
        assert (offsets is not None) == (room >= count)
        for offset in offsets or ():
            first = offset // PAGE
            assert offset % PAGE == 0
            assert self.pages[first : first + pages] == [None] * pages
            self.pages[first : first + pages] = [offset] * pages
            self.slots[offset] = pages

    @precondition(lambda self: self.slots)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        """A freed slot's pages are free."""
        offset = data.draw(st.sampled_from(sorted(self.slots)))
        self.space.free(offset)
        pages = self.slots.pop(offset)
        self.pages[offset // PAGE : offset // PAGE + pages] = [None] * pages

    @invariant()
    def counts_agree(self) -> None:
        """Used and free bytes are exact."""
        assert self.space.used_bytes == sum(self.slots.values()) * PAGE
        assert self.space.free_bytes == self.pages.count(None) * PAGE

    @invariant()
    def free_extents_are_coalesced(self) -> None:
        """The free list has one entry for each run of free pages, never two neighbours."""
        extents = [self.space._free[start] // PAGE for start in self.space._starts]
        assert extents == self.free_runs()
        assert len(self.space._free) == len(extents)

    def free_runs(self) -> list[int]:
        """Return the lengths of all runs of free pages."""
        runs = "".join("x" if owner is not None else " " for owner in self.pages).split("x")
        return [len(run) for run in runs if run]

    def teardown(self) -> None:
        """Once everything is freed the space is one piece again."""
        for offset in self.slots:
            self.space.free(offset)
        assert self.space.allocate(PAGES * PAGE) == [0]


TestAllocatorMachine = AllocatorMachine.TestCase
TestAllocatorMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
