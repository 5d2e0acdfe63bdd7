"""What the demo says is what was seen: each claim is checked, and a false one ends the demo."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")

_LOOK_SECONDS = 0.002


class ClaimFailed(Exception):
    """Something else was seen than the demo would have said."""

    def __init__(self, claim: str, expected: object, seen: object) -> None:
        self.claim = claim
        self.expected = expected
        self.seen = seen
        super().__init__(f"{claim}: expected {expected}, seen {seen}")


def claim(what: str, *, expected: object, seen: object) -> None:
    """Check one claim.

    Raises:
        ClaimFailed: the two differ.
    """
    if seen != expected:
        raise ClaimFailed(what, expected, seen)


def claim_within(
    seconds: float,
    what: str,
    *,
    expected: object,
    look: Callable[[], _T],
    holds: Callable[[_T], bool],
    meanwhile: Callable[[], None] = lambda: None,
) -> _T:
    """Look until `holds` accepts what is seen, and return that.

    Raises:
        ClaimFailed: it did not within `seconds`; tells what was seen last.
    """
    deadline = time.monotonic() + seconds
    while not holds(seen := look()):
        if time.monotonic() > deadline:
            raise ClaimFailed(what, f"{expected} within {seconds:g} s", seen)
        meanwhile()
        time.sleep(_LOOK_SECONDS)
    return seen
