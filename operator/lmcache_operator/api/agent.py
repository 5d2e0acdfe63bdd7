"""The parts of a spec that become the agent's flags."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct, field

from lmcache_operator.api.fields import Scalar, flag, listed, text

LogLevel = Literal["debug", "info", "warning", "error"]


class Server(Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """The agent process on each node: its ports, its threads, its log."""

    port: Annotated[
        int,
        flag("port", "TCP port that workers connect to. It must differ from httpPort.", low=1),
    ] = 5555
    http_port: Annotated[
        int,
        flag(
            "http_port", "TCP port of health checks and metrics. It must differ from port.", low=1
        ),
    ] = 8080
    chunk_size: Annotated[
        int,
        flag(
            "chunk_size",
            "Tokens per cached chunk; a multiple of every worker's block size. The workers' "
            "setting must be the same.",
        ),
    ] = 256
    max_cpu_workers: (
        Annotated[
            int,
            flag(
                "max_cpu_workers", "Threads for lookups, pings and sessions. Left out: one thread."
            ),
        ]
        | None
    ) = field(default=None, name="maxCPUWorkers")
    max_gpu_workers: (
        Annotated[
            int,
            flag(
                "max_gpu_workers",
                "Threads for store and retrieve. Left out: two, so that one copy that hangs does "
                "not stop the others.",
            ),
        ]
        | None
    ) = field(default=None, name="maxGPUWorkers")
    log_level: Annotated[
        LogLevel, Meta(description="Least severe records written; debug has one per request.")
    ] = "info"
    extra_args: Annotated[
        tuple[Annotated[str, text("One argument.", longest=1024)], ...],
        listed(
            "Further arguments of lmcache-nodeagent, each as one item (--session-ttl-seconds=60). "
            "A flag that has a field in this spec is refused here, so that each setting stands "
            "once.",
            most=64,
        ),
    ] = ()


class Eviction(Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """Which chunks give way when the cache fills up, and how many."""

    policy: Annotated[
        Literal["LRU", "None"],
        Meta(
            description="LRU drops the least recently used chunks. None drops nothing: stores fail "
            "once the cache is full."
        ),
    ] = "LRU"
    trigger_percent: Annotated[
        int,
        flag(
            "eviction_trigger_watermark",
            "Share of the cache in use at which eviction starts, in per cent.",
            per_unit=100,
        ),
    ] = 80
    evict_percent: Annotated[
        int,
        flag(
            "eviction_ratio",
            "Share of the evictable chunks that one eviction drops, in per cent.",
            per_unit=100,
        ),
    ] = 20


class Cache(Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """The host memory cache of each node."""

    size: Annotated[
        Scalar,
        Meta(
            description="Host memory for cached KV data on each node, as a quantity (20Gi). The "
            "agent takes all of it before it is ready, and the pod requests it."
        ),
    ]
    eviction: Eviction = Eviction()


class Hints(Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """Early word of a worker's end. A hint only shortens the silence that counts as death.

    Any sign of life of the worker cancels it.
    """

    mode: Annotated[
        Literal["Enforce", "Disabled"],
        Meta(
            description="Enforce: the operator tells the agents what it sees of worker pods. "
            "Disabled: it does not, and the agents judge by what they see themselves."
        ),
    ] = "Enforce"
    confirm_seconds: Annotated[
        int,
        flag(
            "hint_confirm_seconds",
            "Silence that confirms a hint: the pod is gone or ended without the kubelet's word. "
            "At most reapTimeoutSeconds, unless that is 0.",
        ),
    ] = 15
    close_confirm_seconds: Annotated[
        int,
        flag(
            "close_confirm_seconds",
            "Silence that confirms a closed connection as a worker's death. It leaves a living "
            "worker time to connect again. At most confirmSeconds, unless reapTimeoutSeconds is 0.",
        ),
    ] = 10


class StuckRelease(Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """What happens when a dead worker's memory cannot be released in time."""

    action: Annotated[
        Literal["Alert", "RestartServer"],
        Meta(
            description="Alert: the condition ReaperHealthy turns False, an Event and a metric say "
            "so. RestartServer: the agent also fails its liveness probe, so that the kubelet "
            "restarts it, and the node loses its cache."
        ),
    ] = "Alert"


class Reaping(Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """When a worker counts as dead and its memory is released.

    Proof of death (the process ended, the kubelet reports its container as terminated) acts at
    once, unless mode or reapTimeoutSeconds say that nobody is reaped. Without proof a worker counts
    as dead after silence, and hints shorten how long. All durations are whole seconds. Running
    agents follow a change within 90 seconds, without a restart.
    """

    reap_timeout_seconds: Annotated[
        int,
        flag(
            "worker_reap_timeout_seconds",
            "Silence after which a worker that has pinged counts as dead. 0 reaps nobody. "
            "Otherwise at least 3 x heartbeatIntervalSeconds, so that one lost ping never looks "
            "like a death.",
        ),
    ] = 120
    registration_grace_seconds: Annotated[
        int,
        flag(
            "worker_registration_grace_seconds",
            "Silence after which a worker that never pinged counts as dead. Engines ping only "
            "after their first transfer, so this is long. At least reapTimeoutSeconds.",
        ),
    ] = 3600
    heartbeat_interval_seconds: Annotated[
        int,
        flag(
            "worker_heartbeat_interval_seconds",
            "Interval at which workers ping. It is handed to them in the ConfigMap "
            "<name>-connection; running workers keep the one they started with.",
        ),
    ] = 10
    mode: Annotated[
        Literal["Enforce", "Observe"],
        Meta(
            description="Enforce releases the memory of dead workers. Observe only logs, counts "
            "and reports whom Enforce would have reaped."
        ),
    ] = "Enforce"
    reap_idle_connected: Annotated[
        bool,
        Meta(
            description="Also reap a worker that never pinged at the end of its grace while its "
            "connection is open. An idle rank of a healthy engine looks like that, so think twice."
        ),
    ] = False
    hints: Hints = Hints()
    stuck_release: StuckRelease = StuckRelease()
