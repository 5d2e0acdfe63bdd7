"""The parts of a spec that become the agent pods themselves: image, identity, roll-out."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from lmcache_operator.api.fields import ENV_NAME, FreeForm, Scalar, free, text

_UID = Meta(ge=0, le=2_147_483_647)


class Image(Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """The image of the agent. What is left out is that of the operator's own release."""

    repository: (
        Annotated[str, text("Registry and name, without tag: registry.example/team/agent.")] | None
    ) = None
    tag: (
        Annotated[
            str,
            text(
                "Tag. Left out: the operator's version.",
                pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$",
                longest=128,
            ),
        ]
        | None
    ) = None
    digest: (
        Annotated[
            str,
            text(
                "Digest; wins over the tag. Pin it where images may be pushed again.",
                pattern=r"^sha256:[a-f0-9]{64}$",
            ),
        ]
        | None
    ) = None
    pull_policy: Annotated[
        Literal["Always", "IfNotPresent", "Never"],
        Meta(description="When the kubelet pulls the image."),
    ] = "IfNotPresent"


class ImagePullSecret(
    Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True
):
    """A Secret with registry credentials."""

    name: Annotated[str, text("Name of the Secret, in the namespace of this object.")]


class Gpu(Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """Which GPUs the agents see."""

    vendor: Annotated[
        Literal["None", "NVIDIA"],
        Meta(
            description="None: agents serve workers whose KV cache is in host memory. NVIDIA: the "
            "agents' pods see the node's NVIDIA GPUs, without a device of their own."
        ),
    ] = "None"


class Security(Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """The user that agents run as while transport.devicePlugin.mode is Disabled.

    With memory sharing it must be able to open what the workers create: take the workers' user or
    group. With the device plugin agents are root, in this group.
    """

    run_as_user: Annotated[int, _UID, Meta(description="User id.")] = 65532
    run_as_group: Annotated[int, _UID, Meta(description="Group id.")] = 65532


class UpdateStrategy(Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """How a change of the agents' pods reaches the nodes. A restarted agent starts empty."""

    type: Annotated[
        Literal["OnDelete", "RollingUpdate"],
        Meta(
            description="OnDelete: a node gets its new pod when somebody deletes the old one. "
            "RollingUpdate: the nodes follow by themselves, maxUnavailable at a time."
        ),
    ] = "OnDelete"
    max_unavailable: Annotated[
        Scalar,
        Meta(
            description="How many nodes may be without a ready agent during a RollingUpdate: a "
            "number of 1 or more, or 1% to 100%."
        ),
    ] = 1


class Toleration(Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """A taint that agents tolerate."""

    key: Annotated[str, text("Key of the taint. Left out with Exists: every taint.")] | None = None
    operator: Annotated[
        Literal["Exists", "Equal"],
        Meta(description="Exists takes any value of the taint, Equal takes the one given."),
    ] = "Equal"
    value: Annotated[str, Meta(max_length=63, description="Value for Equal.")] | None = None
    effect: (
        Annotated[
            Literal["NoSchedule", "PreferNoSchedule", "NoExecute"],
            Meta(description="Effect of the taint. Left out: every effect."),
        ]
        | None
    ) = None
    toleration_seconds: (
        Annotated[
            int,
            Meta(
                ge=0,
                le=31_536_000,
                description="How long NoExecute is tolerated. Left out: for ever.",
            ),
        ]
        | None
    ) = None


class EnvVar(Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """A variable of the agent's container."""

    name: Annotated[str, text("Name of the variable.", pattern=ENV_NAME)]
    value: (
        Annotated[str, Meta(max_length=32768, description="Value; $(NAME) is expanded.")] | None
    ) = None
    value_from: (
        Annotated[
            FreeForm,
            free("Source of the value, as in a pod: configMapKeyRef, secretKeyRef, fieldRef."),
        ]
        | None
    ) = None
