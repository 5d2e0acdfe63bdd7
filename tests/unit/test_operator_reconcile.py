"""When passes are made, what becomes of failed ones, and which objects are ours to change."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Self, cast

import pytest

from lmcache_operator.agents.registry import ServerRef
from lmcache_operator.api.root import Spec
from lmcache_operator.cluster import Cluster, KubeObject
from lmcache_operator.config import OperatorConfig
from lmcache_operator.ensure import Ensurer
from lmcache_operator.errors import ApiError, KindMissing, NameTaken, NotFound, Unreachable
from lmcache_operator.names import owner_labels
from lmcache_operator.reconcile import Reconciler
from lmcache_operator.server_pass import Memory, ServerPass
from lmcache_operator.trouble_events import TroubleEvents
from lmcache_operator.troubles import Trouble
from lmcache_operator.work_queue import WorkQueue
from tests.fakes.loop_clock import LoopClock

SERVER = ServerRef("serving", "kv", "uid-1")
CONFIG = OperatorConfig(operator_namespace="ops")
SPEC = {"cache": {"size": "1Gi"}}


def on_loop(test: Callable[[], Coroutine[object, object, None]]) -> Callable[[], None]:
    """Run an asynchronous test."""

    def run() -> None:
        asyncio.run(test())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


class ApplyingCluster:
    """Objects in memory, applied as the API server does it: the same again makes no version."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str | None, str], KubeObject] = {}
        self.applies = 0
        self.created: list[KubeObject] = []
        self.servers: list[KubeObject] = []
        self.missing = False
        self.refuses = False
        self._version = 0

    async def get(self, kind: str, namespace: str | None, name: str) -> KubeObject | None:
        """See `Cluster`."""
        return copy.deepcopy(self.objects.get((kind, namespace, name)))

    async def apply(self, obj: KubeObject) -> KubeObject:
        """See `Cluster`."""
        self.applies += 1
        key = (obj["kind"], obj["metadata"]["namespace"], obj["metadata"]["name"])
        stored = self.objects.get(key)
        version = stored["metadata"].pop("resourceVersion") if stored else ""
        if stored != obj:
            self._version += 1
            version, stored = str(self._version), copy.deepcopy(obj)
        stored["metadata"]["resourceVersion"] = version
        self.objects[key] = stored
        return copy.deepcopy(stored)

    async def create(self, obj: KubeObject) -> bool:
        """See `Cluster`."""
        self.created.append(obj)
        if self.refuses:
            raise ApiError(403, "Forbidden", "being terminated")
        return True

    async def list(self, kind: str, namespace: str | None = None) -> list[KubeObject]:
        """See `Cluster`."""
        del kind, namespace
        if self.missing:
            raise NotFound(404, "NotFound", "page not found")
        return self.servers


def as_cluster(cluster: ApplyingCluster) -> Cluster:
    """Give it where a whole one is asked for."""
    return cast("Cluster", cluster)


def stored_server(name: str, spec: Mapping[str, object] = SPEC) -> KubeObject:
    """Make a server as the API server lists it."""
    return {"metadata": {"namespace": "serving", "name": name, "uid": f"uid-{name}"}, "spec": spec}


class Passes:
    """Stands in for `ServerPass`: answers as a test says, and remembers who was passed over."""

    def __init__(self) -> None:
        self.made: list[str] = []
        self.answer: Callable[[str, Memory], float | None] = lambda _name, _memory: 60.0

    async def run(self, namespace: str, name: str, memory: Memory) -> float | None:
        """See `ServerPass`."""
        del namespace
        self.made.append(name)
        return self.answer(name, memory)


class Bench:
    """A reconciler with everything around it."""

    def __init__(self) -> None:
        self.clock = LoopClock()
        self.cluster = ApplyingCluster()
        self.passes = Passes()
        self.told: list[dict[ServerRef, Spec]] = []
        self.outcomes: list[str] = []
        self.reconciler = Reconciler(
            as_cluster(self.cluster),
            CONFIG,
            cast("ServerPass", self.passes),
            lambda servers: self.told.append(dict(servers)),
            counted=self.outcomes.append,
            now=self.clock.now,
            sleep=self.clock.sleep,
        )

    async def __aenter__(self) -> Self:
        self._running = asyncio.create_task(self.reconciler.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)


