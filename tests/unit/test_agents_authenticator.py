"""Whose stream it is: a table of what the API server may say, and what follows."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from structlog.testing import capture_logs

from lmcache_nodeagent.operator_link.messages import TOKEN_AUDIENCE
from lmcache_operator.agents import authenticator as module
from lmcache_operator.agents.authenticator import Authenticator, Overloaded, Refusal, Refused
from lmcache_operator.agents.refusals import Refusals
from lmcache_operator.agents.registry import AgentIdentity, ServerRef
from lmcache_operator.cluster import TokenReviewResult
from lmcache_operator.errors import Unreachable
from tests.fakes.kube_objects import KubeObject, KubeObjects

NOW = 1_800_000_000.0
CLAIM = "authentication.kubernetes.io/"
GOOD = TokenReviewResult(
    authenticated=True,
    username="system:serviceaccount:serving:kv",
    audiences=(TOKEN_AUDIENCE,),
    extra={
        f"{CLAIM}pod-name": ("kv-x1",),
        f"{CLAIM}pod-uid": ("pod-uid",),
        f"{CLAIM}node-name": ("n1",),
    },
)
KV = ServerRef("serving", "kv", "cr-uid")


def token(claims: object = None, **changes: object) -> str:
    """Make a token as far as it can be read without a key."""
    good = {"aud": [TOKEN_AUDIENCE], "exp": NOW + 600, **changes}
    payload = json.dumps(good if claims is None else claims).encode()
    return f"e30.{base64.urlsafe_b64encode(payload).decode().rstrip('=')}.c2ln"


def controlled(kind: str, name: str, uid: str, by: tuple[str, str, str]) -> KubeObject:
    """Make an object that another one controls: kind, name and uid."""
    reference = {"kind": by[0], "name": by[1], "uid": by[2], "controller": True}
    metadata = {"namespace": "serving", "name": name, "uid": uid, "ownerReferences": [reference]}
    return {"kind": kind, "metadata": metadata, "spec": {"nodeName": "n1"}}


SERVER: KubeObject = {
    "kind": "LMCacheServer",
    "metadata": {"namespace": "serving", "name": "kv", "uid": "cr-uid"},
}
DAEMON_SET = controlled("DaemonSet", "kv", "ds-uid", ("LMCacheServer", "kv", "cr-uid"))
POD = controlled("Pod", "kv-x1", "pod-uid", ("DaemonSet", "kv", "ds-uid"))


class Reviews(KubeObjects):
    """An API server that says one thing of every token.

    Attributes:
        reads: what was asked for, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.says = GOOD
        self.reads: list[str] = []
        for obj in (SERVER, DAEMON_SET, POD):
            self.put(obj)

    async def get(self, kind: str, namespace: str | None, name: str) -> KubeObject | None:
        """See `Cluster`."""
        self.reads.append(kind)
        return await super().get(kind, namespace, name)

    async def token_review(self, token: str, audiences: Sequence[str]) -> TokenReviewResult:
        """See `Cluster`."""
        self.reads.append("TokenReview")
        if self.failure:
            raise self.failure
        assert list(audiences) == [TOKEN_AUDIENCE]
        assert token
        return self.says


@pytest.fixture
def reviews() -> Reviews:
    """Return an API server with one agent."""
    return Reviews()


def judge(
    reviews: Reviews,
    authorization: str | None = None,
    **options: Any,  # noqa: ANN401  # as given
) -> AgentIdentity | Refused:
    """Judge one header by a new authenticator."""
    header = f"Bearer {token()}" if authorization is None else authorization
    judging = Authenticator(reviews, wall_now=lambda: NOW, **options)
    return asyncio.run(judging.authenticate(header))


def test_the_agent_of_a_server(reviews: Reviews) -> None:
    """It is who the API server says it is, until its token expires."""
    assert judge(reviews) == AgentIdentity(KV, "n1", "kv-x1", "pod-uid", NOW + 600)


