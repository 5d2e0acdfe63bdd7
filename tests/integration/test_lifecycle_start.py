"""The agent starts, or says in one message why it cannot; a start that fails leaves nothing."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from tests.fakes.agent_process import AgentProcess, shared_memory_files
from tests.fakes.netns import needs_root
from tests.fakes.raw_client import RawDealer, regions_of
from tests.fakes.worker_process import WorkerProcess
from tests.polling import PATIENCE_SECONDS, poll_until

EXIT_FAILURE = 1
EXIT_USAGE = 2
SMALL = ("--port=0", "--http-port=0", "--l1-size-gb=0.0625")


def start_fails(
    *flags: str, wrapper: tuple[str, ...] = (), timeout: float = PATIENCE_SECONDS
) -> tuple[int, str]:
    """Run an agent that must end by itself; return its exit status and standard error."""
    name = f"failing-start-{os.getpid()}"
    done = subprocess.run(
        [*wrapper, sys.executable, "-m", "lmcache_nodeagent", f"--shm-name={name}", *flags],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.stdout == ""  # the ready line and nothing else goes there
    assert "Traceback" not in done.stderr
    assert not any(name in file for file in shared_memory_files())
    return done.returncode, done.stderr


def test_the_ready_line_is_all_of_standard_output_and_true() -> None:
    """One line of JSON; the ports in it answer from then on."""
    with subprocess.Popen(
        [sys.executable, "-m", "lmcache_nodeagent", *SMALL],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        assert ready.keys() == {"event", "port", "http_port", "pid", "boot_id"}
        assert ready["event"] == "agent_ready"
        assert ready["pid"] == process.pid
        with RawDealer(f"tcp://127.0.0.1:{ready['port']}") as dealer:
            assert dealer.call("noop").value == "OK"
        socket.create_connection(("127.0.0.1", ready["http_port"])).close()
        process.send_signal(signal.SIGTERM)
        rest, _ = process.communicate(timeout=PATIENCE_SECONDS)
        assert rest == ""
        assert process.returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("delay_seconds", [0.05, 0.2, 0.3, 0.35, 0.4, 0.45, 0.5, 0.6])
def test_a_signal_during_the_start_leaves_nothing(delay_seconds: float, tmp_path: Path) -> None:
    """Whatever it is doing: before Python runs our code the signal itself ends it, after that 0."""
    log = tmp_path / "log"
    name = f"start-{delay_seconds}"
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "lmcache_nodeagent", *SMALL, f"--shm-name={name}"],
            stdout=stderr,
            stderr=stderr,
        )
        time.sleep(delay_seconds)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_SECONDS) in {0, -signal.SIGTERM}
    assert not any(name in file for file in shared_memory_files())
    if process.returncode == 0:
        assert "Traceback" not in log.read_text()


def test_a_message_port_in_use_is_a_clear_error() -> None:
    """It names flag and port, and touches nothing of the agent that has it."""
    with AgentProcess() as first:
        code, errors = start_fails(f"--port={first.port}", "--http-port=0", "--l1-size-gb=0.0625")
        assert code == EXIT_USAGE
        assert f"--port {first.port}" in errors
        assert "Address already in use" in errors
        with RawDealer(first.url) as dealer:
            assert dealer.call("noop").value == "OK"


def test_an_http_port_in_use_is_a_clear_error() -> None:
    """Found after the memory was taken: that is given back."""
    with AgentProcess() as first:
        code, errors = start_fails(
            "--port=0", f"--http-port={first.http_port}", "--l1-size-gb=0.0625"
        )
        assert code == EXIT_USAGE
        assert f"http-port {first.http_port}" in errors
        assert len(regions_of(first.pid)) == 1


def test_a_name_of_a_living_agent_is_a_clear_error() -> None:
    """The region stays with its owner, which goes on serving from it."""
    with (
        AgentProcess(f"--shm-name=taken-{os.getpid()}") as first,
        WorkerProcess(first.url, 3) as worker,
    ):
        worker.ask("register")
        assert worker.ask("store", 1) is True
        code, errors = start_fails(*SMALL, f"--shm-name=taken-{os.getpid()}")
        assert code == EXIT_USAGE
        assert f"'taken-{os.getpid()}'" in errors
        assert "living agent" in errors
        assert regions_of(first.pid) == [Path(f"/dev/shm/lmcache-kube.l1.taken-{os.getpid()}")]
        assert worker.ask("lookup", 1) == 2
        assert worker.ask("retrieve", 1) is True


def test_all_broken_rules_are_told_at_once_with_value_and_flag() -> None:
    """One start is enough to learn of everything."""
    code, errors = start_fails(
        "--port=70000",
        "--l1-size-gb=nan",
        "--chunk-size=0",
        "--worker-reap-timeout-seconds=-1",
        "--max-cpu-workers=0",
        "--eviction-policy=FIFO",
        "--hash-algorithm=sha256",
        "--reap-mode=maybe",
    )
    assert code == EXIT_USAGE
    for words in (
        "port",
        "70000",
        "l1-size-gb",
        "chunk-size",
        "worker-reap-timeout-seconds",
        "-1",
        "max-cpu-workers",
        "FIFO",
        "sha256",
        "maybe",
    ):
        assert words in errors, words


def test_an_l1_beyond_the_machine_is_an_error_with_both_figures() -> None:
    """A terabyte times a hundred: refused before anything is allocated."""
    code, errors = start_fails("--port=0", "--http-port=0", "--l1-size-gb=100000")
    assert code == EXIT_FAILURE
    assert str(100_000 << 30) in errors
    assert len(re.findall(r"\d+ bytes", errors)) == 2


@needs_root
def test_a_small_dev_shm_is_an_error_with_both_figures_and_no_bus_error_later() -> None:
    """As in a container without a larger /dev/shm: 16 MiB there, 64 MiB wanted."""
    assert shutil.which("unshare"), "`unshare` not found: apt-get install util-linux"
    mount = 'mount -t tmpfs -o size=16m none /dev/shm && exec "$@"'
    wrapper = ("unshare", "--mount", "sh", "-c", mount, "sh")
    code, errors = start_fails(*SMALL, wrapper=wrapper)
    assert code == EXIT_FAILURE
    assert str(64 << 20) in errors
    assert str(16 << 20) in errors
    assert "/dev/shm" in errors


def test_a_left_over_ipc_socket_is_taken_over_and_a_living_one_refused(tmp_path: Path) -> None:
    """What a killed agent left is no obstacle; what answers is somebody's."""
    path = tmp_path / "run" / "agent.sock"
    with AgentProcess(f"--ipc-path={path}") as first:
        first.kill()
        assert path.is_socket()
    with AgentProcess(f"--ipc-path={path}") as second:
        with RawDealer(f"ipc://{path}") as dealer:
            assert dealer.call("noop").value == "OK"
        code, errors = start_fails(*SMALL, f"--ipc-path={path}")
        assert code == EXIT_USAGE
        assert str(path) in errors
        assert "in use by a running process" in errors
        with RawDealer(f"ipc://{path}") as dealer:
            assert dealer.call("noop").value == "OK"
        assert second.stop() == 0
    assert not path.exists()


