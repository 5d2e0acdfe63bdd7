"""A folder as the kubelet mounts a ConfigMap: an edit swaps one link, for all files at once."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Mapping
from pathlib import Path


class MountedFolder:
    """Files under `path`, which is there from the start as that of an optional ConfigMap is."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._numbers = itertools.count(1)
        path.mkdir(parents=True)

    def put(self, files: Mapping[str, str | bytes]) -> None:
        """Have these files and no others."""
        target = self.path / f"..{next(self._numbers)}"
        target.mkdir()
        for name, content in files.items():
            data = content.encode() if isinstance(content, str) else content
            (target / name).write_bytes(data)
        link, present = self.path / "..data_tmp", self.path / "..data"
        old = present.resolve() if present.is_symlink() else None
        link.symlink_to(target.name)
        link.rename(present)
        for name in files:
            if not (self.path / name).is_symlink():
                (self.path / name).symlink_to(f"..data/{name}")
        for stale in self.path.iterdir():
            if not stale.name.startswith("..") and stale.name not in files:
                stale.unlink()
        if old is not None:
            shutil.rmtree(old)
