"""Reads a stored spec, and turns it into the configuration and the arguments of its agents.

Pure. The API server has checked what is stored, but maybe by an older definition: whatever is
wrong is one `SpecError` that says what to change, for a condition.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from lmcache_nodeagent.config import LIVE_OPTIONS, OPTIONS, AgentConfig, ConfigError
from lmcache_operator.api.root import Spec
from lmcache_operator.api.rules import GIB, OWNED_FLAGS
from lmcache_operator.errors import SpecError
from lmcache_operator.names import LINK_FOLDER, REAPING_FOLDER, REAPING_KEY, TOKEN_FILE
from lmcache_operator.quantity import whole_units

SOCKET_PATH = "/run/lmcache-kube/agent.sock"
"""The agent's Unix socket, in its own container and in those of workers that mount the folder."""

_EVICTION_POLICIES = {"LRU": "LRU", "None": "noop"}
_PER_CENT = 100
_MSGSPEC_PLACE = re.compile(r"(?P<problem>.*?)(?: - at `\$(?P<place>[^`]*)`)?", re.DOTALL)


def read_spec(stored: Mapping[str, object]) -> Spec:
    """Read a spec as the API server returns it.

    Raises:
        SpecError: a field is unknown, missing or of the wrong type or form.
    """
    try:
        return msgspec.convert(stored, Spec)
    except msgspec.ValidationError as error:
        found = _MSGSPEC_PLACE.fullmatch(str(error))
        assert found is not None, "the pattern takes every text"
        place, problem = f"spec{found['place'] or ''}", found["problem"].replace("`", "")
        raise SpecError(
            [f"{place}: {problem[:1].lower()}{problem[1:]}: correct it or leave it out"]
        ) from None


def agent_config(spec: Spec, *, uid: str) -> AgentConfig:
    """Return the configuration of the agents of a spec.

    Args:
        spec: what is wanted.
        uid: the object's uid; it names the shared memory of its agents on each node.

    Raises:
        SpecError: the agent would refuse it; the problems are in the agent's words.
    """
    server, cache, reaping, hints = spec.server, spec.cache, spec.reaping, spec.reaping.hints
    shares_memory = spec.transport.memory_sharing != "None"
    has_socket = spec.transport.unix_socket == "HostPath"
    try:
        return AgentConfig(
            host="*",
            port=server.port,
            ipc_path=SOCKET_PATH if has_socket else "",
            http_host="*",
            http_port=server.http_port,
            l1_size_gb=whole_units(cache.size) / GIB,
            chunk_size=server.chunk_size,
            eviction_policy=_EVICTION_POLICIES[cache.eviction.policy],  # type: ignore[arg-type]
            eviction_trigger_watermark=cache.eviction.trigger_percent / _PER_CENT,
            eviction_ratio=cache.eviction.evict_percent / _PER_CENT,
            shm_name=uid if shares_memory else "",
            supported_transfer_mode="auto",
            max_cpu_workers=server.max_cpu_workers,
            max_gpu_workers=server.max_gpu_workers,
            worker_reap_timeout_seconds=reaping.reap_timeout_seconds,
            worker_registration_grace_seconds=reaping.registration_grace_seconds,
            worker_heartbeat_interval_seconds=reaping.heartbeat_interval_seconds,
            hint_confirm_seconds=hints.confirm_seconds,
            close_confirm_seconds=hints.close_confirm_seconds,
            reap_mode="enforce" if reaping.mode == "Enforce" else "observe",
            reap_idle_connected=reaping.reap_idle_connected,
            hints="enforce" if hints.mode == "Enforce" else "disabled",
            stuck_release="alert" if reaping.stuck_release.action == "Alert" else "restart",
            reaping_settings=f"{REAPING_FOLDER}/{REAPING_KEY}",
            operator_link=LINK_FOLDER,
            operator_token_file=TOKEN_FILE,
            log_level=server.log_level,
            log_format="json",
        )
    except ConfigError as error:
        raise SpecError(error.problems) from None
    except ValueError as error:
        raise SpecError([f"spec.cache.size: {error}"]) from None


def agent_arguments(spec: Spec, *, uid: str) -> list[str]:
    """Return the arguments of the agents of a spec.

    Every flag that the operator owns is written out, also with its default: nothing in the pod's
    environment and no other release's default then changes what the spec says. Left out are the
    settings that may change while agents run: an edit of them must not touch their pods.

    Raises:
        SpecError: the agent would refuse the configuration.
    """
    config = agent_config(spec, uid=uid)
    live = {option.field_name for option in LIVE_OPTIONS}
    values = ((option, getattr(config, option.field_name)) for option in OPTIONS)
    owned = [
        option.argument(value)
        for option, value in values
        if option.flag_name in OWNED_FLAGS and option.field_name not in live and value is not None
    ]
    return [*owned, *spec.server.extra_args]


def reaping_settings(spec: Spec, *, uid: str) -> dict[str, object]:
    """Return the settings that running agents follow, named as the agent's file has them.

    Raises:
        SpecError: the agent would refuse the configuration.
    """
    config = agent_config(spec, uid=uid)
    return {
        option.flag_name.removeprefix("--"): getattr(config, option.field_name)
        for option in LIVE_OPTIONS
    }