def test_a_token_without_a_node(reviews: Reviews) -> None:
    """The pod says where it is."""
    extra = {name: value for name, value in GOOD.extra.items() if "node" not in name}
    reviews.says = TokenReviewResult(True, GOOD.username, "", GOOD.audiences, extra)  # noqa: FBT003
    found = judge(reviews)
    assert isinstance(found, AgentIdentity)
    assert found.node == "n1"


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        ("", Refusal.NO_TOKEN),
        ("Bearer", Refusal.NO_TOKEN),
        ("Basic YTpi", Refusal.NO_TOKEN),
        ("Bearer abc", Refusal.NOT_A_TOKEN),
        ("Bearer a.b.c.d", Refusal.NOT_A_TOKEN),
        ("Bearer e30.%%%.x", Refusal.NOT_A_TOKEN),
        ("Bearer e30.e30.\udcff", Refusal.NOT_A_TOKEN),
        ("Bearer e30.WzFd.x", Refusal.NOT_A_TOKEN),
        (f"Bearer e30.{'W' * 6000}.x", Refusal.NOT_A_TOKEN),
        (f"Bearer {token(aud='https://kubernetes.default.svc')}", Refusal.OTHER_AUDIENCE),
        (f"Bearer {token(aud=None)}", Refusal.OTHER_AUDIENCE),
        (f"Bearer {token(aud={TOKEN_AUDIENCE: 1})}", Refusal.OTHER_AUDIENCE),
        (f"Bearer {token(exp='soon')}", Refusal.NOT_A_TOKEN),
        (f"Bearer {token(exp=10**400)}", Refusal.NOT_A_TOKEN),
        (f"Bearer {token(exp=float('nan'))}", Refusal.NOT_A_TOKEN),
        (f"Bearer {token(exp=NOW - 301)}", Refusal.EXPIRED),
    ],
)
def test_what_nobody_is_asked_about(header: str, reason: Refusal, reviews: Reviews) -> None:
    """What can be seen to be useless costs the API server nothing."""
    found = judge(reviews, header)
    assert isinstance(found, Refused)
    assert found.reason == reason
    assert reviews.reads == []


def test_an_audience_may_be_one_text(reviews: Reviews) -> None:
    """JSON Web Tokens may write a single audience without a list."""
    found = judge(reviews, f"bearer  {token(aud=TOKEN_AUDIENCE)}")
    assert isinstance(found, AgentIdentity)


def test_our_clock_does_not_decide(reviews: Reviews) -> None:
    """Two minutes late by our clock, but the API server takes it."""
    found = judge(reviews, f"Bearer {token(exp=NOW - 120)}")
    assert isinstance(found, AgentIdentity)


def says(**changes: Any) -> Callable[[Reviews], None]:  # noqa: ANN401  # fields of the result
    """Have the API server say something else of the token; None leaves a claim out."""

    def change(reviews: Reviews) -> None:
        claims = {f"{CLAIM}{name}": (value,) for name, value in changes.pop("claims", {}).items()}
        extra = {
            name: value for name, value in {**GOOD.extra, **claims}.items() if value != (None,)
        }
        fields = {"username": GOOD.username, "audiences": GOOD.audiences, "extra": extra}
        reviews.says = TokenReviewResult(**{"authenticated": True, **fields, **changes})

    return change


def without(kind: str, name: str) -> Callable[[Reviews], None]:
    """Delete an object."""
    return lambda reviews: reviews.drop(kind, "serving", name)


def instead(obj: KubeObject) -> Callable[[Reviews], None]:
    """Have another object of that name."""
    return lambda reviews: reviews.put(obj)


def not_controlling(obj: KubeObject) -> KubeObject:
    """Return an object whose owner does not control it."""
    (reference,) = obj["metadata"]["ownerReferences"]
    references = [{**reference, "controller": False}]
    return {**obj, "metadata": {**obj["metadata"], "ownerReferences": references}}