def test_an_ipc_path_that_is_a_file_is_left_alone(tmp_path: Path) -> None:
    """A typing error must not cost anybody a file."""
    path = tmp_path / "precious"
    path.write_text("data")
    code, errors = start_fails(*SMALL, f"--ipc-path={path}")
    assert code == EXIT_USAGE
    assert str(path) in errors
    assert path.read_text() == "data"


@pytest.mark.parametrize(
    ("host", "reached_at"),
    [
        ("localhost", ["127.0.0.1"]),
        ("0.0.0.0", ["127.0.0.1"]),  # noqa: S104  # what is tested
        ("::1", ["[::1]"]),
        ("::", ["[::1]", "127.0.0.1"]),
        ("*", ["[::1]", "127.0.0.1"]),
    ],
)
def test_hosts_of_both_families_can_be_bound(host: str, reached_at: list[str]) -> None:
    """Peers are shown so that they can be told apart and parsed: IPv6 in brackets, IPv4 plain."""
    if not Path("/proc/net/if_inet6").exists() and ":" in "".join(reached_at):
        pytest.skip("this machine has no IPv6")
    with AgentProcess(f"--host={host}") as agent:
        for address in reached_at:
            with WorkerProcess(f"tcp://{address}:{agent.port}", 3) as worker:
                worker.ask("register")
                assert worker.ask("ping") is True
                poll_until(partial(_shows_port_of, agent, address), f"{address} and a port")
                worker.ask("unregister")


def _shows_port_of(agent: AgentProcess, address: str) -> bool:
    """Whether the instance's connection is proven, which its port says."""
    return bool(re.fullmatch(rf"{re.escape(address)}:\d+", agent.instances()[3]["peer"]))


@needs_root
def test_a_machine_without_ipv6_is_served(tmp_path: Path) -> None:
    """All addresses, in a namespace where IPv6 is switched off."""
    off = "echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6; ip link set lo up"
    wrapper = ("unshare", "--net", "sh", "-c", f'{off}; exec "$@"', "sh")
    socket_path = tmp_path / "agent.sock"
    flags = ("--host=*", "--http-host=*", f"--ipc-path={socket_path}")
    with (
        AgentProcess(*flags, wrapper=wrapper),
        RawDealer(f"ipc://{socket_path}") as dealer,
    ):
        assert dealer.call("noop").value == "OK"
