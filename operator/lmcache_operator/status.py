"""From what was seen to the status of a server. Pure.

A condition's transition time changes with its status and at no other time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from lmcache_nodeagent.operator_link.messages import ReapingSettings
from lmcache_operator.api.status import Condition, EffectiveReaping, ReapingStatus, Status
from lmcache_operator.conditions import (
    Seen,
    Verdict,
    all_connected,
    available,
    count_nodes,
    device_plugin,
    hints_flowing,
    progressing,
    ready,
    reaper_healthy,
)
from lmcache_operator.spec import reaping_settings
from lmcache_operator.troubles import Trouble

_Type = Literal[
    "Ready", "Available", "Progressing", "ReaperHealthy", "HintsFlowing", "DevicePlugin"
]


def read_status(stored: Mapping[str, Any]) -> Status:
    """Read a status as it is stored; what cannot be read counts as never written."""
    try:
        return msgspec.convert(stored, Status)
    except msgspec.ValidationError:
        return Status()


def build_status(seen: Seen, earlier: Status, moment: str) -> Status:
    """Return the status.

    Args:
        seen: what is so.
        earlier: what was written last, for transition times, and for what only agents know as long
            as they have not had time to connect.
        moment: now, as Kubernetes writes it.
    """
    nodes = count_nodes(seen.daemon_set)
    told = seen.settled or all_connected(seen, nodes)
    availability, reaper = available(seen, nodes), reaper_healthy(seen)
    hints, plugin = hints_flowing(seen, nodes), device_plugin(seen)
    if not told:
        reaper = _unless_known(reaper, "ReaperHealthy", earlier)
        hints = _unless_known(hints, "HintsFlowing", earlier)
        plugin = _unless_known(plugin, "DevicePlugin", earlier)
    verdicts: dict[_Type, Verdict] = {
        "Ready": ready(seen, availability, reaper, hints, plugin),
        "Available": availability,
        "Progressing": progressing(seen, nodes),
        "ReaperHealthy": reaper,
        "HintsFlowing": hints,
        "DevicePlugin": plugin,
    }
    return Status(
        observed_generation=seen.generation,
        desired_nodes=nodes.desired,
        ready_nodes=nodes.ready,
        updated_nodes=nodes.updated,
        registered_workers=seen.workers.registered if told else earlier.registered_workers,
        reaping=_reaping(seen, earlier, told=told),
        conditions=tuple(
            _condition(kind, verdict, seen.generation, earlier, moment)
            for kind, verdict in verdicts.items()
        ),
    )


def write_status(status: Status) -> dict[str, Any]:
    """Write a status as it is stored: figures of `kubectl get` also when they are 0."""
    written: dict[str, Any] = msgspec.to_builtins(status)
    written["reaping"] = {"total": 0, "suspects": 0, **written.get("reaping", {})}
    return written


def is_urgent(status: Status, earlier: Status) -> bool:
    """Tell whether two differ in more than words, which may wait."""
    return _without_words(status) != _without_words(earlier)


def changed_conditions(status: Status, earlier: Status) -> list[Condition]:
    """Return the conditions whose status or reason has changed."""
    before = {found.type: (found.status, found.reason) for found in earlier.conditions}
    return [c for c in status.conditions if before.get(c.type) != (c.status, c.reason)]


def trouble_of(status: Status) -> Trouble | None:
    """Return why a server is not ready, None if it is."""
    summary = next(found for found in status.conditions if found.type == "Ready")
    return None if summary.status == "True" else Trouble(summary.reason, summary.message)


def _without_words(status: Status) -> Status:
    bare = tuple(msgspec.structs.replace(found, message="") for found in status.conditions)
    return msgspec.structs.replace(status, conditions=bare)


def _condition(
    kind: _Type, verdict: Verdict, generation: int, earlier: Status, moment: str
) -> Condition:
    before = _find(kind, earlier)
    same = before is not None and before.status == verdict.answer
    return Condition(
        type=kind,
        status=verdict.answer,
        reason=verdict.reason,
        message=verdict.message,
        last_transition_time=before.last_transition_time if before and same else moment,
        observed_generation=generation,
    )


def _find(kind: _Type, status: Status) -> Condition | None:
    return next((found for found in status.conditions if found.type == kind), None)


def _unless_known(now: Verdict, kind: _Type, earlier: Status) -> Verdict:
    """Return what was so before, unless that was not known: agents only connect again."""
    before = _find(kind, earlier)
    if before is None or before.status == "Unknown":
        return now
    return Verdict(before.status, before.reason, before.message)


def _reaping(seen: Seen, earlier: Status, *, told: bool) -> ReapingStatus:
    workers, before = seen.workers, earlier.reaping or ReapingStatus()
    return ReapingStatus(
        total=before.total if workers.reaps is None else workers.reaps,
        last_reap_time=workers.last_reap_time or before.last_reap_time,
        last_reason=workers.last_reason or before.last_reason,
        suspects=workers.suspects if told else before.suspects,
        effective=_effective(seen) if told else before.effective,
    )


def _effective(seen: Seen) -> EffectiveReaping | None:
    in_force = [agent.state.settings for agent in seen.agents if agent.state is not None]
    if not in_force:
        return None
    wanted = _wanted(seen)
    common = in_force[0]
    agreed = all(settings == common for settings in in_force)
    return EffectiveReaping(
        nodes=len(in_force),
        nodes_in_sync=sum(settings == wanted for settings in in_force),
        **(_shown(common) if agreed else {}),
    )


def _shown(settings: ReapingSettings) -> dict[str, Any]:
    return {
        "reap_timeout_seconds": round(settings.worker_reap_timeout_seconds),
        "registration_grace_seconds": round(settings.worker_registration_grace_seconds),
        "confirm_seconds": round(settings.hint_confirm_seconds),
        "close_confirm_seconds": round(settings.close_confirm_seconds),
        "mode": settings.reap_mode.capitalize(),
    }


def _wanted(seen: Seen) -> ReapingSettings | None:
    if seen.spec is None:
        return None
    written = reaping_settings(seen.spec, uid=seen.uid, name=seen.name)
    members = {name.replace("-", "_"): value for name, value in written.items()}
    return msgspec.convert(members, ReapingSettings, strict=False)
