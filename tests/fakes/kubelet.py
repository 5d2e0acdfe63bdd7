"""A kubelet's device manager as a process of its own: `python -m tests.fakes.kubelet FOLDER`.

Real gRPC servers and clients, and what a real kubelet was seen to do: it empties the plugins'
folder when it starts, calls a plugin back when that registers, follows its devices, prefers what
the plugin prefers, allocates once for each container and calls `PreStartContainer` before each of
its starts. Its pods are kept in a file, as a kubelet's checkpoint. `FakeKubelet` is the parent's
side; one JSON array per line on standard input, one JSON value back.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Thread
from types import TracebackType
from typing import Any, Self

import grpc

from lmcache_nodeagent.device_plugin.protocol import device_plugin_v1beta1_pb2 as plugin_api
from lmcache_nodeagent.device_plugin.protocol import device_plugin_v1beta1_pb2_grpc as plugin_stubs
from lmcache_nodeagent.device_plugin.protocol import pod_resources_v1_pb2 as list_api
from lmcache_nodeagent.device_plugin.protocol import pod_resources_v1_pb2_grpc as list_stubs
from tests.polling import PATIENCE_SECONDS, poll_until

_PRE_START_SECONDS = 30.0  # constants.go of the protocol


class _Kubelet(plugin_stubs.RegistrationServicer, list_stubs.PodResourcesListerServicer):
    """The child's side."""

    def __init__(self, folder: Path) -> None:
        self._plugins = folder / "device-plugins"
        self._checkpoint = folder / "checkpoint.json"
        self._plugins.mkdir(exist_ok=True)
        (folder / "pod-resources").mkdir(exist_ok=True)
        for left_over in self._plugins.iterdir():
            left_over.unlink()
        (folder / "pod-resources/kubelet.sock").unlink(missing_ok=True)
        self._health: dict[str, str] = {}
        self._resource = ""
        self._plugin: Any = None
        self._server = grpc.server(ThreadPoolExecutor(8))
        plugin_stubs.add_RegistrationServicer_to_server(self, self._server)
        list_stubs.add_PodResourcesListerServicer_to_server(self, self._server)
        self._server.add_insecure_port(f"unix:{self._plugins}/kubelet.sock")
        self._server.add_insecure_port(f"unix:{folder}/pod-resources/kubelet.sock")
        self._server.start()

    def Register(  # noqa: N802  # the protocol's name
        self, request: plugin_api.RegisterRequest, context: grpc.ServicerContext
    ) -> plugin_api.Empty:
        """Call the plugin back, and follow its devices."""
        del context
        assert request.version == "v1beta1"
        assert request.options.pre_start_required
        channel = grpc.insecure_channel(f"unix:{self._plugins}/{request.endpoint}")
        self._resource = request.resource_name
        self._plugin = plugin_stubs.DevicePluginStub(channel)
        Thread(target=self._follow, args=(self._plugin,), daemon=True).start()
        return plugin_api.Empty()

    def _follow(self, plugin: Any) -> None:  # noqa: ANN401  # a stub
        try:
            options = plugin.GetDevicePluginOptions(plugin_api.Empty(), timeout=PATIENCE_SECONDS)
            assert options.pre_start_required
            for told in plugin.ListAndWatch(plugin_api.Empty()):
                self._health = {device.ID: device.health for device in told.devices}
        except grpc.RpcError:
            pass
        if self._plugin is plugin:
            self._plugin, self._health = None, {}

    def List(  # noqa: N802  # the protocol's name
        self, request: list_api.ListPodResourcesRequest, context: grpc.ServicerContext
    ) -> list_api.ListPodResourcesResponse:
        """List the pods that this kubelet knows, one container each."""
        del request, context
        return list_api.ListPodResourcesResponse(
            pod_resources=[
                list_api.PodResources(
                    name=pod["pod"],
                    namespace=pod["namespace"],
                    containers=[
                        list_api.ContainerResources(
                            name="engine",
                            devices=[
                                list_api.ContainerDevices(
                                    resource_name=self._resource, device_ids=[slot]
                                )
                            ],
                        )
                    ],
                )
                for slot, pod in self._pods().items()
            ]
        )

    def _pods(self) -> dict[str, dict[str, str]]:
        if not self._checkpoint.exists():
            return {}
        pods: dict[str, dict[str, str]] = json.loads(self._checkpoint.read_text())
        return pods

    def _keep(self, pods: dict[str, dict[str, str]]) -> None:
        fresh = self._checkpoint.with_suffix(".new")
        fresh.write_text(json.dumps(pods))
        fresh.rename(self._checkpoint)

    def devices(self) -> dict[str, str]:
        """Say which devices there are, and their health."""
        return self._health

    def admit(self, namespace: str, pod: str, slot: str = "") -> dict[str, Any]:
        """Give a pod's container a device, and start it; `slot` overrules the plugin."""
        pods = self._pods()
        free = [name for name, health in self._health.items() if health == "Healthy"]
        free = [name for name in free if name not in pods]
        if not free:
            return {"error": f"Insufficient {self._resource}"}
        slot = slot or self._preferred(free)
        answer = self._plugin.Allocate(
            plugin_api.AllocateRequest(
                container_requests=[plugin_api.ContainerAllocateRequest(devices_ids=[slot])]
            ),
            timeout=PATIENCE_SECONDS,
        ).container_responses[0]
        self._keep({**pods, slot: {"namespace": namespace, "pod": pod}})
        seconds = self.start(slot)
        return {
            "slot": slot,
            "mounts": {mount.container_path: mount.host_path for mount in answer.mounts},
            "envs": dict(answer.envs),
            "seconds": seconds,
        }

    def _preferred(self, free: list[str]) -> str:
        wanted = plugin_api.ContainerPreferredAllocationRequest(
            available_deviceIDs=free, allocation_size=1
        )
        answer = self._plugin.GetPreferredAllocation(
            plugin_api.PreferredAllocationRequest(container_requests=[wanted]),
            timeout=PATIENCE_SECONDS,
        )
        return str(answer.container_responses[0].deviceIDs[0])

    def start(self, slot: str) -> float:
        """Start a container, again or for the first time; return what the plugin took."""
        began_at = time.monotonic()
        self._plugin.PreStartContainer(
            plugin_api.PreStartContainerRequest(devices_ids=[slot]), timeout=_PRE_START_SECONDS
        )
        return time.monotonic() - began_at

    def start_error(self, slot: str) -> str:
        """Start a container that the plugin refuses; return why."""
        try:
            self.start(slot)
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"
        return "started"

    def delete(self, slot: str) -> None:
        """Forget the pod that has a slot."""
        pods = self._pods()
        del pods[slot]
        self._keep(pods)


