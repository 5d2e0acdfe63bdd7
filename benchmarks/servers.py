"""The two servers that are compared, each started as a user would start it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.dealer import Dealer
from tests.process_log import ProcessLog

ROOT = Path(__file__).parents[1]

AGENT, STOCK = "agent", "lmcache"
"""Names of the two, in tables and in the JSON file."""

START_SECONDS = 60.0
STOP_SECONDS = 20.0

_FLAGS = ("--chunk-size=256", "--eviction-policy=LRU", "--max-workers=1")
"""Given to both. Each keeps its own default for everything else."""

_STOCK_FLAGS = ("--no-l1-use-lazy",)
"""Allocate L1 before serving, as the agent always does."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Resident memory of a server and its children, in bytes."""

    total: int
    l1: int
    workers: int

    @property
    def beside_l1(self) -> int:
        """What is left without L1 and without the workers' own mapped KV memory."""
        return self.total - self.l1 - self.workers


class Server:
    """One running server. Its log goes to a file that is shown if it fails."""

    def __init__(self, name: str, l1_gib: float, flags: Sequence[str], ipc_path: str = "") -> None:
        self.name = name
        self.url = f"tcp://127.0.0.1:{free_port()}"
        self.ipc_url = f"ipc://{ipc_path}" if ipc_path else ""
        self._http_port = free_port()
        self._l1_bytes = int(l1_gib * 2**30)
        self._log = ProcessLog()
        command = [
            *_program(name),
            "--host=127.0.0.1",
            f"--port={self.url.rpartition(':')[2]}",
            f"--http-port={self._http_port}",
            f"--l1-size-gb={l1_gib}",
            *_FLAGS,
            *(_STOCK_FLAGS if name == STOCK else ()),
            *([f"--ipc-path={ipc_path}"] if ipc_path else []),
            *flags,
        ]
        environ = {**os.environ, "LMCACHE_DISABLE_BANNER": "1", "LMCACHE_TRACK_USAGE": "false"}
        self.started_at = time.monotonic()
        self._process = subprocess.Popen(
            command, stdout=self._log.fileno(), stderr=subprocess.STDOUT, env=environ, cwd=ROOT
        )

    @property
    def pid(self) -> int:
        """The server's process id."""
        return self._process.pid

    def wait_ready(self) -> float:
        """Return the seconds from the start of the process to the first answered noop."""
        with Dealer(self.url) as dealer:
            dealer.send(dealer.request("noop"))
            while dealer.receive(0.1) is None:
                if self._process.poll() is not None or self._age() > START_SECONDS:
                    raise RuntimeError(f"{self.name} did not start:\n{self._log.text()[-3000:]}")
        return self._age()

    def _age(self) -> float:
        return time.monotonic() - self.started_at

    def memory(self) -> Memory:
        """Sum up /proc/<pid>/smaps (Rss), children included."""
        total = l1 = workers = 0
        for pid in [self.pid, *_descendants(self.pid)]:
            for name, size, rss in _mappings(pid):
                total += rss
                if name.startswith("/dev/shm/lmcache_kv_"):
                    workers += rss
                elif size >= self._l1_bytes:
                    l1 += rss
        return Memory(total, l1, workers)

    def cpu_seconds(self) -> float:
        """Processor time used so far, in ticks of usually 10 ms; what others run is not in it."""
        user, system = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def lists_instance(self, instance_id: int) -> bool:
        """Tell whether the server still names an instance (an id that is found by its digits)."""
        path = "/v1/instances" if self.name == AGENT else "/status"
        url = f"http://127.0.0.1:{self._http_port}{path}"
        with urllib.request.urlopen(url, timeout=10) as reply:
            return str(instance_id) in reply.read().decode()

    def maps_memory_of(self, worker_pid: int) -> bool:
        """Tell whether any KV segment of a worker is still mapped."""
        wanted = f"/dev/shm/lmcache_kv_{worker_pid}_"
        return wanted in Path(f"/proc/{self.pid}/maps").read_text()

    def stop(self) -> None:
        """SIGTERM, and SIGKILL to one that does not heed it."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._log.close()


@contextlib.contextmanager
def running(
    names: Sequence[str], l1_gib: float, flags: Sequence[str] = (), ipc_path: str = ""
) -> Iterator[list[Server]]:
    """Start servers side by side, wait until all serve, and stop them at the end."""
    servers: list[Server] = []
    try:
        for name in names:
            server = Server(name, l1_gib, flags, ipc_path if name == AGENT else "")
            servers.append(server)
        for server in servers:
            server.wait_ready()
        yield servers
    finally:
        for server in servers:
            server.stop()


def stock_program() -> Path:
    """Where the `lmcache` command of the peer is: LMCACHE_STOCK_BIN, or `.venvs/stock`."""
    return Path(os.environ.get("LMCACHE_STOCK_BIN") or ROOT / ".venvs/stock/bin/lmcache")


def _program(name: str) -> list[str]:
    if name == AGENT:
        return [sys.executable, "-m", "lmcache_nodeagent"]
    return [str(stock_program()), "server"]


def free_port() -> int:
    """Return a TCP port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_for(condition: Callable[[], bool], timeout_seconds: float, step_seconds: float) -> float:
    """Poll until `condition` holds; return the seconds that took.

    Raises:
        TimeoutError: It did not hold in time.
    """
    begin = time.monotonic()
    while not condition():
        if time.monotonic() - begin > timeout_seconds:
            raise TimeoutError(f"not within {timeout_seconds} s")
        time.sleep(step_seconds)
    return time.monotonic() - begin


def _descendants(pid: int) -> list[int]:
    children: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        children += map(int, (task / "children").read_text().split())
    return [*children, *(deeper for child in children for deeper in _descendants(child))]


_HEADER = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ \d+ *(.*)$")


def _mappings(pid: int) -> Iterator[tuple[str, int, int]]:
    """Yield (name, bytes of address space, bytes resident) of each mapping."""
    name, size = "", 0
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if header := _HEADER.match(line):
            name, size = header[3], int(header[2], 16) - int(header[1], 16)
        elif line.startswith("Rss:"):
            yield name, size, int(line.split()[1]) * 1024
