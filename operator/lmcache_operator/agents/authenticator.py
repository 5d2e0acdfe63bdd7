"""Whose token this is: the agent of an existing `LMCacheServer`, on the node that its pod is on.

The API server says whether a token is good and which pod it is bound to; what that pod is, the
objects say: controlled by the DaemonSet of a server, and scheduled to a node. Nothing that an
agent says about itself is taken.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from lmcache_nodeagent.operator_link.messages import TOKEN_AUDIENCE
from lmcache_operator import names
from lmcache_operator.agents.registry import AgentIdentity, ServerRef
from lmcache_operator.api.crd import KIND
from lmcache_operator.clock import Now, monotonic, wall
from lmcache_operator.cluster import TokenReviewResult

_AT_ONCE = 8
_MOST_WAITING = 2_000
_MOST_REMEMBERED = 4_096
_OWNER_SECONDS = 5.0  # after an operator's start a thousand agents of one server come together
_CLOCK_SLACK_SECONDS = 300.0  # of this machine against the API server's, which decides
_JWT_PARTS = 3
_LATEST_SECONDS = 2**40  # some 35,000 years from now

_ACCOUNT = "system:serviceaccount:"
_CLAIM = "authentication.kubernetes.io/"


class Refusal(StrEnum):
    """Why a stream is refused, as it is counted and logged."""

    NO_TOKEN = "no_token"  # noqa: S105  # no token
    NOT_A_TOKEN = "not_a_token"  # noqa: S105  # no token
    OTHER_AUDIENCE = "other_audience"
    EXPIRED = "expired"
    TOKEN_REFUSED = "token_refused"  # noqa: S105  # no token
    NOT_AN_ACCOUNT = "not_a_service_account"
    NOT_BOUND = "not_bound_to_a_pod"
    NOT_SERVED = "namespace_not_served"
    NO_SERVER = "no_such_server"
    NO_POD = "no_such_pod"
    OTHER_POD = "not_an_agent_pod"
    OTHER_NODE = "other_node"


@dataclass(frozen=True, slots=True)
class Refused:
    """A refusal, and in words what was found; never the token."""

    reason: Refusal
    detail: str


class Overloaded(Exception):
    """So many agents wait to be looked at that another must come again later."""


class Reviews(Protocol):
    """What is needed of the API server; `Cluster` has it."""

    async def get(self, kind: str, namespace: str | None, name: str) -> dict[str, Any] | None:
        """Return an object, or None if there is none."""

    async def token_review(self, token: str, audiences: Sequence[str]) -> TokenReviewResult:
        """Ask whose a token is."""


@dataclass(frozen=True, slots=True)
class _Bearer:
    """What the API server said of a token."""

    namespace: str
    account: str
    pod_name: str
    pod_uid: str
    node: str
    expires_at: float


@dataclass(frozen=True, slots=True)
class _Owner:
    """An existing server and its DaemonSet, and when that was seen."""

    server: ServerRef
    daemon_set_uid: str
    seen_at: float


class Authenticator:
    """Looks at tokens, a few at once; answers of the API server are kept until a token expires.

    The pod is looked up each time: the token of a pod that is gone is refused at once.
    """

    def __init__(
        self,
        reviews: Reviews,
        *,
        serves: Callable[[str], bool] = lambda _namespace: True,
        now: Now = monotonic,
        wall_now: Now = wall,
    ) -> None:
        self._reviews = reviews
        self._serves = serves
        self._now = now
        self._wall_now = wall_now
        self._at_once = asyncio.Semaphore(_AT_ONCE)
        self._waiting = 0
        self._bearers: OrderedDict[bytes, _Bearer] = OrderedDict()
        self._owners: dict[tuple[str, str], _Owner] = {}

    async def authenticate(self, authorization: str) -> AgentIdentity | Refused:
        """Judge the value of an `Authorization` header.

        Raises:
            Overloaded: too many wait.
            Unreachable: the API server does not answer, which says nothing about the token.
            ApiError: the operator may not ask.
        """
        scheme, _, token = authorization.strip().partition(" ")
        token = token.strip()
        if scheme.lower() != "bearer" or not token:
            return Refused(Refusal.NO_TOKEN, "no bearer token in the Authorization header")
        expires_at = self._look_at(token)
        if isinstance(expires_at, Refused):
            return expires_at
        if self._waiting >= _MOST_WAITING:
            raise Overloaded(f"{self._waiting} agents wait, at most {_MOST_WAITING} may")
        self._waiting += 1
        try:
            async with self._at_once:
                return await self._identify(token, expires_at)
        finally:
            self._waiting -= 1

    def _look_at(self, token: str) -> float | Refused:
        """Return when a token expires, or why nobody need be asked about it.

        What it says of itself is not proven yet: it can only make things worse for it.
        """
        try:
            claims = _claims(token)
        except ValueError as error:
            return Refused(Refusal.NOT_A_TOKEN, str(error))
        audiences = claims.get("aud")
        audiences = [audiences] if isinstance(audiences, str) else audiences
        if not isinstance(audiences, list) or TOKEN_AUDIENCE not in audiences:
            return Refused(Refusal.OTHER_AUDIENCE, f"for {audiences}, not for {TOKEN_AUDIENCE}")
        expires_at = claims.get("exp")
        if not isinstance(expires_at, int | float) or not 0 < expires_at < _LATEST_SECONDS:
            return Refused(Refusal.NOT_A_TOKEN, "it does not say when it expires")
        late = self._wall_now() - expires_at
        if late > _CLOCK_SLACK_SECONDS:
            return Refused(Refusal.EXPIRED, f"{late:.0f} s ago")
        return float(expires_at)

    async def _identify(self, token: str, expires_at: float) -> AgentIdentity | Refused:
        bearer = await self._bearer(token, expires_at)
        if isinstance(bearer, Refused):
            return bearer
        owner = await self._owner(bearer)
        if isinstance(owner, Refused):
            return owner
        pod = await self._reviews.get("Pod", bearer.namespace, bearer.pod_name)
        node = _agent_node(pod, bearer, owner)
        if isinstance(node, Refused):
            return node
        return AgentIdentity(owner.server, node, bearer.pod_name, bearer.pod_uid, expires_at)

    async def _bearer(self, token: str, expires_at: float) -> _Bearer | Refused:
        digest = hashlib.sha256(token.encode()).digest()
        known = self._bearers.get(digest)
        if known is not None and self._wall_now() < known.expires_at:
            self._bearers.move_to_end(digest)
            return known
        result = await self._reviews.token_review(token, [TOKEN_AUDIENCE])
        bearer = _read_review(result, expires_at)
        if isinstance(bearer, _Bearer):
            self._bearers[digest] = bearer
            while len(self._bearers) > _MOST_REMEMBERED:
                self._bearers.popitem(last=False)
        return bearer

    async def _owner(self, bearer: _Bearer) -> _Owner | Refused:
        """Find the server that the agents' ServiceAccount is named after."""
        namespace, name = bearer.namespace, bearer.account
        if not self._serves(namespace):
            return Refused(Refusal.NOT_SERVED, f"namespace {namespace}")
        known = self._owners.get((namespace, name))
        if known is not None and self._now() < known.seen_at + _OWNER_SECONDS:
            return known
        self._owners.pop((namespace, name), None)
        server = await self._reviews.get(KIND, namespace, name)
        if server is None:
            account = f"ServiceAccount {namespace}/{name}"
            return Refused(Refusal.NO_SERVER, f"{account} belongs to no {KIND}")
        uid = server["metadata"]["uid"]
        daemon_set = await self._reviews.get("DaemonSet", namespace, names.daemon_set(name))
        if daemon_set is None or _controller_uid(daemon_set, KIND) != uid:
            return Refused(Refusal.OTHER_POD, f"{namespace}/{name} has no DaemonSet of its own")
        reference = ServerRef(namespace, name, uid)
        owner = _Owner(reference, daemon_set["metadata"]["uid"], self._now())
        self._owners[namespace, name] = owner
        return owner


