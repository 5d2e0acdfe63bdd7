"""How soon a killed worker is forgotten and its memory unmapped."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.results import Results, Row
from benchmarks.servers import AGENT, STOCK, Server, running, wait_for
from benchmarks.victim import Victim

ROWS = (
    Row("killed-tcp", "worker killed to instance gone, TCP", "s"),
    Row("killed-tcp-unmapped", "worker killed to memory unmapped, TCP", "s"),
    Row("killed-ipc", "worker killed to instance gone, Unix socket", "s"),
    Row("killed-ipc-unmapped", "worker killed to memory unmapped, Unix socket", "s"),
)

_SMALLEST_WINDOWS = {
    AGENT: (
        "--worker-reap-timeout-seconds=30",
        "--worker-registration-grace-seconds=30",
        "--close-confirm-seconds=3",
    ),
    STOCK: ("--worker-reap-timeout-seconds=30", "--worker-registration-grace-seconds=30"),
}

_VICTIM_ID = 7_700_000_000_000
_GONE_SECONDS = 90.0
_UNMAPPED_SECONDS = 10.0


def measure_releases(results: Results) -> None:
    """Kill workers, one second apart, and watch what the server lists and what it has mapped.

    The workers of one server are killed side by side, to save the half minute that each takes
    upstream.
    """
    tcp, ipc = ("killed-tcp", "killed-tcp-unmapped"), ("killed-ipc", "killed-ipc-unmapped")
    runs: list[threading.Thread] = []
    with tempfile.TemporaryDirectory() as directory:
        if results.wants(*tcp):
            runs.append(_thread(_kill_workers, results, tcp, AGENT, ""))
            if results.quick:
                results.cannot(tcp[0], STOCK, "takes 30 to 40 s: left out with --quick")
            else:
                runs.append(_thread(_kill_workers, results, tcp, STOCK, ""))
        if results.wants(*ipc):
            runs.append(_thread(_kill_workers, results, ipc, AGENT, str(Path(directory) / "a")))
            for key in ipc:
                results.cannot(key, STOCK, "its server listens on TCP only")
        for run in runs:
            run.join()


def _thread(work: Callable[..., None], *arguments: object) -> threading.Thread:
    thread = threading.Thread(target=work, args=arguments)
    thread.start()
    return thread


def _kill_workers(results: Results, keys: tuple[str, str], name: str, ipc_path: str) -> None:
    with running([name], 0.25, _SMALLEST_WINDOWS[name], ipc_path) as (server,):
        victims = [
            Victim(server.ipc_url or server.url, _VICTIM_ID + n) for n in range(results.rounds)
        ]
        try:
            for victim in victims:
                victim.wait_serving()
                assert server.lists_instance(victim.instance_id)
            watchers = []
            for victim in victims:
                watchers.append(_thread(_kill_one, results, keys, server, victim))
                time.sleep(1.0)
            for watcher in watchers:
                watcher.join()
        finally:
            for victim in victims:
                victim.close()


def _kill_one(results: Results, keys: tuple[str, str], server: Server, victim: Victim) -> None:
    """Kill a worker; note when the server has forgotten it and when its memory is unmapped."""
    step = 0.002 if server.ipc_url else 0.02
    begin = time.monotonic()
    victim.kill()
    wait_for(lambda: not server.lists_instance(victim.instance_id), _GONE_SECONDS, step)
    results.add(keys[0], server.name, time.monotonic() - begin)
    try:
        wait_for(lambda: not server.maps_memory_of(victim.pid), _UNMAPPED_SECONDS, step)
    except TimeoutError:
        why = f"still mapped {_UNMAPPED_SECONDS:.0f} s after the instance was gone"
        results.cannot(keys[1], server.name, why)
        return
    results.add(keys[1], server.name, time.monotonic() - begin)
