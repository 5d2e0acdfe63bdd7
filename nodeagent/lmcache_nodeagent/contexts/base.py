"""What every context offers: one instance's paged KV memory, copied chunk by chunk.

`host.py` maps shared host memory. A context never decides who may use it or for how long; the
transfer modules do that, and drain what is in flight before they close it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from lmcache_nodeagent.contexts.layout import ChunkLayout
from lmcache_nodeagent.contexts.segments import SHM_DIRECTORY
from lmcache_nodeagent.protocol.messages import EngineGroupInfo, LayoutHints, TensorDescriptor

BeforeChunk = Callable[[], None]
"""Called before each chunk is copied. It stops the copy by raising; the rest is not written."""


def go_on() -> None:
    """Let a copy go on."""


class WorkerContext(Protocol):
    """The mapped KV tensors of one instance. Threads: any, several copies at a time.

    `block_ids` holds one list per registered `EngineGroupInfo`, in registration order (exactly one
    list if none was registered), and covers a token range that starts at a chunk boundary. Chunk
    indices count from the start of that range.
    """

    @property
    def nbytes(self) -> int:
        """Bytes of worker memory that are mapped."""
        ...

    @property
    def handles(self) -> frozenset[str]:
        """One name per mapped segment, the same for every context that maps the same memory."""
        ...

    @property
    def is_usable(self) -> bool:
        """False once memory was found to be taken away; a registration then replaces it."""
        ...

    @property
    def layout(self) -> ChunkLayout:
        """How the bytes of one chunk are ordered."""
        ...

    def check_block_ids(self, block_ids: Sequence[Sequence[int]], chunks: int) -> None:
        """Refuse block ids that cannot serve a range of `chunks` chunks.

        Raises:
            LayoutError: another number of lists than registered, too few ids, a length that is no
                multiple of the blocks per chunk, or an id outside the tensors.
        """
        ...

    def gather(
        self,
        block_ids: Sequence[Sequence[int]],
        chunk_indices: Sequence[int],
        destinations: Sequence[memoryview],
        before_chunk: BeforeChunk = go_on,
    ) -> None:
        """Copy chunks out of worker memory; `destinations[i]` receives chunk `chunk_indices[i]`.

        Every byte of a destination is written, unless `before_chunk` raises. Nothing is, if an
        argument is refused.

        Raises:
            LayoutError: as `check_block_ids`, for the chunks up to the last one named.
            TransferError: a destination of the wrong size, or the context cannot copy any more.
        """
        ...

    def scatter(
        self,
        block_ids: Sequence[Sequence[int]],
        chunk_sources: Sequence[tuple[int, memoryview]],
        skip_tokens: int,
        before_chunk: BeforeChunk = go_on,
    ) -> None:
        """Copy (chunk index, object bytes) pairs into worker memory.

        The first `skip_tokens` tokens of the range, rounded down to whole blocks, are not written:
        another request may be reading them.

        Raises:
            LayoutError: as `check_block_ids`, for the chunks up to the last one named.
            TransferError: a source of the wrong size, or the context cannot copy any more.
        """
        ...

    def close(self) -> None:
        """Unmap. Waits for copies in flight; a second call returns once the first is done."""
        ...


class ContextOpener(Protocol):
    """Maps the tensors of a registration."""

    def __call__(
        self,
        tensors: Sequence[TensorDescriptor],
        hints: LayoutHints,
        groups: Sequence[EngineGroupInfo],
        chunk_tokens: int,
        *,
        directory: Path = SHM_DIRECTORY,
    ) -> WorkerContext:
        """Open everything or nothing; shared memory is looked for in `directory`.

        Raises:
            LayoutError: what is wrong with the tensors, and what would be accepted.
        """
        ...
