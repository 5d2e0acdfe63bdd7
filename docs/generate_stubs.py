"""Write the Python side of the kubelet's protocol; with `--check`, only compare.

`make generate` and `make verify` run it. The protocol itself is published by Kubernetes and kept
unchanged beside what is made of it.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from grpc_tools import protoc

_SOURCES = Path(__file__).parents[1] / "nodeagent"
_PROTOCOL = Path("lmcache_nodeagent/device_plugin/protocol")


def main(arguments: Sequence[str]) -> int:
    """Write or check every stub; return the exit status."""
    stale = 0
    for name, text in stubs().items():
        path = _SOURCES / name
        if "--check" not in arguments:
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            stale += 1
            print(f"{path} is out of date", file=sys.stderr)
    if stale:
        print("run `make generate` and commit the result", file=sys.stderr)
    return 1 if stale else 0


def stubs() -> Mapping[str, str]:
    """Return the stubs by their path below `nodeagent/`."""
    protocols = sorted(str(path) for path in (_SOURCES / _PROTOCOL).glob("*.proto"))
    with tempfile.TemporaryDirectory() as folder:
        kinds = ("python_out", "pyi_out", "grpc_python_out")
        status = protoc.main(
            ["", f"-I{_SOURCES}", *(f"--{kind}={folder}" for kind in kinds), *protocols]
        )
        assert status == 0, f"protoc ended with {status}"
        made = sorted(path for path in Path(folder).rglob("*") if path.is_file())
        return {str(path.relative_to(folder)): path.read_text() for path in made}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
