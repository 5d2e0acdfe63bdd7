"""What one request may cost: every bound the codec enforces before it spends memory or time.

libzmq drops a connection that sends a frame beyond `--max-message-bytes` (ZMQ_MAXMSGSIZE, set in
`transport/`), which alone bounds the KV bytes of engine-driven stores below what msgpack can name
(`max_data_bytes`); the codec applies the rest. Decoding recurses only as deep as the message types
and, for values under unknown keys, as the interpreter's recursion limit: it belongs on a thread
with the default stack size, as CPython overruns a stack of 256 KiB before that limit.
"""

from __future__ import annotations

from dataclasses import dataclass

_LARGEST_INT = 9
"""Bytes of the longest msgpack integer."""

_TOKEN = 5
"""Bytes of the longest msgpack integer below 2**32: a token id or a block id."""


@dataclass(frozen=True, slots=True)
class WireLimits:
    """Bounds of one request. Bytes count encoded frames, the others decoded elements."""

    max_message_bytes: int = 256 * 2**20
    max_data_bytes: int = 2**32 - 1
    max_tokens: int = 2**20
    max_block_ids: int = 2**20
    max_block_lists: int = 256
    max_tensors: int = 4096
    max_tensor_bytes: int = 4096
    max_dimensions: int = 8
    max_records: int = 2**16
    max_string_bytes: int = 4096
    max_document_bytes: int = 64 * 2**10
    max_event_bytes: int = 4096

    @property
    def scalar_bytes(self) -> int:
        """Frame of one number, boolean or nil."""
        return _LARGEST_INT

    @property
    def text_bytes(self) -> int:
        """Frame of one string."""
        return self.max_string_bytes + _TOKEN

    @property
    def key_bytes(self) -> int:
        """Frame of a cache key: its tokens and everything around them."""
        return self.max_tokens * _TOKEN + self.max_document_bytes

    @property
    def block_ids_bytes(self) -> int:
        """Frame of block ids, all groups together."""
        return self.max_block_ids * _TOKEN + self.max_document_bytes

    @property
    def tensors_bytes(self) -> int:
        """Frame of the device descriptors of one registration."""
        return self.max_tensors * self.max_tensor_bytes


LIMITS = WireLimits()
"""The limits in force. The message types are built with them, so they are no run-time setting."""
