"""A stand-in for vLLM in a worker pod: put there by a ConfigMap, it needs only the product's image.

It does what a stock worker does to its server (registers memory, pings, registers again when told
that it is not known) and prints a JSON object for each thing that happens. Variables: `URL`,
`PING_SECONDS`, `ON_TERM` (`unregister`, `ignore`). SIGUSR1 makes it take memory without end.
"""

from __future__ import annotations

import json
import os
import signal
import time
from types import FrameType

from lmcache_worker.client import WorkerClient
from lmcache_worker.shared_memory import SharedKvCache
from lmcache_worker.wire import NoReply, RequestRefused

_SHAPE = (2, 256, 16, 8, 128)  # keys and values, blocks, tokens, heads, head size: 16 MiB
_LAYERS = 2
_STEP_BYTES = 8 << 20

_orders: list[str] = []


def _say(event: str, **facts: object) -> None:
    print(json.dumps({"event": event, "at": time.time(), **facts}), flush=True)


def _take_signals() -> None:
    def note(number: int, frame: FrameType | None) -> None:
        del frame
        _orders.append(signal.Signals(number).name)

    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, note)


def _eat() -> None:
    eaten = []
    while True:
        eaten.append(os.urandom(_STEP_BYTES))


def _register(client: WorkerClient, instance_id: int, caches: list[SharedKvCache]) -> None:
    while not _orders:
        try:
            client.register_kv_cache(instance_id, [cache.tensor for cache in caches], "tiny")
        except (NoReply, RequestRefused) as error:
            _say("refused", instance_id=str(instance_id), error=str(error))
            time.sleep(1)
        else:
            _say("registered", instance_id=str(instance_id))
            return


def _serve(client: WorkerClient, instance_id: int, caches: list[SharedKvCache]) -> None:
    pause = float(os.environ["PING_SECONDS"])
    while True:
        if "SIGUSR1" in _orders:
            _eat()
        if "SIGTERM" in _orders:
            _say("told_to_end")
            if os.environ["ON_TERM"] == "unregister":
                client.unregister(instance_id)
                _say("unregistered", instance_id=str(instance_id))
                return
            _orders.clear()
        try:
            if not client.ping(instance_id):
                _register(client, instance_id, caches)
        except NoReply:
            _say("no_reply")
        time.sleep(pause)


def main() -> None:
    """Be a worker until told to end."""
    _take_signals()
    instance_id = int.from_bytes(os.urandom(6), "big")
    caches = [SharedKvCache.create(_SHAPE) for _ in range(_LAYERS)]
    try:
        with WorkerClient(os.environ["URL"], timeout_seconds=2.0) as client:
            _register(client, instance_id, caches)
            _serve(client, instance_id, caches)
    finally:
        for cache in caches:
            cache.close()


if __name__ == "__main__":
    main()
