"""What an agent's journal says becomes Events: in words, in order, each exactly once."""

from __future__ import annotations

import asyncio
from typing import get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_nodeagent.operator_link.messages import (
    EntryKind,
    JournalEntry,
    PodOwner,
    PodRun,
    SlotPod,
)
from lmcache_operator.errors import ApiError, Forbidden, NotFound
from lmcache_operator.events.journal import MAX_WAITING
from lmcache_operator.events.objects import Involved, Origin, event_name, event_object
from lmcache_operator.events.wording import (
    LONGEST_MESSAGE,
    message_of,
    reason_of,
    size_in_words,
    type_of,
)
from tests.fakes.flow_world import BEGAN, SERVER, FlowWorld
from tests.fakes.scripted_agent import ScriptedAgent
from tests.fakes.virtual_loop import in_virtual_time

OWNER = PodOwner(api_version="apps/v1", kind="ReplicaSet", name="w-rs", uid="uid-rs")
WHERE = PodRun(namespace="default", name="w", uid="uid-w", container="engine", owner=OWNER)
REAPED = JournalEntry(
    seq=1,
    kind="reaped",
    instance_id=7,
    registration=1,
    model="demo/model",
    reason="container_terminated",
    evidence=("pod default/w (engine)", "proof: container_terminated, told 0.1 s ago"),
    silent_seconds=3.25,
    happened_at=BEGAN,
    released_bytes=512 * 2**20,
    release_seconds=0.02,
    latency_seconds=0.31,
    trigger="container_terminated",
    mapping=WHERE,
)


def entry(seq: int = 1, kind: EntryKind = "reaped", **changes: object) -> JournalEntry:
    """Make an entry like `REAPED`."""
    return msgspec.structs.replace(REAPED, seq=seq, kind=kind, **changes)


class TestWording:
    """Messages for people."""

    def test_a_reap(self) -> None:
        """Who, why, how long it was silent, and how fast its memory was back."""
        assert message_of(REAPED, "n1") == (
            "Reaped instance 7 of demo/model on node n1: container_terminated, silent for 3.25 s; "
            "released 512 MiB 0.31 s after the container ended. Evidence: pod default/w (engine); "
            "proof: container_terminated, told 0.1 s ago."
        )

    @pytest.mark.parametrize(
        ("reason", "trigger", "since"),
        [
            ("pod_terminated", "pod_terminated", "the pod ended"),
            ("pod_hint", "pod_gone", "its pod was found gone"),
            ("pod_hint", "ended_unreported", "its pod was found ended"),
            ("pod_hint", "", "its end was noticed"),
            ("process_exit", "", "its process exited"),
            ("slot_restarted", "", "the kubelet began to start the next container in its slot"),
            ("slot_released", "", "its pod no longer had the slot"),
            ("pod_hint", "slot_released", "its pod no longer had the slot"),
            ("connection_closed", "", "its connection closed"),
            ("connection_closed", "pod_gone", "its connection closed"),
            ("heartbeat_timeout", "", "it was last heard"),
            ("registration_grace", "", "it was last heard"),
            ("something_newer", "", "its end was noticed"),
        ],
    )
    def test_where_a_latency_starts(self, reason: str, trigger: str, since: str) -> None:
        """By what the agent judged on."""
        message = message_of(entry(reason=reason, trigger=trigger, latency_seconds=12.4), "n1")
        assert f"released 512 MiB 12 s after {since}." in message

    def test_a_release_whose_start_is_not_known(self) -> None:
        """Then how long it took, or that it is not over."""
        assert "released 512 MiB in 0.02 s." in message_of(entry(latency_seconds=None), "n1")
        open_end = entry(latency_seconds=None, release_seconds=None)
        assert "its memory is not released yet." in message_of(open_end, "n1")

    @pytest.mark.parametrize(
        ("kind", "reason", "words"),
        [
            ("would_reap", "WorkerWouldBeReaped", "Would have reaped instance 7"),
            ("cancelled", "ReapCancelled", "then there was a sign of life"),
            ("false_reap", "FalseReap", "after it was reaped"),
            ("stuck_release", "ReleaseStuck", "512 MiB of dead instance 7"),
            ("shared_memory_exceeded", "SharedMemoryExceeded", "It goes on, but cannot register"),
        ],
    )
    def test_other_kinds(self, kind: EntryKind, reason: str, words: str) -> None:
        """Each has a reason to filter by, and says what became of the worker."""
        assert reason_of(kind) == reason
        assert words in message_of(entry(kind=kind), "n1")

    def test_a_start_that_waited(self) -> None:
        """On the new container: which one, for what, and how it ended."""
        held = entry(
            kind="start_held",
            reason="released",
            evidence=("the start of a container waited 3.2 s",),
            slot="5",
            slot_pod=SlotPod(namespace="default", name="w-2", container="engine"),
        )
        assert reason_of("start_held") == "ContainerStartHeld"
        assert type_of(held) == "Normal"
        assert message_of(held, "n1") == (
            "The start of container default/w-2 (engine) waited for memory of an earlier one, "
            "instance 7 of demo/model on node n1: that is back, and it starts. "
            "Evidence: the start of a container waited 3.2 s."
        )

    def test_a_start_that_waited_in_vain(self) -> None:
        """It may fail for want of memory, so somebody should look."""
        held = entry(kind="start_held", reason="gave_up")
        assert type_of(held) == "Warning"
        assert "still mapped, and it starts all the same" in message_of(held, "n1")
        assert "preStartWaitSeconds" in message_of(held, "n1")

    def test_lost_entries_are_mentioned(self) -> None:
        """The agent keeps only so many."""
        assert message_of(entry(missed=3), "n1").endswith(
            "3 earlier entries of this agent are lost."
        )

    @given(st.text(max_size=5000), st.lists(st.text(max_size=2000), max_size=20).map(tuple))
    def test_messages_have_a_limit(self, model: str, evidence: tuple[str, ...]) -> None:
        """Whatever an agent says."""
        for kind in get_args(EntryKind):
            said = entry(kind=kind, model=model, evidence=evidence)
            assert 0 < len(message_of(said, "n1")) <= LONGEST_MESSAGE

    @pytest.mark.parametrize(
        ("size", "words"),
        [
            (0, "0 bytes"),
            (1023, "1023 bytes"),
            (2**20, "1 MiB"),
            (3 * 2**29, "1.5 GiB"),
            (2**50, "1024 TiB"),
            (80 * 2**30 + 2**29, "80 GiB"),
        ],
    )
    def test_sizes(self, size: int, words: str) -> None:
        """In the unit that reads best."""
        assert size_in_words(size) == words


