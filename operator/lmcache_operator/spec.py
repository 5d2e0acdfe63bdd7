"""Reads a stored spec, and turns it into the configuration and the arguments of its agents.

Pure. The API server has checked what is stored, but maybe by an older definition: whatever is
wrong is one `SpecError` that says what to change, for a condition.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from lmcache_nodeagent.config import LIVE_OPTIONS, OPTIONS, AgentConfig, ConfigError
from lmcache_operator.api.root import Spec
from lmcache_operator.api.rules import GIB, OWNED_FLAGS
from lmcache_operator.errors import SpecError
from lmcache_operator.names import (
    LINK_FOLDER,
    REAPING_FOLDER,
    REAPING_KEY,
    TOKEN_FILE,
    slot_memory_folder,
    socket_folder,
)
from lmcache_operator.quantity import whole_units

SOCKET_FOLDER = "/run/lmcache-kube"
SOCKET_PATH = f"{SOCKET_FOLDER}/agent.sock"
"""The agent's Unix socket as workers see it, by the device plugin or by a mounted folder."""

SHARED_MEMORY = "/dev/shm"  # not a temporary file
_SLOTS_MEMORY = "slots"

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


def has_device_plugin(spec: Spec) -> bool:
    """Tell whether workers may ask the kubelet for their agent."""
    return spec.transport.device_plugin.mode == "Enabled"


def slot_memory_bytes(spec: Spec) -> int:
    """Return the most shared memory of each slot; 0 if slots share none.

    Raises:
        SpecError: it is no quantity.
    """
    if not has_device_plugin(spec):
        return 0
    try:
        return whole_units(spec.transport.device_plugin.shared_memory)
    except ValueError as error:
        raise SpecError([f"spec.transport.devicePlugin.sharedMemory: {error}"]) from None


def agent_config(spec: Spec, *, uid: str, name: str) -> AgentConfig:
    """Return the configuration of the agents of a spec.

    Args:
        spec: what is wanted.
        uid: the object's uid; it names the shared memory of its agents on each node.
        name: the object's name; it names the resource of the device plugin.

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
            shm_name=uid if shares_memory or slot_memory_bytes(spec) else "",
            **_plugin(spec, uid=uid, name=name),
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


def _plugin(spec: Spec, *, uid: str, name: str) -> dict[str, Any]:
    """Return what the agents offer to the kubelet. What is left out is the agent's default."""
    if not has_device_plugin(spec):
        return {}
    plugin, memory = spec.transport.device_plugin, slot_memory_bytes(spec)
    found = {
        "device_plugin_resource": name,
        "device_plugin_slots": plugin.slots,
        "slots_folder": SOCKET_FOLDER,
        "slots_host_folder": socket_folder(uid),
        "prestart_wait_seconds": plugin.pre_start_wait_seconds,
    }
    if not memory:
        return found
    host = f"{slot_memory_folder(uid)}/{_SLOTS_MEMORY}"
    # With memorySharing the agent sees the node's whole /dev/shm, else only its own folder there.
    inside = f"{SHARED_MEMORY}/{_SLOTS_MEMORY}" if spec.transport.memory_sharing == "None" else host
    return found | {
        "slot_shared_memory_bytes": memory,
        "slot_shared_memory_folder": inside,
        "slot_shared_memory_host_folder": host,
    }


def agent_arguments(spec: Spec, *, uid: str, name: str) -> list[str]:
    """Return the arguments of the agents of a spec.

    Every flag that the operator owns is written out, also with its default: nothing in the pod's
    environment and no other release's default then changes what the spec says. Left out are the
    settings that may change while agents run: an edit of them must not touch their pods.

    Raises:
        SpecError: the agent would refuse the configuration.
    """
    config = agent_config(spec, uid=uid, name=name)
    live = {option.field_name for option in LIVE_OPTIONS}
    values = ((option, getattr(config, option.field_name)) for option in OPTIONS)
    owned = [
        option.argument(value)
        for option, value in values
        if option.flag_name in OWNED_FLAGS and option.field_name not in live and value is not None
    ]
    return [*owned, *spec.server.extra_args]


def reaping_settings(spec: Spec, *, uid: str, name: str) -> dict[str, object]:
    """Return the settings that running agents follow, named as the agent's file has them.

    Raises:
        SpecError: the agent would refuse the configuration.
    """
    config = agent_config(spec, uid=uid, name=name)
    return {
        option.flag_name.removeprefix("--"): getattr(config, option.field_name)
        for option in LIVE_OPTIONS
    }
