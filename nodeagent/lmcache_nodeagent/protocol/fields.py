"""The payload frames that operations are put together from: name, type, largest size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from lmcache_nodeagent.protocol.limits import LIMITS
from lmcache_nodeagent.protocol.messages import (
    BlockIds,
    CacheKey,
    EngineGroupInfo,
    EngineType,
    InstanceNumber,
    LayoutHints,
    ModelName,
    Positive,
    TensorDescriptor,
    Text,
)


@dataclass(frozen=True, slots=True)
class PayloadField:
    """One payload frame: its name in messages, the type it decodes to, and its largest size."""

    name: str
    type: object
    max_bytes: int


TENSORS = list[TensorDescriptor]
"""Payload type of device descriptors; each is an ext document of its own (`descriptors.py`)."""


def scalar(name: str, kind: object) -> PayloadField:
    """A frame of one number, boolean or nil."""
    return PayloadField(name, kind, LIMITS.scalar_bytes)


def text(name: str, kind: object = Text) -> PayloadField:
    """A frame of one string."""
    return PayloadField(name, kind, LIMITS.text_bytes)


def document(name: str, kind: object) -> PayloadField:
    """A frame of one small map."""
    return PayloadField(name, kind, LIMITS.max_document_bytes)


def listed(name: str, item: object, max_items: int, max_bytes: int) -> PayloadField:
    """A frame of a list of at most `max_items`."""
    kind = Annotated[list[item], Meta(max_length=max_items)]  # type: ignore[valid-type]
    return PayloadField(name, kind, max_bytes)


def numbers(name: str) -> PayloadField:
    """A frame of a short list of integers."""
    return listed(name, int, LIMITS.max_tensors, LIMITS.max_document_bytes)


KEY = PayloadField("key", CacheKey, LIMITS.key_bytes)
INSTANCE = scalar("instance_id", InstanceNumber)
MODEL = text("model_name", ModelName)
REQUEST = text("request_id")
BLOCKS = PayloadField("block_ids", BlockIds, LIMITS.block_ids_bytes)
EVENT = PayloadField("event_handle", bytes, LIMITS.max_event_bytes)
SHARDS = scalar("tp_size", int)  # decoded and ignored, here as upstream


def registration(tensors: str) -> tuple[PayloadField, ...]:
    """All frames of a registration; `tensors` names the frame of device descriptors."""
    groups = listed("engine_group_infos", EngineGroupInfo, LIMITS.max_block_lists, LIMITS.key_bytes)
    return (
        INSTANCE,
        PayloadField(tensors, TENSORS, LIMITS.tensors_bytes),
        MODEL,
        scalar("world_size", Positive),
        text("engine_type", EngineType),
        document("layout_hints", LayoutHints),
        groups,
    )
