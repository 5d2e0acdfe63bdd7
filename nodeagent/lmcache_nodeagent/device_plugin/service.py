"""What the kubelet asks of a device plugin: which slots there are, and to bring one somewhere."""

from __future__ import annotations

import logging
from threading import Condition, Event
from typing import TYPE_CHECKING

import grpc

from lmcache_nodeagent.device_plugin.protocol import device_plugin_v1beta1_pb2 as api
from lmcache_nodeagent.device_plugin.protocol import device_plugin_v1beta1_pb2_grpc as stubs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from lmcache_nodeagent.device_plugin.folders import SlotFolders
    from lmcache_nodeagent.device_plugin.gate import StartGate
    from lmcache_nodeagent.liveness.slots import SlotBook

_log = logging.getLogger(__name__)

OPTIONS = api.DevicePluginOptions(pre_start_required=True, get_preferred_allocation_available=True)

_HEALTH = {True: "Healthy", False: "Unhealthy"}
_LOOK_SECONDS = 1.0


class SlotService(stubs.DevicePluginServicer):
    """Serves the kubelet. Threads: those of gRPC, several at a time."""

    def __init__(
        self,
        book: SlotBook,
        folders: SlotFolders,
        gate: StartGate,
        changed: Callable[[], None],
        run_began: Callable[[], None],
    ) -> None:
        """`changed` and `run_began` are called after the book has changed; they return at once."""
        self._book = book
        self._folders = folders
        self._gate = gate
        self._changed = changed
        self._run_began = run_began
        self._stopping = Event()
        self._health = Condition()  # guards: _healthy
        self._healthy = False

    def set_healthy(self, *, healthy: bool) -> None:
        """Say whether workers may be placed here. Threads: any."""
        with self._health:
            if self._healthy != healthy:
                self._healthy = healthy
                self._health.notify_all()

    def stop(self) -> None:
        """Let every call in progress end."""
        self._stopping.set()
        with self._health:
            self._health.notify_all()

    def GetDevicePluginOptions(  # noqa: N802  # the protocol's name
        self, request: api.Empty, context: grpc.ServicerContext
    ) -> api.DevicePluginOptions:
        """Say which calls the kubelet shall make."""
        del request, context
        return OPTIONS

    def ListAndWatch(  # noqa: N802  # the protocol's name
        self, request: api.Empty, context: grpc.ServicerContext
    ) -> Iterator[api.ListAndWatchResponse]:
        """Say which slots there are now, and again whenever their health changes."""
        del request
        said: bool | None = None
        while context.is_active() and not self._stopping.is_set():
            with self._health:
                if self._healthy == said:
                    self._health.wait(_LOOK_SECONDS)
                healthy = self._healthy
            if healthy != said:
                said = healthy
                yield self._devices(healthy=healthy)

    def _devices(self, *, healthy: bool) -> api.ListAndWatchResponse:
        health = _HEALTH[healthy]
        return api.ListAndWatchResponse(
            devices=[api.Device(ID=name, health=health) for name in self._book.names]
        )

    def GetPreferredAllocation(  # noqa: N802  # the protocol's name
        self, request: api.PreferredAllocationRequest, context: grpc.ServicerContext
    ) -> api.PreferredAllocationResponse:
        """Prefer the slots that have been free longest.

        The kubelet forgets a pod that was deleted by force while it still runs.
        """
        del context
        return api.PreferredAllocationResponse(
            container_responses=[
                api.ContainerPreferredAllocationResponse(deviceIDs=self._preferred(wanted))
                for wanted in request.container_requests
            ]
        )

    def _preferred(self, wanted: api.ContainerPreferredAllocationRequest) -> Sequence[str]:
        must = list(wanted.must_include_deviceIDs)
        known = set(self._book.names) - set(must)
        free = [name for name in wanted.available_deviceIDs if name in known]
        return [*must, *self._book.by_least_use(free)][: wanted.allocation_size]

    def Allocate(  # noqa: N802  # the protocol's name
        self, request: api.AllocateRequest, context: grpc.ServicerContext
    ) -> api.AllocateResponse:
        """Say what a container gets to see. One slot is enough: more are kept for it unused."""
        for wanted in request.container_requests:
            self._require_known(wanted.devices_ids, context)
        answers = []
        for wanted in request.container_requests:
            for name in wanted.devices_ids:
                self._book.allocated(name)
            answers.append(self._container(wanted.devices_ids[0]))
        self._changed()
        return api.AllocateResponse(container_responses=answers)

    def _container(self, name: str) -> api.ContainerAllocateResponse:
        mounts = [
            api.Mount(
                container_path=mount.container_path,
                host_path=mount.host_path,
                read_only=mount.read_only,
            )
            for mount in self._folders.mounts(name)
        ]
        return api.ContainerAllocateResponse(mounts=mounts, envs=self._folders.environment(name))

    def PreStartContainer(  # noqa: N802  # the protocol's name
        self, request: api.PreStartContainerRequest, context: grpc.ServicerContext
    ) -> api.PreStartContainerResponse:
        """Take the kubelet's word that all before has ended, and make room for what comes.

        The container is made after this returns: nothing of it can come before.
        """
        self._require_known(request.devices_ids, context)
        runs = [self._book.begin_run(name) for name in request.devices_ids]
        self._run_began()
        try:
            for name in request.devices_ids:
                self._folders.renew(name)
        except OSError as error:
            _log.exception("slot_folder_not_made")
            context.abort(grpc.StatusCode.INTERNAL, f"no folder for the container: {error}")
        self._gate.wait(runs, self._stopping)
        self._changed()
        return api.PreStartContainerResponse()

    def _require_known(self, names: Iterable[str], context: grpc.ServicerContext) -> None:
        unknown = sorted(set(names) - set(self._book.names))
        if unknown or not names:
            context.abort(
                grpc.StatusCode.NOT_FOUND,
                f"slots {unknown} are not among the {len(self._book.names)} there are",
            )
