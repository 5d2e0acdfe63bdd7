"""Objects and worker memory equal, byte for byte, what LMCache 0.5.6 produced.

`recorded/chunk_layouts.json` is made by `tests/conformance/record_chunk_layouts.py`.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lmcache_nodeagent.contexts.host import open_host_context
from lmcache_nodeagent.protocol.messages import EngineGroupInfo, LayoutHints
from tests.fakes.paged_memory import create_segment, fill, kv_tensor

CASES: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parent / "recorded" / "chunk_layouts.json").read_text()
)


@pytest.mark.parametrize("name", CASES)
def test_bytes_equal_those_of_stock_lmcache(name: str, tmp_path: Path) -> None:
    """A store then a retrieve of a recorded registration gives the recorded digests."""
    case = CASES[name]
    tensors, memory = [], []
    for number, tensor in enumerate(case["tensors"]):
        tensors.append(kv_tensor(f"/{number}", **tensor))
        memory.append(create_segment(tmp_path, f"/{number}", tensor["nbytes"]))
        fill(memory[-1], number)
    context = open_host_context(
        tensors,
        LayoutHints(kv_layout=case["kv_layout"]),
        msgspec.convert(case["groups"], list[EngineGroupInfo]),
        case["chunk_tokens"],
        directory=tmp_path,
    )
    assert context.layout.object_nbytes == case["object_nbytes"]
    objects = [memoryview(bytearray(b"\xaa" * case["object_nbytes"])) for _ in range(3)]

    context.gather(case["store_block_ids"], [0, 1, 2], objects)
    assert [hashlib.sha256(data).hexdigest() for data in objects] == case["object_sha256"]

    context.scatter(
        case["retrieve_block_ids"], list(enumerate(objects)), case["retrieve_skip_tokens"]
    )
    context.close()
    digests = [hashlib.sha256(data.tobytes()).hexdigest() for data in memory]
    assert digests == case["memory_sha256"]
