"""Every error the operator raises on purpose.

OperatorError
├── SpecError     a stored spec that cannot be served: what to change, as a condition shows it
└── PodError      a pod object that is not what the API says a pod is
"""

from __future__ import annotations

from collections.abc import Sequence


class OperatorError(Exception):
    """Root of the tree; never raised itself."""


class SpecError(OperatorError):
    """A spec that cannot be served. The API server refuses such specs; one may be older than it.

    Attributes:
        problems: each a sentence with field, value, limit and fix.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(self.problems))


class PodError(OperatorError):
    """A pod object that is not what the API says a pod is."""
