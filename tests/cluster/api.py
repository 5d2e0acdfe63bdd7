"""The least that a test needs of an API server: one JSON request, as the administrator."""

from __future__ import annotations

import http.client
import json
import ssl
from dataclasses import dataclass
from typing import Any

from tests.cluster.certificates import KeyPair

_TIMEOUT_SECONDS = 30.0
APPLY = "application/apply-patch+yaml"


@dataclass(frozen=True)
class Answer:
    """Status code and body; errors are answers too."""

    status: int
    body: dict[str, Any]

    @property
    def ok(self) -> bool:
        """Whether it was done."""
        return self.status < http.client.BAD_REQUEST

    @property
    def message(self) -> str:
        """The sentence of an error."""
        return str(self.body.get("message", ""))


class Api:
    """Talks to one API server. Each request has a connection of its own: nothing stays open."""

    def __init__(self, port: int, authority: str, admin: KeyPair) -> None:
        self.port = port
        self._context = ssl.create_default_context(cafile=authority)
        self._context.load_cert_chain(admin.certificate, admin.key)

    def request(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        content_type: str = "application/json",
    ) -> Answer:
        """Send one request; the path with its query.

        Raises:
            OSError: nobody answers.
        """
        connection = http.client.HTTPSConnection(
            "127.0.0.1", self.port, timeout=_TIMEOUT_SECONDS, context=self._context
        )
        try:
            text = None if body is None else json.dumps(body)
            connection.request(method, path, text, {"Content-Type": content_type})
            response = connection.getresponse()
            answered = response.read()
            return Answer(response.status, _read(answered))
        finally:
            connection.close()

    def apply(self, path: str, body: dict[str, Any]) -> Answer:
        """Apply an object server-side; the path without the object's name."""
        name = body["metadata"]["name"]
        query = "fieldManager=test&force=true"
        return self.request("PATCH", f"{path}/{name}?{query}", body, content_type=APPLY)


def _read(answered: bytes) -> dict[str, Any]:
    try:
        found = json.loads(answered)
    except ValueError:
        return {"message": answered.decode(errors="replace")}
    return found if isinstance(found, dict) else {"message": str(found)}
