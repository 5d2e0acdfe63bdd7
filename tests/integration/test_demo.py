"""The demo says only what it saw: it passes on a good agent and fails on one that does not reap."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.polling import PATIENCE_SECONDS

ROOT = Path(__file__).parents[2]
COMMAND = (sys.executable, "-m", "demo")

TIMELINE = (
    r"alpha   registers from 127\.0\.0\.1:\d+: the agent maps 128 KiB",
    r"beta    registers from 127\.0\.0\.1:\d+: the agent maps 128 KiB",
    r"gamma   registers from unix socket, pid \d+: the agent maps 128 KiB",
    r"alpha   stores prompt 1: 512 tokens in 2 chunks",
    r"agent   L1 holds 4 chunks",
    r"beta    loads prompt 1: the bytes are alpha's",
    r"beta    FROZEN",
    r"alpha   KILLED",
    r"gamma   loads prompt 1: the bytes are alpha's",
    r"agent   REAPS alpha [2-5]\.\d+ s after its death: connection_closed",
    r"returned: 128 KiB, unmapped in",
    r"gamma   was served all the while: \d+ pings",
    r"gamma   KILLED",
    r"agent   REAPS gamma .* after its death: (process_exit|connection_closed)",
    r"returned: 128 KiB, unmapped in",
    r"agent   SPARES beta",
    r"beta    continued",
    r"beta    loads prompt 2: the bytes are gamma's",
    r"beta    unregisters",
    r"agent   stopped",
    r"All of this was seen and checked",
)


def _run(*flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *flags],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )


def test_shows_a_reap_with_reason_and_latency_and_spares_the_living() -> None:
    """All lines of the timeline appear in order.

    Here as below, the check of every test finds shared memory that is left behind.
    """
    done = _run()
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert "\033" not in done.stdout, "colour is for terminals"
    rest = done.stdout
    for line in TIMELINE:
        found = re.search(line, rest)
        assert found, f"no {line!r} in:\n{rest}"
        rest = rest[found.end() :]


@pytest.mark.parametrize(
    ("flag", "expected", "seen"),
    [
        ("--reap-mode=observe", "an entry in /v1/reaps within 6 s", "{}"),
        ("--chunk-size=128", "4", "8"),
    ],
    ids=["nobody is reaped", "other chunks are stored"],
)
def test_fails_when_the_agent_does_something_else(flag: str, expected: str, seen: str) -> None:
    """A claim that does not hold ends the demo with status 1, what was expected and what was."""
    done = _run(f"--agent-flag={flag}")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "NOT SEEN" in done.stdout
    assert f"expected: {expected}\n" in done.stdout
    assert f"seen:     {seen}\n" in done.stdout
    assert "All of this was seen" not in done.stdout


def test_fails_when_the_agent_does_not_start() -> None:
    """An agent that refuses its flags is told as what it is, not as a traceback."""
    done = _run("--agent-flag=--no-such-flag")
    assert done.returncode == 1
    assert "NOT SEEN: every process does as it is told" in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("moment", ["serves on", "registers", "KILLED"])
def test_cleans_up_when_interrupted(number: signal.Signals, moment: str) -> None:
    """Ctrl-C at any moment ends the agent and the workers, the frozen one included."""
    with subprocess.Popen(COMMAND, cwd=ROOT, stdout=subprocess.PIPE, text=True) as demo:
        assert demo.stdout is not None
        while moment not in (line := demo.stdout.readline()):
            assert line, "the demo ended early"
        family = psutil.Process(demo.pid).children(recursive=True)
        assert family
        demo.send_signal(number)
        rest = demo.stdout.read()
    assert demo.returncode == 130, rest
    assert "cleaned up" in rest
    assert psutil.wait_procs(family, timeout=PATIENCE_SECONDS)[1] == []


@pytest.mark.parametrize("no_color", ["", "1"])
def test_colours_a_terminal_unless_asked_not_to(no_color: str) -> None:
    """NO_COLOR is respected, whatever its value."""
    ours, theirs = pty.openpty()
    environ = {**os.environ, "NO_COLOR": no_color, "TERM": "xterm"}
    command = [*COMMAND, "--agent-flag=--chunk-size=128"]  # ends soon
    with subprocess.Popen(command, cwd=ROOT, stdout=theirs, env=environ):
        os.close(theirs)
        text = _terminal_text(ours)
    os.close(ours)
    assert "NOT SEEN" in text
    assert ("\033[" in text) is not bool(no_color)


def _terminal_text(descriptor: int) -> str:
    """Read until the other end is closed, which a terminal reports as an error."""
    text = b""
    with contextlib.suppress(OSError):
        while piece := os.read(descriptor, 65536):
            text += piece
    return text.decode()
