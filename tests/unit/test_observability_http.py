"""What HTTP answers, to whom, and that it changes nothing; the application without a socket."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from wsgiref.util import setup_testing_defaults

import pytest

from lmcache_nodeagent.observability.http import application, is_loopback
from lmcache_nodeagent.observability.metrics import CONTENT_TYPE

ALL_PATHS = ["/healthz", "/readyz", "/metrics", "/status", "/v1/instances", "/v1/reaps"]
OPEN_PATHS = ALL_PATHS[:3]
LOOPBACK_PATHS = ALL_PATHS[3:]


@dataclass
class FakeView:
    """An agent with one worker and nothing wrong."""

    is_healthy: bool = True
    is_ready: bool = True
    asked_since: list[int] = field(default_factory=list)

    def healthy(self) -> tuple[bool, str]:
        """Answer as set."""
        return self.is_healthy, "all threads run" if self.is_healthy else "the reaper is dead"

    def ready(self) -> tuple[bool, str]:
        """Answer as set."""
        return self.is_ready, "serving" if self.is_ready else "L1 is being allocated"

    def status(self) -> Mapping[str, object]:
        """Return something."""
        return {"worker_liveness": {"tracked_instances": 1}}

    def instances(self) -> Sequence[Mapping[str, object]]:
        """Return one worker."""
        return ({"instance_id": "9223372036854775807", "deadline_seconds": None},)

    def leases(self) -> Sequence[Mapping[str, object]]:
        """One."""
        return [{"request_id": "r1"}]

    def reaps(self, since: int) -> Mapping[str, object]:
        """Remember what was asked."""
        self.asked_since.append(since)
        return {"boot_id": "b", "next": since, "reaps": []}

    def metrics_text(self) -> bytes:
        """Return one line."""
        return b"up 1\n"


@dataclass(frozen=True)
class Answer:
    """What a client gets."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> dict[str, Any]:
        """The body, read."""
        assert self.headers["Content-Type"] == "application/json"
        document: dict[str, Any] = json.loads(self.body)
        return document


def ask(
    path: str, view: FakeView | None = None, method: str = "GET", peer: str = "127.0.0.1"
) -> Answer:
    """Send one request to the application."""
    path, _, query = path.partition("?")
    environ: dict[str, Any] = {
        "PATH_INFO": path,
        "QUERY_STRING": query,
        "REQUEST_METHOD": method,
        "REMOTE_ADDR": peer,
    }
    setup_testing_defaults(environ)
    seen: list[tuple[str, list[tuple[str, str]]]] = []

    def start_response(status: str, headers: list[tuple[str, str]], exc_info: object = None) -> Any:  # noqa: ANN401 - as the protocol has it
        del exc_info
        seen.append((status, headers))
        return io.BytesIO().write

    body = b"".join(application(view or FakeView())(environ, start_response))
    ((status, headers),) = seen
    return Answer(int(status.split()[0]), dict(headers), body)


def test_probes_say_why() -> None:
    """200 when good, 503 when not, with the reason in words."""
    assert ask("/healthz").json == {"healthy": True, "reason": "all threads run"}
    assert ask("/readyz").json == {"ready": True, "reason": "serving"}
    sick = ask("/healthz", FakeView(is_healthy=False))
    assert (sick.status, sick.json["reason"]) == (503, "the reaper is dead")
    starting = ask("/readyz", FakeView(is_ready=False))
    assert (starting.status, starting.json["ready"]) == (503, False)


def test_metrics_are_text() -> None:
    """In the format that their content type names."""
    answer = ask("/metrics")
    assert (answer.headers["Content-Type"], answer.body) == (CONTENT_TYPE, b"up 1\n")


def test_status_and_instances_are_passed_on() -> None:
    """Ids stay strings."""
    assert ask("/status").json == {"worker_liveness": {"tracked_instances": 1}}
    (instance,) = ask("/v1/instances").json["instances"]
    assert instance == {"instance_id": "9223372036854775807", "deadline_seconds": None}


@pytest.mark.parametrize(
    ("query", "since"),
    [("", 0), ("?since=0", 0), ("?since=17", 17), (f"?since={2**63 - 1}", 2**63 - 1), ("?x=1", 0)],
)
def test_reaps_are_asked_from_a_sequence_number_on(query: str, since: int) -> None:
    """From the beginning if none is given."""
    view = FakeView()
    assert ask(f"/v1/reaps{query}", view).json["next"] == since
    assert view.asked_since == [since]


@pytest.mark.parametrize("text", ["", "-1", "1.5", "abc", "%D9%A1", str(2**63), "9" * 5000, "0x10"])
def test_what_is_no_sequence_number_is_refused_with_the_limit(text: str) -> None:
    """Digits of other scripts, and numbers that would take long to read, included."""
    view = FakeView()
    answer = ask(f"/v1/reaps?since={text}", view)
    assert answer.status == 400
    assert "but must be a whole number from 0 to 9223372036854775807" in answer.json["error"]
    assert len(answer.body) < 300
    assert view.asked_since == []


def test_too_many_query_fields_are_refused() -> None:
    """A query is not parsed for ever."""
    assert ask("/v1/reaps?" + "a=1&" * 100).status == 400


@pytest.mark.parametrize("path", ALL_PATHS)
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_can_be_changed(path: str, method: str) -> None:
    """Only GET and HEAD are offered."""
    answer = ask(path, method=method)
    assert (answer.status, answer.headers["Allow"]) == (405, "GET, HEAD")
    assert "nothing can be changed" in answer.json["error"]


@pytest.mark.parametrize("path", ALL_PATHS)
def test_head_is_get_without_the_body(path: str) -> None:
    """Status and length are the same."""
    got, headed = ask(path), ask(path, method="HEAD")
    assert (headed.status, headed.headers, headed.body) == (got.status, got.headers, b"")


@pytest.mark.parametrize("path", ["/", "/status/", "/env", "/v1", "/STATUS"])
def test_other_paths_are_not_found_in_json(path: str) -> None:
    """The answer names the paths that exist."""
    answer = ask(path)
    assert answer.status == 404
    assert "/healthz" in answer.json["error"]


@pytest.mark.parametrize("peer", ["10.0.0.8", "fe80::1%eth0", "::ffff:10.0.0.8", "", "localhost"])
@pytest.mark.parametrize("path", LOOPBACK_PATHS)
def test_what_names_workers_is_for_this_machine_only(path: str, peer: str) -> None:
    """Others get a sentence, not a riddle."""
    answer = ask(path, peer=peer)
    assert answer.status == 403
    assert "answered to loopback only: use a port-forward" in answer.json["error"]


@pytest.mark.parametrize("path", OPEN_PATHS)
def test_health_and_metrics_are_for_everybody(path: str) -> None:
    """The kubelet and Prometheus come from elsewhere."""
    assert ask(path, peer="10.0.0.8").status == 200


@pytest.mark.parametrize("address", ["127.0.0.1", "127.8.0.1", "::1", "::ffff:127.0.0.1", "::1%lo"])
def test_every_spelling_of_loopback_counts(address: str) -> None:
    """A dual-stack listener sees IPv4 peers as IPv6."""
    assert is_loopback(address)


def test_answers_are_not_cached() -> None:
    """Health of a minute ago is no health."""
    assert ask("/healthz").headers["Cache-Control"] == "no-store"
