"""One reply per request: under load, to peers that do not read, leave, or come back."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial

import pytest
import zmq
from msgspec import msgpack

from lmcache_worker.shared_memory import SharedKvCache
from lmcache_worker.wire import encode_request
from tests.fakes.agent_process import FAST_WINDOWS, AgentProcess
from tests.fakes.raw_client import Footprint, Frames, RawDealer, SteadyPinger, counted, says_no
from tests.fixtures.wire import requests
from tests.polling import PATIENCE_SECONDS, poll_until

MIB = 1 << 20
MODEL = "demo/model"
ROUTING_ID = b"a client's own choice"
MIXED = (
    "ping",
    "noop",
    "get_chunk_size",
    "lookup",
    "query_prefetch_status",
    "free_lookup_locks",
    "end_session",
    "store",
    "retrieve",
    "report_block_allocation",
    "unregister_kv_cache",
    "register_kv_cache",
    "prepare_store",
    "cb_unified_lookup",
    "no such operation",
)


@pytest.fixture
def agent() -> Iterator[AgentProcess]:
    """One for each test: counts come a little after replies, and would come into the next one."""
    with AgentProcess(*FAST_WINDOWS) as process:
        process.status()
        yield process


class _LoadedClient(threading.Thread):
    """Keeps requests of all kinds in flight and counts what comes back for each uid."""

    def __init__(self, url: str, seed: int, total: int, in_flight: int) -> None:
        super().__init__(name=f"loaded-client-{seed}")
        self._url, self._total, self._in_flight = url, total, in_flight
        self._choice = random.Random(seed)  # noqa: S311  # a repeatable mix
        self.replies: Counter[object] = Counter()
        self.wrong: list[object] = []

    def run(self) -> None:
        """Send everything, then wait for what is missing."""
        asked: dict[object, str] = {}
        with RawDealer(self._url) as dealer:
            while len(asked) < self._total:
                while len(asked) - self.replies.total() < self._in_flight:
                    operation = self._choice.choice(MIXED)
                    frames = [] if " " in operation else requests.frames(operation)
                    asked[dealer.request(operation, *frames)] = operation
                self._take(dealer.receive(PATIENCE_SECONDS), asked)
            while self.replies.total() < len(asked):
                if not self._take(dealer.receive(PATIENCE_SECONDS), asked):
                    break
            if not dealer.silent():
                self.wrong.append("more than was asked for")

    def _take(self, reply: Frames | None, asked: dict[object, str]) -> bool:
        if reply is None:
            self.wrong.append("a reply is missing")
            return False
        self.replies[reply.uid] += 1
        operation = asked.get(reply.uid)
        if reply.refusal is None and reply.operation != operation:
            self.wrong.append((operation, reply))
        return True


def test_every_request_is_answered_exactly_once_under_load(agent: AgentProcess) -> None:
    """Eight clients with 100 requests in flight each, of all kinds, good and bad."""
    clients = [_LoadedClient(agent.url, seed, total=1500, in_flight=100) for seed in range(8)]
    with SteadyPinger(agent.url):
        for client in clients:
            client.start()
        for client in clients:
            client.join(PATIENCE_SECONDS)
    for client in clients:
        assert not client.wrong, client.wrong[:3]
        assert len(client.replies) >= 1500
        assert set(client.replies.values()) == {1}
    assert counted(agent.http_port, "requests_failed_total") == 0
    assert counted(agent.http_port, "events_dropped_total") == 0


def test_replies_to_a_slow_reader_all_arrive_once_it_reads(agent: AgentProcess) -> None:
    """2,000 questions of a client with a receive limit of 10 and a small buffer, unread for 1 s."""
    options: dict[int, int | bytes] = {zmq.RCVHWM: 10, zmq.RCVBUF: 4096}
    key = {**requests.KEY, "num_kv_readers": 0, "cache_salt": "x" * 129}
    frames = [msgpack.encode(key), b"\x01"]
    with SteadyPinger(agent.url), RawDealer(agent.url, options) as slow:
        footprint = Footprint(agent.pid)
        for _ in range(2000):
            slow.request("lookup", *frames)
        time.sleep(1)  # the case: it reads late
        replies = slow.replies(2000)
        assert len(replies) == 2000
        assert {reply.uid for reply in replies} == set(range(2000))
        assert slow.silent()
        footprint.growth_stays_below(20 * MIB)


def test_replies_beyond_what_is_kept_for_a_peer_are_dropped_and_counted(
    agent: AgentProcess,
) -> None:
    """80,000 unread replies: nobody else waits, memory is bounded, none is lost uncounted."""
    name = "replies_dropped_total"
    before = counted(agent.http_port, name, reason="peer_not_reading")
    options: dict[int, int | bytes] = {zmq.RCVHWM: 10, zmq.RCVBUF: 4096, zmq.SNDHWM: 0}
    with SteadyPinger(agent.url), RawDealer(agent.url, options) as slow:
        footprint = Footprint(agent.pid)
        for _ in range(80_000):
            slow.request("no such operation, and a long name so that replies fill the buffers")
        poll_until(
            lambda: counted(agent.http_port, name, reason="peer_not_reading") > before,
            "the queue is full",
        )
        footprint.growth_stays_below(50 * MIB)
        arrived = 0

        def every_reply_is_accounted_for() -> bool:
            nonlocal arrived
            arrived += len(slow.replies(80_000, 0.5))
            dropped = counted(agent.http_port, name, reason="peer_not_reading") - before
            assert arrived + dropped <= 80_000
            return arrived + dropped == 80_000

        poll_until(every_reply_is_accounted_for, "each reply arrives or is counted")
        assert slow.silent()  # and from now on it is served again


def test_a_peer_that_leaves_right_after_asking_disturbs_nobody(agent: AgentProcess) -> None:
    """Its replies are dropped, which is counted and no warning."""
    name = "replies_dropped_total"
    with SteadyPinger(agent.url):
        footprint = Footprint(agent.pid)
        before = counted(agent.http_port, name, reason="peer_gone")
        for _ in range(50):
            with RawDealer(agent.url, {zmq.LINGER: 1000}) as dealer:
                for _ in range(50):
                    dealer.request("lookup", *requests.frames("lookup"))
        poll_until(lambda: counted(agent.http_port, name, reason="peer_gone") > before)
        footprint.descriptors_return()
        footprint.assert_threads_live()


def test_a_newcomer_with_the_routing_id_of_a_half_open_link_is_served(
    agent: AgentProcess,
) -> None:
    """Answers that the old link had and did not read never reach it.

    Stock clients choose no routing id; libzmq hands a chosen one over without a word to us.
    """
    options: dict[int, int | bytes] = {zmq.ROUTING_ID: ROUTING_ID, zmq.RECONNECT_IVL: -1}
    refused = partial(counted, agent.http_port, "requests_refused_total", operation="lookup")
    with RawDealer(agent.url, options) as old:
        assert old.call("ping", None).value is True
        for _ in range(1000):
            old.request("lookup")
        poll_until(lambda: refused() == 1000)
        with RawDealer(agent.url, options) as new:
            new.skip_uids(1_000_000)
            for _ in range(20):
                assert new.call("ping", None).value is True
            assert new.silent()


def test_a_newcomer_is_served_while_the_old_client_lives(agent: AgentProcess) -> None:
    """Every one of its requests, though both claim the routing id."""
    options: dict[int, int | bytes] = {zmq.ROUTING_ID: ROUTING_ID}
    with SteadyPinger(agent.url), RawDealer(agent.url, options) as old:
        assert old.call("ping", None).value is True
        with RawDealer(agent.url, options) as new:
            new.skip_uids(1_000_000)
            assert new.call("ping", None).value is True
            for _ in range(20):
                assert new.call("ping", None).value is True


def test_an_instance_is_known_by_its_id_and_not_by_the_routing_id(agent: AgentProcess) -> None:
    """Whoever comes with the routing id of a worker's old link does not become that worker."""
    options: dict[int, int | bytes] = {zmq.ROUTING_ID: ROUTING_ID, zmq.RECONNECT_IVL: -1}
    with RawDealer(agent.url, options) as old, SharedKvCache.create([2, 16, 16, 2, 8]) as cache:
        payload = [31, [cache.tensor], MODEL, 1, "vllm", {"kv_layout": "NHD"}, []]
        uid = old.request("register_kv_cache", *encode_request(0, "", payload)[2:])
        assert old.reply_to(uid).refusal is None
        with RawDealer(agent.url, options) as new:
            assert new.call("ping", 32).value is False  # nobody of that id is here
            assert new.call("ping", None).value is True
            assert set(agent.instances()) == {31}
            assert agent.instances()[31]["has_liveness_signal"] is False
            assert new.call("ping", 31).value is True  # the same peer, by its own word: it is back
            assert agent.instances()[31]["has_liveness_signal"] is True
            assert new.call("unregister_kv_cache", 31).refusal is None
            assert agent.instances() == {}


def test_what_an_unknown_sender_asks_is_answered_no_and_leaves_no_session(
    agent: AgentProcess,
) -> None:
    """Ends and questions about requests that nobody began."""
    sessions = agent.status()["sessions"]
    with RawDealer(agent.url) as dealer:
        for operation in ("query_prefetch_status", "wait_prefetch_status"):
            reply = dealer.reply_to(dealer.request(operation, *requests.frames(operation)))
            assert says_no(operation, reply)
        assert dealer.call("end_session", "never begun").refusal is None
    assert agent.status()["sessions"] <= sessions
