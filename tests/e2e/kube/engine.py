"""A stand-in for vLLM in a worker pod: put there by a ConfigMap, it needs only the product's image.

It does what a stock worker does to its server (registers memory, pings, and registers again at the
first good ping after a bad one) and prints a JSON object for each thing that happens. Variables:
`URL`, `PING_SECONDS`, `ON_TERM` (`unregister`, `ignore`). SIGUSR1 makes it take memory without end.
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


class _Worker:
    def __init__(self, client: WorkerClient, caches: list[SharedKvCache]) -> None:
        self._client = client
        self._caches = caches
        self._id = int.from_bytes(os.urandom(6), "big")
        self._healthy = False

    def serve(self) -> None:
        pause = float(os.environ["PING_SECONDS"])
        while True:
            if "SIGUSR1" in _orders:
                _eat()
            if "SIGTERM" in _orders and self._told_to_end():
                return
            self._ping()
            time.sleep(pause)

    def _ping(self) -> None:
        try:
            answer = self._client.ping(self._id)
        except NoReply:
            answer = False
        if answer and not self._healthy:
            self._register()
        elif not answer:
            self._healthy = False
            _say("unhealthy")

    def _register(self) -> None:
        tensors = [cache.tensor for cache in self._caches]
        try:
            self._client.register_kv_cache(self._id, tensors, "tiny")
        except (NoReply, RequestRefused) as error:
            _say("refused", instance_id=str(self._id), error=str(error))
        else:
            self._healthy = True
            _say("registered", instance_id=str(self._id))

    def _told_to_end(self) -> bool:
        _orders.clear()
        _say("told_to_end")
        if os.environ["ON_TERM"] != "unregister":
            return False
        self._client.unregister(self._id)
        _say("unregistered", instance_id=str(self._id))
        return True


def main() -> None:
    """Be a worker until told to end."""
    _take_signals()
    caches = [SharedKvCache.create(_SHAPE) for _ in range(_LAYERS)]
    try:
        with WorkerClient(os.environ["URL"], timeout_seconds=2.0) as client:
            _Worker(client, caches).serve()
    finally:
        for cache in caches:
            cache.close()


if __name__ == "__main__":
    main()
