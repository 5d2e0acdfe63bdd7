"""A reap and a registration of the same id at the same moment: one context, or a clear no."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter

import pytest

from lmcache_worker.wire import RequestRefused
from tests.fakes.agent_process import FAST_WINDOWS
from tests.fakes.stub_agent import StubAgent
from tests.fakes.worker_process import LAYERS, Worker
from tests.polling import poll_until

ROUNDS = 1000
RACERS = 4
REAP_TIMEOUT_SECONDS = 0.03
"""So short that a round takes no longer than the window; the reaper then scans all the time."""

GIVE_UP_SECONDS = 5.0


class Racer(threading.Thread):
    """Registers again and again at the very moment at which its entry runs out."""

    def __init__(self, url: str, number: int, rounds: int) -> None:
        super().__init__(name=f"racer-{number}")
        self._url, self._number, self._rounds = url, number, rounds
        self._random = random.Random(number)  # noqa: S311  # jitter
        self.outcomes: Counter[str] = Counter()
        self.failure: BaseException | None = None

    def run(self) -> None:
        """Thread: racer-<n>."""
        try:
            with Worker(self._url, self._number) as worker:
                for _ in range(self._rounds):
                    self._round(worker)
        except BaseException as failure:  # noqa: BLE001  # the test raises it
            self.failure = failure

    def _round(self, worker: Worker) -> None:
        """Age the entry to its last millisecond, then register, use and leave."""
        self._register(worker)
        worker.ping()
        time.sleep(REAP_TIMEOUT_SECONDS + self._random.uniform(-0.004, 0.012))
        kept = self._register(worker)
        self.outcomes["had to try again" if kept else "registered at once"] += 1
        stored, loaded = worker.store(self._number), worker.retrieve(self._number)
        self.outcomes["served" if stored and loaded else "told no"] += 1
        worker.unregister()

    @staticmethod
    def _register(worker: Worker) -> int:
        """Register as stock workers do, again after a refusal; return how many there were."""
        refusals, deadline = 0, time.monotonic() + GIVE_UP_SECONDS
        while True:
            try:
                worker.register()
            except RequestRefused as refusal:
                if "still being released" not in refusal.reason or time.monotonic() > deadline:
                    raise
                refusals += 1
                time.sleep(0.001)
            else:
                return refusals


@pytest.mark.slow
def test_a_reap_that_meets_a_registration_leaves_one_context_or_a_clear_no() -> None:
    """In a thousand rounds every request is answered, and as many contexts close as open."""
    windows = {"reap_timeout_seconds": REAP_TIMEOUT_SECONDS}
    with StubAgent(*FAST_WINDOWS, windows=windows) as agent:
        racers = [Racer(agent.url, number, ROUNDS // RACERS) for number in range(1, RACERS + 1)]
        for racer in racers:
            racer.start()
        while any(racer.is_alive() for racer in racers):
            handles = agent.counts()["handles"]
            # At most the one in force, one on its way in or out, of two layers each.
            assert len(handles) <= RACERS * LAYERS
            assert all(0 < mapped <= 2 for mapped in handles.values())
            assert len(agent.instances()) <= 2 * RACERS
            time.sleep(0.02)
        for racer in racers:
            racer.join()
            assert racer.failure is None, racer.failure

        outcomes: Counter[str] = Counter()
        for racer in racers:
            outcomes += racer.outcomes
        assert outcomes["served"] + outcomes["told no"] == ROUNDS
        assert outcomes["served"] > ROUNDS / 10
        assert agent.status()["worker_liveness"]["tracked_instances"] == 0
        poll_until(lambda: not agent.counts()["handles"])
        counts = agent.counts()
        assert counts["opened"] == counts["closed"] >= ROUNDS
        reaped = agent.get("/v1/reaps?since=0")["next"]
        assert reaped > ROUNDS / 10, outcomes  # the race was run from both sides
        assert reaped < 2 * ROUNDS
        assert agent.status()["models"] == 0
        assert agent.log_records("thread_failed") == []
        assert agent.metric("requests_failed_total") == 0
