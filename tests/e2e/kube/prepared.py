"""What takes minutes and the network, made before the node's namespaces are entered."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

from tests.cluster.programs import NODE_NAMES, find_or_build
from tests.e2e.kube.image import pause_archive, product_archive
from tests.e2e.kube.name_server import find_or_build_coredns

FOLDER = Path(__file__).parents[3] / "build" / "e2e-kube"
"""Logs, and what the node wrote, of the last run."""

NODE_FOLDER = FOLDER / "node"

_FILE = FOLDER / "prepared.json"


@dataclass(frozen=True)
class Prepared:
    """Where everything is."""

    programs: Path
    coredns: Path
    pause_image: Path
    product_image: Path

    @classmethod
    def make(cls) -> Self:
        """Find or make everything, saying how long each took.

        Raises:
            ProgramsMissing, ImageFailed: with the reason.
        """
        steps: dict[str, Callable[[], Path]] = {
            "programs": partial(find_or_build, NODE_NAMES),
            "coredns": find_or_build_coredns,
            "pause_image": pause_archive,
            "product_image": product_archive,
        }
        found = {}
        for name, make in steps.items():
            began = time.monotonic()
            found[name] = make()
            print(f"{name}: {found[name]} ({time.monotonic() - began:.1f} s)", flush=True)
        return cls(**found)

    def write(self) -> None:
        """Leave it for the process inside, where nothing can be made."""
        _FILE.write_text(json.dumps(dataclasses.asdict(self), default=str))

    @classmethod
    def read(cls) -> Self:
        """Return what was left."""
        return cls(**{name: Path(path) for name, path in json.loads(_FILE.read_text()).items()})
