"""The agent leaves when it is told to: in time, with 0, and nothing of it stays."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import pytest
import zmq

from tests.fakes.agent_process import AgentProcess
from tests.fakes.raw_client import (
    GREETING,
    GREETING_SPLIT,
    RawConnection,
    RawDealer,
    regions_of,
    says_no,
)
from tests.fakes.spawning_agent import PID_FILE
from tests.fakes.stub_agent import StubAgent
from tests.fakes.worker_process import WorkerProcess
from tests.fixtures.wire import requests
from tests.polling import BUSY_SECONDS, PATIENCE_SECONDS, poll_until

STOP_SECONDS = 10.0
O_CLOEXEC = os.O_CLOEXEC


@pytest.fixture
def agent() -> Iterator[AgentProcess]:
    """Start an agent."""
    with AgentProcess() as process:
        yield process


def stops_clean(agent: AgentProcess, number: signal.Signals = signal.SIGTERM) -> None:
    """Signal it; see that it leaves in time, with 0, without region, port or complaint."""
    (region,) = regions_of(agent.pid)
    port = agent.port
    started = time.monotonic()
    agent.signal(number)
    assert agent.process.wait(PATIENCE_SECONDS) == 0
    assert time.monotonic() - started < STOP_SECONDS + BUSY_SECONDS
    assert not region.exists()
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen()
    log = agent.log_text()
    assert "Traceback" not in log
    assert "Assertion" not in log


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_an_idle_agent_leaves_at_a_signal(agent: AgentProcess, number: signal.Signals) -> None:
    """Before its first client; what Kubernetes sends, a terminal, and one that is closed."""
    stops_clean(agent, number)


def test_a_second_signal_makes_nothing_worse(agent: AgentProcess) -> None:
    """Impatient supervisors repeat themselves."""
    threading.Timer(0.05, lambda: _signal_again(agent)).start()
    stops_clean(agent)


def _signal_again(agent: AgentProcess) -> None:
    for _ in range(20):
        with suppress(ProcessLookupError):
            agent.signal(signal.SIGTERM)
        time.sleep(0.01)


@pytest.mark.slow
def test_a_signal_right_after_the_ready_line_is_never_lost() -> None:
    """One that comes while the main thread is about to wait neither ends that wait nor locks up."""
    for attempt in range(4):
        with AgentProcess() as agent:
            time.sleep(attempt * 0.002)
            agent.signal(signal.SIGTERM)
            assert agent.process.wait(PATIENCE_SECONDS) == 0


@pytest.mark.parametrize("sent", [b"", GREETING[:GREETING_SPLIT], GREETING], ids=len)
def test_it_leaves_during_a_handshake(agent: AgentProcess, sent: bytes) -> None:
    """Peers that have sent nothing, half a greeting, or the whole and no more."""
    with ExitStack() as peers:
        for _ in range(5):
            peers.enter_context(RawConnection(agent.port)).send(sent)
        stops_clean(agent)


def test_it_does_not_wait_for_replies_that_nobody_reads(agent: AgentProcess) -> None:
    """Thousands are queued to a client that stopped reading."""
    options: dict[int, int | bytes] = {zmq.RCVHWM: 10, zmq.RCVBUF: 4096, zmq.SNDHWM: 0}
    with RawDealer(agent.url, options) as deaf, RawDealer(agent.url) as other:
        for _ in range(60_000):
            deaf.request("no such operation, and a long name so that replies fill the buffers")
        assert other.call("noop").value == "OK"
        stops_clean(agent)


def test_it_leaves_with_a_frozen_worker_connected(agent: AgentProcess) -> None:
    """SIGSTOP of a registered worker with unread replies; its memory is let go."""
    with WorkerProcess(agent.url, 3) as worker:
        worker.ask("register")
        worker.ask("flood", 2000)
        worker.signal(signal.SIGSTOP)
        stops_clean(agent)


def test_what_runs_when_it_stops_is_finished_and_answered() -> None:
    """A store that is being copied ends with true; what comes meanwhile is refused at once."""
    with StubAgent() as agent, WorkerProcess(agent.url, 3) as worker, RawDealer(agent.url) as late:
        worker.ask("register")
        assert late.call("noop").value == "OK"
        agent.hold("gather")
        worker.tell("store", 1)
        poll_until(lambda: agent.holding("gather"), "the store runs")
        agent.signal(signal.SIGTERM)
        poll_until(lambda: not agent.get("/readyz")["ready"], "it is stopping")
        uid = late.request("lookup", *requests.frames("lookup"))
        assert "stopping" in str(late.reply_to(uid).refusal)
        agent.let_go("gather")
        assert worker.result() is True
        assert agent.process.wait(PATIENCE_SECONDS) == 0


@pytest.mark.slow
def test_what_never_ends_is_answered_no_and_left_behind() -> None:
    """A copy that hangs for good: its client is told, and the agent still leaves in time."""
    with StubAgent() as agent, WorkerProcess(agent.url, 3) as worker, RawDealer(agent.url) as other:
        worker.ask("register")
        agent.hold("gather")
        worker.tell("store", 1)
        poll_until(lambda: agent.holding("gather"), "the store hangs")
        uid = other.request("store", *requests.frames("store"))
        assert says_no("store", other.reply_to(uid))
        started = time.monotonic()
        agent.signal(signal.SIGTERM)
        assert worker.result() is False
        assert agent.process.wait(PATIENCE_SECONDS) == 0
        assert time.monotonic() - started < STOP_SECONDS + BUSY_SECONDS


class _Churn(threading.Thread):
    """A client that comes, asks several things and goes, over and over."""

    def __init__(self, agent: AgentProcess, over: threading.Event, number: int) -> None:
        super().__init__(name=f"churn-{number}")
        self._agent, self._over, self._number = agent, over, number
        self.answered = 0
        self.cycles = 0

    def run(self) -> None:
        """Go on until told to stop."""
        while not self._over.is_set():
            with RawDealer(self._agent.url) as dealer:
                for operation in ("ping", "lookup", "store", "register_kv_cache", "end_session"):
                    dealer.request(operation, *requests.frames(operation))
                self.answered += len(dealer.replies(self._number % 6, 5))
            self.cycles += 1


def _in_full_swing(clients: Sequence[_Churn]) -> bool:
    """Clients have come and gone several times each, and many of them were answered."""
    answered = sum(client.answered for client in clients)
    return answered > len(clients) and sum(client.cycles for client in clients) > 300


class _Watch(threading.Thread):
    """Asks for status and metrics all the time."""

    def __init__(self, agent: AgentProcess, over: threading.Event) -> None:
        super().__init__(name="watch")
        self._agent, self._over = agent, over

    def run(self) -> None:
        """Go on until told to stop, or until nobody answers any more."""
        with suppress(OSError):
            while not self._over.is_set():
                self._agent.status()
                self._agent.metric("connections")


@pytest.mark.slow
def test_it_leaves_in_the_middle_of_traffic_every_time() -> None:
    """64 clients that connect, ask and go, with status calls beside them: four rounds.

    The socket is one thread's: a slip would end the process with an assertion of libzmq.
    """
    for _ in range(4):
        with AgentProcess() as agent:
            stop = threading.Event()
            clients = [_Churn(agent, stop, number) for number in range(64)]
            threads = [*clients, _Watch(agent, stop)]
            for thread in threads:
                thread.start()
            poll_until(lambda: _in_full_swing(clients), "churn")  # noqa: B023
            try:
                stops_clean(agent)
            finally:
                stop.set()
                for thread in threads:
                    thread.join(PATIENCE_SECONDS)


def test_every_descriptor_is_closed_for_children(agent: AgentProcess) -> None:
    """Close-on-exec is set on all but the standard streams, also on those of connections."""
    with WorkerProcess(agent.url, 3) as worker, RawConnection(agent.port):
        worker.ask("register")
        agent.status()
        open_for_children = []
        for info in Path(f"/proc/{agent.pid}/fdinfo").iterdir():
            with suppress(FileNotFoundError):  # one that just closed
                flags = dict(line.split(":", 1) for line in info.read_text().splitlines())["flags"]
                if int(info.name) > 2 and not int(flags, 8) & O_CLOEXEC:
                    open_for_children.append(info.name)
        assert open_for_children == []


def test_a_child_that_lives_on_holds_neither_ports_nor_region(tmp_path: Path) -> None:
    """Started while serving, without care; the ports are free as soon as the agent has left."""
    file = tmp_path / "child"
    with AgentProcess(module="tests.fakes.spawning_agent", environ={PID_FILE: str(file)}) as agent:
        child = psutil.Process(int(file.read_text()))
        try:
            held = set()
            for path in Path(f"/proc/{child.pid}/fd").iterdir():
                with suppress(FileNotFoundError):  # one that just closed
                    held.add(str(path.readlink()))
            assert not [name for name in held if name.startswith("socket:")]
            assert not [name for name in held if "/dev/shm" in name]
            stops_clean(agent)
            assert child.is_running()
        finally:
            child.kill()
