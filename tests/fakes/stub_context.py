"""A worker context for tests: real layout, memory of its own, copies written as plain loops.

It counts what is opened and closed, and hooks run before each step, so that a test can make a step
slow, fail, or never finish (wait for an event or a barrier) without knowing how copies work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from threading import Lock

from lmcache_nodeagent.contexts.base import BeforeChunk, WorkerContext, go_on
from lmcache_nodeagent.contexts.block_ids import read_block_ids
from lmcache_nodeagent.contexts.layout import ChunkLayout, GroupLayout, plan_layout
from lmcache_nodeagent.contexts.segments import SHM_DIRECTORY
from lmcache_nodeagent.errors import TransferError
from lmcache_nodeagent.protocol.messages import EngineGroupInfo, LayoutHints, TensorDescriptor


def _nothing() -> None:
    pass


@dataclass
class StubHooks:
    """Called without arguments before the step they name; may block or raise."""

    before_open: Callable[[], None] = _nothing
    before_gather: Callable[[], None] = _nothing
    before_scatter: Callable[[], None] = _nothing
    before_close: Callable[[], None] = _nothing


@dataclass
class StubCounts:
    """What has happened so far, over all contexts of one opener. Threads: any."""

    opened: int = 0
    closed: int = 0
    gathered_chunks: int = 0
    scattered_chunks: int = 0
    open_handles: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Make the lock."""
        self._lock = Lock()  # guards: every field

    def add(self, **changes: int) -> None:
        """Raise counters by name."""
        with self._lock:
            for name, change in changes.items():
                setattr(self, name, getattr(self, name) + change)

    def handle(self, name: str, change: int) -> None:
        """Count one mapping of a segment more or less; segments without one disappear."""
        with self._lock:
            left = self.open_handles.get(name, 0) + change
            self.open_handles[name] = left
            if left == 0:
                del self.open_handles[name]


class StubOpener:
    """A `ContextOpener` whose contexts are `StubContext`.

    `memory` maps segment names to their bytes; segments not in it are made on the way. `contexts`
    lists what was opened, in order.
    """

    def __init__(
        self, hooks: StubHooks | None = None, memory: Mapping[str, bytearray] | None = None
    ) -> None:
        self.hooks = hooks or StubHooks()
        self.memory: dict[str, bytearray] = dict(memory or {})
        self.counts = StubCounts()
        self.contexts: list[StubContext] = []

    def __call__(
        self,
        tensors: Sequence[TensorDescriptor],
        hints: LayoutHints,
        groups: Sequence[EngineGroupInfo],
        chunk_tokens: int,
        *,
        directory: Path = SHM_DIRECTORY,
    ) -> WorkerContext:
        """Open a context, after the hook."""
        del directory
        self.hooks.before_open()
        layout = plan_layout(tensors, hints, groups, chunk_tokens)
        used = {layer.index for group in layout.groups for layer in group.layers}
        for tensor in tensors:
            self.memory.setdefault(tensor.shm_name, bytearray(tensor.nbytes))
        memory = {index: self.memory[tensors[index].shm_name] for index in used}
        handles = frozenset(tensors[index].shm_name for index in used)
        context = StubContext(layout, memory, handles, self.hooks, self.counts)
        self.contexts.append(context)
        return context


