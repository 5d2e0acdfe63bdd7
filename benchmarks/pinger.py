"""Clients that ping: `python -m benchmarks.pinger URL CLIENTS SECONDS PAUSE`. A process of its own.

Every client is a DEALER of its own with one ping in flight; frames are encoded once. The clients
are served in turn, without polling, which costs the load generator least. Prints JSON: round trips
per second, and latencies in seconds.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass

import zmq

from benchmarks.dealer import Frames
from lmcache_worker.wire import encode_request

_WARM_UP_SECONDS = 0.3


@dataclass(frozen=True, slots=True)
class Pings:
    """What one process of clients measured; `count` includes the warm-up."""

    count: int
    per_second: float
    median_seconds: float
    p99_seconds: float


def ping_from_outside(url: str, clients: int, seconds: float, pause: float = 0.0) -> Pings:
    """Ping from a new process and return what it measured."""
    with start_pinger(url, clients, seconds, pause) as process:
        return finish_pinger(process)


def start_pinger(
    url: str, clients: int, seconds: float, pause: float = 0.0
) -> subprocess.Popen[str]:
    """Start the process."""
    arguments = [url, str(clients), str(seconds), str(pause)]
    command = [sys.executable, "-m", "benchmarks.pinger", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def finish_pinger(process: subprocess.Popen[str]) -> Pings:
    """Wait for the process and read its figures."""
    output, _ = process.communicate()
    if process.returncode:
        raise RuntimeError(f"the pinging clients ended with {process.returncode}")
    return Pings(**json.loads(output))


def _ping(sockets: list[zmq.Socket[bytes]], frames: Frames, seconds: float, pause: float) -> Pings:
    """Keep one ping in flight for each socket; measure after a warm-up."""
    clock = time.perf_counter
    sent_at = [clock()] * len(sockets)
    for socket in sockets:
        socket.send_multipart(frames)
    latencies: list[float] = []
    begin = clock() + _WARM_UP_SECONDS
    end = begin + seconds
    now, count = clock(), 0
    while now < end:
        for index, socket in enumerate(sockets):
            while socket.recv_multipart()[0] != frames[0]:
                pass  # a probe of the agent, not an answer
            now = clock()
            count += 1
            if now >= begin:
                latencies.append(now - sent_at[index])
            if pause:
                time.sleep(pause)
            sent_at[index] = clock()
            socket.send_multipart(frames)
    latencies.sort()
    return Pings(
        count=count,
        per_second=len(latencies) / (now - begin),
        median_seconds=statistics.median(latencies),
        p99_seconds=latencies[int(len(latencies) * 0.99)],
    )


def _main() -> None:
    url, clients, seconds, pause = sys.argv[1:]
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sockets = [context.socket(zmq.DEALER) for _ in range(int(clients))]
    for socket in sockets:
        socket.setsockopt(zmq.RCVTIMEO, 20_000)
        socket.connect(url)
    pings = _ping(sockets, encode_request(0, "ping", (None,)), float(seconds), float(pause))
    print(json.dumps(asdict(pings)))
    context.destroy(linger=0)


if __name__ == "__main__":
    _main()
