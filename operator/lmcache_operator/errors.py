"""Every error the operator raises on purpose.

OperatorError
├── ConfigError       what the operator was told cannot be: everything that is wrong, together
├── SpecError         a stored spec that cannot be served: what to change, as a condition shows it
├── PodError          a pod object that is not what the API says a pod is
├── KindMissing       the API server does not know our kind
├── LeaseLost         another operator acts, or may act from now on
├── NameTaken         an object that we would own exists and is somebody else's
├── Unreachable       no answer of the API server
└── ApiError          an answer of the API server that is a refusal
    ├── Conflict      it changed meanwhile, exists already, or has another owner
    ├── NotFound      it, or what it is in, does not exist
    └── Forbidden     we may not, or an admission rule forbids it
"""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus
from typing import ClassVar


class OperatorError(Exception):
    """Root of the tree; never raised itself."""


class _Problems(OperatorError):
    """Several things are wrong.

    Attributes:
        problems: each a sentence with field, value, limit and fix.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(self.problems))


class ConfigError(_Problems):
    """What the operator was told cannot be."""


class SpecError(_Problems):
    """A spec that cannot be served. The API server refuses such specs; one may be older than it."""


class PodError(OperatorError):
    """A pod object that is not what the API says a pod is."""


class KindMissing(OperatorError):
    """The API server does not know our kind."""


class LeaseLost(OperatorError):
    """Another operator acts, or may act from now on."""


class NameTaken(OperatorError):
    """An object that we would own exists and is somebody else's."""


class Unreachable(OperatorError):
    """No answer of the API server, for now."""


class ApiError(OperatorError):
    """A refusal.

    Attributes:
        status: HTTP status.
        reason: one word of the API server: AlreadyExists, Invalid.
        message: its sentence.
    """

    code: ClassVar[HTTPStatus | None] = None

    def __init__(self, status: int, reason: str, message: str) -> None:
        self.status = status
        self.reason = reason
        self.message = message
        super().__init__(f"{reason} ({status}): {message}")

    @staticmethod
    def of(status: int, reason: str, message: str) -> ApiError:
        """Make the error of the class that stands for a status."""
        for kind in (Conflict, NotFound, Forbidden):
            if kind.code == status:
                return kind(status, reason, message)
        return ApiError(status, reason, message)


class Conflict(ApiError):
    """It changed meanwhile, exists already, or has another owner."""

    code = HTTPStatus.CONFLICT


class NotFound(ApiError):
    """It, or what it is in, does not exist."""

    code = HTTPStatus.NOT_FOUND


class Forbidden(ApiError):
    """We may not, or an admission rule forbids it."""

    code = HTTPStatus.FORBIDDEN
