"""What is measured, section by section. Each starts the servers it needs and takes turns.

In every round both servers are measured, and the one that goes first changes from round to round.
"""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from benchmarks.dealer import Dealer, Frames
from benchmarks.pinger import finish_pinger, ping_from_outside, start_pinger
from benchmarks.results import Results, Row
from benchmarks.servers import AGENT, STOCK, Server, running, wait_for
from benchmarks.victim import Victim
from benchmarks.worker import BLOCKS_PER_CHUNK, Model, Prompts, Worker, look_up, working

MIB = 2**20
BOTH = (AGENT, STOCK)

SMALL = Model("small", layers=4, heads=1, head_size=64, blocks=1024)
"""1 KiB per token, 256 KiB per chunk: a small model's, where the cost per request counts."""

LARGE = Model("large", layers=32, heads=8, head_size=128, blocks=272)
"""128 KiB per token, 32 MiB per chunk: Llama-3-8B's, where memory bandwidth counts."""

PROMPTS = {"1k": 1024, "32k": 32 * 1024, "128k": 128 * 1024}

ROWS = (
    Row("ready-0.25", "process start to first answer, L1 0.25 GiB", "s"),
    Row("ready-1", "process start to first answer, L1 1 GiB", "s"),
    Row("memory-ready", "resident beside L1, just started", "MB"),
    Row("memory-used", "resident beside L1, after all transfers below", "MB"),
    Row("ping-1", "pings, 1 client", "1/s", higher_is_better=True),
    Row("ping-64", "pings, 64 clients", "1/s", higher_is_better=True),
    Row("ping-1-cpu", "the server's processor time for each, 1 client", "us"),
    Row("ping-64-cpu", "the server's processor time for each, 64 clients", "us"),
    *(Row(f"lookup-miss-{size}", f"lookup of {size} tokens, miss", "ms") for size in PROMPTS),
    *(Row(f"lookup-hit-{size}", f"lookup of {size} tokens, hit", "ms") for size in PROMPTS),
    Row("ping-beside-p50", "another's ping beside 128k lookups, median", "ms"),
    Row("ping-beside-p99", "another's ping beside 128k lookups, 99th percentile", "ms"),
    Row("store-small", "store, 1 KiB per token, 16 chunks", "GB/s", higher_is_better=True),
    Row("retrieve-small", "retrieve, 1 KiB per token, 16 chunks", "GB/s", higher_is_better=True),
    Row("store-large", "store, 128 KiB per token, 8 chunks", "GB/s", higher_is_better=True),
    Row("retrieve-large", "retrieve, 128 KiB per token, 8 chunks", "GB/s", higher_is_better=True),
    Row("store-scattered", "the same, blocks scattered: store", "GB/s", higher_is_better=True),
    Row(
        "retrieve-scattered", "the same, blocks scattered: retrieve", "GB/s", higher_is_better=True
    ),
    Row("killed-tcp", "worker killed to instance gone, TCP", "s"),
    Row("killed-tcp-unmapped", "worker killed to memory unmapped, TCP", "s"),
    Row("killed-ipc", "worker killed to instance gone, Unix socket", "s"),
    Row("killed-ipc-unmapped", "worker killed to memory unmapped, Unix socket", "s"),
)

_FORCE = True  # clear drops objects that are locked as well

_LOOKUPS_PER_ROUND = {"1k": 40, "32k": 10, "128k": 5}

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

_T = TypeVar("_T")


def in_turns(sides: Sequence[_T], rounds: int) -> Iterator[_T]:
    """Yield each side once per round; who is first alternates."""
    for number in range(rounds):
        yield from sides if number % 2 == 0 else reversed(sides)


def measure_starts(results: Results) -> None:
    """Start and stop each server once per round."""
    for key, gib in (("ready-0.25", 0.25), ("ready-1", 1.0)):
        keys = (key, "memory-ready") if gib == 1.0 else (key,)
        if not results.wants(*keys):
            continue
        for name in in_turns(BOTH, results.rounds):
            server = Server(name, gib, ())
            try:
                results.add(key, name, server.wait_ready())
                if gib == 1.0:
                    results.add("memory-ready", name, server.memory().beside_l1 / MIB)
            finally:
                server.stop()


