"""The API server: one request at a time, JSON objects in and out, each with a deadline.

The client of the `kubernetes` package gives connection, credentials and TLS; its typed models are
left aside, since they cost memory and know no fields that are newer than they. Thread: the loop.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from types import TracebackType
from typing import Any, Final, Self

import aiohttp
from kubernetes.aio import client, config

from lmcache_operator.api.crd import GROUP, KIND, PLURAL, VERSION
from lmcache_operator.errors import ApiError, Conflict, NotFound, Unreachable
from lmcache_operator.names import FIELD_MANAGER

KubeObject = dict[str, Any]
"""An object of the API, as JSON."""

REQUEST_SECONDS = 10.0
PAGE = 500

MERGE_PATCH = "application/merge-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"
_JSON = "application/json"

_CONNECTIONS = 0  # any number: each watch of worker pods holds one


@dataclass(frozen=True, slots=True)
class Kind:
    """Where objects of a kind are."""

    api_version: str
    plural: str

    def path(self, namespace: str | None, name: str = "") -> str:
        """Return the path of one object or, without a name, of all."""
        root = "/api" if "/" not in self.api_version else "/apis"
        within = f"/namespaces/{namespace}" if namespace else ""
        return f"{root}/{self.api_version}{within}/{self.plural}" + (f"/{name}" if name else "")


KINDS: Final[Mapping[str, Kind]] = {
    KIND: Kind(f"{GROUP}/{VERSION}", PLURAL),
    "ConfigMap": Kind("v1", "configmaps"),
    "DaemonSet": Kind("apps/v1", "daemonsets"),
    "Event": Kind("v1", "events"),
    "Lease": Kind("coordination.k8s.io/v1", "leases"),
    "Namespace": Kind("v1", "namespaces"),
    "Node": Kind("v1", "nodes"),
    "Pod": Kind("v1", "pods"),
    "Secret": Kind("v1", "secrets"),
    "Service": Kind("v1", "services"),
    "ServiceAccount": Kind("v1", "serviceaccounts"),
    "TokenReview": Kind("authentication.k8s.io/v1", "tokenreviews"),
}


@dataclass(frozen=True, slots=True)
class TokenReviewResult:
    """What the API server says of a token.

    Attributes:
        extra: claims such as `authentication.kubernetes.io/pod-uid`, each with its values.
        error: why it is not authenticated, in the API server's words.
    """

    authenticated: bool
    username: str = ""
    uid: str = ""
    audiences: tuple[str, ...] = ()
    extra: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    error: str = ""

    def claim(self, name: str) -> str:
        """Return the first value of a claim, empty if there is none."""
        return next(iter(self.extra.get(name, ())), "")


class Cluster:
    """One connection to the API server, shared by everything in the process.

    Every method raises `Unreachable` if there is no answer in time, and an `ApiError` for refusals
    that it does not turn into an answer.
    """

    def __init__(self, api_client: client.ApiClient) -> None:
        self.client = api_client

    @classmethod
    async def connect(cls, kubeconfig: str = "") -> Self:
        """Read credentials: a kubeconfig, or those of the pod, or the person's own kubeconfig.

        Raises:
            Unreachable: there are no usable ones.
        """
        settings = client.Configuration()
        settings.connection_pool_maxsize = _CONNECTIONS
        try:
            if not kubeconfig and os.environ.get("KUBERNETES_SERVICE_HOST"):
                config.load_incluster_config(  # type: ignore[no-untyped-call]
                    client_configuration=settings
                )
            else:
                await config.load_kube_config(  # type: ignore[no-untyped-call]
                    config_file=kubeconfig or None, client_configuration=settings
                )
        except (config.ConfigException, OSError) as error:
            raise Unreachable(
                f"no credentials for the API server: {error}: run in a pod with a ServiceAccount, "
                "or set KUBECONFIG to a kubeconfig file"
            ) from None
        return cls(client.ApiClient(settings))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.client.close()  # type: ignore[no-untyped-call]

    async def get(self, kind: str, namespace: str | None, name: str) -> KubeObject | None:
        """Return an object, or None if there is none."""
        try:
            return await self.request("GET", KINDS[kind].path(namespace, name))
        except NotFound:
            return None

    async def list(
        self,
        kind: str,
        namespace: str | None = None,
        label_selector: str = "",
        field_selector: str = "",
    ) -> list[KubeObject]:
        """Return all objects of a kind, read in pages; their `kind` and `apiVersion` are unset."""
        items: list[KubeObject] = []
        query = {"limit": str(PAGE)}
        query |= {"labelSelector": label_selector} if label_selector else {}
        query |= {"fieldSelector": field_selector} if field_selector else {}
        while True:
            page = await self.request("GET", KINDS[kind].path(namespace), query=query)
            items += page.get("items") or []
            query["continue"] = page.get("metadata", {}).get("continue", "")
            if not query["continue"]:
                return items

    async def apply(self, obj: KubeObject) -> KubeObject:
        """Apply an object server-side, taking over the fields in it; return what is stored."""
        return await self._apply(obj, "")

    async def apply_status(self, obj: KubeObject) -> KubeObject:
        """Apply the status of an object, which exists."""
        return await self._apply(obj, "/status")

    async def create(self, obj: KubeObject) -> bool:
        """Create an object; False if one of that name exists already."""
        kind, namespace, _ = _place(obj)
        try:
            await self.request("POST", kind.path(namespace), body=obj)
        except Conflict:
            return False
        return True

    async def replace(self, obj: KubeObject) -> KubeObject:
        """Replace an object, at the version in it.

        Raises:
            Conflict: it changed meanwhile.
        """
        kind, namespace, name = _place(obj)
        return await self.request("PUT", kind.path(namespace, name), body=obj)

    async def delete(self, kind: str, namespace: str | None, name: str, *, uid: str = "") -> bool:
        """Delete an object, with `uid` only that one; False if it is not there."""
        guard = {"preconditions": {"uid": uid}} if uid else {}
        body = {"apiVersion": "v1", "kind": "DeleteOptions", **guard}
        try:
            await self.request("DELETE", KINDS[kind].path(namespace, name), body=body)
        except NotFound:
            return False
        except Conflict:
            if not uid:
                raise
            return False  # another one has its name
        return True

    async def merge_patch(
        self, kind: str, namespace: str | None, name: str, patch: KubeObject, *, uid: str = ""
    ) -> KubeObject | None:
        """Patch an object, with `uid` only that one; None if it is not there."""
        metadata = {**patch.get("metadata", {}), **({"uid": uid} if uid else {})}
        body = {**patch, "metadata": metadata} if metadata else patch
        query = {"fieldManager": FIELD_MANAGER}
        path = KINDS[kind].path(namespace, name)
        try:
            return await self.request("PATCH", path, query=query, body=body, content=MERGE_PATCH)
        except NotFound:
            return None
        except ApiError as error:
            if uid and _is_about_uid(error):
                return None  # another one has its name
            raise

    async def token_review(self, token: str, audiences: Sequence[str]) -> TokenReviewResult:
        """Ask whose a token is."""
        kind = KINDS["TokenReview"]
        spec = {"token": token, "audiences": list(audiences)}
        body = {"apiVersion": kind.api_version, "kind": "TokenReview", "spec": spec}
        answer = await self.request("POST", kind.path(None), body=body)
        status = answer.get("status") or {}
        user = status.get("user") or {}
        extra = user.get("extra") or {}
        return TokenReviewResult(
            authenticated=bool(status.get("authenticated")),
            username=user.get("username", ""),
            uid=user.get("uid", ""),
            audiences=tuple(status.get("audiences") or ()),
            extra={name: tuple(values) for name, values in extra.items()},
            error=status.get("error", ""),
        )

    async def serves_our_kind(self) -> bool:
        """Tell whether the definition of our kind is installed, with its status."""
        try:
            found = await self.request("GET", f"/apis/{GROUP}/{VERSION}")
        except NotFound:
            return False
        served = {resource.get("name") for resource in found.get("resources") or ()}
        return {PLURAL, f"{PLURAL}/status"} <= served

    async def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: KubeObject | None = None,
        content: str = _JSON,
        seconds: float = REQUEST_SECONDS,
    ) -> KubeObject:
        """Send one request and return its answer.

        Raises:
            Unreachable: no answer in time, or one that is no JSON.
            ApiError: it is refused.
        """
        try:
            status, text = await self._send(method, path, query or {}, body, content, seconds)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            words = str(error) or f"no answer within {seconds:.0f} s"
            raise Unreachable(f"{method} {path}: {words}") from None
        try:
            answer = json.loads(text)
        except ValueError:
            answer = None
        if isinstance(answer, dict) and status < HTTPStatus.BAD_REQUEST:
            return answer
        if isinstance(answer, dict):
            raise ApiError.of(status, answer.get("reason", ""), answer.get("message", ""))
        if status < HTTPStatus.BAD_REQUEST:
            raise Unreachable(f"{method} {path}: the answer is no JSON object")
        raise ApiError.of(status, HTTPStatus(status).phrase, text.decode(errors="replace")[:500])

    async def _send(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        body: KubeObject | None,
        content: str,
        seconds: float,
    ) -> tuple[int, bytes]:
        prepared = await self.client.param_serialize(
            method,
            path,
            query_params=list(query.items()),
            header_params={"Accept": _JSON, "Content-Type": content},
            body=body,
            auth_settings=["BearerToken"],
        )
        limit = aiohttp.ClientTimeout(total=seconds)
        response = await self.client.call_api(*prepared, _request_timeout=limit)
        return response.status, await response.read()  # type: ignore[no-untyped-call]

    async def _apply(self, obj: KubeObject, subresource: str) -> KubeObject:
        kind, namespace, name = _place(obj)
        return await self.request(
            "PATCH",
            kind.path(namespace, name) + subresource,
            query={"fieldManager": FIELD_MANAGER, "force": "true"},
            body=obj,
            content=APPLY_PATCH,
        )


def _is_about_uid(error: ApiError) -> bool:
    """Tell whether a write was meant for another object of the name."""
    refused = error.status in {HTTPStatus.CONFLICT, HTTPStatus.UNPROCESSABLE_ENTITY}
    return refused and ("metadata.uid" in error.message or "UID in precondition" in error.message)


def _place(obj: KubeObject) -> tuple[Kind, str | None, str]:
    metadata = obj["metadata"]
    return KINDS[obj["kind"]], metadata.get("namespace"), metadata.get("name", "")
