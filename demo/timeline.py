"""What the demo prints: when, who, what; in colour on a terminal."""

from __future__ import annotations

import os
import time
from enum import Enum
from typing import TextIO

_WHO_WIDTH = 7
_RESET = "\033[0m"


class Tone(Enum):
    """How a line looks on a terminal; the values are ANSI colour sequences."""

    PLAIN = ""
    GOOD = "\033[32m"
    BAD = "\033[1;31m"
    WATCH = "\033[33m"
    QUIET = "\033[2m"


class Timeline:
    """Lines that appear as things happen. Thread: main."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._colors = wants_colors(stream)
        self._started_at = time.monotonic()

    def add(self, who: str, what: str, tone: Tone = Tone.PLAIN) -> None:
        """Print one line, stamped with the seconds since the demo began."""
        seconds = time.monotonic() - self._started_at
        self._print(f"{seconds:6.2f} s  {who:<{_WHO_WIDTH}} {what}", tone)

    def remark(self, what: str, tone: Tone = Tone.QUIET) -> None:
        """Print a line that belongs to the one before it."""
        self._print(f"{'':<{_WHO_WIDTH + 11}}{what}", tone)

    def headline(self, what: str, tone: Tone = Tone.PLAIN) -> None:
        """Print a line without a stamp."""
        self._print(what, tone)

    def _print(self, line: str, tone: Tone) -> None:
        if self._colors and tone is not Tone.PLAIN:
            line = f"{tone.value}{line}{_RESET}"
        print(line, file=self._stream, flush=True)


def wants_colors(stream: TextIO) -> bool:
    """Tell whether to colour: on a terminal, unless NO_COLOR is set (https://no-color.org)."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return stream.isatty() and not plain


def size_text(nbytes: int) -> str:
    """Write a size for people."""
    return f"{nbytes // 1024} KiB"


def span_text(seconds: float) -> str:
    """Write a duration for people: `12 ms` or `3.02 s`."""
    if seconds < 0.001:  # noqa: PLR2004  # a millisecond
        return "less than 1 ms"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"
