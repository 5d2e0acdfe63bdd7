"""Pings and look-ups: what a request costs, and what one client's cost another."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

from benchmarks.dealer import Dealer
from benchmarks.models import SMALL
from benchmarks.pinger import finish_pinger, ping_from_outside, start_pinger
from benchmarks.results import Results, Row
from benchmarks.servers import Server
from benchmarks.turns import FORCE, Side, in_turns
from benchmarks.worker import Prompts, Worker, look_up, working

PROMPTS = {"1k": 1024, "32k": 32 * 1024, "128k": 128 * 1024}

PING_ROWS = (
    Row("ping-1", "pings, 1 client", "1/s", higher_is_better=True),
    Row("ping-64", "pings, 64 clients", "1/s", higher_is_better=True),
    Row("ping-1-cpu", "the server's processor time for each, 1 client", "us"),
    Row("ping-64-cpu", "the server's processor time for each, 64 clients", "us"),
)
LOOKUP_ROWS = (
    *(Row(f"lookup-miss-{size}", f"lookup of {size} tokens, miss", "ms") for size in PROMPTS),
    *(Row(f"lookup-hit-{size}", f"lookup of {size} tokens, hit", "ms") for size in PROMPTS),
    Row("ping-beside-p50", "another's ping beside 128k lookups, median", "ms"),
    Row("ping-beside-p99", "another's ping beside 128k lookups, 99th percentile", "ms"),
)
ROWS = (*PING_ROWS, *LOOKUP_ROWS)

_LOOKUPS_PER_ROUND = {"1k": 40, "32k": 10, "128k": 5}


def measure_pings(results: Results, servers: Sequence[Server]) -> None:
    """Ping from a process of its own; take rates and the servers' processor time."""
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


def measure_lookups(results: Results, sides: Sequence[Side]) -> None:
    """Look up prompts that miss or hit, and ping beside the long ones."""
    if not results.wants(*(row.key for row in LOOKUP_ROWS)):
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
            dealer.call("clear", FORCE)


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
