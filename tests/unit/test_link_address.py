"""Where the operator is: files of a mounted folder that come, go and change."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmcache_nodeagent.operator_link.address import Look, Target, look, read_token
from lmcache_nodeagent.operator_link.retry import (
    FIRST_SECONDS,
    LONGEST_SECONDS,
    LONGEST_WHEN_REFUSED_SECONDS,
    STEADY_SECONDS,
    Retry,
)
from tests.fakes.mounted_folder import MountedFolder

CA = "-----BEGIN CERTIFICATE-----\n"


@pytest.fixture
def folder(tmp_path: Path) -> MountedFolder:
    """An optional mount: it is there, and empty."""
    return MountedFolder(tmp_path / "link")


def test_nothing_is_no_problem(folder: MountedFolder) -> None:
    """No folder, no file, or an empty one: there is no operator (yet)."""
    assert look(folder.path / "none") == Look()
    assert look(folder.path) == Look()
    folder.put({"url": " \n", "ca.crt": CA})
    assert look(folder.path) == Look()


@pytest.mark.parametrize(
    ("url", "host", "port"),
    [
        ("wss://lmcache-operator.kube.svc:8443", "lmcache-operator.kube.svc", 8443),
        ("wss://operator/agents", "operator", 443),
        ("wss://[fd00::1]:8443", "fd00::1", 8443),
    ],
)
def test_an_address_and_whom_to_trust(
    folder: MountedFolder, url: str, host: str, port: int
) -> None:
    """White space around both is an editor's."""
    folder.put({"url": f"{url}\n", "ca.crt": CA})
    assert look(folder.path) == Look(Target(url, host, port, CA.strip()))
    target = look(folder.path).target
    assert target is not None
    assert target.secure


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.1.2.3", "[::1]"])
def test_without_encryption_to_this_machine_only(folder: MountedFolder, host: str) -> None:
    """Tests and debugging."""
    folder.put({"url": f"ws://{host}:81"})
    target = look(folder.path).target
    assert target is not None
    assert (target.port, target.secure) == (81, False)
    folder.put({"url": f"ws://{host}"})
    assert look(folder.path).target == Target(f"ws://{host}", host.strip("[]"), 80, "")


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("ws://10.0.0.1:8443", "not encrypted"),
        ("ws://localhost.example:8443", "not encrypted"),
        ("https://operator:8443", "no WebSocket address"),
        ("operator:8443", "no WebSocket address"),
        ("wss://", "no WebSocket address"),
        ("wss://user:secret@operator", "no WebSocket address"),
        ("wss://operator#part", "no WebSocket address"),
        ("wss://operator:port", "cannot be read"),
        ("wss://operator:99999", "cannot be read"),
        ("wss://[::1", "cannot be read"),
        ("\x00", "no WebSocket address"),
    ],
)
def test_what_is_no_address_is_a_problem_with_a_fix(
    folder: MountedFolder, url: str, words: str
) -> None:
    """It is said, and looked at again."""
    folder.put({"url": url, "ca.crt": CA})
    found = look(folder.path)
    assert found.target is None
    assert words in found.problem
    assert "write wss://host:port" in found.problem


def test_without_certificates_nobody_is_trusted(folder: MountedFolder) -> None:
    """Least of all everybody."""
    folder.put({"url": "wss://operator:8443"})
    assert look(folder.path).problem.startswith("ca.crt is missing or empty")


def test_remarks_beside_certificates_may_be_in_any_language(folder: MountedFolder) -> None:
    """Python's `ssl` fails on them in a way that would end the link's thread, and the agent."""
    marked = "# Autorité\n-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n# £"
    folder.put({"url": "wss://operator:8443", "ca.crt": marked})
    target = look(folder.path).target
    assert target is not None
    assert target.ca == "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----"
    folder.put({"url": "wss://operator:8443", "ca.crt": "Autorité"})
    assert look(folder.path).problem.startswith("ca.crt is missing or empty")


@pytest.mark.parametrize(
    ("content", "words"), [(b"\xff\xfe", "is no text"), (b"x" * 300_000, "is larger than")]
)
def test_a_file_that_is_something_else_is_a_problem(
    folder: MountedFolder, content: bytes, words: str
) -> None:
    """Not an end of the link's thread."""
    folder.put({"url": content, "ca.crt": CA})
    assert words in look(folder.path).problem


def test_a_file_that_cannot_be_read_is_a_problem(folder: MountedFolder) -> None:
    """A folder in its place, for one."""
    (folder.path / "url").mkdir()
    assert "url cannot be read" in look(folder.path).problem


def test_the_token_is_read_anew_each_time(tmp_path: Path) -> None:
    """The kubelet replaces it before it expires."""
    path = tmp_path / "token"
    assert read_token(None) == read_token(path) == ""
    path.write_text("first\n")
    assert read_token(path) == "first"
    path.write_text("second")
    assert read_token(path) == "second"


@pytest.mark.parametrize("content", [b"two words", b"a\nb", b"\xff", "käse".encode()])
def test_what_no_header_can_carry_is_no_token(tmp_path: Path, content: bytes) -> None:
    """It would end the attempt in a less orderly way."""
    path = tmp_path / "token"
    path.write_bytes(content)
    assert read_token(path) == ""


# When to try again


def delays(retry: Retry, count: int, *, refused: bool) -> list[float]:
    """The next delays, without their dice."""
    return [retry.delay(refused=refused) for _ in range(count)]


def test_the_first_attempts_come_fast_and_the_later_ones_within_bounds() -> None:
    """An operator that comes back is found within seconds; one that says no is left in peace."""
    away, saying_no = Retry(lambda: 1.0), Retry(lambda: 1.0)
    assert delays(away, 4, refused=False) == pytest.approx([0.1, 0.2, 0.4, 0.8])
    assert delays(away, 9, refused=False)[-1] == LONGEST_SECONDS
    assert delays(saying_no, 12, refused=True)[-1] == LONGEST_WHEN_REFUSED_SECONDS
    assert saying_no.delay(refused=False) == LONGEST_SECONDS


def test_agents_do_not_come_all_at_once() -> None:
    """Each delay is shortened by up to a half."""
    assert Retry(lambda: 0.0).delay(refused=False) == FIRST_SECONDS / 2
    assert FIRST_SECONDS / 2 <= Retry().delay(refused=False) <= FIRST_SECONDS


def test_after_a_steady_stream_the_first_attempt_comes_fast_again() -> None:
    """A stream that ends at once is no success."""
    retry = Retry(lambda: 1.0)
    delays(retry, 9, refused=False)
    assert retry.delay(refused=False, lasted_seconds=STEADY_SECONDS / 2) == LONGEST_SECONDS
    assert retry.delay(refused=False, lasted_seconds=STEADY_SECONDS) == FIRST_SECONDS