@on_loop
async def test_events_of_one_change_make_one_pass() -> None:
    """However many there are; the next pass is a while later."""
    async with Bench() as bench:
        for _ in range(5):
            bench.reconciler.notice("serving", "kv")
        await bench.clock.advance(1)
        assert bench.passes.made == ["kv"]
        bench.reconciler.notice("serving", "kv")
        await bench.clock.advance(0.1)
        assert bench.passes.made == ["kv"]
        await bench.clock.advance(1)
        assert bench.passes.made == ["kv"] * 2


@on_loop
async def test_a_server_is_passed_over_again_when_its_pass_says() -> None:
    """Nothing need happen."""
    async with Bench() as bench:
        bench.passes.answer = lambda _name, _memory: 30.0
        bench.reconciler.notice("serving", "kv")
        await bench.clock.advance(95)
        assert len(bench.passes.made) == 4


@on_loop
async def test_what_a_pass_has_written_makes_no_further_pass() -> None:
    """Nor what it has seen; another version does, and one that may have been missed."""

    def answer(_name: str, memory: Memory) -> float:
        memory.versions = {"7"}
        return 600.0

    async with Bench() as bench:
        bench.passes.answer = answer
        for version, passes in (("6", 1), ("7", 1), ("8", 2), ("", 3)):
            bench.reconciler.notice("serving", "kv", version)
            await bench.clock.advance(5)
            assert len(bench.passes.made) == passes


@on_loop
async def test_a_pass_that_fails_is_made_again_and_hurts_no_other() -> None:
    """Refused, unanswered, or a bug of ours: each is counted, and tried ever more rarely."""
    failures = [ApiError(500, "InternalError", "no"), Unreachable("down"), RuntimeError("a bug")]

    def answer(name: str, _memory: Memory) -> float:
        if name == "bad" and failures:
            raise failures.pop(0)
        return 600.0

    async with Bench() as bench:
        bench.passes.answer = answer
        bench.reconciler.notice("serving", "bad")
        await bench.clock.advance(0.5)
        bench.reconciler.notice("serving", "good")
        await bench.clock.advance(0.5)
        assert bench.outcomes == ["refused", "done"]
        await bench.clock.advance(10)
        assert bench.outcomes == ["refused", "done", "unreachable", "crashed", "done"]
        bench.passes.answer = _refuse
        bench.reconciler.notice("serving", "bad")
        await bench.clock.advance(300)
        assert 10 < len(bench.passes.made) < 20


def _refuse(_name: str, _memory: Memory) -> float:
    raise ApiError(403, "Forbidden", "no")


@on_loop
async def test_a_server_that_is_gone_is_forgotten() -> None:
    """And whoever has to know the servers is told."""

    def answer(_name: str, memory: Memory) -> float | None:
        memory.server, memory.spec = None, None
        return None

    async with Bench() as bench:
        bench.cluster.servers = [stored_server("kv")]
        await bench.reconciler.load()
        assert [server.name for server in bench.told[-1]] == ["kv"]
        bench.passes.answer = answer
        await bench.clock.advance(1)
        assert bench.told[-1] == {}


@on_loop
async def test_a_server_that_no_watch_has_told_of_is_found() -> None:
    """Kopf does not watch a kind that it could not find at its start."""
    async with Bench() as bench:
        await bench.reconciler.load()
        bench.cluster.servers = [stored_server("kv")]
        await bench.clock.advance(59)
        assert bench.passes.made == []
        await bench.clock.advance(5)
        assert bench.passes.made == ["kv"]


@on_loop
async def test_a_kind_that_goes_ends_it() -> None:
    """Within a minute, should the watch not notice."""
    bench = Bench()
    running = asyncio.create_task(bench.reconciler.run())
    bench.cluster.missing = True
    await bench.clock.advance(61)
    with pytest.raises(ExceptionGroup) as caught:
        await running
    assert caught.group_contains(KindMissing)


@on_loop
async def test_all_servers_are_known_before_anything_is_said_of_one() -> None:
    """Those whose spec cannot be served are left out: their pass says why."""
    bench = Bench()
    bench.cluster.servers = [stored_server("a"), stored_server("b"), stored_server("c", {})]
    await bench.reconciler.load()
    (known,) = bench.told
    assert {server.name for server in known} == {"a", "b"}


@on_loop
async def test_a_kind_that_is_missing_is_no_refusal() -> None:
    """There is nothing to work on: the process has to end."""
    bench = Bench()
    bench.cluster.missing = True
    with pytest.raises(KindMissing, match="kubectl apply"):
        await bench.reconciler.load()


