"""A kubelet, its pods and their slots, in any order: the living are spared, the dead are proven."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lmcache_nodeagent.liveness.entry import LivenessEntry, Speaker
from lmcache_nodeagent.liveness.evidence import Connection, Surroundings
from lmcache_nodeagent.liveness.policy import Reason, judge
from lmcache_nodeagent.liveness.slots import SlotBook, SlotOwner
from lmcache_nodeagent.liveness.stalls import Stalls
from tests.fakes.judged import CONFIRM, SETTINGS
from tests.fakes.liveness_parts import FakeClock, close, connection, entry

SLOTS = ("0", "1", "2")
PING_SECONDS = 10.0


@dataclass(eq=False)
class Container:
    """One run of a pod's container, and the worker in it."""

    slot: str
    pod: str
    entry: LivenessEntry
    alive: bool = True
    restarted: bool = False  # the kubelet has started the next one at its slot

    @property
    def connection(self) -> Connection:
        """The worker's only one."""
        return self.entry.registrant


@dataclass
class Node:
    """What the kubelet knows: which pod has which slot."""

    pods: dict[str, str] = field(default_factory=dict)
    started: int = 1
    listed: set[str] = field(default_factory=set)  # by the kubelet that runs now
    gone: dict[str, str] = field(default_factory=dict)  # deleted, though their process may live


class SlotsWorld(RuleBasedStateMachine):
    """Workers ping; the agent reads everything at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = FakeClock(1000.0)
        self.book = SlotBook(SLOTS, self.now)
        self.node = Node()
        self.containers: list[Container] = []
        self.names = 0

    def start(self, slot: str, pod: str) -> None:
        """What the kubelet does for each start of a container."""
        for earlier in self.containers:
            earlier.restarted |= earlier.slot == slot
        run = self.book.begin_run(slot)
        made = connection(f"{slot}/{run.run}", serial=len(self.containers) + 1, local=True)
        made.slot = run
        assert made.link is not None
        made.link.slot = slot
        self.names += 1
        self.containers.append(Container(slot, pod, entry(made, number=self.names, at=self.now())))

    def ask(self) -> None:
        """Read the kubelet's list."""
        owners = {slot: SlotOwner("team", pod, "engine") for slot, pod in self.node.pods.items()}
        self.book.listed(owners, self.now(), f"kubelet {self.node.started}")
        self.node.listed |= set(self.node.pods)

    def free(self) -> list[str]:
        """Slots that no pod has and where nothing runs: the kubelet prefers those."""
        busy = {one.slot for one in self.containers if one.alive}
        return [slot for slot in SLOTS if slot not in self.node.pods and slot not in busy]

    def living(self) -> list[Container]:
        """Those whose process runs."""
        return [one for one in self.containers if one.alive]

    @precondition(lambda self: self.free())
    @rule(data=st.data(), same_name=st.booleans())
    def admit(self, data: st.DataObject, *, same_name: bool) -> None:
        """Start a pod, maybe one that has the name of an earlier one."""
        slot = data.draw(st.sampled_from(self.free()))
        self.names += 1
        pod = "engine-0" if same_name else f"engine-{self.names}"
        self.book.allocated(slot)
        self.node.pods[slot] = pod
        self.node.listed.discard(slot)
        self.start(slot, pod)

    @precondition(lambda self: self.living())
    @rule(data=st.data(), held=st.booleans())
    def crash(self, data: st.DataObject, *, held: bool) -> None:
        """End a process; a child of it may hold the connection."""
        container = data.draw(st.sampled_from(self.living()))
        container.alive = False
        if held:
            container.connection.process_gone = data.draw(st.booleans())
        else:
            close(container.connection, self.now())

    @precondition(lambda self: self.dead_with_pods())
    @rule(data=st.data())
    def restart(self, data: st.DataObject) -> None:
        """Start the container of a pod again."""
        container = data.draw(st.sampled_from(self.dead_with_pods()))
        self.start(container.slot, container.pod)

    def dead_with_pods(self) -> list[Container]:
        """Those that the kubelet would start again."""
        return [
            one
            for one in self.containers
            if not one.alive and not one.restarted and self.node.pods.get(one.slot) == one.pod
        ]

    @precondition(lambda self: self.node.pods)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        """Delete a pod by force: its process may run on."""
        del self.node.pods[data.draw(st.sampled_from(sorted(self.node.pods)))]

    @rule()
    def look(self) -> None:
        """Read the list."""
        self.ask()

    @rule()
    def restart_kubelet(self) -> None:
        """Start the kubelet again, which lists nothing at first."""
        self.node.started += 1
        self.node.listed.clear()
        self.book.listed({}, self.now(), f"kubelet {self.node.started}")

    @rule(seconds=st.sampled_from([0.1, 1.0, PING_SECONDS, CONFIRM]))
    def pass_time(self, seconds: float) -> None:
        """Let the living ping, as often as they do."""
        end = self.now() + seconds
        while self.now() < end:
            self.now.advance(min(PING_SECONDS, end - self.now()))
            for one in self.living():
                assert one.entry.speaker(one.connection) is Speaker.RIGHTFUL
                one.entry.seen(one.connection, self.now())
                one.entry.pinged(self.now())

    @invariant()
    def the_living_are_spared(self) -> None:
        """Whatever the kubelet has forgotten."""
        for one in self.living():
            assert self.reason(one) is None

    @invariant()
    def the_dead_of_earlier_runs_are_proven(self) -> None:
        """Whatever still holds their connection, and nobody of theirs speaks any more."""
        for one in self.containers:
            assert self.book.is_over(one.connection.slot) is one.restarted
            if one.restarted:
                assert self.reason(one) in {Reason.SLOT_RESTARTED, Reason.PROCESS_EXIT}

    @invariant()
    def who_lost_its_slot_and_its_connection_is_dead(self) -> None:
        """At once, with the list that lacks it."""
        words = self.book.words()
        for one in self.containers:
            given_up = words[one.slot].given_up_at is not None
            gone = one.connection.process_gone or not one.connection.is_open
            if not one.alive and not one.restarted and given_up and gone:
                assert self.reason(one) is Reason.SLOT_RELEASED

    @invariant()
    def slots_speak_for_their_own_only(self) -> None:
        """No other slot, and no earlier run."""
        for one in self.containers:
            for other in self.containers:
                if other.slot != one.slot or other.connection.slot.run < one.connection.slot.run:
                    assert one.entry.speaker(other.connection) is Speaker.STRANGER

    def reason(self, container: Container) -> Reason | None:
        """Judge a worker."""
        open_ones = (one.connection.link for one in self.containers if one.connection.is_open)
        links = tuple(link for link in open_ones if link is not None)
        around = Surroundings(links, slots=self.book.words())
        made = container.entry
        return judge(made, self.now(), SETTINGS, around, Stalls(), describe=False).reason


TestSlotsWorld = SlotsWorld.TestCase
TestSlotsWorld.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