class StubContext:
    """See the module. `memory` has the segment of each layer, by tensor index."""

    def __init__(
        self,
        layout: ChunkLayout,
        memory: Mapping[int, bytearray],
        handles: frozenset[str],
        hooks: StubHooks,
        counts: StubCounts,
    ) -> None:
        self._layout = layout
        self._memory = memory
        self._handles = handles
        self._hooks = hooks
        self._counts = counts
        self._lock = Lock()  # guards: _closed
        self._closed = False
        self.is_usable = True
        counts.add(opened=1)
        for handle in handles:
            counts.handle(handle, +1)

    @property
    def nbytes(self) -> int:
        """Bytes of the segments in use."""
        return sum(len(data) for data in {id(m): m for m in self._memory.values()}.values())

    @property
    def handles(self) -> frozenset[str]:
        """The segments' names."""
        return self._handles

    @property
    def layout(self) -> ChunkLayout:
        """As planned by the real code."""
        return self._layout

    @property
    def closed(self) -> bool:
        """Whether `close` has begun its work."""
        with self._lock:
            return self._closed

    def check_block_ids(self, block_ids: Sequence[Sequence[int]], chunks: int) -> None:
        """As the real code."""
        read_block_ids(self._layout, block_ids, chunks)

    def gather(
        self,
        block_ids: Sequence[Sequence[int]],
        chunk_indices: Sequence[int],
        destinations: Sequence[memoryview],
        before_chunk: BeforeChunk = go_on,
    ) -> None:
        """Copy byte by byte, after the hook."""
        pairs = list(zip(chunk_indices, destinations, strict=True))
        self._check(block_ids, pairs, writable=True)
        self._hooks.before_gather()
        for chunk, destination in pairs:
            before_chunk()
            view = destination.cast("B")
            view[:] = bytes(len(view))
            for group in self._layout.groups:
                for at, memory, start in self._heads(group, block_ids, chunk, 0):
                    view[at : at + group.head_bytes] = memory[start : start + group.head_bytes]
        self._counts.add(gathered_chunks=len(pairs))

    def scatter(
        self,
        block_ids: Sequence[Sequence[int]],
        chunk_sources: Sequence[tuple[int, memoryview]],
        skip_tokens: int,
        before_chunk: BeforeChunk = go_on,
    ) -> None:
        """Copy byte by byte, after the hook."""
        self._check(block_ids, chunk_sources, writable=False)
        self._hooks.before_scatter()
        for chunk, source in chunk_sources:
            before_chunk()
            view = source.cast("B")
            for group in self._layout.groups:
                for at, memory, start in self._heads(group, block_ids, chunk, skip_tokens):
                    memory[start : start + group.head_bytes] = view[at : at + group.head_bytes]
        self._counts.add(scattered_chunks=len(chunk_sources))

    def close(self) -> None:
        """Count once, after the hook."""
        with self._lock:
            first, self._closed = not self._closed, True
        if first:
            self._hooks.before_close()
            self._counts.add(closed=1)
            for handle in self._handles:
                self._counts.handle(handle, -1)

    def _check(
        self,
        block_ids: Sequence[Sequence[int]],
        pairs: Sequence[tuple[int, memoryview]],
        *,
        writable: bool,
    ) -> None:
        if self.closed:
            raise TransferError("the context is closed")
        for chunk, data in pairs:
            wrong = data.nbytes != self._layout.object_nbytes or (writable and data.readonly)
            if chunk < 0 or wrong or not data.c_contiguous:
                raise TransferError(f"chunk {chunk} with an object of {data.nbytes} bytes")
        self.check_block_ids(block_ids, max((chunk for chunk, _ in pairs), default=-1) + 1)

    def _heads(
        self, group: GroupLayout, block_ids: Sequence[Sequence[int]], chunk: int, skip_tokens: int
    ) -> Iterator[tuple[int, bytearray, int]]:
        """Yield (object offset, segment, segment offset) of each head of each slot that moves."""
        planes, _, slots, heads, _ = group.layers[0].shape
        per_chunk = group.blocks_per_chunk
        ids = block_ids[group.block_list][chunk * per_chunk : (chunk + 1) * per_chunk]
        front = per_chunk - group.window_blocks
        for block in range(front, per_chunk):
            if chunk * per_chunk + block < skip_tokens // group.tokens_per_block:
                continue
            indices = product(range(planes), range(len(group.layers)), range(slots), range(heads))
            for plane, number, slot, head in indices:
                layer = group.layers[number]
                row = (plane * len(group.layers) + number) * group.window_blocks + block - front
                at = group.offset + ((row * slots + slot) * heads + head) * group.head_bytes
                place = (plane, ids[block], slot, head, 0)
                start = layer.offset
                start += sum(i * s for i, s in zip(place, layer.strides, strict=True))
                yield at, self._memory[layer.index], start
