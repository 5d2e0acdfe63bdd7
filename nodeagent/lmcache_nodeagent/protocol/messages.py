"""The documents of the operations that vLLM's connector uses, and the rules they keep.

Types and defaults are those of LMCache's multiprocess mode. Unknown keys are ignored,
missing optional ones take the default, integers are never booleans or floats. The rules hold
when a document is decoded; a Struct built in code is only checked by its `__post_init__`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Literal

from msgspec import Meta, Struct

from lmcache_nodeagent.ids import MAX_INSTANCE_ID
from lmcache_nodeagent.protocol.limits import LIMITS

InstanceNumber = Annotated[int, Meta(ge=0, le=MAX_INSTANCE_ID)]
"""An instance id on the wire; see `ids.InstanceId`."""

NonNegative = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Text = Annotated[str, Meta(max_length=LIMITS.max_string_bytes)]

ModelName = Annotated[str, Meta(max_length=LIMITS.max_string_bytes, pattern=r"\A[^@]*\Z")]
"""Cache namespace. L2 file names separate their parts by `@`."""

CacheSalt = Annotated[str, Meta(max_length=128, pattern=r"\A[^@/\\\0]*\Z")]
"""Isolation namespace inside a model; it becomes part of L2 file names as well."""

TokenIds = Annotated[list[int], Meta(max_length=LIMITS.max_tokens)]
"""Token ids; that each fits uint32 is checked where they are hashed."""

BlockIdList = Annotated[list[NonNegative], Meta(max_length=LIMITS.max_block_ids)]
BlockIds = Annotated[list[BlockIdList], Meta(max_length=LIMITS.max_block_lists)]
"""One list of paged block ids for each `EngineGroupInfo` of the registration, in its order."""

# Settings travel as they came in the user's request. Typing them to this depth bounds the nesting
# and leaves no place for ext types.
_Scalar = str | int | float | bool | None
_Setting1 = _Scalar | list[_Scalar] | dict[str, _Scalar]
_Setting2 = _Scalar | list[_Setting1] | dict[str, _Setting1]
_Setting3 = _Scalar | list[_Setting2] | dict[str, _Setting2]
RequestConfigs = dict[str, _Setting3]
"""Per-request settings (`lmcache.*`), at most four containers deep; the agent ignores them."""


class CacheKey(Struct, frozen=True):
    """What a transfer or lookup is about: tokens [start, end) of a prompt, for one KV shard.

    `token_ids` is the whole sequence that the client knows. `worker_id` is the shard, below
    `world_size`, or None for all shards (scheduler requests). `num_kv_readers` is the number of
    read locks that a lookup takes on each object.
    """

    model_name: ModelName
    world_size: Positive
    worker_id: NonNegative | None
    token_ids: TokenIds
    start: NonNegative
    end: NonNegative
    request_id: Text
    cache_salt: CacheSalt = ""
    request_configs: RequestConfigs | None = None
    num_kv_readers: NonNegative = 0

    def __post_init__(self) -> None:
        """Check what concerns two fields.

        Raises:
            ValueError: Names both fields; a decode error when it comes off the wire.
        """
        if self.start > self.end:
            raise ValueError(f"start {self.start} is beyond end {self.end}")
        if self.worker_id is not None and self.worker_id >= self.world_size:
            raise ValueError(f"worker_id {self.worker_id} is outside world_size {self.world_size}")


class EngineType(StrEnum):
    """The engines whose workers register."""

    VLLM = "vllm"
    ATOM = "atom"
    SGLANG = "sglang"
    TRTLLM = "trtllm"
    MOCK = "mock"


class LayoutHints(Struct, frozen=True):
    """What the tensors' shapes do not tell.

    `kv_layout` is the order of the token and head dimensions of the shapes on the wire.
    """

    kv_layout: Literal["NHD", "HND", "BLHNC", "BLNHC"] | None = None
    num_kv_heads: Positive | None = None
    tokens_per_block: Positive | None = None
    kv_list_layout: Literal["k_v", "unified"] | None = None
    head_dim: Positive | None = None


class EngineGroupInfo(Struct, frozen=True):
    """Layers of one engine KV-cache group that share a physical form.

    `layer_indices` index the registration's tensors. `tokens_per_block` 0 takes the tensor's own
    figure; `sw_size_tokens` is the sliding window, -1 for full attention; a tag above 0 sets the
    group's objects apart from the others.
    """

    engine_group_id: NonNegative
    layer_indices: Annotated[list[NonNegative], Meta(max_length=LIMITS.max_tensors)]
    tokens_per_block: NonNegative = 0
    sw_size_tokens: Annotated[int, Meta(ge=-1)] = -1
    extra_object_group_tag: NonNegative = 0
    recurrent_state: bool = False


class TensorMetadata(Struct, frozen=True, forbid_unknown_fields=True):
    """A strided view into its storage: strides and offset in elements, dtype without `torch.`."""

    dtype: Text
    shape: Annotated[list[NonNegative], Meta(max_length=LIMITS.max_dimensions)]
    stride: Annotated[list[NonNegative], Meta(max_length=LIMITS.max_dimensions)]
    storage_offset: NonNegative
    device_uuid: Text

    def span_elements(self) -> int:
        """Elements from the start of the storage to the end of the view; 0 for an empty view."""
        if 0 in self.shape:
            return 0
        steps = zip(self.shape, self.stride, strict=True)
        return self.storage_offset + 1 + sum((size - 1) * stride for size, stride in steps)


class TensorDescriptor(Struct, frozen=True):
    """One KV tensor of a worker: an ext 1 document, decoded by `descriptors.decode_tensor`.

    `type` is the kind of memory. Host memory (`cpu_shm`) is described in full: the POSIX segment
    name with its leading slash ("" for an empty tensor) and the size of the whole segment. Of
    the other kinds only `metadata` is kept, which `npu` has not at the top level.
    """

    type: Literal["cpu_shm", "cuda", "cuda_raw", "cuda_vmm", "musa", "npu"]
    metadata: TensorMetadata | None = None
    shm_name: Text = ""
    nbytes: NonNegative = 0


class BlockAllocationRecord(Struct, frozen=True):
    """Blocks and tokens that one request gained in a scheduler step; feeds metrics only."""

    req_id: Text
    new_block_ids: BlockIdList
    new_token_ids: TokenIds


class EngineDrivenRegistration(Struct, frozen=True):
    """Registration of a worker that copies by itself (operation 14).

    `use_mla` means a single plane; `num_physical_slots` is the token slots in a chunk, None for
    as many as tokens.
    """

    instance_id: InstanceNumber
    model_name: ModelName
    world_size: Positive
    block_size: Positive
    num_layers: Positive
    hidden_dim_size: Positive
    dtype_str: Text
    use_mla: bool
    num_physical_slots: Positive | None = None


class SharedPoolInfo(Struct, frozen=True):
    """Where engine-driven workers find L1: segment name without a leading slash, size in bytes.

    An empty name tells them to send the bytes in their messages.
    """

    shm_name: str = ""
    pool_size: int = 0


class PoolSlot(Struct, frozen=True):
    """One chunk's place in the shared pool: `offset` and `length` in bytes."""

    offset: int
    length: int
    shape: list[int]
    dtype: str


class SlotContext(Struct, frozen=True, omit_defaults=True):
    """The slots of one engine-driven transfer; without slots it is the empty map.

    `chunk_indices` (stores only) are the chunks within [start, end) that want writing, one for
    each slot.
    """

    slots: list[PoolSlot] | None = None
    chunk_indices: list[int] | None = None


class PrepareStoreReply(Struct, frozen=True):
    """Answer to prepare_store; a context without slots makes the worker send its bytes."""

    context: SlotContext


@dataclass(frozen=True, slots=True)
class EncodedReply:
    """A reply's document, made where its bytes may be read, and sent without another copy."""

    document: memoryview


class PrepareRetrieveReply(Struct, frozen=True):
    """Answer to prepare_retrieve; `data` stays empty where there is a shared pool."""

    success: bool
    data: bytes
    context: SlotContext
