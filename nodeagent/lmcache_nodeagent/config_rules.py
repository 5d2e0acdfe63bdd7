"""Rules between settings. Each broken one is a sentence with value, limit and fix."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator

from lmcache_nodeagent.config_flags import value_text

MISSED_HEARTBEATS = 3
"""A worker may miss this many pings before silence counts (worker-liveness design, section 5.4)."""

_MAX_SOCKET_PATH_BYTES = 107  # sun_path of unix(7), less the closing zero


def listener_problems(*, port: int, http_port: int, ipc_path: str) -> Iterator[str]:
    """Check that the listeners can exist beside each other."""
    if port and port == http_port:
        yield (
            f"http-port is {http_port}, but must differ from port ({port}): "
            "give one of them another number, or 0 for a free one"
        )
    path_bytes = len(os.fsencode(ipc_path))
    if path_bytes > _MAX_SOCKET_PATH_BYTES:
        yield (
            f"ipc-path is {path_bytes} bytes long, but must be {_MAX_SOCKET_PATH_BYTES} or less: "
            "choose a shorter path"
        )


def window_problems(
    *, timeout: float, grace: float, interval: float, hint: float, close: float
) -> Iterator[str]:
    """Check the liveness windows, all in seconds; a timeout of 0 switches them off."""
    if timeout == 0 or not all(map(math.isfinite, (timeout, grace, interval, hint, close))):
        return
    if grace < timeout:
        yield (
            f"worker-registration-grace-seconds is {value_text(grace)}, but must be "
            f"worker-reap-timeout-seconds ({value_text(timeout)}) or more: "
            f"raise the grace to {value_text(timeout)} or lower the timeout"
        )
    if timeout < (least := MISSED_HEARTBEATS * interval):
        yield (
            f"worker-reap-timeout-seconds is {value_text(timeout)}, but must be "
            f"{MISSED_HEARTBEATS} x worker-heartbeat-interval-seconds ({value_text(interval)}) = "
            f"{value_text(least)} or more: raise the timeout to {value_text(least)} or lower the "
            f"interval to {value_text(timeout // MISSED_HEARTBEATS)}"
        )
    if hint > timeout:
        yield (
            f"hint-confirm-seconds is {value_text(hint)}, but must be worker-reap-timeout-seconds "
            f"({value_text(timeout)}) or less: lower it to {value_text(timeout)}"
        )
    if close > hint:
        yield (
            f"close-confirm-seconds is {value_text(close)}, but must be hint-confirm-seconds "
            f"({value_text(hint)}) or less: lower it to {value_text(hint)}, or raise "
            f"hint-confirm-seconds to {value_text(close)}"
        )


def bare_host(host: str) -> str:
    """Take the brackets off an IPv6 host, which URLs need and socket calls do not."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host
