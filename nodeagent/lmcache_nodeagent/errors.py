"""Every error the agent raises on purpose.

LmcacheKubeError
├── RequestError            the caller's fault; answered on the wire, never ends a thread
│   ├── MalformedRequest    frames, types or sizes that do not fit the operation
│   ├── UnknownOperation    a number or name outside the table
│   ├── UnsupportedOperation  in the table, but no module serves it here
│   ├── LayoutError         KV tensors the agent cannot map or move
│   ├── NotRegistered       an instance id that has no context
│   ├── NotTheSpeaker       a connection that may not speak for this instance
│   ├── StillReleasing      id or memory of a context that is still being released
│   ├── TooManyRegistered   a peer that holds as much as one may
│   ├── TooLarge            more bytes than a message may have
│   ├── TooMuchWaiting      bytes that wait for a client, beyond what may
│   └── Overloaded          a full queue, or an agent that is stopping
└── AgentError              ours
    ├── ConfigError         bad flags, all broken rules in one message
    ├── CapacityError       L1 that does not fit the machine
    └── TransferError       a copy that failed
        └── TransferOverdue one that ran out of time
"""

from __future__ import annotations

from collections.abc import Sequence


class LmcacheKubeError(Exception):
    """Root of the tree; never raised itself."""


class RequestError(LmcacheKubeError):
    """The caller's fault. `code` is the low-cardinality label that metrics and logs use."""

    code = "request_error"


class MalformedRequest(RequestError):
    """Frames, types or sizes that do not fit the operation."""

    code = "malformed"


class UnknownOperation(RequestError):
    """A number or name outside the table of the LMCache release that the agent speaks."""

    code = "unknown_operation"


class UnsupportedOperation(RequestError):
    """An operation of the table that no module of this agent serves."""

    code = "unsupported_operation"


class LayoutError(RequestError):
    """KV tensors the agent cannot map or move."""

    code = "layout"


class NotRegistered(RequestError):
    """An instance id that has no context."""

    code = "not_registered"


class NotTheSpeaker(RequestError):
    """A connection that may not speak for this instance (another peer holds it)."""

    code = "not_the_speaker"


class StillReleasing(RequestError):
    """An instance id or memory handle whose previous context is still being released."""

    code = "still_releasing"


class TooManyRegistered(RequestError):
    """A peer that holds as much as one may: descriptors and mappings are for all workers."""

    code = "too_many_registered"


class TooLarge(RequestError):
    """More bytes than a message may have (`--max-message-bytes`)."""

    code = "too_large"


class TooMuchWaiting(RequestError):
    """Bytes of requests or of unread replies, beyond what one client or all may have waiting."""

    code = "too_much_waiting"


class Overloaded(RequestError):
    """A full queue, or an agent that is stopping; the same request may work later."""

    code = "overloaded"


class AgentError(LmcacheKubeError):
    """The agent's fault."""


class ConfigError(AgentError):
    """Bad flags; carries every broken rule, each with value, limit and fix."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


class CapacityError(AgentError):
    """An L1 size that does not fit: the message has the wanted and the available bytes."""


class TransferError(AgentError):
    """A copy between worker memory and L1 that failed."""


class TransferOverdue(TransferError):
    """A transfer that did not finish before its deadline."""
