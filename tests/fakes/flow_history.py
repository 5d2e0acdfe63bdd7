"""Random histories of pods, workers, agents and operators, beside what really happened in them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from lmcache_nodeagent.operator_link.messages import Evidence, InstanceReport
from lmcache_operator.names import WORKER_LABEL
from tests.fakes.flow_world import FlowWorld
from tests.fakes.pods import Json, container_status, pod, running, terminated

START_UP_SECONDS = 3.0
"""An engine registers this long after its container began, at the earliest."""

ADDRESSES = ("10.1.0.1", "10.1.0.2", "10.1.0.3")


@dataclass
class Run:
    """One run of the engine's container."""

    id: str
    began: float
    ended: float | None = None


@dataclass
class TruePod:
    """A pod as it really is.

    Attributes:
        told: its kubelet has reported all of it.
        over: nothing will run in it any more, and its address is free.
        evicted: it was ended without a word on its containers.
        gone: there is no object.
    """

    name: str
    uid: str
    address: str
    runs: list[Run]
    told: bool = False
    over: bool = False
    evicted: bool = False
    gone: bool = False
    marked: bool = False
    labelled: bool = True

    @property
    def run(self) -> Run:
        """The latest run."""
        return self.runs[-1]

    @property
    def is_alive(self) -> bool:
        """Whether something runs in it."""
        return self.run.ended is None


@dataclass
class TrueWorker:
    """A registration, and where it really runs."""

    report: InstanceReport
    boot_id: str
    pod: TruePod
    run: Run