class TestObject:
    """Events as the API server takes them."""

    origin = Origin(
        Involved("lmcache-kube.dev/v1alpha1", "LMCacheServer", "default", "kv", "uid-kv"),
        "n1",
        "boot-1",
    )

    def test_its_name_is_what_it_tells(self) -> None:
        """The same entry has the same name, wherever it is told; others have others."""
        names = {
            event_name(boot, seq, place)
            for boot in ("a", "b")
            for seq in (1, 2)
            for place in ("server", "worker")
        }
        assert len(names) == 8
        assert event_name("a", 1, "worker") in names
        assert all(name == name.lower() and len(name) < 64 for name in names)

    def test_it_is_in_the_namespace_of_its_object(self) -> None:
        """Which Kubernetes demands."""
        worker = Involved("v1", "Pod", "teams", "w", "uid-w")
        found = event_object(self.origin, REAPED, worker, "worker")
        assert found["metadata"]["namespace"] == "teams"
        assert found["involvedObject"]["uid"] == "uid-w"
        assert found["type"] == "Warning"
        assert found["source"] == {"component": "lmcache-operator", "host": "n1"}
        assert found["lastTimestamp"] == "2023-11-14T22:13:20Z"


async def started() -> tuple[FlowWorld, ScriptedAgent]:
    """Start an operator with one node and one worker pod that runs."""
    world = FlowWorld()
    world.put_pod()
    await world.start_operator()
    return world, world.agent()


