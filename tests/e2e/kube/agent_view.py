"""What the agent in a pod says to its own loopback interface, which only the node can reach."""

from __future__ import annotations

import ctypes
import http.client
import json
import os
import socket
from threading import Thread
from typing import Any

_CLONE_NEWNET = 0x40000000
_PORT = 8080
_TIMEOUT_SECONDS = 10.0


class AgentView:
    """One agent process, by its id on the node."""

    def __init__(self, process_id: int) -> None:
        self._process_id = process_id

    def instances(self) -> dict[str, dict[str, Any]]:
        """Return the registered instances by id."""
        body = self._get("/v1/instances")
        found: list[dict[str, Any]] = body["instances"] if isinstance(body, dict) else body
        return {instance["instance_id"]: instance for instance in found}

    def reaps(self, instance_id: str) -> list[dict[str, Any]]:
        """Return the reaps of an instance: none, or one."""
        entries: list[dict[str, Any]] = self._get("/v1/reaps")["reaps"]
        return [entry for entry in entries if entry["instance_id"] == instance_id]

    def reap_count(self) -> int:
        """Count all reaps since the agent started."""
        return len(self._get("/v1/reaps")["reaps"])

    def _get(self, path: str) -> Any:  # noqa: ANN401  # JSON
        connection = http.client.HTTPConnection("127.0.0.1", _PORT, timeout=_TIMEOUT_SECONDS)
        connection.sock = _socket_of(self._process_id)
        try:
            connection.sock.connect(("127.0.0.1", _PORT))
            connection.request("GET", path)
            return json.loads(connection.getresponse().read())
        finally:
            connection.close()


def _socket_of(process_id: int) -> socket.socket:
    """Make a socket in a process's network namespace; it stays there, wherever it is used."""
    made: list[socket.socket] = []
    thread = Thread(target=_make_socket, args=(process_id, made), name="in-the-pod")
    thread.start()  # entering a namespace is a thread's own affair, and this one ends in there
    thread.join()
    assert made, f"no way into the network of process {process_id}"
    made[0].settimeout(_TIMEOUT_SECONDS)
    return made[0]


def _make_socket(process_id: int, made: list[socket.socket]) -> None:
    namespace = os.open(f"/proc/{process_id}/ns/net", os.O_RDONLY)
    try:
        library = ctypes.CDLL(None, use_errno=True)
        if library.setns(namespace, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
        made.append(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
    finally:
        os.close(namespace)
