"""The settings of the message port: where workers connect, and how much may wait for them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from lmcache_nodeagent.config_flags import Bounds, Flag, Group
from lmcache_nodeagent.config_plugin import DevicePluginConfig

PORTS = Bounds(0, 65_535)
HOST = r"[^\s/]+"
HOST_WORDS = "a host name, an address, or *"
MESSAGES_OF_ONE = 2
"""Of the largest size that may wait for one client: one that is copied, and one behind it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MessagesConfig(DevicePluginConfig):
    """What the agent reads from workers, and where."""

    host: str = field(
        default="localhost",
        metadata=Flag(
            Group.MESSAGES,
            "Address the message port listens on; IPv6 with or without brackets, * for all.",
            pattern=HOST,
            pattern_words=HOST_WORDS,
        ).metadata,
    )
    port: int = field(
        default=5555,
        metadata=Flag(
            Group.MESSAGES, "TCP port for workers; 0 takes a free one.", bounds=PORTS
        ).metadata,
    )
    ipc_path: str = field(
        default="",
        metadata=Flag(
            Group.MESSAGES,
            "Also listen on a Unix socket at this path. Workers that connect there are known by "
            "process, so their death is proven at once.",
            pattern="/.+",
            pattern_words="an absolute path",
        ).metadata,
    )
    max_message_bytes: int = field(
        default=268_435_456,
        metadata=Flag(
            Group.MESSAGES,
            "Largest message accepted; a connection that sends a larger one is closed. An "
            "engine-driven worker that does not map L1 sends a whole store in one, and gets a "
            "whole load in one.",
            unit="bytes",
            bounds=Bounds(1 << 20, 1 << 32),
        ).metadata,
    )
    max_waiting_bytes: int | None = field(
        default=None,
        metadata=Flag(
            Group.MESSAGES,
            "How much may wait in the agent: of requests, and as much again of replies that "
            "clients have not read. More is answered no at once. One client gets two messages "
            "of the largest size, at most half. A quarter of the memory that L1 leaves if not "
            "given, at least two messages of the largest size.",
            unit="bytes",
            bounds=Bounds(1 << 20, 1 << 50),
        ).metadata,
    )


def message_problems(config: MessagesConfig) -> Iterator[str]:
    """Check that what may wait has room for what one client may send."""
    least = MESSAGES_OF_ONE * config.max_message_bytes
    if config.max_waiting_bytes is not None and config.max_waiting_bytes < least:
        yield (
            f"max-waiting-bytes is {config.max_waiting_bytes}, but must be"
            f" {MESSAGES_OF_ONE} x max-message-bytes ({config.max_message_bytes}) = {least} or"
            f" more: raise it to {least} or lower max-message-bytes to"
            f" {config.max_waiting_bytes // MESSAGES_OF_ONE}"
        )
