"""Record how the stock environment's PyTorch pickles the tensors of engine-driven workers.

    .venvs/stock/bin/python tests/conformance/record_pickles.py \
        > tests/unit/recorded/pickled_tensors.json

`tests/unit/test_protocol_pickled_tensors.py` reads each payload with our reader. Each case has two
tensors, as a store of two chunks.
"""

# mypy: disable-error-code="import-not-found"
# The stock packages are not installed where types are checked.

from __future__ import annotations

import hashlib
import json
import pickle
import sys
from typing import Any

import torch

SHAPES = {"planes": (2, 2, 4, 3), "single": (3, 4, 5), "ones": (1, 1, 4, 1)}
DTYPES = (
    *("bfloat16", "float16", "float32", "float64", "uint8", "int8", "int16", "int32", "int64"),
    "bool",
)


def record(shape: tuple[int, ...], dtype: str, protocol: int) -> dict[str, Any]:
    """Pickle two tensors as `EngineDrivenContextPickle` does."""
    noise = torch.Generator().manual_seed(7)
    bytes_per_element = torch.empty((), dtype=getattr(torch, dtype)).element_size()
    tensors = []
    for _ in range(2):
        highest = 2 if dtype == "bool" else 256
        raw = torch.randint(0, highest, (*shape, bytes_per_element), generator=noise)
        as_bytes = raw.to(torch.uint8).contiguous()
        tensors.append(as_bytes.view(-1).view(getattr(torch, dtype)).view(shape).clone())
    digests = [
        hashlib.sha256(tensor.view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
        for tensor in tensors
    ]
    payload = pickle.dumps(tensors, protocol=protocol)
    return {
        "dtype": dtype,
        "shape": list(shape),
        "protocol": protocol,
        "sha256": digests,
        "payload": payload.hex(),
    }


def main() -> None:
    """Write the cases, one a line."""
    cases = [record(SHAPES["planes"], dtype, pickle.DEFAULT_PROTOCOL) for dtype in DTYPES]
    cases += [record(shape, "bfloat16", pickle.DEFAULT_PROTOCOL) for shape in SHAPES.values()]
    cases += [record(SHAPES["planes"], "bfloat16", protocol) for protocol in (3, 5)]
    lines = ",\n".join(json.dumps(case) for case in cases)
    sys.stdout.write(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
