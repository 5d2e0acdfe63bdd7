"""How the programs of a test control plane are started."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tests.cluster.certificates import Authority

_ISSUER = "https://kubernetes.default.svc"

# What acts on objects that exist here. Left out is what judges nodes: there is no kubelet that
# would renew a node's lease, and its pods would be evicted.
_CONTROLLERS = (
    "daemonset-controller",
    "deployment-controller",
    "garbage-collector-controller",
    "namespace-controller",
    "replicaset-controller",
    "root-ca-certificate-publisher-controller",
    "serviceaccount-controller",
)

_NO_REACH = (
    "--bind-address=127.0.0.1",
    "--advertise-address=127.0.0.1",
    "--endpoint-reconciler-type=none",  # nobody reaches it from a pod
    "--service-cluster-ip-range=10.0.0.0/24",
)


@dataclass(frozen=True)
class NodeNetwork:
    """Where nodes and pods reach the control plane, and which addresses Services get."""

    address: str
    """Of the API server; not of the loopback interface, since pods connect to it."""

    service_range: str
    api_service_address: str
    """The first address of that range, which the Service `kubernetes` takes."""

    pod_range: str


def etcd_flags(folder: Path, port: int) -> list[str]:
    """Return the flags of etcd, whose data goes with the test."""
    return [
        f"--data-dir={folder}",
        f"--listen-client-urls=http://127.0.0.1:{port}",
        f"--advertise-client-urls=http://127.0.0.1:{port}",
        "--listen-peer-urls=http://127.0.0.1:0",
        "--unsafe-no-fsync",
        "--log-level=warn",
    ]


def api_flags(
    authority: Authority, network: NodeNetwork | None, etcd_port: int, port: int
) -> list[str]:
    """Return the flags of the API server, after issuing its certificates."""
    hosts = ("127.0.0.1", "localhost", *(_api_hosts(network) if network else ()))
    pair = authority.issue("apiserver", "kube-apiserver", hosts=hosts)
    tokens = authority.signing_key("service-accounts")
    reach = _reach_flags(authority, network) if network else _NO_REACH
    return [
        f"--etcd-servers=http://127.0.0.1:{etcd_port}",
        f"--secure-port={port}",
        *reach,
        f"--tls-cert-file={pair.certificate}",
        f"--tls-private-key-file={pair.key}",
        f"--client-ca-file={authority.certificate}",
        f"--service-account-issuer={_ISSUER}",
        f"--service-account-key-file={tokens}",
        f"--service-account-signing-key-file={tokens}",
        "--authorization-mode=Node,RBAC",
        "--allow-privileged=true",
    ]


def _api_hosts(network: NodeNetwork) -> tuple[str, ...]:
    service = "kubernetes.default.svc"
    names = ("kubernetes", "kubernetes.default", service, f"{service}.cluster.local")
    return (network.address, network.api_service_address, *names)


def _reach_flags(authority: Authority, network: NodeNetwork) -> list[str]:
    """Return what pods reaching the API server, and it reaching kubelets, takes."""
    kubelet = authority.issue("apiserver-kubelet", "apiserver-kubelet", group="system:masters")
    return [
        "--bind-address=0.0.0.0",
        f"--advertise-address={network.address}",
        f"--service-cluster-ip-range={network.service_range}",
        f"--kubelet-client-certificate={kubelet.certificate}",
        f"--kubelet-client-key={kubelet.key}",
        f"--kubelet-certificate-authority={authority.certificate}",
        "--kubelet-preferred-address-types=InternalIP",
        "--enable-admission-plugins=NodeRestriction",
    ]


def controller_flags(
    authority: Authority, network: NodeNetwork | None, kubeconfig: Path
) -> list[str]:
    """Return the flags of the controllers."""
    return [
        f"--kubeconfig={kubeconfig}",
        f"--controllers={'*' if network else ','.join(_CONTROLLERS)}",
        f"--root-ca-file={authority.certificate}",
        "--use-service-account-credentials=true",
        "--leader-elect=false",
        "--secure-port=0",
    ]


def scheduler_flags(kubeconfig: Path) -> list[str]:
    """Return the flags of the scheduler."""
    return [
        f"--kubeconfig={kubeconfig}",
        f"--authentication-kubeconfig={kubeconfig}",
        f"--authorization-kubeconfig={kubeconfig}",
        "--leader-elect=false",
        "--secure-port=0",
    ]
