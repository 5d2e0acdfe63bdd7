"""Worker pods of a story: objects whose status is written as a kubelet would write it."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lmcache_operator.names import INSTANCE_IDS_ANNOTATION
from tests.cluster.api import Api
from tests.fakes.pods import Json, container_status, moment, running, terminated

MERGE = "application/merge-patch+json"
ENGINE, SIDECAR = "engine", "proxy"
GRACE_SECONDS = 30
SIGKILLED = 137


@dataclass(frozen=True)
class _Run:
    """One run of a container."""

    id: str
    began: float


class StoryPod:
    """One pod of one node. Everything that changes it writes to the API server at once.

    A write of the status returns the monotonic moment just before it was sent.
    """

    def __init__(
        self,
        api: Api,
        namespace: str,
        name: str,
        *,
        node: str,
        addresses: Sequence[str],
        labels: Mapping[str, str],
        containers: Sequence[str] = (ENGINE,),
        spec: Mapping[str, object] | None = None,
        owner: Mapping[str, object] | None = None,
    ) -> None:
        """Create the object.

        Args:
            api: the API server.
            namespace: of the pod.
            name: of the pod.
            node: where it is bound to from the start.
            addresses: its IP addresses once it runs, one for each family; may be empty.
            labels: its labels.
            containers: names of its containers.
            spec: further fields of its spec.
            owner: its owner reference.
        """
        self._api = api
        self._collection = f"/api/v1/namespaces/{namespace}/pods"
        self.namespace = namespace
        self.name = name
        self.addresses = tuple(addresses)
        self._runs: dict[str, _Run] = {}
        self._states: dict[str, Json] = {}
        self._last: dict[str, Json | None] = {}
        self._names = tuple(containers)
        body = {
            "metadata": {
                "name": name,
                "labels": dict(labels),
                "ownerReferences": [owner] if owner else [],
            },
            "spec": {
                "nodeName": node,
                "terminationGracePeriodSeconds": GRACE_SECONDS,
                "containers": [{"name": each, "image": "none"} for each in containers],
                **(spec or {}),
            },
        }
        answer = api.request("POST", self._collection, body)
        assert answer.ok, answer.message
        self.uid = str(answer.body["metadata"]["uid"])

    @property
    def path(self) -> str:
        """Of the object."""
        return f"{self._collection}/{self.name}"

    @property
    def address(self) -> str:
        """The first address."""
        return self.addresses[0]

    def run(self, *, at: float | None = None) -> float:
        """Start all containers; `at` is when that was, if not just now."""
        for name in self._names:
            self._start(name, at)
        return self.write()

    def end_container(
        self, name: str = ENGINE, *, reason: str = "Error", code: int = SIGKILLED
    ) -> float:
        """Report that a container's run has ended just now."""
        self._end(name, reason, code)
        return self.write()

    def restart_container(self, name: str = ENGINE, *, at: float | None = None) -> float:
        """Report in one write that a run has ended and the next one runs, as after a quick crash.

        Watchers are not promised every state in between. `at` is when that was, if not just now.
        """
        if "running" in self._states[name]:
            self._end(name, "Error", SIGKILLED, at)
        self._last[name] = self._states[name]
        self._start(name, at)
        return self.write()

    def end(
        self,
        *,
        phase: str = "Failed",
        reason: str = "Error",
        code: int = SIGKILLED,
        at: float | None = None,
    ) -> float:
        """Report that every container has ended, and so the pod; `at` is when, if not just now."""
        for name in self._names:
            if "running" in self._states[name]:
                self._end(name, reason, code, at)
        return self.write(phase=phase)

    def write(self, *, phase: str = "Running", ready: bool = True, **changes: object) -> float:
        """Write a status with the containers as they are; `changes` are further fields of it."""
        statuses = [
            container_status(
                name, self._states[name], last=self._last[name], run=self._runs[name].id
            )
            for name in self._names
            if name in self._states
        ]
        status: Json = {
            "phase": phase,
            "containerStatuses": statuses,
            "conditions": [_condition("Ready", true=ready and phase == "Running")],
            **changes,
        }
        if self.addresses:
            status["podIP"] = self.addresses[0]
            status["podIPs"] = [{"ip": address} for address in self.addresses]
        return self._patch_status(status)

    def replace_states(self, states: Mapping[str, Json], *, phase: str) -> float:
        """Write container states that no kubelet saw happen, such as lost ones."""
        self._states |= states
        return self.write(phase=phase)

    def delete(self, *, grace_seconds: int = GRACE_SECONDS) -> float:
        """Delete it; with 0 by force, or as a kubelet does in the end."""
        began = time.monotonic()
        body = {"kind": "DeleteOptions", "gracePeriodSeconds": grace_seconds}
        answer = self._api.request("DELETE", self.path, body)
        assert answer.ok, answer.message
        return began

    def relabel(self, **labels: str | None) -> None:
        """Change labels; None removes one."""
        body = {"metadata": {"labels": labels}}
        assert self._api.request("PATCH", self.path, body, content_type=MERGE).ok

    def read(self) -> dict[str, Any]:
        """Return the object as it is, empty if it is gone or another one has its name."""
        answer = self._api.request("GET", self.path)
        return answer.body if answer.ok and answer.body["metadata"]["uid"] == self.uid else {}

    def annotated_ids(self) -> list[int]:
        """Return the instance ids in its annotation."""
        annotations = self.read().get("metadata", {}).get("annotations", {})
        text: str = annotations.get(INSTANCE_IDS_ANNOTATION, "")
        return [int(part) for part in text.split(",") if part]

    def _start(self, name: str, at: float | None = None) -> None:
        run = _Run(f"containerd://{uuid.uuid4().hex}{uuid.uuid4().hex}", at or time.time())
        self._runs[name] = run
        self._states[name] = running(run.began)
        self._last.setdefault(name, None)

    def _end(self, name: str, reason: str, code: int, at: float | None = None) -> None:
        run = self._runs[name]
        self._states[name] = terminated(
            run.began, at or time.time(), run=run.id, reason=reason, code=code
        )

    def _patch_status(self, status: Json) -> float:
        began = time.monotonic()
        answer = self._api.request(
            "PATCH", f"{self.path}/status", {"status": status}, content_type=MERGE
        )
        assert answer.ok, answer.message
        return began


def _condition(kind: str, *, true: bool) -> Json:
    return {
        "type": kind,
        "status": "True" if true else "False",
        "lastTransitionTime": moment(time.time()),
    }
