"""Agents as the API server knows them: a server, its DaemonSet, pods on nodes, and their tokens.

Pods are made as the DaemonSet controller makes them, bound to nodes as a scheduler binds them; the
tokens are those that a kubelet would ask for.
"""

from __future__ import annotations

import base64
import itertools
import json
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature

from lmcache_nodeagent.operator_link.messages import TOKEN_AUDIENCE
from lmcache_operator.agents.registry import ServerRef
from lmcache_operator.api.crd import GROUP, KIND, PLURAL, VERSION
from tests.cluster.api import Api
from tests.cluster.control_plane import ControlPlane

_FIELD_BYTES = 32  # of each half of a signature over P-256


@dataclass(frozen=True)
class AgentPod:
    """The pod of one agent."""

    server: ServerRef
    node: str
    name: str
    uid: str


class AgentObjects:
    """Makes servers and agents in one namespace; leaving it deletes the nodes, which have none."""

    def __init__(self, control_plane: ControlPlane, namespace: str) -> None:
        self.api: Api = control_plane.api
        self.namespace = namespace
        self._signing_key: Path = control_plane.folder / "pki" / "service-accounts.key"
        self._numbers = itertools.count(1)
        self._nodes: set[str] = set()
        self._sets: dict[ServerRef, str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for node in self._nodes:
            self.api.request("DELETE", f"/api/v1/nodes/{node}")

    def server(self, name: str = "kv") -> ServerRef:
        """Make a server with what the operator would make for it."""
        document = {
            "apiVersion": f"{GROUP}/{VERSION}",
            "kind": KIND,
            "metadata": {"name": name},
            "spec": {"cache": {"size": "1Gi"}},
        }
        path = f"/apis/{GROUP}/{VERSION}/namespaces/{self.namespace}/{PLURAL}"
        reference = ServerRef(self.namespace, name, self._made(path, document)["uid"])
        self.account(name)
        self.daemon_set(reference)
        return reference

    def account(self, name: str) -> None:
        """Make a ServiceAccount."""
        self._made(self._path("serviceaccounts"), {"metadata": {"name": name}})

    def daemon_set(self, server: ServerRef) -> str:
        """Make the DaemonSet of a server, for this namespace's nodes; return its uid."""
        labels = {"agent-of": server.name}
        document = {
            "metadata": {
                "name": server.name,
                "ownerReferences": [
                    _controller(f"{GROUP}/{VERSION}", KIND, server.name, server.uid)
                ],
            },
            "spec": {
                "selector": {"matchLabels": labels},
                "updateStrategy": {"type": "OnDelete"},
                "template": {
                    "metadata": {"labels": labels},
                    "spec": {
                        "nodeSelector": {"agents": self.namespace},
                        "serviceAccountName": server.name,
                        "containers": [{"name": "agent", "image": "none"}],
                    },
                },
            },
        }
        path = f"/apis/apps/v1/namespaces/{self.namespace}/daemonsets"
        self._sets[server] = self._made(path, document)["uid"]
        return self._sets[server]

    def owner(self, server: ServerRef) -> dict[str, Any]:
        """Return the owner reference of a server's agents."""
        return _controller("apps/v1", "DaemonSet", server.name, self._sets[server])

    def agent(self, server: ServerRef, *, account: str = "") -> AgentPod:
        """Make a node and an agent's pod on it."""
        node = f"{self.namespace}-{next(self._numbers)}"
        # The pod comes first: the controller then sees that nothing is missing on the new node.
        pod = self.pod(server, node, account=account, owners=[self.owner(server)])
        labels = {"agents": self.namespace}
        self._made("/api/v1/nodes", {"metadata": {"name": node, "labels": labels}})
        self._nodes.add(node)
        return pod

    def pod(
        self,
        server: ServerRef,
        node: str,
        *,
        name: str = "",
        account: str = "",
        owners: list[dict[str, Any]] | None = None,
    ) -> AgentPod:
        """Make a pod; without owners it lacks the agents' labels, or their set would adopt it."""
        metadata: dict[str, Any] = {"labels": {"agent-of": server.name} if owners else {}}
        metadata |= {"name": name} if name else {"generateName": f"{server.name}-"}
        metadata |= {"ownerReferences": owners} if owners else {}
        spec = {
            "nodeName": node,
            "serviceAccountName": account or server.name,
            "automountServiceAccountToken": False,
            "tolerations": [{"operator": "Exists"}],
            "containers": [{"name": "agent", "image": "none"}],
        }
        made = self._made(self._path("pods"), {"metadata": metadata, "spec": spec})
        return AgentPod(server, node, made["name"], made["uid"])

    def delete(self, plural: str, name: str) -> None:
        """Delete an object of the core or apps API at once, as if its kubelet had agreed."""
        root = "/apis/apps/v1" if plural == "daemonsets" else "/api/v1"
        root = f"/apis/{GROUP}/{VERSION}" if plural == PLURAL else root
        path = f"{root}/namespaces/{self.namespace}/{plural}/{name}"
        answer = self.api.request("DELETE", path, {"gracePeriodSeconds": 0})
        assert answer.ok, answer.message

    def token(
        self,
        pod: AgentPod | None,
        *,
        account: str = "kv",
        audience: str = TOKEN_AUDIENCE,
    ) -> str:
        """Ask for a token of a ServiceAccount, bound to a pod or to nothing."""
        spec: dict[str, Any] = {"audiences": [audience] if audience else []}
        if pod is not None:
            bound = {"apiVersion": "v1", "kind": "Pod", "name": pod.name, "uid": pod.uid}
            spec["boundObjectRef"] = bound
        path = self._path(f"serviceaccounts/{account}/token")
        answer = self.api.request("POST", path, {"spec": spec})
        assert answer.ok, answer.message
        return str(answer.body["status"]["token"])

    def agent_token(self, pod: AgentPod) -> str:
        """Ask for the token that an agent has."""
        return self.token(pod, account=pod.server.name)

    def token_until(self, pod: AgentPod, expires_at: float) -> str:
        """Make an agent's token with another end, signed with the API server's key."""
        token = self.agent_token(pod)
        head, claims, _ = token.split(".")
        changed = {
            **_decoded(claims),
            "exp": int(expires_at),
            "nbf": 0,
            "iat": int(time.time() - 60),
        }
        signed = f"{head}.{_encoded(json.dumps(changed).encode())}"
        key = serialization.load_pem_private_key(self._signing_key.read_bytes(), None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        signature = key.sign(signed.encode(), ec.ECDSA(hashes.SHA256()))
        halves = (half.to_bytes(_FIELD_BYTES) for half in decode_dss_signature(signature))
        return f"{signed}.{_encoded(b''.join(halves))}"

    def review_fails(self, token: str) -> bool:
        """Tell whether the API server itself has stopped taking a token."""
        spec = {"token": token, "audiences": [TOKEN_AUDIENCE]}
        path = "/apis/authentication.k8s.io/v1/tokenreviews"
        answer = self.api.request("POST", path, {"spec": spec})
        return answer.ok and not answer.body["status"].get("authenticated")

    def _path(self, rest: str) -> str:
        return f"/api/v1/namespaces/{self.namespace}/{rest}"

    def _made(self, path: str, document: dict[str, Any]) -> dict[str, Any]:
        answer = self.api.request("POST", path, document)
        assert answer.ok, answer.message
        metadata: dict[str, Any] = answer.body["metadata"]
        return metadata


def _controller(api_version: str, kind: str, name: str, uid: str) -> dict[str, Any]:
    reference = {"apiVersion": api_version, "kind": kind, "name": name, "uid": uid}
    return {**reference, "controller": True}


def _decoded(part: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)))
    return found


def _encoded(part: bytes) -> str:
    return base64.urlsafe_b64encode(part).decode().rstrip("=")
