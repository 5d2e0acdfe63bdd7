"""Where the operator is and what the agent shows it: files of a mounted folder, read at each look.

A ConfigMap that is mounted optionally may come late, go, and change at any time.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

URL_FILE, CA_FILE = "url", "ca.crt"

_DEFAULT_PORTS = {"wss": 443, "ws": 80}
_MAX_BYTES = 256 << 10


@dataclass(frozen=True, slots=True)
class Target:
    """Who to connect to. `ca` are the certificates to trust, as PEM; empty without TLS."""

    url: str
    host: str
    port: int
    ca: str

    @property
    def secure(self) -> bool:
        """Whether the stream is encrypted and the operator's certificate checked."""
        return bool(self.ca)


@dataclass(frozen=True, slots=True)
class Look:
    """What a look at the folder found: a target, or why there is none; neither if it is empty."""

    target: Target | None = None
    problem: str = ""


def look(folder: Path) -> Look:
    """Read the folder. Threads: any."""
    try:
        url = _text(folder / URL_FILE)
        if not url:
            return Look()
        return _checked(url, _without_remarks(_text(folder / CA_FILE)))
    except _Unusable as error:
        return Look(problem=str(error))


def read_token(path: Path | None) -> str:
    """Return the token, or an empty text if there is none that can be sent. Threads: any."""
    if path is None:
        return ""
    try:
        token = _text(path)
    except _Unusable:
        return ""
    return token if token.isascii() and token.isprintable() and " " not in token else ""


class _Unusable(Exception):
    """A file that is there but cannot be used; the message says why."""


def _checked(url: str, ca: str) -> Look:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise _Unusable(f"url {url[:200]!r} cannot be read ({error}): {_FORM}") from None
    if parts.scheme not in _DEFAULT_PORTS or not host or parts.username or parts.fragment:
        raise _Unusable(f"url {url[:200]!r} is no WebSocket address: {_FORM}")
    port = port or _DEFAULT_PORTS[parts.scheme]
    if parts.scheme == "ws":
        if not _is_loopback(host):
            raise _Unusable(f"url {url[:200]!r} is not encrypted: {_FORM}; ws to loopback only")
        return Look(Target(url, host, port, ""))
    if not ca:
        raise _Unusable(f"{CA_FILE} is missing or empty: the operator's certificates go there")
    return Look(Target(url, host, port, ca))


def _without_remarks(certificates: str) -> str:
    """Leave out lines of other letters, as in the names beside certificates: `ssl` takes none."""
    return "\n".join(line for line in certificates.split("\n") if line.isascii())


_FORM = "write wss://host:port"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _text(path: Path) -> str:
    """Return a file's text without space around it; empty if there is no such file."""
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except OSError as error:
        raise _Unusable(f"{path.name} cannot be read ({error.strerror or error})") from None
    if len(content) > _MAX_BYTES:
        raise _Unusable(f"{path.name} is larger than {_MAX_BYTES} bytes")
    try:
        return content.decode().strip()
    except UnicodeDecodeError:
        raise _Unusable(f"{path.name} is no text") from None
