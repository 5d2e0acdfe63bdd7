"""Reading what a process writes while it writes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from functools import partial

import pytest

from tests.polling import poll_until
from tests.process_log import ProcessLog

LINES = 20_000
WRITER = f"""
import json, sys
for number in range({LINES}):
    print(json.dumps({{"event": "written", "number": number}}), file=sys.stderr)
"""


@pytest.fixture
def log() -> Iterator[ProcessLog]:
    """An empty one."""
    made = ProcessLog()
    yield made
    made.close()


def _has_written(log: ProcessLog, writer: subprocess.Popen[bytes]) -> bool:
    return bool(log.records()) and writer.poll() is not None


def test_reading_loses_nothing_of_what_is_written_meanwhile(log: ProcessLog) -> None:
    """Also by two processes, one after the other."""
    for run in (1, 2):
        with subprocess.Popen([sys.executable, "-c", WRITER], stderr=log.fileno()) as writer:
            poll_until(partial(_has_written, log, writer))
        numbers = [record["number"] for record in log.records("written")]
        assert numbers == [*range(LINES)] * run


def test_a_line_that_is_half_written_is_not_there_yet(log: ProcessLog) -> None:
    """Readers would take it for damage."""
    for part, seen in (('{"event": "a"}\n{"eve', 1), ('nt": "b"}', 1), ("\n", 2)):
        subprocess.run(
            [sys.executable, "-c", f"print({part!r}, end='')"], stdout=log.fileno(), check=True
        )
        assert len(log.records()) == seen


def test_only_what_comes_later_can_be_asked_for(log: ProcessLog) -> None:
    """As after a restart of the process."""
    for event in ("a", "b", "a"):
        position = len(log.text())
        line = f'{{"event": "{event}"}}'
        subprocess.run([sys.executable, "-c", f"print({line!r})"], stdout=log.fileno(), check=True)
        assert log.records(starts_at=position) == [{"event": event}]
    assert len(log.records("a")) == 2