def _claims(token: str) -> dict[str, Any]:
    """Read the claims of a token without proof.

    Raises:
        ValueError: it is no JSON Web Token.
    """
    if not token.isascii():
        raise ValueError("it has characters that no token has")
    parts = token.split(".")
    if len(parts) != _JWT_PARTS:
        raise ValueError(f"{len(parts)} parts, but a JSON Web Token has {_JWT_PARTS}")
    padded = parts[1] + "=" * (-len(parts[1]) % 4)
    try:
        claims = json.loads(base64.urlsafe_b64decode(padded))
    except (binascii.Error, ValueError, RecursionError):
        raise ValueError("its claims cannot be read") from None
    if not isinstance(claims, dict):
        raise ValueError("its claims are no JSON object")  # noqa: TRY004  # it is input
    return claims


def _read_review(result: TokenReviewResult, expires_at: float) -> _Bearer | Refused:
    if not result.authenticated or TOKEN_AUDIENCE not in result.audiences:
        return Refused(Refusal.TOKEN_REFUSED, result.error or "the API server does not accept it")
    namespace, _, account = result.username.removeprefix(_ACCOUNT).partition(":")
    if not result.username.startswith(_ACCOUNT) or not account:
        return Refused(Refusal.NOT_AN_ACCOUNT, f"of {result.username}")
    pod_name, pod_uid = result.claim(f"{_CLAIM}pod-name"), result.claim(f"{_CLAIM}pod-uid")
    if not pod_name or not pod_uid:
        return Refused(Refusal.NOT_BOUND, f"of {result.username}")
    node = result.claim(f"{_CLAIM}node-name")
    return _Bearer(namespace, account, pod_name, pod_uid, node, expires_at)


def _agent_node(pod: dict[str, Any] | None, bearer: _Bearer, owner: _Owner) -> str | Refused:
    """Return the node of an agent's pod."""
    place = f"{bearer.namespace}/{bearer.pod_name}"
    if pod is None or pod["metadata"]["uid"] != bearer.pod_uid:
        return Refused(Refusal.NO_POD, f"pod {place} with uid {bearer.pod_uid} is gone")
    if _controller_uid(pod, "DaemonSet") != owner.daemon_set_uid:
        agents = f"the DaemonSet of {owner.server.namespace}/{owner.server.name}"
        return Refused(Refusal.OTHER_POD, f"pod {place} is not controlled by {agents}")
    node = str(pod["spec"].get("nodeName") or "")
    if not node or bearer.node not in {"", node}:
        said = f"its token was made for {bearer.node or 'no node'}"
        return Refused(Refusal.OTHER_NODE, f"pod {place} is on {node or 'no node'}, {said}")
    return node


def _controller_uid(obj: dict[str, Any], kind: str) -> str:
    """Return the uid of the object of a kind that controls this one, empty if there is none."""
    for reference in obj["metadata"].get("ownerReferences") or ():
        if reference.get("controller") and reference.get("kind") == kind:
            return str(reference.get("uid", ""))
    return ""
