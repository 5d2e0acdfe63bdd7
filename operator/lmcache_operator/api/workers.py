"""The part of a spec that says which pods are workers."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from lmcache_operator.api.fields import DNS_LABEL, listed, mapped, text

_LabelValue = Annotated[str, Meta(max_length=63, description="Value of a label.")]


class Requirement(Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """One condition on the labels of a pod."""

    key: Annotated[str, text("Label that is looked at.", longest=317)]
    operator: Annotated[
        Literal["In", "NotIn", "Exists", "DoesNotExist"],
        Meta(description="In and NotIn compare with values; the others take none."),
    ]
    values: Annotated[
        tuple[_LabelValue, ...], listed("Values for In and NotIn.", most=64, kind="set")
    ] = ()


class PodSelector(Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """Labels that make a pod a worker of this server.

    It cannot be changed, since the workers of the old selection would be forgotten while they run.
    Left out: pods labelled lmcache-kube.dev/server=<name of this object>.
    """

    match_labels: Annotated[
        dict[str, _LabelValue], mapped("Labels that the pod must have, with these values.")
    ] = {}
    match_expressions: Annotated[
        tuple[Requirement, ...],
        listed("Further conditions; all of them must hold.", most=32),
    ] = ()


class Workers(Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """The engine pods that use this server, and where they are."""

    pod_selector: PodSelector | None = None
    namespaces: Annotated[
        tuple[Annotated[str, text("Name of a namespace.", pattern=DNS_LABEL, longest=63)], ...],
        listed(
            "Namespaces that workers run in. Left out: the namespace of this object.",
            most=64,
            kind="set",
        ),
    ] = ()
    container_name: (
        Annotated[
            str,
            text(
                "Container that the engine runs in. Left out: the pod's only container; in pods "
                "with more of them, only the end of the whole pod is proof.",
                pattern=DNS_LABEL,
                longest=63,
            ),
        ]
        | None
    ) = None
    annotate: Annotated[
        bool,
        Meta(
            description="Write the annotation lmcache-kube.dev/instance-ids on worker pods. "
            "Nothing else of a worker's pod is ever touched."
        ),
    ] = True