class TestPosting:
    """From the journal to the API server."""

    @in_virtual_time
    async def test_on_the_pod_and_on_the_server(self) -> None:
        """Then it is acknowledged, and counted."""
        world, agent = await started()
        agent.write(REAPED)
        await world.settle()
        assert sorted(world.cluster.notes()) == [
            ("LMCacheServer", "kv", "WorkerReaped"),
            ("Pod", "w", "WorkerReaped"),
        ]
        assert agent.acknowledged == 1
        summary = world.flow.summary(SERVER)
        assert (summary.reaps_total, summary.last_reason) == (1, "container_terminated")
        assert summary.last_reap_time == "2023-11-14T22:13:20.000000Z"

    @in_virtual_time
    async def test_a_held_start_is_told_on_the_pod_that_waited(self) -> None:
        """Not on the one whose memory it waited for; on that one if it is not known which."""
        world, agent = await started()
        world.put_pod("w-2")
        await world.settle()
        waiting = SlotPod(namespace="default", name="w-2", container="engine")
        agent.write(entry(1, "start_held", reason="released", slot="5", slot_pod=waiting))
        unknown = SlotPod(namespace="default", name="w-3", container="engine")
        agent.write(entry(2, "start_held", reason="gave_up", slot="5", slot_pod=unknown))
        await world.settle()
        told = [note[1] for note in world.cluster.notes("ContainerStartHeld")]
        assert sorted(told) == ["kv", "kv", "w", "w-2"]
        assert agent.acknowledged == 2
        assert world.flow.summary(SERVER).reaps_total == 0

    @in_virtual_time
    async def test_the_pod_is_gone(self) -> None:
        """What controlled it is told instead; without that, the pod's name still is."""
        world, agent = await started()
        world.pods.delete("default", "w")
        await world.settle()
        agent.write(entry(1))
        agent.write(entry(2, mapping=msgspec.structs.replace(WHERE, owner=None)))
        await world.settle()
        workers = [note[:2] for note in world.cluster.notes() if note[0] != "LMCacheServer"]
        assert workers == [("ReplicaSet", "w-rs"), ("Pod", "w")]

    @in_virtual_time
    async def test_another_pod_has_its_name(self) -> None:
        """It is not told of a stranger."""
        world, agent = await started()
        world.put_pod("w", uid="uid-w-2", addresses=("10.1.0.2",))
        await world.settle()
        agent.write(REAPED)
        await world.settle()
        (worker,) = [note for note in world.cluster.notes() if note[0] != "LMCacheServer"]
        assert worker[:2] == ("ReplicaSet", "w-rs")

    @in_virtual_time
    async def test_an_instance_without_a_pod(self) -> None:
        """Only the server is told; and of pods elsewhere, whatever the agent says, nothing."""
        world, agent = await started()
        agent.write(entry(1, mapping=None))
        elsewhere = PodRun(namespace="kube-system", name="dns", uid="u")
        agent.write(entry(2, mapping=elsewhere))
        await world.settle()
        assert {note[0] for note in world.cluster.notes()} == {"LMCacheServer"}
        assert agent.acknowledged == 2

    @in_virtual_time
    async def test_the_mapping_is_newer_than_the_entry(self) -> None:
        """The agent had not been told yet where the instance runs."""
        world, agent = await started()
        report = agent.register(7, at=BEGAN)
        await world.settle()
        agent.write(entry(registration=report.registration, mapping=None))
        await world.settle()
        assert ("Pod", "w", "WorkerReaped") in world.cluster.notes()

    @in_virtual_time
    async def test_only_reaps_are_counted(self) -> None:
        """The other kinds are told."""
        world, agent = await started()
        kinds: tuple[EntryKind, ...] = ("would_reap", "cancelled", "false_reap", "stuck_release")
        for seq, kind in enumerate(kinds, 1):
            agent.write(entry(seq, kind))
        await world.settle()
        assert len(world.cluster.events) == 8
        assert world.flow.summary(SERVER).reaps_total == 0

    @in_virtual_time
    async def test_an_outage(self) -> None:
        """Nothing is acknowledged, nothing is lost, and the order stays."""
        world, agent = await started()
        world.cluster.reachable = False
        for seq in range(1, 11):
            agent.write(entry(seq, instance_id=seq))
        await world.settle(seconds=60)
        assert agent.acknowledged == 0
        tries = world.cluster.creations
        assert tries < 40
        world.cluster.reachable = True
        await world.settle(seconds=10)
        assert agent.acknowledged == 10
        told = [
            int(event["message"].split()[2])
            for event in world.cluster.events.values()
            if event["involvedObject"]["kind"] == "Pod"
        ]
        assert told == list(range(1, 11))
        assert world.flow.summary(SERVER).reaps_total == 10

    @pytest.mark.parametrize(
        "refusal",
        [
            NotFound(404, "NotFound", 'namespaces "default" not found'),
            Forbidden(403, "Forbidden", "it is being terminated"),
            ApiError(422, "Invalid", "Event is invalid"),
        ],
    )
    @in_virtual_time
    async def test_an_event_that_can_never_be(self, refusal: ApiError) -> None:
        """It is acknowledged and counted as such: nobody else waits behind it."""
        world, agent = await started()
        world.cluster.refusal = lambda obj: refusal if obj.get("kind") == "Event" else None
        agent.write(REAPED)
        await world.settle()
        assert agent.acknowledged == 1
        assert world.flow.counts()["events"]["impossible"] == 2
        assert world.flow.summary(SERVER).reaps_total == 0

    @in_virtual_time
    async def test_an_api_server_that_fails_for_long(self) -> None:
        """Its errors are waited out for minutes, then the Event is given up."""
        world, agent = await started()
        broken = ApiError(500, "InternalError", "webhook")
        world.cluster.refusal = lambda obj: broken if obj.get("kind") == "Event" else None
        agent.write(REAPED)
        await world.settle(seconds=60)
        assert agent.acknowledged == 0
        await world.settle(seconds=700)
        assert agent.acknowledged == 1

    @in_virtual_time
    async def test_a_busy_agent_does_not_hold_up_another(self) -> None:
        """Queues take turns."""
        world, agent = await started()
        other = world.agent("n2")
        for seq in range(1, 200):
            agent.write(entry(seq))
        other.write(entry(1))
        for _ in range(50):
            await asyncio.sleep(0)
        hosts = [event["source"]["host"] for event in world.cluster.events.values()]
        assert "n2" in hosts
        assert len(hosts) < 200

    @in_virtual_time
    async def test_more_than_can_wait(self) -> None:
        """The agent begins again, and says what was dropped: nothing is lost."""
        world, agent = await started()
        world.cluster.reachable = False
        for seq in range(1, MAX_WAITING + 101):
            agent.write(entry(seq, mapping=None))
        world.cluster.reachable = True
        while agent.acknowledged < MAX_WAITING + 100:
            await world.settle(seconds=1)
            if agent.session.end_cause is not None:
                agent.connect(world.registry)
        assert world.flow.counts()["events"]["dropped"] >= 100
        assert len(world.cluster.events) == MAX_WAITING + 100
        assert world.flow.gauges()["events_waiting"] == 0


