"""Serve stock vLLM with stock LMCache, kill it, and check both: `make e2e`.

`python -m tests.e2e.run [--mode MODE] [--transport tcp|ipc] [--logs DIRECTORY]`, once `make` has
built the stock environment. A mode is lmcache_driven, engine_driven (KV in the messages) or
engine_shm (workers map L1). Ends with `N passed, N failed`, and with status 0 only if nothing
failed.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.conformance.stock_process import STOCK_PYTHON
from tests.e2e.vllm_process import Answer, VllmProcess
from tests.fakes.agent_process import AgentProcess
from tests.polling import poll_until

CHUNK_TOKENS = 64
L1_GB = 0.25
SMALL_L1_GB = 0.001
"""Room for 16 chunks: the longest prompt has 15, all prompts together 29."""
LENGTHS = (400, 384, 130, 40, 1000)
"""Prompts: several chunks and a rest, whole chunks, two and a little, less than one, many."""
SHARED, LONGER = 500, 750
ROUNDS, AT_ONCE = 4, 8
RELEASE_SECONDS = {"tcp": 11.0, "ipc": 1.0}
"""What is promised for a killed worker: the close window and a second; the process's own end."""
MODES: dict[str, tuple[str, ...]] = {
    "lmcache_driven": (),
    "engine_driven": ("--supported-transfer-mode=engine_driven",),
    "engine_shm": ("--supported-transfer-mode=auto", "--shm-name=e2e"),
}
"""The agent's flags by mode."""
RUNS = (
    *(("lmcache_driven", transport) for transport in ("tcp", "ipc")),
    ("engine_driven", "tcp"),
    ("engine_shm", "ipc"),
)
ABORTED = 6
MAKE_MODEL = Path(__file__).with_name("tiny_model.py")


@dataclass
class Report:
    """Prints each result as it comes and counts them."""

    passed: int = 0
    failed: list[str] = field(default_factory=list)

    def check(self, name: str, ok: bool, detail: str) -> None:  # noqa: FBT001  # it is the result
        """Record one result."""
        print(f"{'PASS' if ok else 'FAIL'} {name}: {detail}", flush=True)
        if ok:
            self.passed += 1
        else:
            self.failed.append(name)


