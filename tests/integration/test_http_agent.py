"""What a running agent shows over HTTP, to whom, and that nobody changes anything there."""

from __future__ import annotations

import http.client
import ipaddress
import json
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.fakes.agent_process import AgentProcess
from tests.fakes.stub_agent import StubAgent
from tests.fakes.worker_process import MODEL, WorkerProcess
from tests.polling import PATIENCE_SECONDS, poll_until

LARGE_ID = (1 << 63) - 1
MAPPED_BYTES = 2 * 2 * 64 * 16 * 2 * 8 * 2
EVERYWHERE = ("/healthz", "/readyz", "/metrics")
LOOPBACK_ONLY = ("/status", "/v1/instances", "/v1/leases", "/v1/reaps")
LIVENESS_KEYS = {
    "enabled",
    "reap_timeout_seconds",
    "registration_grace_seconds",
    "tracked_instances",
}
L1_KEYS = {"capacity_bytes", "used_bytes", "pinned_bytes", "objects"}
INSTANCE_KEYS = {
    "instance_id",
    "registration",
    "registered_at",
    "mapping",
    "hints",
    "model",
    "world_size",
    "rank",
    "mode",
    "bytes",
    "peer",
    "state",
    "last_seen_seconds",
    "has_liveness_signal",
    "window",
    "deadline_seconds",
    "held_by",
    "evidence",
    "slot",
    "slot_pod",
}
REAP_KEYS = {
    "seq",
    "instance_id",
    "registration",
    "mapping",
    "trigger",
    "latency_seconds",
    "model",
    "reason",
    "evidence",
    "silent_seconds",
    "detected_at",
    "release_seconds",
    "bytes",
}
STATES = {"active", "idle", "closed", "suspect", "releasing"}
WINDOWS = {"heartbeat_timeout", "registration_grace", "hint", "close", "none"}


@pytest.fixture(scope="module")
def agent() -> Iterator[AgentProcess]:
    """Run one agent on all addresses for the whole file."""
    with AgentProcess("--http-host=*", "--worker-reap-timeout-seconds=30") as process:
        yield process


def ask(
    agent: AgentProcess, path: str, method: str = "GET", host: str = "127.0.0.1"
) -> tuple[int, bytes]:
    """Send one request; return status and body."""
    connection = http.client.HTTPConnection(host, agent.http_port, timeout=PATIENCE_SECONDS)
    try:
        connection.request(method, path)
        reply = connection.getresponse()
        return reply.status, reply.read()
    finally:
        connection.close()


def other_address() -> str:
    """Return an address of this machine that is not loopback."""
    for addresses in psutil.net_if_addrs().values():
        for entry in addresses:
            try:
                parsed = ipaddress.ip_address(entry.address)
            except ValueError:
                continue  # a hardware address, or one with a zone
            if not parsed.is_loopback and not parsed.is_link_local:
                return entry.address
    pytest.skip("this machine has no address but loopback")


def test_health_and_readiness_say_why(agent: AgentProcess) -> None:
    """Small bodies with a reason in words."""
    assert agent.get("/healthz") == {"healthy": True, "reason": "requests are served"}
    assert agent.get("/readyz") == {"ready": True, "reason": "requests are served"}


def test_status_tells_how_liveness_and_l1_stand(agent: AgentProcess) -> None:
    """Figures follow what happens: a worker comes, stores, looks up, leaves."""
    before = agent.status()
    assert before["worker_liveness"].keys() >= LIVENESS_KEYS
    assert before["worker_liveness"]["enabled"] is True
    assert before["worker_liveness"]["reap_timeout_seconds"] == 30
    assert before["l1"].keys() >= L1_KEYS
    assert before["l1"]["capacity_bytes"] == 64 << 20
    with WorkerProcess(agent.url, 7) as worker:
        worker.ask("register")
        assert worker.ask("store", 1) is True
        assert worker.ask("lookup", 1) == 2
        status = agent.status()
        assert status["worker_liveness"]["tracked_instances"] == 1
        assert status["l1"]["objects"] == 2
        assert 0 < status["l1"]["pinned_bytes"] <= status["l1"]["used_bytes"]
        worker.ask("end_session", 1)
        worker.ask("unregister")
    poll_until(lambda: agent.status()["l1"]["pinned_bytes"] == 0)
    assert agent.status()["worker_liveness"]["tracked_instances"] == 0


def test_instances_are_shown_with_all_that_is_known_of_them(agent: AgentProcess) -> None:
    """Ids are decimal text: 63 bits do not survive JavaScript or jq as numbers."""
    with WorkerProcess(agent.url, LARGE_ID) as worker:
        worker.ask("register")
        (entry,) = agent.get("/v1/instances")["instances"]
        assert entry.keys() == INSTANCE_KEYS
        assert entry["instance_id"] == str(LARGE_ID)
        assert entry["model"] == MODEL
        assert (entry["world_size"], entry["rank"]) == (1, None)  # transfers tell the rank
        assert entry["mode"] == "lmcache_driven/cpu_shm"
        assert entry["bytes"] == MAPPED_BYTES
        assert entry["peer"].startswith("127.0.0.1")  # its port comes with its first reply
        assert entry["state"] in STATES
        assert entry["has_liveness_signal"] is False
        assert entry["window"] in WINDOWS
        assert isinstance(entry["evidence"], list)
        assert worker.ask("store", 1) is True
        assert worker.ask("ping") is True
        (entry,) = agent.get("/v1/instances")["instances"]
        assert entry["rank"] == 0
        assert entry["state"] == "active"
        assert entry["has_liveness_signal"] is True
        assert entry["window"] == "heartbeat_timeout"
        assert 0 < entry["deadline_seconds"] <= 30
        assert entry["last_seen_seconds"] < 5
        worker.ask("unregister")
    assert agent.get("/v1/instances") == {"instances": []}