@dataclass
class History:
    """Applies steps to a world, and remembers the truth.

    Attributes:
        reuses_early: addresses are given away before their last owner's end is reported.
    """

    world: FlowWorld
    reuses_early: bool = False
    pods: list[TruePod] = field(default_factory=list)
    workers: list[TrueWorker] = field(default_factory=list)
    judged: int = 0

    async def step(self, number: int, choice: int) -> None:
        """Do one of the things that can happen; some need what is not there, and do nothing."""
        steps: tuple[tuple[int, Callable[[int], object]], ...] = (
            (3, self.create),
            (6, self.register),
            (6, self.report),
            (2, self.crash),
            (2, self.restart),
            (1, self.finish),
            (1, self.delete),
            (1, self.delete_by_force),
            (1, self.mark),
            (1, self.relabel),
            (1, self.evict),
            (1, self.cut_link),
            (1, self.restart_agent),
            (1, self.cut_watch),
            (3, self.serve),
            (1, self.stop_operator),
            (4, self.start_operator),
        )
        likely = [step for weight, step in steps for _ in range(weight)]
        done = likely[number % len(likely)](choice)
        if isinstance(done, Awaitable):
            await done
        await self.world.settle((0.3, 0.3, 2.0, 4.0, 40.0)[choice % 5])
        self.check()

    def create(self, choice: int) -> None:
        """Start a pod; its kubelet reports it later."""
        address = ADDRESSES[choice % len(ADDRESSES)]
        for other in self.pods:
            reported = other.told or other.gone or self.reuses_early
            if other.address == address and not (other.over and reported):
                return
        name = f"p{len(self.pods)}"
        true = TruePod(name, f"uid-{name}", address, [Run(f"{name}-0", self.world.wall())])
        self.pods.append(true)
        document = pod(phase="Pending", addresses=(), uid=true.uid)
        document["metadata"] |= {"name": name, "labels": {WORKER_LABEL: "kv"}}
        self.world.pods.put(document)

    def register(self, choice: int) -> None:
        """Have a worker register, if an engine has had the time to start."""
        alive = [p for p in self.pods if p.is_alive and not p.over]
        ready = [p for p in alive if p.run.began + START_UP_SECONDS <= self.world.wall()]
        if ready:
            true = ready[choice % len(ready)]
            agent = self.world.agent()
            report = agent.register(len(self.workers), at=self.world.wall(), peer=true.address)
            self.workers.append(TrueWorker(report, agent.boot_id, true, true.run))

    def crash(self, choice: int) -> None:
        """End a run."""
        if (true := self._some(choice, lambda p: p.is_alive and not p.gone)) is not None:
            self._end(true)

    def restart(self, choice: int) -> None:
        """Begin the next run."""
        found = self._some(choice, lambda p: not p.is_alive and not p.over and not p.gone)
        if found is not None:
            run = Run(f"{found.name}-{len(found.runs)}", self.world.wall())
            found.runs.append(run)
            found.told = False

    def finish(self, choice: int) -> None:
        """End a pod."""
        if (true := self._some(choice, lambda p: not p.over and not p.gone)) is not None:
            if true.is_alive:
                self._end(true)
            true.over = True
            true.told = False

    def evict(self, choice: int) -> None:
        """End a pod the hard way: nothing is said of its containers."""
        if (true := self._some(choice, lambda p: not p.over and not p.gone)) is not None:
            if true.is_alive:
                self._end(true)
            true.over = true.evicted = True
            true.told = False

    def report(self, choice: int) -> None:
        """Have the kubelet report a pod."""
        if (true := self._some(choice, lambda p: not p.told and not p.gone)) is not None:
            self._report(true)

    def delete(self, choice: int) -> None:
        """Remove the object of a pod that is over."""
        if (true := self._some(choice, lambda p: p.over and p.told and not p.gone)) is not None:
            self._remove(true)

    def delete_by_force(self, choice: int) -> None:
        """Remove the object; what runs in it may go on, and keeps the address."""
        if (true := self._some(choice, lambda p: not p.gone)) is not None:
            self._remove(true)
            if choice % 2 and true.is_alive:
                self._end(true)
            true.over = not true.is_alive

    def mark(self, choice: int) -> None:
        """Ask for a pod's deletion."""
        if (true := self._some(choice, lambda p: not p.gone)) is not None:
            true.marked = True
            self._write(true)

    def relabel(self, choice: int) -> None:
        """Take a pod out of the selection, or back into it."""
        if (true := self._some(choice, lambda p: not p.gone)) is not None:
            true.labelled = not true.labelled
            self._write(true)

    def cut_link(self, choice: int) -> None:
        """End the agent's stream; it comes back."""
        del choice
        if self.world.runs:
            self.world.agent().connect(self.world.registry)

    def restart_agent(self, choice: int) -> None:
        """Start the agent anew; its workers are gone from it."""
        del choice
        self.world.agent().restart()
        if self.world.runs:
            self.world.agent().connect(self.world.registry)

    def cut_watch(self, choice: int) -> None:
        """Make the API server unreachable, and maybe have it forget history."""
        self.world.pods.reachable = False
        if choice % 2:
            self.world.pods.expire()
        self.world.pods.cut()

    def serve(self, choice: int) -> None:
        """Make the API server reachable."""
        del choice
        self.world.pods.reachable = True

    async def stop_operator(self, choice: int = 0) -> None:
        """Kill the operator."""
        del choice
        if self.world.runs:
            await self.world.stop_operator()

    async def start_operator(self, choice: int = 0) -> None:
        """Start an operator."""
        del choice
        if not self.world.runs:
            await self.world.start_operator()

    async def calm_down(self) -> None:
        """Let everybody do what is left to do."""
        self.world.pods.reachable = True
        await self.start_operator()
        for true in self.pods:
            if not true.gone:
                self._report(true)
        await self.world.settle(seconds=60)
        self.check()

    def check(self) -> None:
        """Fail if an agent was told anything wrong since the last check."""
        evidence = self.world.agent().evidence
        for found in evidence[self.judged :]:
            self._check_one(found)
        self.judged = len(evidence)

    def present(self) -> list[TrueWorker]:
        """Return the registrations that the agent has."""
        agent = self.world.agent()
        return [worker for worker in self.workers if worker.boot_id == agent.boot_id]

    def _check_one(self, found: Evidence) -> None:
        worker = next(
            each
            for each in self.workers
            if (each.boot_id, each.report.registration) == (found.boot_id, found.registration)
        )
        true = worker.pod
        if found.proof:
            assert found.pod_uid == true.uid, "proof about a stranger"
            assert worker.run.ended is not None, "proof about a run that goes on"
        elif not self.reuses_early:
            assert found.pod_uid == true.uid, "a hint about a stranger"
            assert true.gone or true.over or worker.run.ended is not None, "a hint about nothing"

    def _some(self, choice: int, fits: Callable[[TruePod], bool]) -> TruePod | None:
        found = [each for each in self.pods if fits(each)]
        return found[choice % len(found)] if found else None

    def _end(self, true: TruePod) -> None:
        true.run.ended = self.world.wall()
        true.told = False

    def _remove(self, true: TruePod) -> None:
        true.gone = True
        self.world.pods.delete("default", true.name)

    def _report(self, true: TruePod) -> None:
        true.told = True

        def write(document: Json) -> None:
            document["status"] = pod(
                *_statuses(true),
                phase=_phase(true),
                addresses=(true.address,),
            )["status"]

        self.world.pods.change("default", true.name, write)

    def _write(self, true: TruePod) -> None:
        def write(document: Json) -> None:
            metadata = document["metadata"]
            metadata["labels"] = {WORKER_LABEL: "kv"} if true.labelled else {}
            if true.marked:
                metadata["deletionTimestamp"] = "2030-01-01T00:00:00Z"

        self.world.pods.change("default", true.name, write)


def _phase(true: TruePod) -> str:
    return "Failed" if true.over else "Running"


def _statuses(true: TruePod) -> list[Json]:
    if true.evicted:
        return []
    last = None
    if len(true.runs) > 1:
        before = true.runs[-2]
        assert before.ended is not None
        last = terminated(before.began, before.ended, run=before.id)
    run = true.run
    now = running(run.began) if run.ended is None else terminated(run.began, run.ended, run=run.id)
    return [container_status("engine", now, last=last, run=run.id)]
