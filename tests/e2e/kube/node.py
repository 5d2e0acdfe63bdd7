"""A real node on a test control plane: containerd, kubelet, kube-proxy, and CoreDNS for its pods.

To be used inside `namespaces.run_inside`, since it writes where any node writes.
"""

from __future__ import annotations

import http.client
import json
import subprocess
from pathlib import Path
from typing import Any

from tests.cluster.control_plane import ControlPlane
from tests.cluster.program_flags import NodeNetwork
from tests.e2e.kube.image import PAUSE_IMAGE
from tests.e2e.kube.machine import CNI_PLUGINS
from tests.e2e.kube.name_server import corefile
from tests.e2e.kube.namespaces import NODE_ADDRESS, cgroup
from tests.e2e.kube.prepared import NODE_FOLDER

NAME = "node-1"
NETWORK = NodeNetwork(
    address=NODE_ADDRESS,
    service_range="10.96.0.0/16",
    api_service_address="10.96.0.1",
    pod_range="10.88.0.0/16",
)

_DNS_SERVICE_ADDRESS = "10.96.0.10"
_DNS_READY_PORT = 8181
_CONTAINERD_SOCKET = "/run/containerd/containerd.sock"

# The machine may withhold CAP_SYS_RESOURCE, without which nobody's oom_score_adj can be lowered.
_CONTAINERD_CONFIG = f"""\
version = 2
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE_IMAGE}"
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{CNI_PLUGINS}"
    conf_dir = "%s"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
"""

# Each pod has a link to the node and a route of its own: with a bridge, answers between two pods
# would bypass the node, and with it the address translation of Services.
_POD_NETWORK = {
    "cniVersion": "0.4.0",
    "name": "pods",
    "plugins": [
        {
            "type": "ptp",
            "ipMasq": False,
            "ipam": {
                "type": "host-local",
                "ranges": [[{"subnet": NETWORK.pod_range}]],
                "routes": [{"dst": "0.0.0.0/0"}],
            },
        },
        {"type": "portmap", "capabilities": {"portMappings": True}},
    ],
}


