"""A control plane that stays, for a person: `up FOLDER` starts it, `down FOLDER` ends it."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil

from tests.cluster.control_plane import ControlPlane, ProgramEnded
from tests.cluster.programs import ProgramsMissing, find_or_build

_STOP_SECONDS = 5.0


def _up(folder: Path) -> int:
    if (folder / "processes.json").exists():
        print(f"{folder} has one already: `make cluster-down` ends it", file=sys.stderr)
        return 1
    shutil.rmtree(folder, ignore_errors=True)
    try:
        cluster = ControlPlane(folder, find_or_build(), outlives=True).start()
    except (ProgramsMissing, ProgramEnded) as error:
        print(error, file=sys.stderr)
        return 1
    started = {
        name: [pid, psutil.Process(pid).create_time()] for name, pid in cluster.processes().items()
    }
    (folder / "processes.json").write_text(json.dumps(started))
    print(f"export KUBECONFIG={cluster.kubeconfig} PATH={cluster.programs}:$PATH")
    return 0


def _down(folder: Path) -> int:
    """End the processes that `up` wrote down, if they still are those."""
    record = folder / "processes.json"
    known = json.loads(record.read_text()) if record.exists() else {}
    alive = []
    for pid, created in reversed(known.values()):
        try:
            process = psutil.Process(pid)
            if process.create_time() == created:
                process.terminate()
                alive.append(process)
        except psutil.NoSuchProcess:
            continue
    for process in psutil.wait_procs(alive, timeout=_STOP_SECONDS)[1]:
        process.kill()
    shutil.rmtree(folder, ignore_errors=True)
    return 0


def main(arguments: Sequence[str]) -> int:
    """Start or end it; return the exit status."""
    match arguments:
        case ["up", folder]:
            return _up(Path(folder).resolve())
        case ["down", folder]:
            return _down(Path(folder).resolve())
        case _:
            print("usage: standing.py up|down FOLDER", file=sys.stderr)
            return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
