"""An agent that cannot have what it needs says so at once and ends; it never half starts."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.polling import PATIENCE_SECONDS


@pytest.fixture
def taken_port() -> Iterator[int]:
    """A TCP port of 127.0.0.1 that somebody else listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield int(listener.getsockname()[1])


def _start(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lmcache_nodeagent", "--l1-size-gb=0.01", *flags]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
    )


def test_a_taken_message_port_is_named(taken_port: int) -> None:
    """Exit status 2, and the message has the flag with its value, the reason and the fix."""
    done = _start(f"--port={taken_port}", "--http-port=0")
    assert done.returncode == 2
    assert f"--port {taken_port}" in done.stderr
    assert "Address already in use" in done.stderr
    assert "choose a free one" in done.stderr
    assert done.stdout == ""


def test_a_taken_http_port_is_named(taken_port: int) -> None:
    """The same for HTTP, whose port is taken last: everything that is open by then is closed."""
    done = _start("--port=0", f"--http-port={taken_port}")
    assert done.returncode == 2
    assert f"http-port {taken_port}" in done.stderr
    assert "Address already in use" in done.stderr
    assert "free port" in done.stderr
    assert done.stdout == ""


def test_an_l1_that_does_not_fit_is_refused_with_both_figures() -> None:
    """Exit status 1; the message has the wanted and the available bytes, and what limits them."""
    done = _start("--port=0", "--http-port=0", "--l1-size-gb=1000000")
    assert done.returncode == 1
    assert "an L1 of 1073741824000000 bytes does not fit" in done.stderr
    assert "leaves" in done.stderr
    assert "make L1 smaller" in done.stderr


def test_all_bad_flags_are_told_together() -> None:
    """One start is enough to learn of every mistake."""
    done = _start("--worker-reap-timeout-seconds=10", "--close-confirm-seconds=20", "--enable=x")
    assert done.returncode == 2
    for flag in ("worker-reap-timeout-seconds is 10", "close-confirm-seconds is 20", "--enable"):
        assert flag in done.stderr