def test_a_release_in_progress_is_shown_as_such() -> None:
    """Still listed, `releasing`, without a window; gone when its memory is."""
    with StubAgent() as agent, WorkerProcess(agent.url, 7) as worker:
        worker.ask("register")
        agent.hold("close")
        worker.tell("unregister")
        poll_until(lambda: agent.holding("close"), "the release has begun")
        (entry,) = agent.get("/v1/instances")["instances"]
        assert entry.keys() == INSTANCE_KEYS
        assert (entry["state"], entry["window"], entry["deadline_seconds"]) == (
            "releasing",
            "none",
            None,
        )
        agent.let_go("close")
        worker.result()
        assert agent.get("/v1/instances") == {"instances": []}


def test_the_journal_of_reaps_can_be_followed() -> None:
    """`since` is exclusive, `next` is what to pass next; a poller misses and repeats nothing."""
    with StubAgent(windows={"close_confirm_seconds": 0.1}) as agent:
        empty = agent.get("/v1/reaps?since=0")
        assert empty.items() >= {"boot_id": agent.boot_id, "next": 0, "reaps": []}.items()
        seen: list[dict[str, Any]] = []
        position = 0
        for number in (1, 2, 3):
            with WorkerProcess(agent.url, LARGE_ID - number) as worker:
                worker.ask("register")
                assert worker.ask("ping") is True
                worker.kill()
                agent.wait_reaped(LARGE_ID - number)
            page = agent.get(f"/v1/reaps?since={position}")
            seen += page["reaps"]
            position = page["next"]
            assert agent.get(f"/v1/reaps?since={position}")["reaps"] == []
        assert [reap["seq"] for reap in seen] == [1, 2, 3]
        assert position == 3
        assert [reap["instance_id"] for reap in seen] == [str(LARGE_ID - n) for n in (1, 2, 3)]
        for reap in seen:
            assert reap.keys() == REAP_KEYS
            assert reap["reason"] == "connection_closed"
            assert reap["bytes"] > 0
            assert reap["evidence"]
            assert reap["release_seconds"] is None or reap["release_seconds"] >= 0
        assert agent.get("/v1/reaps")["reaps"] == agent.get("/v1/reaps?since=0")["reaps"]
        assert [r["seq"] for r in agent.get("/v1/reaps?since=2")["reaps"]] == [3]
        ahead = agent.get("/v1/reaps?since=1000")  # from an earlier life of the agent
        assert ahead["boot_id"] == agent.boot_id
        assert ahead["reaps"] == []
        assert ahead["next"] <= 3


@pytest.mark.parametrize("since", ["-1", "x", "1.5", "", str(1 << 63), "1e3", "%00"])
def test_a_position_that_is_none_is_a_400_that_says_what_to_pass(
    agent: AgentProcess, since: str
) -> None:
    """Never an empty page that a poller would take for the truth."""
    status, body = ask(agent, f"/v1/reaps?since={since}")
    assert status == 400
    assert "since" in json.loads(body)["error"]


def test_what_is_not_public_is_answered_to_loopback_only(agent: AgentProcess) -> None:
    """Health and metrics to everybody; ids, models and peers to those on this machine."""
    address = other_address()
    for path in EVERYWHERE:
        assert ask(agent, path, host=address)[0] == 200
        assert ask(agent, path)[0] == 200
    for path in LOOPBACK_ONLY:
        status, body = ask(agent, path, host=address)
        assert status == 403
        assert json.loads(body).keys() == {"error"}
        assert ask(agent, path)[0] == 200


def test_claiming_to_be_on_this_machine_does_not_help(agent: AgentProcess) -> None:
    """The kernel's word counts, no header's."""
    connection = http.client.HTTPConnection(
        other_address(), agent.http_port, timeout=PATIENCE_SECONDS
    )
    for header in ("X-Forwarded-For", "X-Real-IP", "Forwarded"):
        value = "for=127.0.0.1" if header == "Forwarded" else "127.0.0.1"
        connection.request("GET", "/status", headers={header: value, "Host": "localhost"})
        reply = connection.getresponse()
        assert reply.status == 403
        reply.read()
    connection.close()


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"])
def test_nothing_can_be_changed(agent: AgentProcess, method: str) -> None:
    """Every path refuses every method that could; a worker and its objects stay as they are."""
    with WorkerProcess(agent.url, 7) as worker:
        worker.ask("register")
        for path in (*EVERYWHERE, *LOOPBACK_ONLY):
            status, body = ask(agent, path, method)
            assert status == 405
            assert b"nothing can be changed over HTTP" in body
        for path in ("/v1/instances/7", "/v1/clear", "/env", "/conf", "/", "/status/"):
            assert ask(agent, path, method)[0] == 404
        assert set(agent.instances()) == {7}
        worker.ask("unregister")


def test_metrics_parse_and_name_no_instance(agent: AgentProcess) -> None:
    """No label carries an id, a request or a peer: they would grow without end."""
    with WorkerProcess(agent.url, LARGE_ID) as worker:
        worker.ask("register")
        assert worker.ask("ping") is True
        text = ask(agent, "/metrics")[1].decode()
        worker.ask("unregister")
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert str(LARGE_ID) not in text
    assert "127.0.0.1" not in text
    names = [name for name in families if name.startswith("lmcache_kube_")]
    assert len(names) > 10
    labels = {label for family in families.values() for s in family.samples for label in s.labels}
    assert not labels & {"instance_id", "peer", "request_id", "pod"}
    states = families["lmcache_kube_instances"].samples
    assert {sample.labels["state"] for sample in states} == STATES
    assert sum(sample.value for sample in states) == 1
