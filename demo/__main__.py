"""`python -m demo`: sets the scene, runs the story, and leaves nothing behind, Ctrl-C included.

Exit status: 0 if all of it was seen, 1 if a claim did not hold, 130 after Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Generator, Sequence
from pathlib import Path
from types import FrameType

from demo.claims import ClaimFailed
from demo.story import CLOSE_WINDOW_SECONDS, REAP_TIMEOUT_SECONDS, Cast, Story
from demo.timeline import Timeline, Tone
from lmcache_nodeagent.ids import MAX_INSTANCE_ID
from tests.fakes.agent_process import AgentProcess
from tests.fakes.worker_process import WorkerProcess

EXIT_CLAIM_FAILED = 1
EXIT_INTERRUPTED = 130

_LOG_LINES_SHOWN = 5
_L1_SIZE_GB = 1 / 64  # fits the 64 MB of shared memory that containers get by default
_OWN_SESSION = ("setsid",)
"""Runs a command where a Ctrl-C of this terminal does not reach it: ending it is our job."""


class _Interrupts:
    """Ctrl-C and SIGTERM end the demo by an exception, but never between a start and its record.

    A second one does not wait. Thread: main.
    """

    def __init__(self) -> None:
        self._held = False
        self._pending = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        if self._held and not self._pending:
            self._pending = True
            return
        raise KeyboardInterrupt

    @contextlib.contextmanager
    def held(self) -> Generator[None]:
        """Put an interrupt off until the end of the block."""
        self._held = True
        try:
            yield
        finally:
            self._held = False
        if self._pending:
            raise KeyboardInterrupt

    @staticmethod
    def ignore() -> None:
        """Let the clean-up finish."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; return the exit status."""
    parser = argparse.ArgumentParser(prog="make demo", description=__doc__)
    parser.add_argument("--agent-flag", action="append", default=[], help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    timeline = Timeline(sys.stdout)
    timeline.headline(
        "One agent, three workers. One is killed, one frozen, one served throughout.\n"
    )
    interrupts = _Interrupts()
    started = time.monotonic()
    try:
        with contextlib.ExitStack() as scene:
            try:
                _play(scene, interrupts, timeline, options.agent_flag)
            finally:
                interrupts.ignore()
    except KeyboardInterrupt:
        timeline.headline("\nInterrupted; everything is cleaned up.", Tone.WATCH)
        return EXIT_INTERRUPTED
    except ClaimFailed:
        return EXIT_CLAIM_FAILED
    seconds = time.monotonic() - started
    timeline.headline(f"\nAll of this was seen and checked, in {seconds:.1f} s.", Tone.GOOD)
    return 0


def _play(
    scene: contextlib.ExitStack,
    interrupts: _Interrupts,
    timeline: Timeline,
    agent_flags: Sequence[str],
) -> None:
    """Start everybody and run the story; `scene` ends whatever was started."""
    folder = Path(scene.enter_context(tempfile.TemporaryDirectory(prefix="lmcache-kube-demo-")))
    socket = folder / "agent.sock"
    agent = AgentProcess(
        f"--worker-reap-timeout-seconds={REAP_TIMEOUT_SECONDS}",
        f"--close-confirm-seconds={CLOSE_WINDOW_SECONDS}",
        f"--ipc-path={socket}",
        *agent_flags,
        l1_size_gb=_L1_SIZE_GB,
        wrapper=_OWN_SESSION,
    )
    scene.callback(agent.close)
    try:
        with interrupts.held():
            agent.start()
        timeline.add("agent", f"serves on {agent.url} and ipc://{socket}")
        alpha, beta, gamma = (
            _worker(scene, interrupts, url) for url in (agent.url, agent.url, f"ipc://{socket}")
        )
        Story(Cast(agent, alpha, beta, gamma), timeline).run()
    except ClaimFailed as failed:
        _report(failed, agent, timeline)
        raise
    except (AssertionError, OSError) as error:  # how the fakes say that a process misbehaves
        misbehaved = ClaimFailed("every process does as it is told", "no error", error)
        _report(misbehaved, agent, timeline)
        raise misbehaved from error


def _worker(scene: contextlib.ExitStack, interrupts: _Interrupts, url: str) -> WorkerProcess:
    """Start a worker with an id as stock workers choose theirs: 63 random bits."""
    with interrupts.held():
        instance_id = uuid.uuid4().int & MAX_INSTANCE_ID
        return scene.enter_context(WorkerProcess(url, instance_id, wrapper=_OWN_SESSION))


def _report(failed: ClaimFailed, agent: AgentProcess, timeline: Timeline) -> None:
    """Print what was expected and what was seen, and the end of the agent's log."""
    timeline.add("demo", f"NOT SEEN: {failed.claim}", Tone.BAD)
    timeline.remark(f"expected: {failed.expected}", Tone.BAD)
    timeline.remark(f"seen:     {failed.seen}", Tone.BAD)
    timeline.remark("the agent's last log lines:")
    for line in agent.log_text().splitlines()[-_LOG_LINES_SHOWN:]:
        timeline.remark(f"  {line}")


if __name__ == "__main__":
    sys.exit(main())
