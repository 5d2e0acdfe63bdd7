"""What the operator reports about a server."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from lmcache_operator.api.fields import listed

_Count = Meta(ge=0)
_MOMENT = {"format": "date-time"}


class EffectiveReaping(Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """The settings that the agents say they use; left out where they do not agree (yet)."""

    nodes: Annotated[int, _Count, Meta(description="Agents that have reported their settings.")] = 0
    nodes_in_sync: Annotated[
        int, _Count, Meta(description="Agents among them that use what the spec says.")
    ] = 0
    reap_timeout_seconds: Annotated[int, _Count, Meta(description="As in spec.reaping.")] | None = (
        None
    )
    registration_grace_seconds: (
        Annotated[int, _Count, Meta(description="As in spec.reaping.")] | None
    ) = None
    confirm_seconds: (
        Annotated[int, _Count, Meta(description="As in spec.reaping.hints.")] | None
    ) = None
    close_confirm_seconds: (
        Annotated[int, _Count, Meta(description="As in spec.reaping.hints.")] | None
    ) = None
    mode: Annotated[str, Meta(max_length=32, description="As in spec.reaping.")] | None = None


class ReapingStatus(Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """Workers found dead, and the settings in force."""

    total: Annotated[
        int, _Count, Meta(description="Workers reaped since this object was created.")
    ] = 0
    last_reap_time: (
        Annotated[str, Meta(description="When the last one was.", extra_json_schema=_MOMENT)] | None
    ) = None
    last_reason: (
        Annotated[str, Meta(max_length=64, description="Why: heartbeat_timeout, process_exit, …")]
        | None
    ) = None
    suspects: Annotated[
        int, _Count, Meta(description="Workers whose death is hinted at and not yet confirmed.")
    ] = 0
    effective: EffectiveReaping | None = None


class Condition(Struct, frozen=True, kw_only=True, rename="camel"):
    """One aspect of the state, as Kubernetes conditions are."""

    type: Annotated[
        Literal[
            "Ready", "Available", "Progressing", "ReaperHealthy", "HintsFlowing", "DevicePlugin"
        ],
        Meta(description="Which aspect."),
    ]
    status: Annotated[Literal["True", "False", "Unknown"], Meta(description="Whether it holds.")]
    reason: Annotated[
        str, Meta(min_length=1, max_length=256, description="Why, in one word for programs.")
    ]
    message: Annotated[
        str, Meta(max_length=32768, description="Why, in words for people, with what to do.")
    ]
    last_transition_time: Annotated[
        str, Meta(description="When status last changed.", extra_json_schema=_MOMENT)
    ]
    observed_generation: (
        Annotated[int, _Count, Meta(description="Generation of the spec that this is about.")]
        | None
    ) = None


class Status(Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """What the operator sees. Nobody else writes here."""

    observed_generation: (
        Annotated[int, _Count, Meta(description="Generation of the spec that this is about.")]
        | None
    ) = None
    desired_nodes: (
        Annotated[int, _Count, Meta(description="Nodes that should run an agent.")] | None
    ) = None
    ready_nodes: Annotated[int, _Count, Meta(description="Nodes whose agent is ready.")] | None = (
        None
    )
    updated_nodes: (
        Annotated[int, _Count, Meta(description="Nodes whose agent is of the current spec.")] | None
    ) = None
    registered_workers: (
        Annotated[int, _Count, Meta(description="Engine workers registered on all nodes.")] | None
    ) = None
    reaping: ReapingStatus | None = None
    conditions: Annotated[
        tuple[Condition, ...],
        listed(
            "Ready sums up the others. Available: every node has a ready agent. Progressing: pods "
            "are being replaced. ReaperHealthy: dead workers' memory is released. HintsFlowing: "
            "agents are connected to the operator. DevicePlugin: kubelets know the resource by "
            "which workers reach their agent.",
            most=16,
            kind="map",
            key="type",
        ),
    ] = ()
