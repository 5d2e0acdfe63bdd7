"""Record the frames of stock LMCache clients and its stock server as test fixtures.

Run it in the stock environment, which `make conformance` makes:

    .venvs/stock/bin/python tests/conformance/record_frames.py tests/fixtures/wire [SESSION...]

It starts the stock server on a free port, puts a recording proxy in front of it, runs the stock
vLLM adapters through one session of each transfer mode, and writes one JSON file for each.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch  # type: ignore[import-not-found]
import zmq
from lmcache.integration.vllm.vllm_multi_process_adapter import (  # type: ignore[import-not-found]
    LMCacheMPSchedulerAdapter,
    LMCacheMPWorkerAdapter,
    LoadStoreOp,
    ParallelStrategy,
)
from lmcache.v1.multiprocess.custom_types import (  # type: ignore[import-not-found]
    BlockAllocationRecord,
    IPCCacheServerKey,
)
from lmcache.v1.multiprocess.group_view import EngineGroupInfo  # type: ignore[import-not-found]

RELEASE = "0.5.6"
MODEL = "demo/model"
CHUNK_TOKENS = 32
BLOCK_TOKENS = 16
TOKENS = list(range(70_000, 70_075))
END = 64
TIMEOUT_SECONDS = 60.0
L1_GIB = "0.2"

SESSIONS = {
    "lmcache_driven": ("lmcache_driven", True),
    "engine_driven": ("engine_driven", True),
    "engine_driven_pickle": ("engine_driven", False),
}
"""Transfer mode of each session, and whether its server has a shared pool."""

Exchange = dict[str, object]


class RecordingProxy:
    """Passes messages between clients and the server and keeps them. Thread: its own."""

    def __init__(self, server_url: str) -> None:
        self._server_url = server_url
        self._context = zmq.Context()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="recording-proxy")
        self._exchanges: dict[tuple[bytes, bytes], Exchange] = {}
        self._front = self._context.socket(zmq.ROUTER)
        self.url = f"tcp://127.0.0.1:{self._front.bind_to_random_port('tcp://127.0.0.1')}"
        self._thread.start()

    def close(self) -> list[Exchange]:
        """Stop; return the exchanges in the order of their requests."""
        self._stop.set()
        self._thread.join()
        self._context.destroy(linger=0)
        return list(self._exchanges.values())

    def _run(self) -> None:
        backs: dict[bytes, zmq.Socket[bytes]] = {}
        poller = zmq.Poller()
        poller.register(self._front, zmq.POLLIN)
        while not self._stop.is_set():
            ready = dict(poller.poll(100))
            if self._front in ready:
                identity, *frames = self._front.recv_multipart()
                if identity not in backs:
                    backs[identity] = self._context.socket(zmq.DEALER)
                    backs[identity].connect(self._server_url)
                    poller.register(backs[identity], zmq.POLLIN)
                if frames[1]:  # a stream's control frames have no operation
                    self._exchanges[identity, frames[0]] = {
                        "connection": list(backs).index(identity),
                        "request": [frame.hex() for frame in frames],
                        "replies": [],
                    }
                backs[identity].send_multipart(frames)
            for identity, back in backs.items():
                if back in ready:
                    frames = back.recv_multipart()
                    replies = self._exchanges[identity, frames[0]]["replies"]
                    assert isinstance(replies, list)
                    replies.append([frame.hex() for frame in frames])
                    self._front.send_multipart([identity, *frames])


@contextlib.contextmanager
def stock_server(*, pool: bool) -> Iterator[str]:
    """Run the stock server on free ports, with a shared pool or without; yield its URL."""
    port, http_port = _free_port(), _free_port()
    command = [
        str(Path(sys.executable).parent / "lmcache"),
        "server",
        *("--port", str(port)),
        *("--http-port", str(http_port)),
        *("--l1-size-gb", L1_GIB),
        *("--eviction-policy", "LRU"),
        *("--chunk-size", str(CHUNK_TOKENS)),
        *("--supported-transfer-mode", "auto"),
        *(("--shm-name", f"record_{os.getpid()}") if pool else ()),
    ]
    log = Path(f"stock-server-{port}.log")
    with (
        log.open("wb") as output,
        subprocess.Popen(command, stdout=output, stderr=output) as server,
    ):
        try:
            yield f"tcp://127.0.0.1:{port}"
        finally:
            server.terminate()
    log.unlink()


def make_adapters(
    url: str, context: zmq.Context[zmq.Socket[bytes]], mode: str
) -> tuple[LMCacheMPSchedulerAdapter, LMCacheMPWorkerAdapter]:
    """Make a scheduler and a worker as vLLM does, with a heartbeat that shows once."""
    strategy = ParallelStrategy(
        mla_only=False, vllm_world_size=1, vllm_worker_id=0, tp_size=1, pp_size=1, n_servers=1
    )
    config = {
        "lmcache.mp.mq_timeout": TIMEOUT_SECONDS,
        "lmcache.mp.heartbeat_interval": TIMEOUT_SECONDS,
        "lmcache.mp.mp_transfer_mode": mode,
    }
    return (
        LMCacheMPSchedulerAdapter(
            [url], context, MODEL, BLOCK_TOKENS, strategy, extra_config=config
        ),
        LMCacheMPWorkerAdapter(url, context, MODEL, BLOCK_TOKENS, strategy, extra_config=config),
    )


def run_session(url: str, mode: str, *, pool: bool) -> dict[str, object]:
    """Store a prompt, find it and load it with the stock adapters; return the file's header."""
    context = zmq.Context()
    scheduler, worker = make_adapters(url, context, mode)
    caches = {
        f"layer.{layer}": torch.randn(2, 8, BLOCK_TOKENS, 2, 8, dtype=torch.bfloat16)
        for layer in range(2)
    }
    worker.register_kv_caches(
        caches, [EngineGroupInfo(0, [0, 1], BLOCK_TOKENS)], {"kv_layout": "NHD"}
    )
    _lookup(scheduler, "cold", expected=0)
    event = worker.create_recorded_event() if mode == "lmcache_driven" else None
    stored = LoadStoreOp(TOKENS, [[1, 2, 3, 4]], 0, END)
    worker.submit_store_request("cold", stored, event)
    _until(lambda: "cold" in (worker.get_finished({"cold"})[0] or ()))
    time.sleep(0.5)  # stock stores become visible a little after their reply
    scheduler.end_session("cold")
    _lookup(scheduler, "warm", expected=END // CHUNK_TOKENS)
    loaded = LoadStoreOp(TOKENS, [[5, 6, 7, 0]], 0, END, skip_first_n_tokens=BLOCK_TOKENS)
    worker.submit_retrieve_request("warm", loaded, event)
    _until(lambda: "warm" in (worker.get_finished(set())[1] or ()))
    scheduler.end_session("warm")
    _lookup(scheduler, "freed", expected=END // CHUNK_TOKENS)
    scheduler.free_lookup_locks(TOKENS, 0, END, "freed")
    scheduler.cleanup_lookup_result("freed")
    scheduler.report_block_allocations([BlockAllocationRecord("freed", [1, 2], [5, 6, 7])])
    _plain_calls(worker, mode, pool=pool)
    scheduler.reset_cache()
    instance_id = worker.instance_id
    worker.shutdown()
    scheduler.shutdown()
    context.destroy(linger=0)
    return {
        "release": RELEASE,
        "transfer_mode": mode,
        "instance_id": str(instance_id),
        "scheduler_pid": os.getpid(),
    }


def _plain_calls(worker: LMCacheMPWorkerAdapter, mode: str, *, pool: bool) -> None:
    """Calls that the adapters make rarely or never, and the server's ways to say no."""
    client = worker.req_client
    stranger = 7
    key = IPCCacheServerKey(
        model_name=MODEL,
        world_size=1,
        worker_id=0,
        token_ids=tuple(range(40)),
        start=0,
        end=CHUNK_TOKENS,
        request_id="absent",
        cache_salt="tenant-1",
        request_configs={"lmcache.tag": "x", "lmcache.list": [1, 2.5, None, True]},
        num_kv_readers=1,
    )
    calls = [client.noop(), client.ping(None), client.ping(worker.instance_id)]
    if mode == "lmcache_driven":
        calls.append(client.store(key, stranger, [[1, 2]], b""))
        calls.append(client.retrieve(key, stranger, [[1, 2]], b"", 0))
        calls.append(client.wait_prefetch_status("absent", 0.5))
    else:
        calls.append(client.prepare_retrieve(key, worker.instance_id))
        if pool:  # without one the stock server does not answer a commit of nothing
            calls.append(client.commit_store(key, worker.instance_id, b""))
        stream = client.subscribe_kv_events(worker.instance_id, MODEL, 0, 16)
        next(stream)
        stream.close()
    for call in calls:
        call.result(timeout=TIMEOUT_SECONDS)


def _lookup(scheduler: LMCacheMPSchedulerAdapter, request_id: str, expected: int) -> None:
    scheduler.maybe_submit_lookup_request(request_id, TOKENS)
    _until(lambda: scheduler.check_lookup_result(request_id) is not None)
    found = scheduler.check_lookup_result(request_id)
    assert found in (expected, expected * CHUNK_TOKENS), found


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "the stock side does not answer"
        time.sleep(0.01)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def write_fixture(path: Path, header: dict[str, object], exchanges: list[Exchange]) -> None:
    """Write one exchange a line, so that a new recording diffs well."""
    lines = ",\n".join(json.dumps(exchange, separators=(",", ":")) for exchange in exchanges)
    head = json.dumps(header)[:-1]
    path.write_text(f'{head}, "exchanges": [\n{lines}\n]}}\n', encoding="utf-8")


def main() -> None:
    """Record the sessions, or those named, into the directory named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("session", nargs="*", choices=[*SESSIONS, []])
    chosen = parser.parse_args()
    installed = importlib.metadata.version("lmcache")
    if installed != RELEASE:
        sys.exit(f"lmcache {installed} is installed; the fixtures are of {RELEASE}")
    for session in chosen.session or SESSIONS:
        mode, pool = SESSIONS[session]
        with stock_server(pool=pool) as url:
            proxy = RecordingProxy(url)
            try:
                header = run_session(proxy.url, mode, pool=pool)
            finally:
                exchanges = proxy.close()
        write_fixture(chosen.directory / f"{session}.json", header, exchanges)


if __name__ == "__main__":
    main()