class Node:
    """One node; its processes belong to the control plane and end with it."""

    def __init__(self, cluster: ControlPlane, coredns: Path) -> None:
        self._cluster = cluster
        self._coredns = coredns
        self._folder = cluster.folder / "node"

    def start(self, *images: Path) -> None:
        """Start everything, load the images, and wait until the node takes pods."""
        (self._folder / "cni").mkdir(parents=True)
        self._start_containerd()
        for archive in images:
            self.load_image(archive)
        self._start_kubelet()
        self._start_proxy()
        self._start_dns()
        self._cluster.wait("the node", self._is_ready)

    def load_image(self, archive: Path) -> None:
        """Put an image into the node's store."""
        done = self.ctr("images", "import", str(archive))
        assert done.returncode == 0, done.stderr

    def ctr(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Ask containerd about the pods' containers and images."""
        command = ["ctr", f"--address={_CONTAINERD_SOCKET}", "--namespace=k8s.io", *words]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    def process_id(self, container_id: str) -> int | None:
        """Return the first process of a container, by its id as a pod's status has it.

        None if it does not run: a status is always a little old.
        """
        wanted = container_id.rpartition("/")[2]
        for line in self.ctr("tasks", "list").stdout.splitlines():
            match line.split():
                case [found, pid, "RUNNING"] if found == wanted:
                    return int(pid)
        return None

    def _start_containerd(self) -> None:
        (self._folder / "cni" / "10-pods.conflist").write_text(json.dumps(_POD_NETWORK))
        config = self._folder / "containerd.toml"
        config.write_text(_CONTAINERD_CONFIG % (self._folder / "cni"))
        self._cluster.start_program("containerd", "containerd", f"--config={config}")
        self._cluster.wait("containerd", lambda: self.ctr("version").returncode == 0)

    def _start_kubelet(self) -> None:
        kubeconfig = self._cluster.user_kubeconfig(NAME, f"system:node:{NAME}", "system:nodes")
        serving = self._cluster.authority.issue(
            "kubelet-serving", f"system:node:{NAME}", hosts=(NODE_ADDRESS, NAME)
        )
        resolver = self._folder / "resolv.conf"
        resolver.write_text("")
        config = self._folder / "kubelet.json"
        config.write_text(
            json.dumps(
                {
                    **_KUBELET,
                    "authentication": {
                        "anonymous": {"enabled": False},
                        "webhook": {"enabled": True},
                        "x509": {"clientCAFile": str(self._cluster.authority.certificate)},
                    },
                    "tlsCertFile": str(serving.certificate),
                    "tlsPrivateKeyFile": str(serving.key),
                    "resolvConf": str(resolver),
                }
            )
        )
        self._cluster.start_program(
            "kubelet",
            self._cluster.programs / "kubelet",
            f"--config={config}",
            f"--kubeconfig={kubeconfig}",
            f"--cert-dir={self._folder}",
            f"--hostname-override={NAME}",
            f"--node-ip={NODE_ADDRESS}",
        )

    def _start_proxy(self) -> None:
        kubeconfig = self._cluster.user_kubeconfig("proxy", "system:kube-proxy")
        self._cluster.start_program(
            "kube-proxy",
            self._cluster.programs / "kube-proxy",
            f"--kubeconfig={kubeconfig}",
            f"--hostname-override={NAME}",
            f"--cluster-cidr={NETWORK.pod_range}",
            "--proxy-mode=iptables",
            "--conntrack-max-per-core=0",  # the machine's, not ours to set
            "--conntrack-tcp-timeout-established=0s",
            "--conntrack-tcp-timeout-close-wait=0s",
        )

    def _start_dns(self) -> None:
        kubeconfig = self._cluster.user_kubeconfig("dns", "coredns", "system:masters")
        config = self._folder / "Corefile"
        config.write_text(corefile(NODE_ADDRESS, kubeconfig))
        self._cluster.start_program("coredns", self._coredns, "-conf", str(config))
        for path, body in _dns_objects():
            answer = self._cluster.api.request("POST", path, body)
            assert answer.ok, answer.message
        self._cluster.wait("CoreDNS", _dns_is_ready)

    def _is_ready(self) -> bool:
        found = self._cluster.api.request("GET", f"/api/v1/nodes/{NAME}")
        conditions = found.body["status"].get("conditions", []) if found.ok else []
        return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


_KUBELET: dict[str, Any] = {
    "apiVersion": "kubelet.config.k8s.io/v1beta1",
    "kind": "KubeletConfiguration",
    "authorization": {"mode": "Webhook"},
    "cgroupDriver": "cgroupfs",
    "cgroupRoot": f"/{cgroup(NODE_FOLDER)}",
    "clusterDNS": [_DNS_SERVICE_ADDRESS],
    "clusterDomain": "cluster.local",
    "containerRuntimeEndpoint": f"unix://{_CONTAINERD_SOCKET}",
    "enforceNodeAllocatable": [],
    "evictionHard": {
        "imagefs.available": "100Mi",
        "memory.available": "50Mi",
        "nodefs.available": "100Mi",
        "nodefs.inodesFree": "1%",
    },
    "failCgroupV1": False,
    "failSwapOn": False,
    "imageGCHighThresholdPercent": 100,
    "localStorageCapacityIsolation": False,  # cAdvisor may not know the root's device
    "nodeStatusUpdateFrequency": "5s",
    "oomScoreAdj": 0,
}


def _dns_objects() -> list[tuple[str, dict[str, Any]]]:
    """Return the Service that pods ask, and where it leads: CoreDNS runs on the node itself."""
    protocols = {"dns": "UDP", "dns-tcp": "TCP"}
    ports = [{"name": name, "port": 53, "protocol": p} for name, p in protocols.items()]
    service = {
        "metadata": {"name": "kube-dns"},
        "spec": {"clusterIP": _DNS_SERVICE_ADDRESS, "ports": ports},
    }
    endpoints = {
        "metadata": {"name": "kube-dns", "labels": {"kubernetes.io/service-name": "kube-dns"}},
        "addressType": "IPv4",
        "ports": ports,
        "endpoints": [{"addresses": [NODE_ADDRESS], "conditions": {"ready": True}}],
    }
    namespace = "namespaces/kube-system"
    return [
        (f"/api/v1/{namespace}/services", service),
        (f"/apis/discovery.k8s.io/v1/{namespace}/endpointslices", endpoints),
    ]


def _dns_is_ready() -> bool:
    connection = http.client.HTTPConnection(NODE_ADDRESS, _DNS_READY_PORT, timeout=1)
    try:
        connection.request("GET", "/ready")
        return connection.getresponse().status == http.HTTPStatus.OK
    except OSError:
        return False
    finally:
        connection.close()
