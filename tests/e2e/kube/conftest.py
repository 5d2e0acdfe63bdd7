"""One real node for all tests of this folder, with the product installed and serving."""

from __future__ import annotations

import time
from collections.abc import Generator

import pytest

from tests.e2e.kube.prepared import Prepared
from tests.e2e.kube.real_cluster import ROOT, RealCluster
from tests.e2e.kube.worker_pods import SERVER, ServedNamespace

NAMESPACE = "serving"


@pytest.fixture(scope="session")
def cluster() -> Generator[RealCluster]:
    """The node, the definition of our kind, and an operator that acts."""
    began = time.monotonic()
    with RealCluster(Prepared.read()) as cluster:
        print(f"\nnode ready after {time.monotonic() - began:.1f} s")
        cluster.install_definition()
        cluster.install_operator()
        print(f"operator acts after {time.monotonic() - began:.1f} s")
        yield cluster


@pytest.fixture(scope="session")
def served(cluster: RealCluster) -> ServedNamespace:
    """A namespace with the example's server, whose agent is ready."""
    began = time.monotonic()
    cluster.kubectl("create", "namespace", NAMESPACE)
    label = "pod-security.kubernetes.io/enforce=privileged"
    cluster.kubectl("label", "namespace", NAMESPACE, label)
    example = str(ROOT / "examples" / "lmcacheserver-tcp.yaml")
    cluster.kubectl("apply", "--namespace", NAMESPACE, "--filename", example)
    namespace = ServedNamespace(cluster, NAMESPACE)
    namespace.wait_ready(SERVER)
    print(f"\nserver ready {time.monotonic() - began:.1f} s after kubectl apply")
    namespace.create_engine()
    return namespace
