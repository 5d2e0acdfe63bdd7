"""A whole node at random: the living are never reaped, the dead go in time."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from lmcache_nodeagent.liveness.windows import LivenessSettings
from tests.fakes.liveness_kubelet import Kubelet
from tests.fakes.liveness_processes import Worker
from tests.fakes.liveness_world import World

ADDRESSES = st.sampled_from(["10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4", "10.0.0.5"])
INTERVALS = st.sampled_from([None, 10.0, 60.0])
SAYINGS = st.sampled_from(["nothing", "something", "uid 0", "lookup", "other id"])
STALLS = st.sampled_from([0.4, 2.0, 45.0, 200.0])
PAUSES = st.sampled_from([0.05, 1.0, 4.0, 9.0, 31.0, 130.0, 1000.0])

LOST_SYNS_SECONDS = 6.3
"""A living peer reconnects after 0.1 s, or after this with its first SYNs lost."""


class NodeMachine(RuleBasedStateMachine):
    """Whatever happens, in whatever order. The world checks after every scan."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(LivenessSettings())
        self.kubelet = Kubelet(self.world)

    @initialize(timeout=st.sampled_from([30.0, 120.0]), mode=st.sampled_from(["on", "on", "off"]))
    def configure(self, timeout: float, mode: str) -> None:
        """Choose T, and rarely observe only."""
        self.world = World(
            LivenessSettings(reap_timeout_seconds=timeout, enforce=mode == "on"),
        )
        self.kubelet = Kubelet(self.world)

    def pick(self, data: st.DataObject) -> Worker:
        """One of the workers that are up."""
        return data.draw(st.sampled_from(list(self.world.living())))

    def someone_lives(self) -> bool:
        """Whether there is one."""
        return any(True for _ in self.world.living())

    @precondition(lambda self: len(self.world.workers) < 8)
    @rule(address=ADDRESSES, interval=INTERVALS)
    def start(self, address: str, interval: float | None) -> None:
        """A worker starts; those of one address are ranks of one pod."""
        self.world.start_worker(address, interval)

    @precondition(someone_lives)
    @rule(data=st.data())
    def kill(self, data: st.DataObject) -> None:
        """A process ends."""
        self.world.kill(self.pick(data))

    @precondition(someone_lives)
    @rule(data=st.data())
    def freeze_or_thaw(self, data: st.DataObject) -> None:
        """SIGSTOP and SIGCONT: the connection stays, the pings do not."""
        worker = self.pick(data)
        worker.frozen = not worker.frozen

    @precondition(someone_lives)
    @rule(data=st.data(), seconds=st.sampled_from([0.1, 0.9, LOST_SYNS_SECONDS]))
    def drop(self, data: st.DataObject, seconds: float) -> None:
        """A connection breaks and is made again."""
        self.world.drop(self.pick(data), seconds)

    @precondition(someone_lives)
    @rule(data=st.data(), pause=st.sampled_from([0.5, 1000.0]))
    def drop_twice(self, data: st.DataObject, pause: float) -> None:
        """Twice within a second, or a quarter of an hour later."""
        worker = self.pick(data)
        self.world.drop(worker, 0.1)
        self.world.run(pause)
        if worker in self.world.living():
            self.world.drop(worker, LOST_SYNS_SECONDS)

    @rule(seconds=st.sampled_from([0.1, 9.0, 14.0]))
    def cut_the_network(self, seconds: float) -> None:
        """Everybody's connection breaks at once, and is made again within the confirm time."""
        living = list(self.world.living())
        heard = {w.address for w in living if w.pipe.connection and w.pipe.connection.is_open}
        if len(heard) > 1:
            for worker in living:
                self.world.drop(worker, seconds)

    @precondition(lambda self: len(self.world.strangers) < 3)
    @rule(address=ADDRESSES, says=SAYINGS)
    def connect_stranger(self, address: str, says: str) -> None:
        """Schedulers, probers, workers to be."""
        self.world.connect_stranger(address, says)

    @precondition(lambda self: self.world.strangers)
    @rule(data=st.data())
    def disconnect_stranger(self, data: st.DataObject) -> None:
        """They leave again."""
        self.world.disconnect_stranger(data.draw(st.sampled_from(self.world.strangers)))

    @rule(seconds=STALLS, router=st.booleans(), reaper=st.booleans(), goes_on=st.booleans())
    def stall(self, seconds: float, *, router: bool, reaper: bool, goes_on: bool) -> None:
        """The agent is late; the world may go on meanwhile."""
        self.world.stall(seconds, router=router, reaper=reaper)
        if not goes_on:
            self.world.run(seconds)

    @rule(seconds=PAUSES)
    def pass_time(self, seconds: float) -> None:
        """Nothing happens but pings."""
        self.world.run(seconds)

    # What kubelet and operator say

    def someone_is_registered(self) -> bool:
        """Whether there is one."""
        return bool(self.registered())

    def a_run_has_ended(self) -> bool:
        """Whether there is one of a registered worker."""
        return bool(self.ended_runs())

    def registered(self) -> list[Worker]:
        """Workers, dead or alive, that the agent knows."""
        return [worker for worker in self.world.workers if worker.entry is not None]

    def ended_runs(self) -> list[Worker]:
        """Those of them whose process has ended."""
        return [worker for worker in self.registered() if not worker.alive]

    @precondition(a_run_has_ended)
    @rule(data=st.data())
    def prove(self, data: st.DataObject) -> None:
        """The kubelet has reported the end of a run."""
        self.kubelet.prove(data.draw(st.sampled_from(self.ended_runs())))

    @precondition(someone_is_registered)
    @rule(data=st.data())
    def mistake(self, data: st.DataObject) -> None:
        """A stale view takes a living worker for a run before it, whose end is reported."""
        worker = data.draw(st.sampled_from(self.registered()))
        if runs := self.kubelet.may_take_for(worker):
            self.kubelet.prove(worker, of=data.draw(st.sampled_from(runs)))

    @precondition(someone_is_registered)
    @rule(data=st.data())
    def hint(self, data: st.DataObject) -> None:
        """A pod is deleted by force; its processes may run on."""
        self.kubelet.hint(data.draw(st.sampled_from(self.registered())))

    @precondition(someone_lives)
    @rule(data=st.data(), pause=st.sampled_from([0.0, 8.9, 9.9, 14.9, 15.1, 74.9]))
    def hint_and_drop(self, data: st.DataObject, pause: float) -> None:
        """A connection that held an instance breaks when the hint's window is nearly over."""
        worker = self.pick(data)
        if worker.entry is None:
            return
        self.kubelet.hint(worker)
        self.world.run(pause)
        if worker in self.world.living():
            self.world.drop(worker, LOST_SYNS_SECONDS)

    @precondition(lambda self: bool(self.kubelet.said))
    @rule(data=st.data())
    def repeat(self, data: st.DataObject) -> None:
        """Anything may be said again, in any order."""
        self.kubelet.repeat(data.draw(st.sampled_from(self.kubelet.said)))

    @precondition(lambda self: bool(self.world.ended) and len(self.world.workers) < 8)
    @rule(data=st.data(), same_id=st.booleans())
    def restart(self, data: st.DataObject, *, same_id: bool) -> None:
        """A container runs again, maybe with the id that its process had before."""
        ended = data.draw(st.sampled_from(self.world.ended))
        up = {w.container for w in self.world.workers if w.alive}
        if ended.container not in up:
            ends = (w.killed_at for w in self.world.ended if w.container == ended.container)
            self.world.run(max(0.0, max(ends) + 1.0 - self.world.now()))
            self.world.restart(ended, same_id=same_id)

    @rule(seconds=st.sampled_from([-3600.0, -1.5, 1.5, 3600.0]))
    def set_clock(self, seconds: float) -> None:
        """Somebody sets the node's clock."""
        self.world.set_clock(seconds)


NodeMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestNode = NodeMachine.TestCase


def world(timeout: float = 30.0) -> World:
    """A node where reaping is on."""
    return World(LivenessSettings(reap_timeout_seconds=timeout))


@pytest.mark.parametrize("interval", [None, 10.0])
def test_a_killed_worker_is_gone_ten_seconds_later(interval: float | None) -> None:
    """Also one that never pinged."""
    node = world()
    victim = node.start_worker("10.0.0.1", interval)
    node.run(25.0)
    node.kill(victim)
    node.run(9.9)
    assert node.reaped == []
    node.run(0.2)
    assert node.reaped == [victim]


def test_a_frozen_worker_lives_until_t_ends() -> None:
    """Its connection is open; only its silence counts."""
    node = world()
    victim = node.start_worker("10.0.0.1", 10.0)
    node.run(20.0)
    victim.frozen = True
    node.run(29.9)
    assert node.reaped == []
    node.run(0.2)
    assert node.reaped == [victim]


def test_a_worker_frozen_for_less_than_t_is_not_reaped() -> None:
    """It speaks again in time."""
    node = world()
    lucky = node.start_worker("10.0.0.1", 10.0)
    node.run(20.0)
    lucky.frozen = True
    node.run(19.0)
    lucky.frozen = False
    node.run(500.0)
    assert node.reaped == []


def test_an_idle_worker_survives_everything_but_its_death() -> None:
    """Cut twice, a day apart from its last word."""
    node = world()
    idle = node.start_worker("10.0.0.1", None)
    for pause in (0.5, 0.5, 1000.0, 86_400.0):
        node.run(pause)
        node.drop(idle, LOST_SYNS_SECONDS)
    node.run(86_400.0)
    assert node.reaped == []
    node.kill(idle)
    node.run(10.5)
    assert node.reaped == [idle]


def test_a_slow_heartbeat_that_is_known_keeps_its_worker() -> None:
    """60 s with T = 30."""
    node = world()
    slow = node.start_worker("10.0.0.1", 60.0)
    node.run(3600.0)
    assert node.reaped == []
    slow.frozen = True
    node.run(179.0)
    assert node.reaped == []
    node.run(2.0)
    assert node.reaped == [slow]


def test_probers_that_come_and_go_keep_nobody() -> None:
    """Every two seconds one, for as long as the dead wait."""
    node = world()
    victim = node.start_worker("10.0.0.1", None)
    node.run(1.0)
    node.kill(victim)
    for _ in range(6):
        node.connect_stranger("10.0.0.9", "uid 0")
        node.run(1.0)
        node.disconnect_stranger(node.strangers[0])
        node.run(1.0)
    assert node.reaped == [victim]


@pytest.mark.parametrize(("router", "reaper"), [(True, False), (False, True), (True, True)])
def test_nobody_is_reaped_because_the_agent_was_late(*, router: bool, reaper: bool) -> None:
    """Not even if it stood still for ten T."""
    node = world()
    for number in range(1, 6):
        node.start_worker(f"10.0.0.{number}", 10.0 if number % 2 else None)
    node.run(100.0)
    node.stall(300.0, router=router, reaper=reaper)
    node.run(1000.0)
    assert node.reaped == []
