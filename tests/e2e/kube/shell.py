"""A command or a shell on a real cluster with the operator installed, for a person."""

from __future__ import annotations

import os
import sys

from tests.e2e.kube.prepared import Prepared
from tests.e2e.kube.real_cluster import RealCluster


def main(command: list[str]) -> int:
    """Run it; the cluster ends with it."""
    with RealCluster(Prepared.read()) as cluster:
        cluster.install_definition()
        cluster.install_operator()
        print("a node is ready and the operator acts; the cluster ends with this command")
        return cluster.run(command or [os.environ.get("SHELL", "bash")])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
