"""A context on host memory: the shared memory segments of a CPU worker (`cpu_shm`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Condition

from lmcache_nodeagent.contexts.base import BeforeChunk, go_on
from lmcache_nodeagent.contexts.block_ids import BlockTable, read_block_ids
from lmcache_nodeagent.contexts.copying import GroupCopier
from lmcache_nodeagent.contexts.layout import ChunkLayout, plan_layout
from lmcache_nodeagent.contexts.segments import SHM_DIRECTORY, Segment, open_segment
from lmcache_nodeagent.errors import LayoutError, TransferError
from lmcache_nodeagent.protocol.messages import EngineGroupInfo, LayoutHints, TensorDescriptor

HOST_TAG = "cpu_shm"
"""Descriptor type of POSIX shared memory."""


def open_host_context(
    tensors: Sequence[TensorDescriptor],
    hints: LayoutHints,
    groups: Sequence[EngineGroupInfo],
    chunk_tokens: int,
    *,
    directory: Path = SHM_DIRECTORY,
) -> HostContext:
    """Map the segments behind a registration; everything or nothing is open afterwards.

    A `ContextOpener`. Segments that only left-out layers use are not mapped.

    Raises:
        LayoutError: tensors that are not host memory, cannot be mapped, or have no known layout.
    """
    for index, tensor in enumerate(tensors):
        if tensor.type != HOST_TAG:
            raise LayoutError(
                f"tensor {index} is {tensor.type!r} memory; this agent maps {HOST_TAG!r} only, so "
                "register engine-driven (SHM or pickle transfers) or run the engine on CPU"
            )
    layout = plan_layout(tensors, hints, groups, chunk_tokens)
    used = {layer.index for group in layout.groups for layer in group.layers}
    segments = _open_all([tensors[index] for index in sorted(used)], directory)
    return HostContext(layout, {i: segments[tensors[i].shm_name] for i in used})


class HostContext:
    """KV tensors in host memory, mapped read and write. Threads: any; see `WorkerContext`."""

    def __init__(self, layout: ChunkLayout, segments: Mapping[int, Segment]) -> None:
        """`segments` has the segment of each layer by tensor index; they are closed with this."""
        self._layout = layout
        self._segments = tuple(dict.fromkeys(segments.values()))
        self._nbytes = sum(segment.nbytes for segment in self._segments)
        self._handles = frozenset(segment.handle for segment in self._segments)
        self._idle = Condition()  # guards: _copies, _closing, _closed
        self._copies = 0
        self._closing = False
        self._closed = False
        self._copiers = tuple(
            GroupCopier(group, [memoryview(segments[layer.index].buffer) for layer in group.layers])
            for group in layout.groups
        )

    @property
    def nbytes(self) -> int:
        """Bytes mapped, each segment counted once."""
        return self._nbytes

    @property
    def handles(self) -> frozenset[str]:
        """`<device>:<inode>` of each segment."""
        return self._handles

    @property
    def is_usable(self) -> bool:
        """See `WorkerContext.is_usable`."""
        return not any(segment.is_lost for segment in self._segments)

    @property
    def layout(self) -> ChunkLayout:
        """How the bytes of one chunk are ordered."""
        return self._layout

    def check_block_ids(self, block_ids: Sequence[Sequence[int]], chunks: int) -> None:
        """See `WorkerContext.check_block_ids`."""
        read_block_ids(self._layout, block_ids, chunks)

    def gather(
        self,
        block_ids: Sequence[Sequence[int]],
        chunk_indices: Sequence[int],
        destinations: Sequence[memoryview],
        before_chunk: BeforeChunk = go_on,
    ) -> None:
        """See `WorkerContext.gather`."""
        self._check_objects(destinations, writable=True)
        if len(chunk_indices) != len(destinations):
            raise TransferError(f"{len(destinations)} destinations for {len(chunk_indices)} chunks")
        tables = read_block_ids(self._layout, block_ids, _chunks(chunk_indices))
        with self._copying():
            self._gather(tables, chunk_indices, destinations, before_chunk)

    def scatter(
        self,
        block_ids: Sequence[Sequence[int]],
        chunk_sources: Sequence[tuple[int, memoryview]],
        skip_tokens: int,
        before_chunk: BeforeChunk = go_on,
    ) -> None:
        """See `WorkerContext.scatter`."""
        chunk_indices = [index for index, _ in chunk_sources]
        sources = [source for _, source in chunk_sources]
        self._check_objects(sources, writable=False)
        tables = read_block_ids(self._layout, block_ids, _chunks(chunk_indices))
        with self._copying():
            self._scatter(tables, chunk_indices, sources, skip_tokens, before_chunk)

    def close(self) -> None:
        """See `WorkerContext.close`."""
        with self._idle:
            first, self._closing = not self._closing, True
            # No timeout: a copy in flight ends by itself, and unmapping under it would be fatal.
            self._idle.wait_for(lambda: self._copies == 0 if first else self._closed)
        if not first:
            return
        self._copiers = ()  # their views keep the mappings open
        for segment in self._segments:
            segment.close()
        with self._idle:
            self._closed = True
            self._idle.notify_all()

    @contextmanager
    def _copying(self) -> Iterator[None]:
        """Hold the mappings open for one copy. Views of them must not outlive the block."""
        with self._idle:
            if self._closing:
                raise TransferError("the context is closed")
            self._copies += 1
        try:
            self._check_whole()
            yield
            self._check_whole()  # what was copied may be zeros otherwise
        finally:
            with self._idle:
                self._copies -= 1
                self._idle.notify_all()

    def _check_whole(self) -> None:
        for segment in self._segments:
            if not segment.is_whole():
                raise TransferError(
                    f"shared memory {segment.name!r} was cut short; the worker has to register"
                    " its memory again"
                )

    def _gather(
        self,
        tables: Sequence[BlockTable],
        chunk_indices: Sequence[int],
        destinations: Sequence[memoryview],
        before_chunk: BeforeChunk,
    ) -> None:
        for copier, table in zip(self._copiers, tables, strict=True):
            copier.gather(table, chunk_indices, destinations, before_chunk)

    def _scatter(
        self,
        tables: Sequence[BlockTable],
        chunk_indices: Sequence[int],
        sources: Sequence[memoryview],
        skip_tokens: int,
        before_chunk: BeforeChunk,
    ) -> None:
        for copier, table in zip(self._copiers, tables, strict=True):
            copier.scatter(table, chunk_indices, sources, skip_tokens, before_chunk)

    def _check_objects(self, objects: Sequence[memoryview], *, writable: bool) -> None:
        expected = self._layout.object_nbytes
        for data in objects:
            if data.nbytes != expected or not data.c_contiguous or (writable and data.readonly):
                raise TransferError(
                    f"an object is {expected} contiguous bytes, not {data.nbytes} "
                    f"(contiguous: {data.c_contiguous}, read-only: {data.readonly})"
                )


def _chunks(chunk_indices: Sequence[int]) -> int:
    """Chunks that the range must have at least."""
    if min(chunk_indices, default=0) < 0:
        raise TransferError(f"chunk index {min(chunk_indices)} is negative")
    return max(chunk_indices, default=-1) + 1


def _open_all(tensors: Sequence[TensorDescriptor], directory: Path) -> dict[str, Segment]:
    """Map each distinct segment once; by the names the tensors use."""
    sizes: dict[str, int] = {}
    for tensor in tensors:
        sizes[tensor.shm_name] = max(tensor.nbytes, sizes.get(tensor.shm_name, 0))
    segments: dict[str, Segment] = {}
    try:
        for name, nbytes in sizes.items():
            segments[name] = open_segment(name, nbytes, directory)
    except BaseException:
        for segment in segments.values():
            segment.close()
        raise
    return segments
