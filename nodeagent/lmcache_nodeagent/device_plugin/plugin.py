"""The device plugin's thread: finds the kubelet, registers, follows what it lists.

Nothing of the data path waits for it. A kubelet that is away, slow or broken costs new workers
their start and nobody else anything.
"""

from __future__ import annotations

import contextlib
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING

import grpc

from lmcache_nodeagent.device_plugin.pod_resources import identity, list_owners
from lmcache_nodeagent.device_plugin.protocol import device_plugin_v1beta1_pb2 as api
from lmcache_nodeagent.device_plugin.protocol import device_plugin_v1beta1_pb2_grpc as stubs
from lmcache_nodeagent.device_plugin.service import OPTIONS
from lmcache_nodeagent.events import DevicePluginOff, DevicePluginRegistered, PodResourcesUnread

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lmcache_nodeagent.clock import Now
    from lmcache_nodeagent.config import AgentConfig
    from lmcache_nodeagent.device_plugin.folders import SlotFolders
    from lmcache_nodeagent.device_plugin.memory_watch import SharedMemoryWatch
    from lmcache_nodeagent.device_plugin.service import SlotService
    from lmcache_nodeagent.events import Publish
    from lmcache_nodeagent.liveness.slots import SlotBook
    from lmcache_nodeagent.liveness.targets import InstanceLivenessTarget, ReapableEntry

DOMAIN = "lmcache-kube.dev"
_VERSION = "v1beta1"
_KUBELET = "kubelet.sock"

_LOOK_SECONDS = 0.5
_LIST_SECONDS = 10.0
_LIST_SPACING_SECONDS = 0.5
"""However much happens, the kubelet is not asked more often than this."""

_REGISTER_SECONDS = 5.0
_RETRY_SECONDS = 2.0
_STOP_SECONDS = 0.2
_SPARE_CALLS = 8
_LEFT_OVER_SECONDS = 60.0
"""A slot that was never listed for anybody is empty for good after this: a kubelet that has just
started lists its pods one by one."""


class State(StrEnum):
    """Where the plugin stands with the kubelet."""

    REGISTERED = "registered"
    NO_KUBELET = "no_kubelet"
    CONFLICT = "conflict"
    FAILING = "failing"


@dataclass(frozen=True, slots=True)
class Status:
    """What people see; replaced as a whole."""

    state: State
    problem: str = ""


