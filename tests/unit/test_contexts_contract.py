"""The shared context contract, on host memory and on the stub that other tests use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from lmcache_nodeagent.contexts.base import WorkerContext
from lmcache_nodeagent.contexts.host import open_host_context
from lmcache_nodeagent.protocol.messages import EngineGroupInfo, LayoutHints, TensorDescriptor
from tests.contract.context_contract import ContextContract, Harness
from tests.fakes.paged_memory import create_segment
from tests.fakes.stub_context import StubOpener


class HostHarness:
    """Files in a temporary folder stand for /dev/shm."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._memory: dict[str, NDArray[np.uint8]] = {}

    def open(
        self,
        tensors: Sequence[TensorDescriptor],
        hints: LayoutHints,
        groups: Sequence[EngineGroupInfo],
        chunk_tokens: int,
    ) -> WorkerContext:
        """Create the segments and map them."""
        for tensor in tensors:
            self._memory[tensor.shm_name] = create_segment(
                self._directory, tensor.shm_name, tensor.nbytes
            )
        return open_host_context(tensors, hints, groups, chunk_tokens, directory=self._directory)

    def memory(self, name: str) -> NDArray[np.uint8]:
        """Bytes of a file."""
        return self._memory[name]

    def close(self) -> None:
        """Drop the mappings of the test itself."""
        self._memory.clear()


class StubHarness:
    """The opener keeps the memory itself."""

    def __init__(self) -> None:
        self._opener = StubOpener()

    def open(
        self,
        tensors: Sequence[TensorDescriptor],
        hints: LayoutHints,
        groups: Sequence[EngineGroupInfo],
        chunk_tokens: int,
    ) -> WorkerContext:
        """Open a stub."""
        return self._opener(tensors, hints, groups, chunk_tokens)

    def memory(self, name: str) -> NDArray[np.uint8]:
        """Bytes of a bytearray."""
        return np.frombuffer(self._opener.memory[name], dtype=np.uint8)


class TestHostContext(ContextContract):
    """Mapped files."""

    @pytest.fixture
    def harness(self, tmp_path: Path) -> Iterator[Harness]:
        """A fresh folder."""
        harness = HostHarness(tmp_path)
        yield harness
        harness.close()


class TestStubContext(ContextContract):
    """Loops over bytearrays."""

    @pytest.fixture
    def harness(self) -> Harness:
        """A fresh opener."""
        return StubHarness()
