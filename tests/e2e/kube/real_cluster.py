"""A whole cluster of one node, the product installed by the commands that people use."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from lmcache_operator.api.crd import GROUP, PLURAL
from tests.cluster.control_plane import ControlPlane
from tests.e2e.kube.node import NETWORK, Node
from tests.e2e.kube.prepared import FOLDER, Prepared
from tests.polling import poll_until

ROOT = Path(__file__).parents[3]
OPERATOR_NAMESPACE = "lmcache-kube-system"

_ROLL_OUT_SECONDS = 120


class RealCluster:
    """One control plane with one real node. Entering it starts everything."""

    def __init__(self, prepared: Prepared) -> None:
        self.plane = ControlPlane(FOLDER / "cluster", prepared.programs, network=NETWORK)
        self.node = Node(self.plane, prepared.coredns)
        self._prepared = prepared

    def __enter__(self) -> Self:
        self.plane.start()
        self.node.start(self._prepared.pause_image, self._prepared.product_image)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.plane.stop()

    def kubectl(self, *words: str, given: str | None = None) -> str:
        """Run kubectl and return what it says; it must succeed."""
        done = self.plane.kubectl(*words, given=given)
        assert done.returncode == 0, f"kubectl {' '.join(words)}: {done.stderr}"
        return done.stdout

    def objects(self, *words: str) -> list[dict[str, Any]]:
        """Return what `kubectl get` finds."""
        found: dict[str, Any] = json.loads(self.kubectl("get", "--output=json", *words))
        items: list[dict[str, Any]] = found["items"] if found["kind"] == "List" else [found]
        return items

    def install_definition(self) -> None:
        """Apply the definition of our kind, and wait until kubectl knows it."""
        self.kubectl("apply", "--server-side", "--filename", str(ROOT / "crds"))
        explain = ("explain", f"{PLURAL}.{GROUP}")
        poll_until(lambda: self.plane.kubectl(*explain).returncode == 0, "our kind")

    def install_operator(self) -> None:
        """Apply the manifests, and wait until the operator acts."""
        self.kubectl("apply", "--kustomize", str(ROOT / "deploy"))
        self.roll_out("deployment/lmcache-operator", OPERATOR_NAMESPACE)

    def roll_out(self, what: str, namespace: str) -> None:
        """Wait until its pods are ready."""
        limit = f"--timeout={_ROLL_OUT_SECONDS}s"
        self.kubectl("rollout", "status", what, f"--namespace={namespace}", limit)

    def run(self, command: list[str]) -> int:
        """Run a person's command with this cluster as its own; return its status."""
        path = f"{self.plane.programs}{os.pathsep}{os.environ['PATH']}"
        env = {**os.environ, "KUBECONFIG": str(self.plane.kubeconfig), "PATH": path}
        return subprocess.run(command, env=env, check=False).returncode