@on_loop
async def test_a_queue_gives_each_key_to_one_at_a_time() -> None:
    """What is added meanwhile is given afterwards; the earlier moment counts."""
    clock = LoopClock()
    queue: WorkQueue[str] = WorkQueue(clock.now)
    queue.add("a", 5)
    queue.add("a", 50)
    taking = asyncio.create_task(queue.take())
    await clock.settle()
    assert not taking.done()
    clock.jump(5)
    queue.add("b")
    assert {await taking, await queue.take()} == {"a", "b"}
    queue.add("a")
    again = asyncio.create_task(queue.take())
    await clock.settle()
    assert not again.done()
    queue.done("a")
    assert await again == "a"


def wanted(**labels: str) -> KubeObject:
    """Make an object that a server wants."""
    return {
        "kind": "ConfigMap",
        "metadata": {
            "namespace": "serving",
            "name": "kv-reaping",
            "labels": {**owner_labels("serving", "kv", "uid-1"), **labels},
        },
    }


@on_loop
async def test_what_is_as_it_was_applied_is_not_applied_again() -> None:
    """No request to write, and nobody is told of a change."""
    cluster, written = ApplyingCluster(), list[str]()
    ensurer = Ensurer(as_cluster(cluster), written.append)
    await ensurer.ensure(SERVER, wanted())
    await ensurer.ensure(SERVER, wanted())
    assert (cluster.applies, written) == (1, ["ConfigMap"])
    await ensurer.ensure(SERVER, wanted(a="b"))
    assert (cluster.applies, written) == (2, ["ConfigMap"] * 2)
    cluster.objects["ConfigMap", "serving", "kv-reaping"]["metadata"]["resourceVersion"] = "99"
    await ensurer.ensure(SERVER, wanted(a="b"))
    assert (cluster.applies, len(written)) == (3, 2)  # somebody else's field: nothing changed


@pytest.mark.parametrize(
    ("metadata", "ours"),
    [
        ({}, False),
        ({"labels": {"a": "b"}}, False),
        ({"labels": owner_labels("serving", "kv", "an earlier one")}, True),
        ({"labels": owner_labels("elsewhere", "kv", "uid-1")}, False),
        ({"ownerReferences": [{"uid": "uid-1"}]}, True),
        ({"ownerReferences": [{"uid": "uid-2"}]}, False),
        ({"managedFields": [{"manager": "lmcache-operator"}]}, True),
        ({"managedFields": [{"manager": "helm"}]}, False),
    ],
)
def test_whose_an_object_is(metadata: dict[str, Any], ours: bool) -> None:  # noqa: FBT001  # a row
    """By labels, else by its owner, else by who manages its fields; all others stay untouched."""
    cluster = ApplyingCluster()
    stored = {"kind": "ConfigMap", "metadata": {"resourceVersion": "1", **metadata}}
    cluster.objects["ConfigMap", "serving", "kv-reaping"] = stored
    ensurer = Ensurer(as_cluster(cluster), list[str]().append)
    ensuring = ensurer.ensure(SERVER, wanted())
    if ours:
        asyncio.run(ensuring)
        return
    with pytest.raises(NameTaken, match="ConfigMap serving/kv-reaping"):
        asyncio.run(ensuring)
    assert cluster.applies == 0


@on_loop
async def test_a_trouble_is_posted_once_an_hour() -> None:
    """The API server forgets Events; what lasts is said again under the same name."""
    cluster, clock = ApplyingCluster(), LoopClock()
    events = TroubleEvents(as_cluster(cluster), now=clock.now)
    trouble = Trouble("NoNodesMatch", "No node. " * 500)
    await events.post(SERVER, 1, trouble)
    await events.post(SERVER, 1, Trouble("NoNodesMatch", "other words"))
    assert len(cluster.created) == 1
    await events.post(SERVER, 2, trouble)
    clock.jump(3601)
    await events.post(SERVER, 1, trouble)
    names = [event["metadata"]["name"] for event in cluster.created]
    assert names[0] == names[2] != names[1]
    assert len(cluster.created[0]["message"]) <= 1024


@on_loop
async def test_an_event_that_is_refused_is_given_up() -> None:
    """It is no reason to leave a server alone."""
    cluster = ApplyingCluster()
    cluster.refuses = True
    events = TroubleEvents(as_cluster(cluster), now=LoopClock().now)
    for _ in range(2):
        await events.post(SERVER, 1, Trouble("NoNodesMatch", "No node."))
    assert len(cluster.created) == 1