REFUSED: dict[str, tuple[Callable[[Reviews], None], Refusal, str]] = {
    "not authenticated": (
        says(authenticated=False, error="service account token has been invalidated"),
        Refusal.TOKEN_REFUSED,
        "invalidated",
    ),
    "no word why": (says(authenticated=False), Refusal.TOKEN_REFUSED, "does not accept"),
    "audience not confirmed": (says(audiences=("api",)), Refusal.TOKEN_REFUSED, ""),
    "a person": (says(username="admin"), Refusal.NOT_AN_ACCOUNT, "of admin"),
    "a node": (says(username="system:node:n1"), Refusal.NOT_AN_ACCOUNT, "system:node:n1"),
    "half an account": (
        says(username="system:serviceaccount:serving"),
        Refusal.NOT_AN_ACCOUNT,
        "",
    ),
    "not bound": (
        says(claims={"pod-name": None, "pod-uid": None}),
        Refusal.NOT_BOUND,
        "serving:kv",
    ),
    "bound to a name only": (says(claims={"pod-uid": None}), Refusal.NOT_BOUND, ""),
    "other account": (
        says(username="system:serviceaccount:serving:default"),
        Refusal.NO_SERVER,
        "serving/default belongs to no LMCacheServer",
    ),
    "same account elsewhere": (
        says(username="system:serviceaccount:evil:kv"),
        Refusal.NO_SERVER,
        "evil/kv",
    ),
    "server gone": (without("LMCacheServer", "kv"), Refusal.NO_SERVER, ""),
    "server made anew": (
        instead({**SERVER, "metadata": {**SERVER["metadata"], "uid": "newer"}}),
        Refusal.OTHER_POD,
        "no DaemonSet of its own",
    ),
    "no DaemonSet": (without("DaemonSet", "kv"), Refusal.OTHER_POD, "no DaemonSet"),
    "somebody's DaemonSet": (
        instead(controlled("DaemonSet", "kv", "ds-uid", ("Other", "kv", "cr-uid"))),
        Refusal.OTHER_POD,
        "no DaemonSet",
    ),
    "DaemonSet owned, not controlled": (
        instead(not_controlling(DAEMON_SET)),
        Refusal.OTHER_POD,
        "",
    ),
    "pod gone": (without("Pod", "kv-x1"), Refusal.NO_POD, "kv-x1 with uid pod-uid is gone"),
    "pod of the same name": (
        instead(controlled("Pod", "kv-x1", "newer", ("DaemonSet", "kv", "ds-uid"))),
        Refusal.NO_POD,
        "",
    ),
    "pod of a Deployment": (
        instead(controlled("Pod", "kv-x1", "pod-uid", ("ReplicaSet", "kv", "ds-uid"))),
        Refusal.OTHER_POD,
        "not controlled by the DaemonSet of serving/kv",
    ),
    "pod of another DaemonSet": (
        instead(controlled("Pod", "kv-x1", "pod-uid", ("DaemonSet", "kv", "other"))),
        Refusal.OTHER_POD,
        "",
    ),
    "pod owned, not controlled": (instead(not_controlling(POD)), Refusal.OTHER_POD, ""),
    "pod of nobody": (
        instead({"kind": "Pod", "metadata": {**POD["metadata"], "ownerReferences": None}}),
        Refusal.OTHER_POD,
        "",
    ),
    "pod on another node": (
        instead({**POD, "spec": {"nodeName": "n2"}}),
        Refusal.OTHER_NODE,
        "is on n2, its token was made for n1",
    ),
    "pod on no node": (instead({**POD, "spec": {}}), Refusal.OTHER_NODE, "is on no node"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_who_is_refused(name: str, reviews: Reviews) -> None:
    """Each with its own reason, and in words what was found."""
    change, reason, words = REFUSED[name]
    change(reviews)
    found = judge(reviews)
    assert isinstance(found, Refused), found
    assert found.reason == reason
    assert words in found.detail


def test_a_namespace_that_is_left_alone(reviews: Reviews) -> None:
    """Its objects are not even looked at."""
    found = judge(reviews, serves={"elsewhere"}.__contains__)
    assert isinstance(found, Refused)
    assert found.reason == Refusal.NOT_SERVED
    assert reviews.reads == ["TokenReview"]


def test_an_api_server_that_is_away(reviews: Reviews) -> None:
    """That says nothing about the token."""
    reviews.failure = Unreachable("no answer")
    with pytest.raises(Unreachable):
        judge(reviews)


def test_a_token_is_reviewed_once_until_it_expires(reviews: Reviews) -> None:
    """But its pod is looked up each time, and a server now and then."""
    moment = [NOW]

    async def story() -> None:
        judging = Authenticator(reviews, now=lambda: moment[0], wall_now=lambda: moment[0])
        asked = []
        for moment[0] in (NOW, NOW + 1, NOW + 7, NOW + 595, NOW + 601):
            reviews.reads.clear()
            assert isinstance(await judging.authenticate(f"Bearer {token()}"), AgentIdentity)
            asked.append(list(reviews.reads))
        whole = ["TokenReview", "LMCacheServer", "DaemonSet", "Pod"]
        assert asked == [whole, ["Pod"], whole[1:], whole[1:], whole]
        reviews.drop("Pod", "serving", "kv-x1")
        assert isinstance(await judging.authenticate(f"Bearer {token()}"), Refused)

    asyncio.run(story())


def test_refusals_are_not_remembered(reviews: Reviews) -> None:
    """A server may be made a moment after its agent's first try."""

    async def story() -> None:
        judging = Authenticator(reviews, wall_now=lambda: NOW)
        reviews.drop("LMCacheServer", "serving", "kv")
        assert isinstance(await judging.authenticate(f"Bearer {token()}"), Refused)
        reviews.put(SERVER)
        assert isinstance(await judging.authenticate(f"Bearer {token()}"), AgentIdentity)

    asyncio.run(story())


def test_what_is_remembered_is_bounded(reviews: Reviews, monkeypatch: pytest.MonkeyPatch) -> None:
    """The token unused for the longest is forgotten, and reviewed again."""
    monkeypatch.setattr(module, "_MOST_REMEMBERED", 2)
    tokens = [f"Bearer {token(exp=NOW + 600 + each)}" for each in range(3)]

    async def story() -> None:
        judging = Authenticator(reviews, wall_now=lambda: NOW)
        for each in (*tokens[:2], tokens[0], tokens[2]):
            await judging.authenticate(each)
        reviews.reads.clear()
        await judging.authenticate(tokens[0])
        assert "TokenReview" not in reviews.reads
        await judging.authenticate(tokens[1])
        assert "TokenReview" in reviews.reads

    asyncio.run(story())


def test_a_thousand_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The API server sees eight at a time; beyond a bound agents are sent away to come again."""
    monkeypatch.setattr(module, "_MOST_WAITING", 900)

    class Slow(Reviews):
        now_asked = most_asked = 0

        async def token_review(self, token: str, audiences: Sequence[str]) -> TokenReviewResult:
            """Take some turns of the loop."""
            self.now_asked += 1
            self.most_asked = max(self.most_asked, self.now_asked)
            for _ in range(5):
                await asyncio.sleep(0)
            self.now_asked -= 1
            return await super().token_review(token, audiences)

    reviews = Slow()

    async def story() -> None:
        judging = Authenticator(reviews, wall_now=lambda: NOW)
        headers = [f"Bearer {token(exp=NOW + 600 + each)}" for each in range(1000)]
        answers = await asyncio.gather(*map(judging.authenticate, headers), return_exceptions=True)
        assert sum(isinstance(each, AgentIdentity) for each in answers) == 900
        assert sum(isinstance(each, Overloaded) for each in answers) == 100
        assert isinstance(await judging.authenticate(headers[-1]), AgentIdentity)

    asyncio.run(story())
    assert reviews.most_asked == 8


def test_refusals_are_counted_and_logged_once_in_a_while() -> None:
    """Each peer and reason once a minute, with how many were not logged; the rest is counted."""
    moment = [0.0]
    refusals = Refusals(now=lambda: moment[0])
    with capture_logs() as logs:
        for moment[0] in range(0, 100, 10):
            refusals.note("10.0.0.1", "no_token", "x" * 1000)
        refusals.note("10.0.0.2", "no_token", "")
        refusals.note("10.0.0.1", "expired", "")
    assert refusals.counts == {"no_token": 11, "expired": 1}
    assert [(each["peer"], each["reason"], each["unlogged"]) for each in logs] == [
        ("10.0.0.1", "no_token", 0),
        ("10.0.0.1", "no_token", 5),
        ("10.0.0.2", "no_token", 0),
        ("10.0.0.1", "expired", 0),
    ]
    assert len(logs[0]["detail"]) == 300


def test_who_is_refused_is_not_remembered_for_ever() -> None:
    """Ten thousand peers cost no more than a thousand."""
    refusals = Refusals()
    with capture_logs():
        for peer in range(10_000):
            refusals.note(str(peer), "no_token", "")
    assert len(refusals._logged) == 1024