class Session:
    """The checks against one vLLM in one mode over one transport."""

    def __init__(
        self,
        mode: str,
        transport: str,
        agents: Agents,
        vllm: VllmProcess,
        report: Report,
    ) -> None:
        self._name = f"{mode} {transport}"
        self._transport = transport
        self._agents = agents
        self._vllm = vllm
        self._report = report
        self._prompts = {length: _prompt(length, length) for length in LENGTHS}
        self._cold: dict[int, Answer] = {}

    def run(self) -> None:
        """Run all of them, in order: each builds on what the earlier ones stored."""
        for stage in (self._run_cold, self._run_warm, self._run_prefix, self._run_parallel):
            stage()
        self._run_abort()
        self._run_restart()
        self._run_small()
        self._run_kill()

    @property
    def _agent(self) -> AgentProcess:
        return self._agents.current

    def _run_cold(self) -> None:
        """Prompts never seen are computed."""
        for length, prompt in self._prompts.items():
            answer = self._cold[length] = self._vllm.ask_counted(prompt)
            ok = (answer.computed, answer.loaded) == (length, 0)
            self._check(f"cold {length}", ok, _sources(answer))
        chunks = sum(length // CHUNK_TOKENS for length in LENGTHS)
        stored = self._await_objects(chunks)
        self._check("cold stored", stored == chunks, f"{stored} of {chunks} chunks in L1")

    def _run_warm(self) -> None:
        """The same prompts are loaded, and give the same output."""
        for length, prompt in self._prompts.items():
            answer = self._vllm.ask_counted(prompt)
            same = answer.same_as(self._cold[length])
            ok = same and answer.loaded == _full_hit(length)
            self._check(f"warm {length}", ok, f"{_sources(answer)}, same output: {same}")

    def _run_prefix(self) -> None:
        """Another tail after a shared head loads the head; the salted reference loads nothing."""
        head = " ".join(self._prompts[max(LENGTHS)].split()[:SHARED])
        prompt = f"{head} {_prompt(LONGER, LONGER - SHARED)}"
        reference = self._vllm.ask_counted(prompt, salt="reference")
        self._check("prefix reference", reference.loaded == 0, _sources(reference))
        answer = self._vllm.ask_counted(prompt)
        same = answer.same_as(reference)
        ok = same and answer.loaded == SHARED // CHUNK_TOKENS * CHUNK_TOKENS
        self._check("prefix", ok, f"{_sources(answer)}, same output: {same}")

    def _run_parallel(self) -> None:
        """Several loads at once. Batches of another shape round differently."""
        before = self._vllm.tokens_by_source().get("external_kv_transfer", 0)
        lengths = [length for _ in range(ROUNDS) for length in LENGTHS]
        with ThreadPoolExecutor(AT_ONCE) as pool:
            answers = list(pool.map(lambda n: self._vllm.ask(self._prompts[n]), lengths))
        same = sum(
            answer.same_as(self._cold[length], tolerance=1e-2)
            for length, answer in zip(lengths, answers, strict=True)
        )
        loaded = self._vllm.tokens_by_source().get("external_kv_transfer", 0) - before
        wanted = sum(map(_full_hit, lengths))
        self._check(
            "parallel",
            (same, loaded) == (len(lengths), wanted),
            f"{same} of {len(lengths)} outputs the same, {loaded} of {wanted} tokens loaded",
        )

    def _run_abort(self) -> None:
        """Clients that go away leave nothing behind, and the next ones get what they should."""
        prompt = self._prompts[max(LENGTHS)]
        for number in range(ABORTED):
            self._vllm.ask_and_leave(prompt if number % 2 else _prompt(5000 + number, 200))
        clean = _within(lambda: self._held() == 0, 10)
        answer = self._vllm.ask_counted(prompt)
        same = answer.same_as(self._cold[max(LENGTHS)])
        ok = clean and same and answer.loaded == _full_hit(max(LENGTHS))
        left = f"{self._held()} bytes pinned or reserved"
        self._check("abort", ok, f"{left}, {_sources(answer)}, same output: {same}")

    def _run_restart(self) -> None:
        """The agent is killed and replaced: its worker comes back, to an empty cache."""
        self._agents.replace()
        back = _within(lambda: len(self._agent.instances()) == 1, 20)
        prompt = self._prompts[384]
        answers = [self._vllm.ask_counted(prompt)]
        # Neither stored nor loaded while the scheduler's next ping is still to come.
        _within(lambda: self._ask_into(answers, prompt).loaded > 0, 20)
        same = all(answer.same_as(self._cold[384]) for answer in answers)
        ok = back and same and (answers[0].loaded, answers[-1].loaded) == (0, _full_hit(384))
        loaded = ", ".join(str(answer.loaded) for answer in answers)
        detail = f"then {loaded} tokens loaded, same output: {same}"
        self._check("restart", ok, f"registered again: {back}, {detail}")

    def _run_small(self) -> None:
        """An L1 that holds half of what is asked for: less is loaded, the output is the same."""
        self._agents.replace(l1_size_gb=SMALL_L1_GB)
        back = _within(lambda: len(self._agent.instances()) == 1, 20)
        warm: list[Answer] = []
        _within(lambda: self._ask_into(warm, self._prompts[384]).loaded > 0, 20)
        answers = [(n, self._vllm.ask_counted(self._prompts[n])) for n in (*LENGTHS, *LENGTHS)]
        same = sum(answer.same_as(self._cold[length]) for length, answer in answers)
        l1 = self._agent.status()["l1"]
        loaded = sum(answer.loaded for _, answer in answers)
        ok = back and same == len(answers) and 0 < loaded < 2 * sum(map(_full_hit, LENGTHS))
        evicted = f"{l1['evicted_total']} chunks evicted, {loaded} tokens loaded"
        ok = ok and l1["evicted_total"] > 0
        self._check("small", ok, f"{same} of {len(answers)} outputs the same, {evicted}")

    def _ask_into(self, answers: list[Answer], prompt: str) -> Answer:
        answers.append(self._vllm.ask_counted(prompt))
        return answers[-1]

    def _held(self) -> int:
        """Bytes that requests have pinned or reserved."""
        l1 = self._agent.status()["l1"]
        return int(l1["pinned_bytes"]) + int(l1["staging_bytes"])

    def _run_kill(self) -> None:
        """SIGKILL of the whole process group: the agent releases all that it held, in time."""
        before = len(self._agent.instances())
        limit = RELEASE_SECONDS[self._transport]
        killed = self._vllm.kill_group()
        gone = _within(lambda: not self._agent.instances(), 3 * limit)
        seconds = time.monotonic() - killed
        reasons = ", ".join(sorted({reap["reason"] for reap in self._agent.reaps()}))
        self._check(
            "kill",
            before > 0 and gone and seconds <= limit,
            f"{before} instance(s) gone after {seconds:.2f} s (limit {limit:.0f} s): {reasons}",
        )

    def _check(self, name: str, ok: bool, detail: str) -> None:  # noqa: FBT001  # it is the result
        self._report.check(f"{self._name} {name}", ok, detail)

    def _await_objects(self, wanted: int) -> int:
        """Stores end a little after their request; return what is there in the end."""
        _within(lambda: self._objects() >= wanted, 10)
        return self._objects()

    def _objects(self) -> int:
        return int(self._agent.status()["l1"]["objects"])


class Agents:
    """One agent after the other on the same ports, with the same flags."""

    def __init__(self, *flags: str) -> None:
        self._flags = flags
        self.current = AgentProcess(*flags, l1_size_gb=L1_GB)
        self.log = ""

    def __enter__(self) -> Self:
        self.current.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.log += self.current.log_text()
        self.current.close()

    def replace(self, l1_size_gb: float = L1_GB) -> None:
        """Kill it and start the next one."""
        self.current.kill()
        self.log += self.current.log_text()
        port = self.current.port
        self.current.close()
        self.current = AgentProcess(*self._flags, l1_size_gb=l1_size_gb, port=port).start()


def run_one(mode: str, transport: str, model: Path, logs: Path, report: Report) -> None:
    """Start an agent and a vLLM that uses it, and check them."""
    socket_path = logs / "agent.sock"
    flags = (f"--chunk-size={CHUNK_TOKENS}", f"--ipc-path={socket_path}", *MODES[mode])
    with Agents(*flags) as agents:
        url = agents.current.url if transport == "tcp" else f"ipc://{socket_path}"
        connector = {
            "lmcache.mp.server_urls": [url],
            "lmcache.mp.mp_transfer_mode": mode.replace("engine_shm", "engine_driven"),
            "lmcache.mp.heartbeat_interval": 2,
            "lmcache.mp.mq_timeout": 5,
        }
        started = time.monotonic()
        with VllmProcess(model, connector, logs / f"vllm-{mode}-{transport}.log") as vllm:
            print(f"{mode} {transport}: vLLM serves after {time.monotonic() - started:.0f} s")
            Session(mode, transport, agents, vllm, report).run()
    (logs / f"agent-{mode}-{transport}.log").write_text(agents.log)


def _prompt(seed: int, words: int) -> str:
    """Return that many words of the model's vocabulary, the same ones each time."""
    choice = random.Random(seed)  # noqa: S311  # a repeatable prompt, no secret
    return " ".join(f"t{choice.randrange(1000)}" for _ in range(words))


def _full_hit(length: int) -> int:
    """Tokens that a complete hit loads: whole chunks, but never a prompt's last token."""
    return min(length // CHUNK_TOKENS * CHUNK_TOKENS, length - 1)


def _sources(answer: Answer) -> str:
    return f"{answer.computed} tokens computed, {answer.loaded} loaded"


def _within(predicate: Callable[[], bool], seconds: float) -> bool:
    """Wait like `poll_until`, but say no instead of failing."""
    try:
        return poll_until(predicate, patience_seconds=seconds)
    except AssertionError:
        return False


def _chosen(
    modes: Sequence[str] | None, transports: Sequence[str] | None
) -> Sequence[tuple[str, str]]:
    """Every pair that was asked for; by default those that differ from each other."""
    if not modes and not transports:
        return RUNS
    if not transports:
        return [run for run in RUNS if run[0] in (modes or ())]
    return [(mode, transport) for mode in modes or MODES for transport in transports]


def main() -> int:
    """Run the chosen modes over the chosen transports; return the exit status."""
    parser = argparse.ArgumentParser(prog="make e2e", description=__doc__)
    parser.add_argument("--mode", choices=sorted(MODES), action="append")
    parser.add_argument("--transport", choices=sorted(RELEASE_SECONDS), action="append")
    parser.add_argument("--logs", type=Path, help="keep the logs here")
    chosen = parser.parse_args()
    report = Report()
    with tempfile.TemporaryDirectory(prefix="lmcache-kube-e2e-") as scratch:
        logs = (chosen.logs or Path(scratch)).resolve()
        logs.mkdir(parents=True, exist_ok=True)
        model = Path(scratch, "model")
        quiet = {**os.environ, "TQDM_DISABLE": "1"}
        subprocess.run([STOCK_PYTHON, MAKE_MODEL, model], check=True, env=quiet)
        for mode, transport in _chosen(chosen.mode, chosen.transport):
            try:
                run_one(mode, transport, model, logs, report)
            except (AssertionError, OSError) as error:  # vLLM or the agent ended, mostly
                report.check(f"{mode} {transport} completed", ok=False, detail=str(error))
    print(f"{report.passed} passed, {len(report.failed)} failed")
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
