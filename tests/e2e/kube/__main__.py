"""`make e2e-kube`: makes what a real node needs, and runs the tests on one.

`python -m tests.e2e.kube [ARGUMENTS OF PYTEST]`; with `--shell` first, a command (by default a
shell) runs on a node with the operator installed instead, KUBECONFIG and PATH set for it.
"""

from __future__ import annotations

import fcntl
import shutil
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.cluster.programs import ProgramsMissing
from tests.e2e.kube.image import ImageFailed
from tests.e2e.kube.machine import MachineLacks, check_machine
from tests.e2e.kube.namespaces import run_inside
from tests.e2e.kube.prepared import FOLDER, NODE_FOLDER, Prepared

_LOCK = Path("/run/lmcache-kube-node.lock")


def main(arguments: Sequence[str]) -> int:
    """Run the tests; return their status."""
    try:
        check_machine()
        with one_node_at_a_time():
            prepared = Prepared.make()
            shutil.rmtree(FOLDER, ignore_errors=True)
            FOLDER.mkdir(parents=True)
            prepared.write()
            return run_inside(NODE_FOLDER, [sys.executable, *_words(arguments)])
    except (MachineLacks, ProgramsMissing, ImageFailed) as error:
        print(error, file=sys.stderr)
        return 1


@contextmanager
def one_node_at_a_time(path: Path = _LOCK) -> Generator[None]:
    """Wait for the node of another process, and say so.

    They would not meet, but share the cores, and a third one may drop images that a second uses.
    """
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"another node runs on this machine ({path} is locked): waiting", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _words(arguments: Sequence[str]) -> list[str]:
    match arguments:
        case ["--shell", *command]:
            return ["-m", "tests.e2e.kube.shell", *command]
        case _:
            return ["-m", "pytest", "tests/e2e/kube", *arguments]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
