"""What the agent can be told: one frozen object, each setting once, with its default and bounds.

Flags, environment variables, `--help`, the reference in `docs/` and the operator's rendering all
derive from the fields (`config_flags.py`); `config_parsing.py` reads them. Names and defaults that
`lmcache server` 0.5.6 has too are kept.
"""

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
from lmcache_nodeagent.config_messages import (
    HOST,
    HOST_WORDS,
    PORTS,
    MessagesConfig,
    message_problems,
)
from lmcache_nodeagent.config_plugin import SOCKETS_FOLDER, plugin_problems
from lmcache_nodeagent.config_reaping import LIVE_OPTIONS
from lmcache_nodeagent.config_rules import listener_problems, window_problems
from lmcache_nodeagent.errors import ConfigError

# The operator takes all from here.
__all__ = [
    "LIVE_OPTIONS",
    "OPTIONS",
    "SOCKETS_FOLDER",
    "AgentConfig",
    "ConfigError",
]

_GIB = 1 << 30
_THREADS = Bounds(1, 256)
_QUEUE = Bounds(1, 1_000_000)
_SHARE = Bounds(0.01, 1)
_PATH = "/.+"
_PATH_WORDS = "an absolute path"


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig(MessagesConfig):
    """The settings of one agent. Only `l1_size_gb` has no default.

    Raises:
        ConfigError: all broken rules together, each with value, limit and fix.
    """

    http_host: str = field(
        default="127.0.0.1",
        metadata=Flag(
            Group.HTTP,
            "Address for health, metrics and status; status is answered to loopback only.",
            pattern=HOST,
            pattern_words=HOST_WORDS,
        ).metadata,
    )
    http_port: int = field(
        default=8080,
        metadata=Flag(Group.HTTP, "TCP port for HTTP; 0 takes a free one.", bounds=PORTS).metadata,
    )

    l1_size_gb: float = field(
        metadata=Flag(
            Group.CACHE,
            "Size of the host memory cache. All of it is taken before the agent is ready.",
            unit="GiB",
            bounds=Bounds(0.001, 1 << 20),
        ).metadata,
    )
    chunk_size: int = field(
        default=256,
        metadata=Flag(
            Group.CACHE,
            "Tokens per cached chunk; a multiple of every worker's block size.",
            unit="tokens",
            bounds=Bounds(1, 1 << 20),
        ).metadata,
    )
    hash_algorithm: Literal["blake3"] = field(
        default="blake3",
        metadata=Flag(
            Group.CACHE,
            "Hash that names chunks.",
            refused={
                "builtin": "Python's hash differs from process to process and is easy to collide",
                "sha256_cbor": "it is the slower hash, and chunk names never leave this agent",
            },
        ).metadata,
    )
    eviction_policy: Literal["LRU", "noop"] = field(
        default="LRU",
        metadata=Flag(
            Group.CACHE,
            "Which chunks give way when L1 fills up: the least recently used, or none "
            "(stores then fail once it is full).",
            refused={
                "ARC": "adaptive replacement is not built; LRU is the nearest",
                "IsolatedLRU": "quotas per cache salt are not built; LRU treats all salts alike",
            },
        ).metadata,
    )
    eviction_trigger_watermark: float = field(
        default=0.8,
        metadata=Flag(
            Group.CACHE, "Share of L1 in use at which eviction starts.", bounds=_SHARE
        ).metadata,
    )
    eviction_ratio: float = field(
        default=0.2,
        metadata=Flag(
            Group.CACHE, "Share of the evictable chunks that one eviction drops.", bounds=_SHARE
        ).metadata,
    )
    l1_read_ttl_seconds: float = field(
        default=300.0,
        metadata=Flag(
            Group.CACHE,
            "How long a lookup keeps the chunks it found from eviction while nobody reads them.",
            unit="seconds",
            bounds=LIFETIME,
        ).metadata,
    )
    l1_write_ttl_seconds: float = field(
        default=600.0,
        metadata=Flag(
            Group.CACHE,
            "How long a reservation may stay unwritten before it is dropped.",
            unit="seconds",
            bounds=LIFETIME,
        ).metadata,
    )
    session_ttl_seconds: float = field(
        default=600.0,
        metadata=Flag(
            Group.CACHE,
            "How long a request's session may stay unused.",
            unit="seconds",
            bounds=LIFETIME,
        ).metadata,
    )
    kv_event_log_size: int = field(
        default=32_768,
        metadata=Flag(
            Group.CACHE,
            "Changes of L1 that are kept for engines that follow KV events, with their tokens: "
            "4 bytes each. One that falls behind is told that it lost some. 0 offers no events.",
            bounds=Bounds(0, 1 << 22),
        ).metadata,
    )
    shm_name: str = field(
        default="",
        metadata=Flag(
            Group.CACHE,
            "Name of the L1 region that engine-driven workers map. Empty: the region is named "
            "by the port, and such workers are offered pickle mode only.",
            pattern=r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}",
            pattern_words="up to 100 letters, digits, dots, dashes and underscores",
        ).metadata,
    )

    supported_transfer_mode: Literal["lmcache_driven", "engine_driven", "auto"] = field(
        default="lmcache_driven",
        metadata=Flag(
            Group.TRANSFERS,
            "Who moves the bytes: the agent, which maps workers' memory; or the workers, which map "
            "L1 (see shm-name) or send the bytes; auto serves both. A worker in another mode is "
            "refused when it registers.",
        ).metadata,
    )
    null_block_id: int = field(
        default=0,
        metadata=Flag(
            Group.TRANSFERS,
            "The engine's block id for absent KV data.",
            bounds=Bounds(0, (1 << 63) - 1),
        ).metadata,
    )
    max_workers: int = field(
        default=1,
        metadata=Flag(
            Group.TRANSFERS, "Threads of each pool that has no count of its own.", bounds=_THREADS
        ).metadata,
    )
    max_cpu_workers: int | None = field(
        default=None,
        metadata=Flag(
            Group.TRANSFERS,
            "Threads for lookups and sessions; max-workers if not given.",
            bounds=_THREADS,
        ).metadata,
    )
    max_gpu_workers: int | None = field(
        default=None,
        metadata=Flag(
            Group.TRANSFERS,
            "Threads for store and retrieve; max-workers if not given, but at least 2, so that one "
            "copy that hangs does not stop the others.",
            bounds=_THREADS,
        ).metadata,
    )
    normal_queue_size: int = field(
        default=1024,
        metadata=Flag(
            Group.TRANSFERS,
            "Lookups and the like that may wait; more are refused at once. One client gets half.",
            bounds=_QUEUE,
        ).metadata,
    )
    affinity_queue_size: int = field(
        default=1024,
        metadata=Flag(
            Group.TRANSFERS,
            "Transfers that may wait; more are refused at once. One client gets half.",
            bounds=_QUEUE,
        ).metadata,
    )

    transfer_deadline_seconds: float = field(
        default=60.0,
        metadata=Flag(
            Group.TRANSFERS,
            "Time from the arrival of a store or retrieve to its answer. One that takes longer is "
            "answered negatively, so that the engine goes on without it. 0 waits without end.",
            unit="seconds",
            bounds=Bounds(0.1, YEAR_SECONDS, zero_is_off=True),
        ).metadata,
    )

    release_deadline_seconds: float = field(
        default=30.0,
        metadata=Flag(
            Group.LIVENESS,
            "Time a dead worker's memory may take to release before it is reported as stuck.",
            unit="seconds",
            bounds=Bounds(0.1, YEAR_SECONDS),
        ).metadata,
    )
    reaping_settings: str = field(
        default="",
        metadata=Flag(
            Group.LIVENESS,
            "JSON file with any of the settings that may change while the agent runs, named as the "
            "flags but for the dashes in front. It is read again every few seconds and wins over "
            "flags. A bad one changes nothing and is reported.",
            pattern=_PATH,
            pattern_words=_PATH_WORDS,
        ).metadata,
    )

    operator_link: str = field(
        default="",
        metadata=Flag(
            Group.LINK,
            "Folder with the files url (wss://host:port, where the operator listens) and ca.crt "
            "(whose certificates it may have). They are read again whenever they change.",
            pattern=_PATH,
            pattern_words=_PATH_WORDS,
        ).metadata,
    )
    operator_token_file: str = field(
        default="",
        metadata=Flag(
            Group.LINK,
            "File with the token that says to the operator who this agent is.",
            pattern=_PATH,
            pattern_words=_PATH_WORDS,
        ).metadata,
    )

    instance_id: str = field(
        default="",
        metadata=Flag(
            Group.LOGS,
            "Name of this agent in telemetry; empty takes a new one at each start.",
            pattern=r"\S{1,200}",
            pattern_words="up to 200 characters without spaces",
        ).metadata,
    )
    log_level: Literal["debug", "info", "warning", "error"] = field(
        default="info",
        metadata=Flag(
            Group.LOGS, "Least severe records written; debug has one per request."
        ).metadata,
    )
    log_format: Literal["auto", "json", "console"] = field(
        default="auto",
        metadata=Flag(
            Group.LOGS, "auto is console on a terminal and JSON lines elsewhere."
        ).metadata,
    )

    def __post_init__(self) -> None:
        """Check every field by its own bounds, then the fields against each other."""
        values = ((option, getattr(self, option.field_name)) for option in OPTIONS)
        problems = [problem for option, value in values if (problem := option.problem(value))]
        problems += listener_problems(
            port=self.port, http_port=self.http_port, ipc_path=self.ipc_path
        )
        problems += message_problems(self)
        problems += plugin_problems(self)
        problems += window_problems(
            timeout=self.worker_reap_timeout_seconds,
            grace=self.worker_registration_grace_seconds,
            interval=self.worker_heartbeat_interval_seconds,
            hint=self.hint_confirm_seconds,
            close=self.close_confirm_seconds,
        )
        if problems:
            raise ConfigError(problems)

    @property
    def l1_size_bytes(self) -> int:
        """Size of L1; a GB of this flag is 2**30 bytes, as in `lmcache server`."""
        return int(self.l1_size_gb * _GIB)

    @property
    def normal_threads(self) -> int:
        """Threads of the pool for lookups and sessions."""
        return self.max_workers if self.max_cpu_workers is None else self.max_cpu_workers

    @property
    def transfer_threads(self) -> int:
        """Threads of the pool for store and retrieve."""
        return max(self.max_workers, 2) if self.max_gpu_workers is None else self.max_gpu_workers

    @property
    def serves_lmcache_driven(self) -> bool:
        """Whether workers may let the agent map their memory."""
        return self.supported_transfer_mode in {"lmcache_driven", "auto"}

    @property
    def serves_engine_driven(self) -> bool:
        """Whether workers may copy by themselves."""
        return self.supported_transfer_mode in {"engine_driven", "auto"}

    @property
    def pool_name(self) -> str:
        """Name of the L1 region; with port 0, first `replace(config, port=…)` by the bound one."""
        if self.shm_name:
            return self.shm_name
        assert self.port, "the region is named by the bound port, which is not known yet"
        return f"port-{self.port}"

    def to_args(self) -> list[str]:
        """Write the arguments that give this configuration again: whatever is not the default."""
        values = ((option, getattr(self, option.field_name)) for option in OPTIONS)
        return [
            option.argument(value)
            for option, value in values
            if option.required or value != option.default
        ]


OPTIONS: tuple[Option, ...] = options_of(AgentConfig)
"""Every setting as people meet it."""
