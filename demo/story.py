"""The demo's steps. Each says what it checked, never what it only hopes for."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from demo.claims import claim, claim_within
from demo.machine import (
    exits_are_proven,
    mapped_bytes,
    process_state,
    regions_of_port,
    shared_bytes,
)
from demo.timeline import Timeline, Tone, size_text, span_text
from tests.fakes.agent_process import AgentProcess
from tests.fakes.worker_process import CHUNK_TOKENS, WorkerProcess

CLOSE_WINDOW_SECONDS = 3
REAP_TIMEOUT_SECONDS = 30

_SLACK_SECONDS = 2.0  # for a machine that is busy with other things
_CHUNKS = 2
_SOURCE_BLOCK, _TARGET_BLOCK = 1, 32  # where a worker stores from, and loads to
_PROMPT_OF_ALPHA, _PROMPT_OF_GAMMA = 1, 2


@dataclass(slots=True)
class Cast:
    """Who takes part. `alpha` and `beta` connect over TCP, `gamma` over a Unix socket."""

    agent: AgentProcess
    alpha: WorkerProcess
    beta: WorkerProcess
    gamma: WorkerProcess
    names: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.names = {
            self.alpha.instance_id: "alpha",
            self.beta.instance_id: "beta",
            self.gamma.instance_id: "gamma",
        }

    @property
    def workers(self) -> Sequence[WorkerProcess]:
        """All three."""
        return self.alpha, self.beta, self.gamma

    def name(self, worker: WorkerProcess) -> str:
        """What the timeline calls a worker."""
        return self.names[worker.instance_id]


class Story:
    """Runs the steps. Thread: main.

    Raises (all steps): `ClaimFailed`.
    """

    def __init__(self, cast: Cast, timeline: Timeline) -> None:
        self._cast = cast
        self._agent = cast.agent
        self._timeline = timeline
        self._digests: dict[int, str] = {}  # prompt -> the bytes its first owner had
        self._frozen_at = 0.0
        self._worker_bytes = 0

    def run(self) -> None:
        """Run all steps in order."""
        self._workers_register()
        self._workers_share_a_prompt()
        self._one_freezes()
        self._one_is_killed()
        self._one_is_killed_at_a_unix_socket()
        self._the_frozen_one_goes_on()
        self._everything_is_given_back()

    def _workers_register(self) -> None:
        for worker in self._cast.workers:
            worker.ask("register")
            claim("ping is answered true", expected=True, seen=worker.ask("ping"))
            entry = self._instance(worker)
            self._worker_bytes = shared_bytes(worker.pid)
            kernel = mapped_bytes(self._agent.pid, worker.pid)
            claim("bytes mapped, by the kernel", expected=self._worker_bytes, seen=kernel)
            claim("bytes mapped, by the agent", expected=self._worker_bytes, seen=entry["bytes"])
            claim("state of a worker that pings", expected="active", seen=entry["state"])
            self._say(
                worker,
                f"registers from {entry['peer']}: the agent maps"
                f" {size_text(kernel)} of its KV cache",
            )

    def _workers_share_a_prompt(self) -> None:
        cast = self._cast
        for worker, prompt in ((cast.alpha, _PROMPT_OF_ALPHA), (cast.gamma, _PROMPT_OF_GAMMA)):
            claim("store succeeds", expected=True, seen=worker.ask("store", prompt, _CHUNKS))
            self._digests[prompt] = worker.ask("digest", _SOURCE_BLOCK, _CHUNKS)
            tokens = _CHUNKS * CHUNK_TOKENS
            self._say(worker, f"stores prompt {prompt}: {tokens} tokens in {_CHUNKS} chunks")
        cache = self._agent.status()["l1"]
        claim("objects in L1", expected=2 * _CHUNKS, seen=cache["objects"])
        self._timeline.add(
            "agent", f"L1 holds {cache['objects']} chunks, {size_text(cache['used_bytes'])}"
        )
        self._load(cast.beta, _PROMPT_OF_ALPHA, "alpha")

    def _one_freezes(self) -> None:
        beta = self._cast.beta
        beta.signal(signal.SIGSTOP)
        self._frozen_at = time.monotonic()
        claim_within(
            _SLACK_SECONDS,
            "beta is stopped",
            expected="state T",
            look=lambda: process_state(beta.pid),
            holds=lambda state: state == "T",
        )
        self._say(beta, "FROZEN (SIGSTOP): silent, but its connection stays open", Tone.WATCH)

    def _one_is_killed(self) -> None:
        alpha, gamma = self._cast.alpha, self._cast.gamma
        alpha.kill()
        killed_at = time.monotonic()
        self._say(alpha, "KILLED (SIGKILL)", Tone.BAD)
        entry = claim_within(
            _SLACK_SECONDS,
            "the agent sees alpha's connection close",
            expected="state closed, window close",
            look=lambda: self._instance(alpha),
            holds=lambda seen: (seen["state"], seen["window"]) == ("closed", "close"),
        )
        self._timeline.add(
            "agent",
            f"alpha's connection closed; if it does not return within"
            f" {entry['deadline_seconds']:.1f} s, it is dead",
        )
        self._load(gamma, _PROMPT_OF_ALPHA, "alpha")
        pings = _Pings(gamma)
        reap = self._reaped(alpha, CLOSE_WINDOW_SECONDS + 1 + _SLACK_SECONDS, pings.once)
        self._say_reaped(alpha, reap, time.monotonic() - killed_at, "connection_closed")
        claim("gamma's slowest ping takes less than 1 s", expected=True, seen=pings.slowest < 1)
        self._say(
            gamma,
            f"was served all the while: {pings.count} pings,"
            f" the slowest {span_text(pings.slowest)}",
            Tone.GOOD,
        )

    def _one_is_killed_at_a_unix_socket(self) -> None:
        gamma = self._cast.gamma
        proven = exits_are_proven()
        gamma.kill()
        killed_at = time.monotonic()
        self._say(gamma, "KILLED (SIGKILL), at the other end of a Unix socket", Tone.BAD)
        limit = _SLACK_SECONDS if proven else CLOSE_WINDOW_SECONDS + 1 + _SLACK_SECONDS
        reap = self._reaped(gamma, limit)
        seconds = time.monotonic() - killed_at
        self._say_reaped(gamma, reap, seconds, "process_exit" if proven else "connection_closed")
        if not proven:
            self._timeline.remark("(proof of exit in milliseconds needs Linux 6.5 or newer)")

    def _the_frozen_one_goes_on(self) -> None:
        beta = self._cast.beta
        frozen_for = time.monotonic() - self._frozen_at
        entry = self._instance(beta)
        claim("beta's window", expected="heartbeat_timeout", seen=entry["window"])
        claim(
            "the kernel still sees beta's memory mapped",
            expected=self._worker_bytes,
            seen=mapped_bytes(self._agent.pid, beta.pid),
        )
        self._timeline.add(
            "agent",
            f"SPARES beta: silent for {entry['last_seen_seconds']:.1f} s,"
            f" {entry['deadline_seconds']:.0f} s of {REAP_TIMEOUT_SECONDS} s left",
            Tone.GOOD,
        )
        beta.signal(signal.SIGCONT)
        claim("beta's first ping is answered true", expected=True, seen=beta.ask("ping"))
        self._say(
            beta, f"continued (SIGCONT) after {frozen_for:.1f} s: still registered", Tone.GOOD
        )
        self._load(beta, _PROMPT_OF_GAMMA, "gamma")

    def _everything_is_given_back(self) -> None:
        beta, port = self._cast.beta, self._agent.port
        claim(
            "reaped, in order",
            expected=["alpha", "gamma"],
            seen=[self._cast.names[int(reap["instance_id"])] for reap in self._agent.reaps()],
        )
        beta.ask("unregister")
        claim("instances left", expected={}, seen=self._agent.instances())
        self._say(beta, "unregisters; the agent maps nobody's memory any more")
        claim("the agent's L1 region", expected=1, seen=len(regions_of_port(port)))
        claim("exit status of the agent after SIGTERM", expected=0, seen=self._agent.stop())
        claim("L1 regions left in /dev/shm", expected=[], seen=regions_of_port(port))
        self._timeline.add("agent", "stopped (SIGTERM): exit status 0, L1 removed")

    def _load(self, worker: WorkerProcess, prompt: int, owner: str) -> None:
        """Let a worker load a prompt of another one and compare the bytes."""
        worker.ask("zero", _TARGET_BLOCK, _CHUNKS)
        claim("chunks found", expected=_CHUNKS, seen=worker.ask("lookup", prompt, _CHUNKS))
        claim("retrieve succeeds", expected=True, seen=worker.ask("retrieve", prompt, _CHUNKS))
        claim(
            f"bytes that {self._cast.name(worker)} loaded (SHA-256)",
            expected=self._digests[prompt],
            seen=worker.ask("digest", _TARGET_BLOCK, _CHUNKS),
        )
        worker.ask("end_session", prompt)
        self._say(
            worker,
            f"loads prompt {prompt}: the bytes are {owner}'s"
            f" (SHA-256 {self._digests[prompt][:8]}...)",
            Tone.GOOD,
        )

    def _instance(self, worker: WorkerProcess) -> Mapping[str, Any]:
        """What `/v1/instances` says of a worker."""
        name = self._cast.name(worker)
        return claim_within(
            _SLACK_SECONDS,
            f"{name} is registered",
            expected=f"{name} in /v1/instances",
            look=lambda: self._agent.instances().get(worker.instance_id, {}),
            holds=bool,
        )

    def _reaped(
        self,
        worker: WorkerProcess,
        seconds: float,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> Mapping[str, Any]:
        """Wait for a worker's entry in the agent's journal of reaps."""
        return claim_within(
            seconds,
            f"{self._cast.name(worker)} is reaped",
            expected="an entry in /v1/reaps",
            look=lambda: self._journal_entry(worker.instance_id),
            holds=bool,
            meanwhile=meanwhile,
        )

    def _journal_entry(self, instance_id: int) -> Mapping[str, Any]:
        reaps = self._agent.reaps()
        return next((reap for reap in reaps if int(reap["instance_id"]) == instance_id), {})

    def _say_reaped(
        self, worker: WorkerProcess, reap: Mapping[str, Any], seconds: float, reason: str
    ) -> None:
        """Check a reap against the kernel's view of the agent, and tell it."""
        name = self._cast.name(worker)
        claim(f"why {name} was reaped", expected=reason, seen=reap["reason"])
        claim("bytes returned, by the journal", expected=self._worker_bytes, seen=reap["bytes"])
        claim(
            f"bytes of {name} that the kernel sees mapped",
            expected=0,
            seen=mapped_bytes(self._agent.pid, worker.pid),
        )
        claim(f"{name} is gone", expected=False, seen=worker.instance_id in self._agent.instances())
        self._timeline.add(
            "agent", f"REAPS {name} {span_text(seconds)} after its death: {reason}", Tone.GOOD
        )
        self._timeline.remark(f"evidence: {'; '.join(reap['evidence'])}")
        released = span_text(reap["release_seconds"])
        self._timeline.remark(f"returned: {size_text(reap['bytes'])}, unmapped in {released}")

    def _say(self, worker: WorkerProcess, what: str, tone: Tone = Tone.PLAIN) -> None:
        self._timeline.add(self._cast.name(worker), what, tone)


class _Pings:
    """Pings of one worker, one at a time, and how long the slowest took."""

    def __init__(self, worker: WorkerProcess) -> None:
        self._worker = worker
        self.count = 0
        self.slowest = 0.0

    def once(self) -> None:
        """Ping and wait for the answer."""
        started = time.monotonic()
        claim("ping is answered true", expected=True, seen=self._worker.ask("ping"))
        self.slowest = max(self.slowest, time.monotonic() - started)
        self.count += 1
