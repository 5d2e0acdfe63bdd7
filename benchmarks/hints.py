"""How soon a dead worker's memory is back, by what told of its death: `--only hints`.

The kubelet's word goes the whole way: a real API server, the operator, the link, the agent. The
status is written as a kubelet writes it; what the kubelet itself takes to notice is not in it.
"""

from __future__ import annotations

import json
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.servers import wait_for
from tests.cluster.control_plane import ControlPlane
from tests.cluster.programs import find
from tests.cluster.story import PROOF_ONLY, SMALLEST, Story, make_ready
from tests.cluster.story_pods import StoryPod
from tests.cluster.story_worker import LivingWorker
from tests.fakes.agent_process import AgentProcess

KEY = "hints"
NAMESPACE = "bench"

_SAMPLES = {
    "kubelet": 200,
    "together": 100,
    "deleted": 20,
    "socket": 100,
    "close": 20,
    "silence": 10,
}
_QUICK_SAMPLES = {
    "kubelet": 20,
    "together": 20,
    "deleted": 2,
    "socket": 20,
    "close": 3,
    "silence": 0,
}
_AT_ONCE = 10
_LIMIT_SECONDS = 60.0
_STEP_SECONDS = 0.001
_WINDOWS = (
    "--worker-reap-timeout-seconds=30",
    "--worker-registration-grace-seconds=600",
    "--hint-confirm-seconds=3",
    "--close-confirm-seconds=3",
)


@dataclass(frozen=True)
class Trigger:
    """What told of deaths, and the seconds from `begins` to the memory's release."""

    key: str
    title: str
    begins: str
    seconds: Sequence[float]


def measure_hints(*, quick: bool) -> list[Trigger]:
    """Measure every trigger; needs the programs of a control plane."""
    programs = find()
    if programs is None:
        raise FileNotFoundError("no programs of a control plane: run `make cluster-programs`")
    counts = _QUICK_SAMPLES if quick else _SAMPLES
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        found = [*_in_a_cluster(programs, folder, counts), *_by_an_agent(folder, counts)]
    return [trigger for trigger in found if trigger.seconds]


