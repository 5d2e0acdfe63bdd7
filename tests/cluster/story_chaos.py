"""Random rounds of a story: some parts go down, pods and workers change, the parts come back."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tests.cluster.story import Story
from tests.cluster.story_events import KubeEvent
from tests.cluster.story_nodes import StoryNode
from tests.cluster.story_pods import StoryPod
from tests.polling import poll_until

FEWEST_ENGINES, MOST_ENGINES = 3, 6
_LOG_CHARACTERS = 4000


@dataclass
class Engine:
    """One pod and the workers that live in it; `marked` for deletion, it starts nothing more."""

    pod: StoryPod
    node: StoryNode
    alive: list[int] = field(default_factory=list)
    marked: bool = False
    populated_at: float = 0.0


class Chaos:
    """Keeps the books of who lives; a round that does not converge fails with its script.

    Reported only: every end is one that the kubelet reports, and its pod stays until the round
    after, so that all of it is proof. Otherwise pods also go unreported.

    Attributes:
        slowest: the slowest round: its seconds, what it waited for, and its script.
    """

    def __init__(self, story: Story, seed: int, *, reported_only: bool) -> None:
        self._story = story
        self._reported_only = reported_only
        self._finished: list[StoryPod] = []
        self._random = random.Random(seed)  # noqa: S311  # nothing secret
        self._engines: list[Engine] = []
        self._last_id = 0
        self._reaps: dict[tuple[str, int], int] = {}
        self._script: list[str] = []
        self.slowest: tuple[float, list[str], list[str]] = (0.0, [], [])

    def begin(self) -> None:
        """Make the first engines."""
        for _ in range(FEWEST_ENGINES):
            self._new_engine()
        self._converge()

    def round(self) -> float:
        """Do one round; return the seconds from the moment all parts were up to convergence."""
        self._script = []
        for pod in self._finished:
            pod.delete()
        self._finished.clear()
        bring_up = self._take_down()
        for _ in range(self._random.randint(1, 4)):
            self._change()
        self._random.shuffle(bring_up)
        for action in bring_up:
            action()
        self._story.operator.wait_for_record("operator_acts")
        return self._converge()

    def _take_down(self) -> list[Callable[[], object]]:
        """End some of the parts, in any order; return what starts them again."""
        story = self._story
        parts = ["operator", *(str(number) for number in range(len(story.nodes)))]
        down = self._random.sample(parts, self._random.randint(1, len(parts)))
        bring_up: list[Callable[[], object]] = []
        for part in down:
            kill = self._random.random() < 0.3
            self._script.append(f"{'kill' if kill else 'stop'} {part}")
            if part == "operator":
                (story.operator.kill if kill else story.operator.stop)()
                bring_up.append(story.operator.launch)
            else:
                node = story.nodes[int(part)]
                (node.agent.kill if kill else node.agent.stop)()
                bring_up.append(node.start_agent)
        return bring_up

    def _change(self) -> None:
        leavings = [self._finish] if self._reported_only else [self._finish, self._force]
        changes = list(leavings)
        if not self._reported_only:
            changes.append(self._replace)
        if any(not engine.marked for engine in self._engines):
            changes += [self._end, self._restart, self._mark]
        if len(self._engines) >= MOST_ENGINES:
            changes = leavings
        elif len(self._engines) < FEWEST_ENGINES:
            changes = [self._new_engine]
        else:
            changes.append(self._new_engine)
        self._random.choice(changes)()

    def _new_engine(self) -> None:
        node = self._random.choice(self._story.nodes)
        engine = Engine(self._story.pod(f"w{self._last_id + 1}", node=node), node)
        self._engines.append(engine)
        self._populate(engine)

    def _populate(self, engine: Engine) -> None:
        """Start one or two workers in a container that has just started."""
        for _ in range(self._random.choice([1, 1, 2])):
            self._last_id += 1
            self._story.worker(engine.pod, self._last_id, node=engine.node)
            engine.alive.append(self._last_id)
        engine.populated_at = time.time()
        self._script.append(f"{engine.pod.name} runs {engine.alive}")

    def _die(self, why: str, *, restarts: bool = False) -> Engine:
        engine = self._random.choice(
            [each for each in self._engines if not (restarts and each.marked)]
        )
        if restarts:
            # Kubelets report whole seconds, and take more than one to run a container anew.
            second_after = math.floor(engine.populated_at) + 1
            poll_until(lambda: time.time() >= second_after, "the next second")
        for number in engine.alive:
            self._story.workers[number].kill()
        self._script.append(f"{engine.pod.name} {why}, {engine.alive} dead")
        engine.alive.clear()
        return engine

    def _end(self) -> None:
        engine = self._die("ends, then restarts", restarts=True)
        engine.pod.end_container()
        engine.pod.restart_container()
        self._populate(engine)

    def _restart(self) -> None:
        engine = self._die("restarts in one write", restarts=True)
        engine.pod.restart_container()
        self._populate(engine)

    def _finish(self) -> None:
        engine = self._die("finishes")
        engine.pod.end()
        if self._reported_only:
            self._finished.append(engine.pod)
        else:
            engine.pod.delete(grace_seconds=0)
        self._engines.remove(engine)

    def _force(self) -> None:
        engine = self._die("is deleted by force")
        engine.pod.delete(grace_seconds=0)
        self._engines.remove(engine)

    def _replace(self) -> None:
        engine = self._die("is replaced under its name")
        engine.pod.delete(grace_seconds=0)
        engine.pod = self._story.pod(engine.pod.name, node=engine.node)
        engine.marked = False
        self._populate(engine)

    def _mark(self) -> None:
        engine = self._random.choice([each for each in self._engines if not each.marked])
        engine.pod.delete()
        engine.marked = True
        self._script.append(f"{engine.pod.name} is marked for deletion")

    def _converge(self) -> float:
        began = time.monotonic()
        waits: list[str] = []

        def converged() -> bool:
            problem = self._difference()
            if problem and problem not in waits[-1:]:
                waits.append(problem)
            return not problem

        def said() -> str:
            script = "\n  ".join(self._script)
            return f"{waits[-1]}, after:\n  {script}\n{self._logs()}"

        poll_until(converged, said)
        seconds = time.monotonic() - began
        if seconds > self.slowest[0]:
            self.slowest = (seconds, waits, self._script)
        return seconds

    def _logs(self) -> str:
        logs = [self._story.operator.log_text()]
        logs += [node.agent.log_text() for node in self._story.nodes]
        metrics = self._story.operator.get("/metrics")[1].splitlines()
        logs.append("\n".join(line for line in metrics if line.startswith("lmcache_")))
        return "\n\n".join(text[-_LOG_CHARACTERS:] for text in logs)

    def _difference(self) -> str:
        """Say what is not yet as it should be; empty if everything is."""
        story = self._story
        for node in story.nodes:
            node.mount()
            wanted = {n for engine in self._engines if engine.node is node for n in engine.alive}
            if (found := set(node.agent.instances())) != wanted:
                return f"{node.name} has {found} instead of {wanted}"
            self._note_reaps(node)
        for engine in self._engines:
            if engine.marked:
                continue  # nobody writes to a pod that is about to go
            if (ids := engine.pod.annotated_ids()) != sorted(engine.alive):
                return f"{engine.pod.name} is annotated {ids} instead of {engine.alive}"
        alive = sum(len(engine.alive) for engine in self._engines)
        if (count := story.status().get("registeredWorkers")) != alive:
            return f"the status says {count} workers instead of {alive}"
        return self._wrong_events()

    def _note_reaps(self, node: StoryNode) -> None:
        """Remember each reap; one of a worker that lives is the worst that can happen."""
        alive = {n for engine in self._engines for n in engine.alive}
        for reap in node.agent.reaps():
            number = int(reap["instance_id"])
            assert number not in alive, f"alive, but reaped: {reap}, after {self._script}"
            self._reaps[node.agent.boot_id, int(reap["seq"])] = number

    def _wrong_events(self) -> str:
        events = self._story.events("WorkerReaped")
        about_server = [event for event in events if event.kind == "LMCacheServer"]
        others = [event for event in events if event.kind != "LMCacheServer"]
        if doubled := [event for event in events if event.count != 1]:
            raise AssertionError(f"doubled: {doubled}")
        assert len(about_server) <= len(self._reaps), f"more Events than reaps: {about_server}"
        assert len(others) <= len(self._reaps), f"more Events than reaps: {others}"
        assert not self._story.events("FalseReap")
        if len(about_server) < len(self._reaps):
            return (
                f"{len(about_server)} Events for {len(self._reaps)} reaps: {_notes(about_server)}"
            )
        return ""


def _notes(events: Sequence[KubeEvent]) -> list[str]:
    return [event.note for event in events]
