"""What the kubelet and the runtime make of a pod that has a slot: its mounts, its processes.

Needs root: each container is a PID and a mount namespace of its own.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.fakes.agent_process import AgentProcess
from tests.fakes.kubelet import FakeKubelet
from tests.fakes.worker_process import WorkerProcess

URL = "ipc:///run/lmcache-kube/agent.sock"
RESOURCE = "lmcache-kube.dev/kv"
SLOTS = 4

_SCRIPT = """\
set -e
mount -t tmpfs none /run
while [ "$1" != -- ]; do
  mkdir -p "$1"
  mount --bind "$2" "$1"
  shift 2
done
shift
exec "$@"
"""


def in_container(mounts: Mapping[str, str]) -> Sequence[str]:
    """Return what goes before a command that shall run in a container with these mounts."""
    pairs = [word for pair in mounts.items() for word in pair]
    return ("unshare", "--pid", "--fork", "--mount", "sh", "-c", _SCRIPT, "sh", *pairs, "--")


@dataclass
class SlotNode:
    """A kubelet, an agent with a device plugin, and their folders. Entered: both run."""

    flags: Sequence[str] = ()
    shared_memory_bytes: int = 0
    make_agent: Callable[..., AgentProcess] = AgentProcess
    agent: AgentProcess = field(init=False)
    kubelet: FakeKubelet = field(init=False)
    folder: Path = field(init=False)

    def __post_init__(self) -> None:
        """Make what has to be there before."""
        self._made = tempfile.TemporaryDirectory(prefix="slots-")  # sockets need short paths
        self.folder = Path(self._made.name)
        self._shared = Path("/dev/shm") / self.folder.name
        self.kubelet = FakeKubelet(self.folder / "kubelet")
        self.stack = ExitStack()

    @property
    def shared(self) -> Path:
        """The folder of the slots' shared memory."""
        return self._shared / "slots"

    def start_agent(self) -> AgentProcess:
        """Start an agent; also again, in the same folders."""
        flags = [
            *self.kubelet.flags,
            "--device-plugin-resource=kv",
            f"--device-plugin-slots={SLOTS}",
            f"--slots-folder={self.folder}/agent",
            *self.flags,
        ]
        if self.shared_memory_bytes:
            flags += [
                f"--slot-shared-memory-bytes={self.shared_memory_bytes}",
                f"--slot-shared-memory-folder={self.shared}",
            ]
        self.agent = self.stack.enter_context(self.make_agent(*flags))
        return self.agent

    def container(self, admitted: Mapping[str, Any], instance_id: int) -> WorkerProcess:
        """Start a worker as the runtime does with what the kubelet got from the plugin."""
        wrapper = in_container(admitted["mounts"])
        return self.stack.enter_context(WorkerProcess(URL, instance_id, wrapper))

    def __enter__(self) -> Self:
        self.stack.enter_context(self.kubelet)
        self.start_agent()
        self.kubelet.wait_healthy(SLOTS)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stack.close()
        shutil.rmtree(self._shared, ignore_errors=True)
        self._made.cleanup()