def table(triggers: Sequence[Trigger]) -> str:
    """Return the table as Markdown."""
    lines = [
        "| what tells of the death | from | p50 | p99 | max | n |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for trigger in triggers:
        ordered = sorted(trigger.seconds)
        p99 = ordered[max(0, -(-99 * len(ordered) // 100) - 1)]
        figures = [statistics.median(ordered), p99, ordered[-1]]
        cells = [trigger.title, trigger.begins, *(_shown(each) for each in figures)]
        lines.append(f"| {' | '.join(cells)} | {len(ordered)} |")
    return "\n".join(lines)


def write(triggers: Sequence[Trigger], path: Path, about: Mapping[str, object]) -> None:
    """Write all samples as JSON."""
    path.parent.mkdir(exist_ok=True)
    rows = [asdict(trigger) for trigger in triggers]
    path.write_text(json.dumps({**about, "triggers": rows}, indent=2) + "\n")


def _in_a_cluster(programs: Path, folder: Path, counts: Mapping[str, int]) -> Iterator[Trigger]:
    with ControlPlane(folder / "cluster", programs) as control_plane:
        make_ready(control_plane, NAMESPACE)
        with Story(control_plane, NAMESPACE, folder) as story:
            story.begin(PROOF_ONLY)
            yield Trigger(
                "kubelet",
                "kubelet: container terminated",
                "status written",
                _kubelet_words(story, counts["kubelet"], first=1, together=False),
            )
            yield Trigger(
                "together",
                "the same, ten containers at once",
                "status written",
                _kubelet_words(story, counts["together"], first=501, together=True),
            )
            story.edit(reaping=SMALLEST)
            _follow_edit(story)
            yield Trigger(
                "deleted",
                "pod deleted by force, worker silent, its connection open (window of 3 s)",
                "pod deleted",
                _forced_deletions(story, counts["deleted"]),
            )


def _kubelet_words(story: Story, count: int, *, first: int, together: bool) -> list[float]:
    """Kill workers, each in a pod of its own, and report their containers.

    One after the other, each once the one before is released; or ten at a time, as fast as the
    API server takes the writes.
    """
    seconds: list[float] = []
    for begin in range(first, first + count, _AT_ONCE):
        numbers = range(begin, min(begin + _AT_ONCE, first + count))
        pods = _engines(story, numbers)
        if together:
            for number in numbers:
                story.workers[number].kill()
            workers = [story.workers[number] for number in numbers]
            with ThreadPoolExecutor(1, "watch") as pool:
                released = pool.submit(_release_moments, story.agent, workers)
                began = {number: pods[number].end_container() for number in numbers}
            seconds += _differences(released.result(), began)
        else:
            for number in numbers:
                story.workers[number].kill()
                one = {number: pods[number].end_container()}
                seconds += _released_since(story.agent, [story.workers[number]], one)
        _say("together" if together else "kubelet", seconds[-len(numbers) :])
        for pod in pods.values():
            pod.delete(grace_seconds=0)
    return seconds


def _engines(story: Story, numbers: Sequence[int]) -> dict[int, StoryPod]:
    """Make pods with a worker each, and wait until the operator knows which is in which."""
    pods = {number: story.pod(f"w{number}") for number in numbers}
    for number, pod in pods.items():
        story.worker(pod, number)
    for number, pod in pods.items():
        story.workers[number].wait_registered()
        story.wait_annotated(pod, number)
    return pods


def _forced_deletions(story: Story, count: int) -> list[float]:
    """Freeze workers: a connection that closed would tell by itself."""
    seconds = []
    for number in range(1001, 1001 + count):
        pod = story.engine(f"w{number}", number)
        story.wait_rhythm(number)
        worker = story.workers[number]
        worker.signal(signal.SIGSTOP)
        began = pod.delete(grace_seconds=0)
        seconds.append(_until_unmapped(story.agent, worker, began))
        _say("deleted", seconds[-1:])
    return seconds


def _follow_edit(story: Story) -> None:
    def follows() -> bool:
        story.node.mount()
        liveness = story.agent.status()["worker_liveness"]
        return bool(liveness["hint_confirm_seconds"] == SMALLEST["hints"]["confirmSeconds"])

    wait_for(follows, _LIMIT_SECONDS, 0.1)


def _by_an_agent(folder: Path, counts: Mapping[str, int]) -> Iterator[Trigger]:
    """What an agent finds out by itself, with the smallest windows that it allows."""
    path = folder / "agent.sock"
    with AgentProcess(*_WINDOWS, f"--ipc-path={path}") as agent:
        with _workers(f"ipc://{path}", counts["socket"], 1) as workers:
            seconds = [_killed(agent, worker) for worker in workers]
        _say("socket", seconds)
        yield Trigger("socket", "Unix socket: the process exited (pidfd)", "SIGKILL", seconds)
        with _workers(agent.url, counts["close"], 201) as workers:
            seconds = _closed(agent, workers)
        _say("close", seconds)
        yield Trigger("close", "TCP: the connection closed (window of 3 s)", "SIGKILL", seconds)
        with _workers(agent.url, counts["silence"], 401) as workers:
            seconds = _silent(agent, workers)
        _say("silence", seconds)
        yield Trigger("silence", "silence (T of 30 s)", "last ping", seconds)


@contextmanager
def _workers(url: str, count: int, first: int) -> Iterator[list[LivingWorker]]:
    workers: list[LivingWorker] = []
    try:
        for begin in range(first, first + count, _AT_ONCE):
            numbers = range(begin, min(begin + _AT_ONCE, first + count))
            started = [LivingWorker(url, number) for number in numbers]
            workers += started
            for worker in started:
                worker.wait_registered()
        yield workers
    finally:
        for worker in workers:
            worker.close()


def _killed(agent: AgentProcess, worker: LivingWorker) -> float:
    began = time.monotonic()
    worker.kill()
    return _until_unmapped(agent, worker, began)


def _closed(agent: AgentProcess, workers: Sequence[LivingWorker]) -> list[float]:
    """Kill one, wait, and kill the next: closes of one address do not count as one event."""
    return [_killed(agent, worker) for worker in workers]


def _silent(agent: AgentProcess, workers: Sequence[LivingWorker]) -> list[float]:
    """Freeze them all: what they said last was said at most one ping ago."""
    wait_for(lambda: _have_pinged(agent, workers), _LIMIT_SECONDS, 0.05)
    for worker in workers:
        worker.signal(signal.SIGSTOP)
    shown = agent.instances()
    now = time.monotonic()
    began = {
        worker.instance_id: now - shown[worker.instance_id]["last_seen_seconds"]
        for worker in workers
    }
    return _released_since(agent, workers, began)


def _have_pinged(agent: AgentProcess, workers: Sequence[LivingWorker]) -> bool:
    shown = agent.instances()
    return all(shown[worker.instance_id]["has_liveness_signal"] for worker in workers)


def _released_since(
    agent: AgentProcess, workers: Sequence[LivingWorker], began: Mapping[int, float]
) -> list[float]:
    """Wait for all; return how long each took."""
    return _differences(_release_moments(agent, workers), began)


def _release_moments(agent: AgentProcess, workers: Sequence[LivingWorker]) -> dict[int, float]:
    """Wait until the memory of all is unmapped; return when each one's was."""
    waiting = list(workers)
    moments: dict[int, float] = {}

    def none_is_left() -> bool:
        maps = Path(f"/proc/{agent.pid}/maps").read_text()
        now = time.monotonic()
        for worker in [one for one in waiting if f"lmcache_kv_{one.pid}_" not in maps]:
            waiting.remove(worker)
            moments[worker.instance_id] = now
        return not waiting

    wait_for(none_is_left, _LIMIT_SECONDS, _STEP_SECONDS)
    return moments


def _differences(ended: Mapping[int, float], began: Mapping[int, float]) -> list[float]:
    return [ended[number] - start for number, start in began.items()]


def _until_unmapped(agent: AgentProcess, worker: LivingWorker, began: float) -> float:
    wait_for(lambda: _is_unmapped(agent, worker), _LIMIT_SECONDS, _STEP_SECONDS)
    return time.monotonic() - began


def _is_unmapped(agent: AgentProcess, worker: LivingWorker) -> bool:
    return f"lmcache_kv_{worker.pid}_" not in Path(f"/proc/{agent.pid}/maps").read_text()


def _shown(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _say(key: str, seconds: Sequence[float]) -> None:
    print(f"{key}: {', '.join(map(_shown, seconds))}", file=sys.stderr, flush=True)