def measure_messages(results: Results) -> None:
    """Everything that needs running servers, on one pair of them."""
    keys = [row.key for row in ROWS if not row.key.startswith(("ready", "memory-r", "killed"))]
    if not results.wants(*keys):
        return
    with running(BOTH, l1_gib=1.5) as servers:
        sides = [(server, Dealer(server.url)) for server in servers]
        _measure_pings(results, servers)
        _measure_lookups(results, sides)
        _measure_transfers(results, sides)
        for server, dealer in sides:
            if results.wants("memory-used"):
                results.add("memory-used", server.name, server.memory().beside_l1 / MIB)
            dealer.__exit__(None, None, None)


Side = tuple[Server, Dealer]


def _measure_pings(results: Results, servers: Sequence[Server]) -> None:
    seconds = 0.7 if results.quick else 2.0
    for key, clients in (("ping-1", 1), ("ping-64", 64)):
        if not results.wants(key, f"{key}-cpu"):
            continue
        for server in in_turns(servers, results.rounds):
            before = server.cpu_seconds()
            pings = ping_from_outside(server.url, clients, seconds)
            results.add(key, server.name, pings.per_second)
            used = server.cpu_seconds() - before
            results.add(f"{key}-cpu", server.name, used / pings.count * 1e6)


def _measure_lookups(results: Results, sides: Sequence[Side]) -> None:
    if not results.wants(*(row.key for row in ROWS if row.key.startswith(("lookup", "ping-b")))):
        return
    prompts = Prompts(seed=1)
    stored = prompts.tokens(PROMPTS["128k"])
    with working(SMALL, [dealer for _, dealer in sides], instance_id=101) as worker:
        for _, dealer in sides:
            _store_everywhere(worker, dealer, stored, prompts)
        for size, tokens in PROMPTS.items():
            for kind, prefix in (("miss", []), ("hit", stored[:tokens])):
                key = f"lookup-{kind}-{size}"
                if not results.wants(key):
                    continue
                for server, dealer in in_turns(sides, results.rounds):
                    new = [
                        [*prefix, *prompts.tokens(tokens - len(prefix) + 200)]
                        for _ in range(_LOOKUPS_PER_ROUND[size])
                    ]
                    hits = len(prefix) // 256
                    times = [_timed_lookup(worker, dealer, p, prompts, hits) for p in new]
                    results.add(key, server.name, statistics.median(times) * 1000)
        if results.wants("ping-beside-p50", "ping-beside-p99"):
            _measure_pings_beside(results, sides, worker, prompts)
        for _, dealer in sides:
            dealer.call("clear", _FORCE)


