"""CoreDNS, which answers for the names of Services: built once from its pinned release."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

from tests.cluster.programs import (
    ProgramsMissing,
    cache_folder,
    go_toolchain,
    one_build_at_a_time,
    run_go,
)

RELEASE = "v1.12.4"
_PACKAGE = "github.com/coredns/coredns"


def find_or_build_coredns() -> Path:
    """Return the program.

    Raises:
        ProgramsMissing: it is not in the cache, and the build failed.
    """
    folder = cache_folder() / f"coredns-{RELEASE}"
    program = folder / "coredns"
    with one_build_at_a_time():
        if not program.exists():
            print(f"building CoreDNS {RELEASE} into {folder}: minutes, once", file=sys.stderr)
            began = time.monotonic()
            unfinished = folder.with_suffix(".unfinished")
            unfinished.mkdir(parents=True, exist_ok=True)
            _install(unfinished)
            unfinished.rename(folder)
            print(f"built in {time.monotonic() - began:.0f} s", file=sys.stderr)
    return program


def _install(folder: Path) -> None:
    flags = ["-v", "-trimpath", "-ldflags", "-s -w"]
    command = [go_toolchain(), "install", *flags, f"{_PACKAGE}@{RELEASE}"]
    if status := run_go(command, cwd=folder, env={"GOBIN": str(folder), "GOFLAGS": "-mod=mod"}):
        raise ProgramsMissing(
            f"`go install` of {_PACKAGE}@{RELEASE} ended with {status}; its own words stand "
            "above. It needs the Go module proxy and about 2 GB of disk"
        )


def corefile(address: str, kubeconfig: Path) -> str:
    """Return its configuration: names of the cluster, and no others."""
    return re.sub(
        r"^ {4}",
        "",
        f"""\
    .:53 {{
      bind {address}
      errors
      ready {address}:8181
      kubernetes cluster.local in-addr.arpa ip6.arpa {{
        kubeconfig {kubeconfig}
      }}
      cache 5
    }}
    """,
        flags=re.MULTILINE,
    )