class FakeKubelet:
    """The parent's side. `folder` has device-plugins/ and pod-resources/ as a node does."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "device-plugins").mkdir(parents=True, exist_ok=True)
        self._process: subprocess.Popen[str] | None = None

    @property
    def flags(self) -> tuple[str, ...]:
        """What an agent needs to find it."""
        return (
            f"--device-plugin-folder={self.folder}/device-plugins",
            f"--pod-resources-socket={self.folder}/pod-resources/kubelet.sock",
        )

    def start(self) -> Self:
        """Start it; also again, with the pods it had."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.fakes.kubelet", str(self.folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        assert self._read() == "ready"
        return self

    def tell(self, command: str, *arguments: object) -> None:
        """Send a command without waiting for its result."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([command, *arguments]) + "\n")
        self._process.stdin.flush()

    def result(self) -> Any:  # noqa: ANN401  # JSON
        """Wait for the result of the command that was sent first."""
        return self._read()

    def __call__(self, command: str, *arguments: object) -> Any:  # noqa: ANN401  # JSON
        """Send a command and wait for its result."""
        self.tell(command, *arguments)
        return self.result()

    def wait_healthy(self, slots: int) -> None:
        """Wait until so many devices are there and healthy."""
        poll_until(lambda: list(self("devices").values()).count("Healthy") == slots)

    def _read(self) -> Any:  # noqa: ANN401  # JSON
        assert self._process is not None
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the kubelet ended with {self._process.wait(PATIENCE_SECONDS)}"
        return json.loads(line)

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        """End it without a word to anybody; its sockets stay."""
        if self._process is None:
            return
        self._process.kill()
        self._process.wait(PATIENCE_SECONDS)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        self._process = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.kill()


def _main() -> None:
    kubelet = _Kubelet(Path(sys.argv[1]))
    print(json.dumps("ready"), flush=True)  # noqa: T201  # the parent reads it
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        print(json.dumps(getattr(kubelet, command)(*arguments)), flush=True)  # noqa: T201


if __name__ == "__main__":
    _main()