class TestOverOperators:
    """No Event is lost or doubled, and no reap counted twice."""

    @in_virtual_time
    async def test_a_new_stream_repeats(self) -> None:
        """What waits is not queued again, and what is done is acknowledged again."""
        world, agent = await started()
        agent.write(entry(1))
        await world.settle()
        world.cluster.reachable = False
        agent.write(entry(2))
        await world.settle()
        agent.unacknowledged.insert(0, entry(1))
        agent.connect(world.registry)
        await world.settle()
        assert agent.acknowledged == 1
        world.cluster.reachable = True
        await world.settle(seconds=10)
        assert agent.acknowledged == 2
        assert world.flow.summary(SERVER).reaps_total == 2
        assert len(world.cluster.events) == 4

    @in_virtual_time
    async def test_the_agent_goes_before_its_entry_is_posted(self) -> None:
        """It is posted all the same, and nothing of that boot is kept."""
        world, agent = await started()
        world.cluster.reachable = False
        agent.write(REAPED)
        await world.settle()
        agent.disconnect()
        world.cluster.reachable = True
        await world.settle(seconds=10)
        assert len(world.cluster.events) == 2
        assert world.flow._journal._queues == {}

    @in_virtual_time
    async def test_the_total_goes_on(self) -> None:
        """From the status, as soon as it can be read; until then there is none."""
        world = FlowWorld()
        world.put_pod()
        world.cluster.servers["default", "kv"]["status"] = {
            "reaping": {
                "total": 40,
                "lastReapTime": "2020-01-01T00:00:00Z",
                "lastReason": "process_exit",
            }
        }
        world.cluster.reachable = False
        await world.start_operator()
        assert world.flow.summary(SERVER).reaps_total is None
        world.cluster.reachable = True
        await world.settle(seconds=5)
        summary = world.flow.summary(SERVER)
        assert (summary.reaps_total, summary.last_reason) == (40, "process_exit")
        world.agent().write(REAPED)
        await world.settle()
        summary = world.flow.summary(SERVER)
        assert (summary.reaps_total, summary.last_reason) == (41, "container_terminated")

    @pytest.mark.parametrize("seed", range(20))
    @in_virtual_time
    async def test_operators_end_at_any_moment(self, seed: int) -> None:
        """Each entry is two Events and one reap, whoever posted which of them when."""
        world = FlowWorld()
        world.put_pod()
        await world.start_operator()
        agent = world.agent()
        for seq in range(1, 16):
            agent.write(entry(seq, happened_at=BEGAN + seq / 10))
            for _ in range((seed * 7 + seq * 3) % 11):
                await asyncio.sleep(0)
            await asyncio.sleep(((seed * 5 + seq * 3) % 8) / 10)
            if (seed + seq) % 3 == 0:
                await world.stop_operator()
                await world.start_operator()
        await world.settle(seconds=5)
        assert agent.acknowledged == 15
        assert len(world.cluster.events) == 30
        assert world.flow.summary(SERVER).reaps_total == 15

    @pytest.mark.parametrize("stored", [False, True])
    @in_virtual_time
    async def test_the_total_is_not_known_yet(self, stored: bool) -> None:  # noqa: FBT001
        """An Event from before is counted once it is known whether it was counted before."""
        world, agent = await started()
        agent.write(entry(1, happened_at=BEGAN + 1))
        await asyncio.sleep(0.2)
        assert len(world.cluster.events) == 2
        if stored:
            await asyncio.sleep(0.2)
        await world.stop_operator()
        busy = ApiError(429, "TooManyRequests", "later")
        world.cluster.refusal = lambda obj: busy if obj == {} else None
        await world.start_operator()
        agent.write(entry(2, happened_at=BEGAN + 2))
        await world.settle(seconds=20)
        assert world.flow.summary(SERVER).reaps_total is None
        assert agent.acknowledged == 0
        world.cluster.refusal = lambda _: None
        await world.settle(seconds=35)
        assert world.flow.summary(SERVER).reaps_total == 2
        assert agent.acknowledged == 2

    @in_virtual_time
    async def test_a_reap_is_repeated_before_it_is_stored(self) -> None:
        """By a new stream of the same agent: it is the same reap."""
        world, agent = await started()
        agent.write(REAPED)
        await asyncio.sleep(0.1)
        agent.connect(world.registry)
        await asyncio.sleep(0.1)
        assert agent.acknowledged == 0
        await world.settle(seconds=2)
        assert world.flow.summary(SERVER).reaps_total == 1
        assert agent.acknowledged == 1

    @in_virtual_time
    async def test_the_server_goes_while_a_reap_is_not_stored(self) -> None:
        """Nothing is left of it, and the next one begins at nought."""
        world, agent = await started()
        agent.write(REAPED)
        await asyncio.sleep(0.1)
        world.remove()
        await world.settle(seconds=2)
        assert world.flow._totals._reaps == {}
        assert world.flow._totals._counted_to == {}
        agent.write(entry(2))
        await world.settle(seconds=2)
        assert agent.acknowledged == 2

    @in_virtual_time
    async def test_a_reap_that_no_status_will_show(self) -> None:
        """It is acknowledged in the end: the status may be broken, its Events are there."""
        world, agent = await started()
        broken = Forbidden(403, "Forbidden", "no reading of servers")
        world.cluster.refusal = lambda obj: broken if obj == {} else None
        agent.write(REAPED)
        await world.settle(seconds=20)
        assert agent.acknowledged == 0
        await world.settle(seconds=20)
        assert agent.acknowledged == 1

    @in_virtual_time
    async def test_the_server_is_another_one_by_then(self) -> None:
        """What happened before it is not counted, and not waited for."""
        world, agent = await started()
        world.cluster.servers["default", "kv"]["metadata"]["uid"] = "another"
        agent.write(REAPED)
        await world.settle()
        assert agent.acknowledged == 1
