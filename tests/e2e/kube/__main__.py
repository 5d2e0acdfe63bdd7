"""`make e2e-kube`: makes what a real node needs, and runs the tests on one.

`python -m tests.e2e.kube [ARGUMENTS OF PYTEST]`; with `--shell` first, a command (by default a
shell) runs on a node with the operator installed instead, KUBECONFIG and PATH set for it.
"""

from __future__ import annotations

import fcntl
import shutil
import sys
from collections.abc import Sequence

from tests.cluster.programs import ProgramsMissing
from tests.e2e.kube.image import ImageFailed
from tests.e2e.kube.machine import MachineLacks, check_machine
from tests.e2e.kube.namespaces import run_inside
from tests.e2e.kube.prepared import FOLDER, NODE_FOLDER, Prepared


def main(arguments: Sequence[str]) -> int:
    """Run the tests; return their status."""
    try:
        check_machine()
        prepared = Prepared.make()
    except (MachineLacks, ProgramsMissing, ImageFailed) as error:
        print(error, file=sys.stderr)
        return 1
    FOLDER.parent.mkdir(exist_ok=True)
    with FOLDER.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        shutil.rmtree(FOLDER, ignore_errors=True)
        FOLDER.mkdir()
        prepared.write()
        match arguments:
            case ["--shell", *command]:
                words = ["-m", "tests.e2e.kube.shell", *command]
            case _:
                words = ["-m", "pytest", "tests/e2e/kube", *arguments]
        return run_inside(NODE_FOLDER, [sys.executable, *words])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