class DevicePlugin:
    """Thread: device-plugin, but for `wake`, `stop` and `status` (any)."""

    def __init__(
        self,
        config: AgentConfig,
        book: SlotBook,
        folders: SlotFolders,
        service: SlotService,
        memory: SharedMemoryWatch,
        targets: Sequence[InstanceLivenessTarget],
        is_ready: Callable[[], bool],
        changed: Callable[[], None],
        publish: Publish,
        now: Now,
    ) -> None:
        self.resource = f"{DOMAIN}/{config.device_plugin_resource}"
        folder = Path(config.device_plugin_folder)
        self._endpoint = folder / f"lmcache-kube_{config.device_plugin_resource}.sock"
        self._kubelet = folder / _KUBELET
        self._pod_resources = Path(config.pod_resources_socket)
        self._book = book
        self._folders = folders
        self._service = service
        self._memory = memory
        self._targets = targets
        self._is_ready = is_ready
        self._changed = changed
        self._publish = publish
        self._now = now
        self._server: grpc.Server | None = None
        self._served = ""  # identity of our own socket
        self._registered_with = ""
        self._look_at = self._list_at = self._listed_at = now()
        self._unread = ""
        self._asked = Event()
        self._woken = Event()
        self._stopping = Event()
        self.status = Status(State.NO_KUBELET)

    def run(self) -> None:
        """Follow the kubelet until stopped."""
        self.status = Status(State.NO_KUBELET, "not looked for yet")
        while not self._stopping.is_set():
            self._service.set_healthy(healthy=self._is_ready())
            if self._now() >= self._look_at:
                self._look_for_kubelet()
            if self._asked.is_set():
                self._asked.clear()
                self._list_at = min(self._list_at, self._listed_at + _LIST_SPACING_SECONDS)
            if self._now() >= self._list_at:
                self._list()
                self._memory.look()
            self._woken.wait(max(0.0, min(_LOOK_SECONDS, self._list_at - self._now())))
            self._woken.clear()
        self._service.set_healthy(healthy=False)
        self._stop_serving()

    def wake(self) -> None:
        """Ask the kubelet soon who has which slot: something has happened. Threads: any."""
        self._asked.set()
        self._woken.set()

    def stop(self) -> None:
        """Make `run` return soon. Threads: any."""
        self._stopping.set()
        self._service.stop()
        self._woken.set()

    # Registering

    def _look_for_kubelet(self) -> None:
        self._look_at = self._now() + _LOOK_SECONDS
        kubelet = identity(self._kubelet)
        if not kubelet:
            self._stop_serving()
            self._say(State.NO_KUBELET, f"nobody listens at {self._kubelet}")
        elif kubelet != self._registered_with or identity(self._endpoint) != self._served:
            self._stop_serving()
            self._register(kubelet)

    def _register(self, kubelet: str) -> None:
        """Serve, and tell the kubelet where; it forgets all plugins when it starts."""
        self._look_at = self._now() + _RETRY_SECONDS
        if _is_served(self._endpoint):
            self._say(State.CONFLICT, f"another agent of this node serves {self.resource}")
            return
        try:
            self._serve()
            with grpc.insecure_channel(f"unix:{self._kubelet}") as channel:
                stubs.RegistrationStub(channel).Register(
                    api.RegisterRequest(
                        version=_VERSION,
                        endpoint=self._endpoint.name,
                        resource_name=self.resource,
                        options=OPTIONS,
                    ),
                    timeout=_REGISTER_SECONDS,
                )
        except (grpc.RpcError, OSError, RuntimeError) as error:
            self._stop_serving()
            self._say(State.FAILING, _words(error))
            return
        self._registered_with = kubelet
        self._say(State.REGISTERED)
        self._list_at = self._now()

    def _serve(self) -> None:
        names = len(self._book.names)
        calls = ThreadPoolExecutor(names + _SPARE_CALLS, thread_name_prefix="kubelet-call")
        self._server = grpc.server(calls)
        stubs.add_DevicePluginServicer_to_server(self._service, self._server)
        self._server.add_insecure_port(f"unix:{self._endpoint}")
        self._server.start()
        self._served = identity(self._endpoint)

    def _stop_serving(self) -> None:
        self._registered_with = ""
        if self._server is None:
            return
        ours = identity(self._endpoint) == self._served
        self._server.stop(_STOP_SECONDS).wait()
        self._server = None
        if ours:
            with contextlib.suppress(OSError):
                self._endpoint.unlink()

    def _say(self, state: State, problem: str = "") -> None:
        """Report a state once, however long it lasts."""
        before, self.status = self.status, Status(state, problem)
        if self.status == before and state is not State.REGISTERED:
            return
        if state is State.REGISTERED:
            self._publish(DevicePluginRegistered(self.resource, len(self._book.names)))
        else:
            self._publish(DevicePluginOff(self.resource, state.value, problem))
        self._changed()

    # Following

    def _list(self) -> None:
        asked_at = self._listed_at = self._now()
        self._list_at = asked_at + _LIST_SECONDS
        kubelet = identity(self._pod_resources)
        if not kubelet:
            return
        try:
            owners = list_owners(self._pod_resources, self.resource)
        except grpc.RpcError as error:
            problem = _words(error)
            if problem != self._unread:
                self._publish(PodResourcesUnread(str(self._pod_resources), problem))
            self._unread = problem
            return
        self._unread = ""
        if self._book.listed(owners, asked_at, kubelet):
            self._changed()
        self._remove_left_overs()

    def _remove_left_overs(self) -> None:
        """Empty the shared memory of slots that no pod has and whose instances are released."""
        used: set[str] = set()

        def visit(entry: ReapableEntry) -> None:
            used.add(entry.slot.slot)

        for target in self._targets:
            target.visit_entries(visit)
            for entry in target.leaving_entries():
                visit(entry)
        for name in self._book.left(_LEFT_OVER_SECONDS):
            if name not in used:
                with contextlib.suppress(OSError):  # tried again after the next list
                    self._folders.remove_left_overs(name)


def _is_served(endpoint: Path) -> bool:
    """Tell whether somebody living listens at a socket."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(endpoint))
        except OSError:
            return False
    return True


def _words(error: Exception) -> str:
    if isinstance(error, grpc.Call):
        return f"{error.code().name}: {error.details()}"
    return str(error)
