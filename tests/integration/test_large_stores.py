"""A store that is too large for a message: its worker is told, and goes on."""

from __future__ import annotations

from pathlib import Path

from msgspec import msgpack

from tests.fakes.agent_process import FAST_WINDOWS, AgentProcess
from tests.fakes.raw_client import RawDealer, counted, encoded
from tests.fixtures.wire.requests import INSTANCE_ID, KEY, REGISTRATION_MAP
from tests.polling import poll_until

LIMIT = 1 << 20
TOKENS = 256


def test_a_store_that_broke_its_connection_is_answered(tmp_path: Path) -> None:
    """At the next thing that the worker says; it stays registered, and what fits is stored."""
    socket = tmp_path / "agent.sock"
    flags = (*FAST_WINDOWS, "--supported-transfer-mode=auto", f"--ipc-path={socket}")
    with AgentProcess(*flags, f"--max-message-bytes={LIMIT}") as agent:
        for url in (agent.url, f"ipc://{socket}"):
            with RawDealer(url) as worker:
                _lose_a_store(worker)
        refused = {"operation": "commit_store", "reason": "too_large"}
        poll_until(lambda: counted(agent.http_port, "requests_refused_total", **refused) == 2)
        words = f"at most {LIMIT} bytes; raise --max-message-bytes"
        poll_until(lambda: words in agent.log_text(), words)


def _lose_a_store(worker: RawDealer) -> None:
    form = {"num_layers": 4, "hidden_dim_size": 128}  # chunks of half the limit
    worker.call("register_kv_cache_engine_driven_context", {**REGISTRATION_MAP, **form})
    key = {**KEY, "world_size": 1, "worker_id": 0, "token_ids": list(range(3 * TOKENS))}
    key["end"] = 3 * TOKENS
    assert worker.call("prepare_store", key, INSTANCE_ID).value == {"context": {}}
    lost = worker.request("commit_store", *encoded(key, INSTANCE_ID, bytes(LIMIT + 1)))
    answers: dict[object, object] = {}

    def answered() -> bool:
        pings.append(worker.request("ping", msgpack.encode(INSTANCE_ID)))
        answers.update((reply.uid, reply.value) for reply in worker.replies(2, 0.5))
        return lost in answers

    pings: list[int] = []
    poll_until(answered, "the lost store is answered")
    answers.update((reply.uid, reply.value) for reply in worker.replies(len(pings), 0.5))
    assert answers.pop(lost) is False
    assert set(answers.values()) == {True}, "nothing but pings was answered beside it"
    assert worker.call("prepare_store", {**key, "end": TOKENS}, INSTANCE_ID)
    worker.call("unregister_kv_cache_engine_driven_context", INSTANCE_ID)
