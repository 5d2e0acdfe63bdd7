"""The reaping settings: those that a file may change while the agent runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from lmcache_nodeagent.config_flags import (
    LIFETIME,
    YEAR_SECONDS,
    Bounds,
    Flag,
    Group,
    Option,
    options_of,
)

_CONFIRMATION = Bounds(3, YEAR_SECONDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReapingConfig:
    """The part of `AgentConfig` that `--reaping-settings` may change; `AgentConfig` checks it."""

    worker_reap_timeout_seconds: float = field(
        default=120.0,
        metadata=Flag(
            Group.LIVENESS,
            "Silence after which a worker that has pinged counts as dead. 0 reaps nobody.",
            unit="seconds",
            bounds=Bounds(30, YEAR_SECONDS, zero_is_off=True),
        ).metadata,
    )
    worker_registration_grace_seconds: float = field(
        default=3600.0,
        metadata=Flag(
            Group.LIVENESS,
            "Silence after which a worker that never pinged counts as dead.",
            unit="seconds",
            bounds=LIFETIME,
        ).metadata,
    )
    worker_heartbeat_interval_seconds: float = field(
        default=10.0,
        metadata=Flag(
            Group.LIVENESS,
            "Interval at which workers are set to ping.",
            unit="seconds",
            bounds=Bounds(0.1, YEAR_SECONDS),
        ).metadata,
    )
    hint_confirm_seconds: float = field(
        default=15.0,
        metadata=Flag(
            Group.LIVENESS,
            "Silence that confirms a hint of a worker's death.",
            unit="seconds",
            bounds=_CONFIRMATION,
        ).metadata,
    )
    close_confirm_seconds: float = field(
        default=10.0,
        metadata=Flag(
            Group.LIVENESS,
            "Silence that confirms a closed connection as a worker's death.",
            unit="seconds",
            bounds=_CONFIRMATION,
        ).metadata,
    )
    reap_mode: Literal["enforce", "observe"] = field(
        default="enforce",
        metadata=Flag(
            Group.LIVENESS, "observe only logs and counts whom enforce would have reaped."
        ).metadata,
    )
    reap_idle_connected: bool = field(
        default=False,
        metadata=Flag(
            Group.LIVENESS,
            "Also reap a worker that never pinged at its grace while its connection is open.",
        ).metadata,
    )
    hints: Literal["enforce", "disabled"] = field(
        default="enforce",
        metadata=Flag(
            Group.LIVENESS,
            "disabled does without the operator's word about worker pods, proof included.",
        ).metadata,
    )
    stuck_release: Literal["alert", "restart"] = field(
        default="alert",
        metadata=Flag(
            Group.LIVENESS,
            "What a release past its deadline does beside being reported: restart also fails the "
            "health check, so that whoever runs this agent starts it again.",
        ).metadata,
    )


LIVE_OPTIONS: tuple[Option, ...] = options_of(ReapingConfig)
"""The settings that may change while the agent runs."""
