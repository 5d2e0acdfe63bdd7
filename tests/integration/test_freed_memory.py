"""What large messages held is the system's again once they are answered."""

from __future__ import annotations

from msgspec import msgpack

from tests.fakes.agent_process import FAST_WINDOWS, AgentProcess
from tests.fakes.raw_client import Footprint, RawDealer
from tests.fixtures.wire import requests

MIB = 1 << 20
BURSTS = 5


def test_bursts_of_large_messages_leave_nothing_behind() -> None:
    """Messages of one and a half megabytes, a hundred at a time, from five clients in turn."""
    frames = requests.frames("register_kv_cache")
    frames[1] = msgpack.encode([requests.tensor()] * 10_000)
    with AgentProcess(*FAST_WINDOWS) as agent:
        footprint = Footprint(agent.pid)
        for _ in range(BURSTS):
            with RawDealer(agent.url) as dealer:
                for _ in range(100):
                    dealer.request("register_kv_cache", *frames)
                dealer.replies(100)
        footprint.growth_stays_below(15 * MIB)