def _store_everywhere(
    worker: Worker, dealer: Dealer, tokens: Sequence[int], prompts: Prompts
) -> None:
    """Store a long prompt; its chunks share blocks, for lookups do not care."""
    usable = [1 + n % (SMALL.blocks - 1) for n in range(len(tokens) // 16)]
    dealer.exchange(worker.store(dealer, tokens, prompts.request_id(), usable))
    request_id = prompts.request_id()
    worker.wait_visible(dealer, tokens, request_id)
    worker.let_go(dealer, tokens, request_id)


def _timed_lookup(
    worker: Worker, dealer: Dealer, tokens: Sequence[int], prompts: Prompts, expected: int
) -> float:
    """Return the seconds from sending a lookup to having its result."""
    request_id = prompts.request_id()
    lookup = dealer.request("lookup", worker.key(tokens, request_id, shard=None), 1)
    begin = time.perf_counter()
    found = look_up(dealer, lookup, request_id)
    seconds = time.perf_counter() - begin
    worker.let_go(dealer, tokens, request_id)
    if found != expected:
        raise AssertionError(f"{found} chunks found, expected {expected}")
    return seconds


def _measure_pings_beside(
    results: Results, sides: Sequence[Side], worker: Worker, prompts: Prompts
) -> None:
    seconds = 1.5 if results.quick else 3.0
    request_ids = [prompts.request_id() for _ in range(8)]
    keys = [
        worker.key(prompts.tokens(PROMPTS["128k"]), request_id, shard=None)
        for request_id in request_ids
    ]
    for server, dealer in in_turns(sides, results.rounds):
        lookups = [dealer.request("lookup", key, 1) for key in keys]
        with start_pinger(server.url, 1, seconds, pause=0.002) as process:
            while process.poll() is None:
                for lookup, request_id in zip(lookups, request_ids, strict=True):
                    look_up(dealer, lookup, request_id)
            pings = finish_pinger(process)
        results.add("ping-beside-p50", server.name, pings.median_seconds * 1000)
        results.add("ping-beside-p99", server.name, pings.p99_seconds * 1000)


def _measure_transfers(results: Results, sides: Sequence[Side]) -> None:
    for model, chunks, suffixes in (
        (SMALL, 16, ("small",)),
        (LARGE, 8, ("large", "scattered")),
    ):
        keys = [f"{verb}-{suffix}" for verb in ("store", "retrieve") for suffix in suffixes]
        if not results.wants(*keys):
            continue
        with working(model, [dealer for _, dealer in sides], instance_id=102) as worker:
            for suffix in suffixes:
                if not results.wants(f"store-{suffix}", f"retrieve-{suffix}"):
                    continue
                blocks = _blocks(model, chunks, scattered=suffix == "scattered")
                for _, dealer in sides:  # touches all memory once, and checks the bytes
                    _check_bytes(worker, dealer, *blocks)
                for server, dealer in in_turns(sides, results.rounds):
                    repeats = 10 if model is SMALL else 2
                    rates = _transfer_rates(worker, dealer, blocks, repeats)
                    results.add(f"store-{suffix}", server.name, rates[0])
                    results.add(f"retrieve-{suffix}", server.name, rates[1])


Blocks = tuple[Sequence[int], Sequence[int]]


def _blocks(model: Model, chunks: int, *, scattered: bool) -> Blocks:
    """Choose blocks to store from and to retrieve into; block 0 is the engine's null block."""
    order = np.arange(1, model.blocks)
    if scattered:
        order = np.random.default_rng(7).permutation(order)
    count = chunks * BLOCKS_PER_CHUNK
    return order[:count].tolist(), order[-count:].tolist()


def _check_bytes(
    worker: Worker, dealer: Dealer, source: Sequence[int], target: Sequence[int]
) -> None:
    worker.blank(target)
    prompts = Prompts(seed=99 + len(source))
    _transfer(worker, dealer, prompts, (source, target))
    if not worker.same(source, target):
        raise AssertionError("what came back is not what was stored")


def _transfer_rates(
    worker: Worker, dealer: Dealer, blocks: Blocks, repeats: int
) -> tuple[float, float]:
    """Return the medians of GB/s (10^9) of stores and of retrieves."""
    prompts = Prompts(seed=time.monotonic_ns())
    pairs = [_transfer(worker, dealer, prompts, blocks) for _ in range(repeats)]
    nbytes = len(blocks[0]) * 16 * worker.model.token_bytes
    stores, retrieves = zip(*pairs, strict=True)
    return nbytes / statistics.median(stores) / 1e9, nbytes / statistics.median(retrieves) / 1e9


def _transfer(
    worker: Worker, dealer: Dealer, prompts: Prompts, blocks: Blocks
) -> tuple[float, float]:
    """Store a new prompt and retrieve it; return the seconds of both. Leaves the cache empty."""
    tokens = prompts.tokens(len(blocks[0]) * 16)
    storing_id = prompts.request_id()
    to_store = worker.store(dealer, tokens, storing_id, blocks[0])
    request_id = prompts.request_id()
    to_retrieve = worker.retrieve(dealer, tokens, request_id, blocks[1])
    store_seconds = _seconds(dealer, to_store)
    worker.wait_visible(dealer, tokens, request_id)
    retrieve_seconds = _seconds(dealer, to_retrieve)
    for ended in (storing_id, request_id):
        dealer.call("end_session", ended)
    dealer.call("clear", _FORCE)
    return store_seconds, retrieve_seconds


def _seconds(dealer: Dealer, frames: Frames) -> float:
    begin = time.perf_counter()
    reply = dealer.exchange(frames)
    seconds = time.perf_counter() - begin
    if not reply[-1].endswith(b"\xc3"):  # msgpack true
        raise AssertionError("a transfer was answered false")
    return seconds


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
