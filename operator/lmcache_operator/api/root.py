"""The spec as a whole."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from lmcache_operator.api.agent import Cache, Reaping, Server
from lmcache_operator.api.fields import FreeForm, free, free_with, listed, mapped, text
from lmcache_operator.api.pod import (
    EnvVar,
    Gpu,
    Image,
    ImagePullSecret,
    Security,
    Toleration,
    UpdateStrategy,
)
from lmcache_operator.api.transport import Transport
from lmcache_operator.api.workers import Workers

_LabelValue = Annotated[str, Meta(max_length=63, description="Value of a label.")]
_Annotation = Annotated[str, Meta(max_length=65536, description="Value of an annotation.")]
_VolumeItem = Annotated[FreeForm, free_with("A volume, as in a pod.", name="Name of the volume.")]
_MountItem = Annotated[
    FreeForm,
    free_with(
        "A mount, as in a pod.",
        name="Name of the volume.",
        mountPath="Absolute path in the container.",
    ),
]


class Spec(Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """What is wanted: one agent on each selected node, and how it treats its workers.

    Only cache.size is required.
    """

    cache: Cache
    image: Image = Image()
    image_pull_secrets: Annotated[
        tuple[ImagePullSecret, ...],
        listed("Secrets for pulling the image.", most=16, kind="map", key="name"),
    ] = ()
    workers: Workers = Workers()
    server: Server = Server()
    reaping: Reaping = Reaping()
    gpu: Gpu = Gpu()
    transport: Transport = Transport()
    security: Security = Security()
    update_strategy: UpdateStrategy = UpdateStrategy()
    node_selector: Annotated[
        dict[str, _LabelValue],
        mapped("Labels of the nodes that get an agent. Left out: every node."),
    ] = {}
    affinity: (
        Annotated[FreeForm, free("Finer choice of nodes, as in a pod: nodeAffinity.")] | None
    ) = None
    tolerations: Annotated[
        tuple[Toleration, ...],
        listed("Taints that agents tolerate: those of your GPU nodes.", most=64),
    ] = ()
    priority_class_name: (
        Annotated[
            str,
            text("PriorityClass of the agents' pods; system-node-critical keeps them longest."),
        ]
        | None
    ) = None
    runtime_class_name: Annotated[str, text("RuntimeClass of the agents' pods.")] | None = None
    resources: (
        Annotated[
            FreeForm,
            free(
                "Requests and limits of the agent's container, as in a pod. cache.size is added to "
                "the memory figures; left out, 500m CPU and 512Mi beside the cache are requested."
            ),
        ]
        | None
    ) = None
    pod_labels: Annotated[
        dict[str, _LabelValue], mapped("Further labels of the agents' pods.")
    ] = {}
    pod_annotations: Annotated[
        dict[str, _Annotation], mapped("Further annotations of the agents' pods.")
    ] = {}
    env: Annotated[
        tuple[EnvVar, ...],
        listed(
            "Further variables of the agent's container. Names that begin with LMCACHE_KUBE_ are "
            "flags and are refused here.",
            most=64,
            kind="map",
            key="name",
        ),
    ] = ()
    volumes: Annotated[
        tuple[_VolumeItem, ...],
        listed("Further volumes of the agents' pods.", most=32, kind="map", key="name"),
    ] = ()
    volume_mounts: Annotated[
        tuple[_MountItem, ...],
        listed("Further mounts of the agent's container.", most=32, kind="map", key="mountPath"),
    ] = ()
    termination_grace_period_seconds: Annotated[
        int,
        Meta(
            ge=5,
            le=3600,
            description="Time that an agent gets to answer what it has begun and to stop.",
        ),
    ] = 30
