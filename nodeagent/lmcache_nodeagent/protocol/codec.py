"""From frames to checked values and back. Pure; thread: any with the default stack size.

Nothing a peer sends raises anything but a `RequestError`. Counts and sizes are checked before
anything is decoded, and the decoders are typed, so that no frame costs more than its own bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, cast

import msgspec
from msgspec.msgpack import Decoder, Ext

from lmcache_nodeagent.errors import AgentError, MalformedRequest, UnknownOperation
from lmcache_nodeagent.ids import InstanceId
from lmcache_nodeagent.protocol.descriptors import decode_tensor
from lmcache_nodeagent.protocol.fields import TENSORS, PayloadField
from lmcache_nodeagent.protocol.limits import LIMITS
from lmcache_nodeagent.protocol.messages import (
    CacheKey,
    EncodedReply,
    EngineDrivenRegistration,
    InstanceNumber,
    TensorDescriptor,
)
from lmcache_nodeagent.protocol.operations import (
    LMCACHE_RELEASE,
    OPERATIONS,
    OPERATIONS_BY_ID,
    Operation,
)
from lmcache_nodeagent.protocol.prompts import PromptMemory

Frame = bytes | memoryview
"""One frame of a message. A large one may lie in memory that is libzmq's: it is not copied until it
is decoded."""

_MAX_OPERATION_BYTES = 128
_MAX_REASON_CHARS = 500


class _InstanceOnly(msgspec.Struct):
    """The one key of a registration map that the router needs."""

    instance_id: InstanceNumber


_integer = Decoder(int)
_operation = Decoder(int | str)
_data = Decoder(memoryview)
_flag = Decoder(bool | Literal[0, 1])
_instance_only = Decoder(_InstanceOnly)
_tensors = Decoder(Annotated[list[Ext], msgspec.Meta(max_length=LIMITS.max_tensors)])


# By identity: hashing a typing construct takes longer than decoding a number. The table of
# operations keeps the types alive.
_decoders: Mapping[int, Decoder[object]] = {
    id(field.type): Decoder(cast("type[object]", field.type))
    for operation in OPERATIONS.values()
    for field in operation.payload
    if field.type not in (TENSORS, memoryview)
}


_keys = PromptMemory(Decoder(CacheKey).decode)


def decode_operation(frame: Frame) -> Operation:
    """Find the operation that a request names, by number or by name.

    Raises:
        MalformedRequest: The frame is neither a msgpack integer nor a string.
        UnknownOperation: The table does not have it.
    """
    if len(frame) > _MAX_OPERATION_BYTES:
        raise MalformedRequest(
            f"operation frame of {len(frame)} bytes; at most {_MAX_OPERATION_BYTES}"
        )
    try:
        value = _operation.decode(frame)
    except msgspec.DecodeError as error:
        raise MalformedRequest(f"operation frame: {error}") from error
    found = OPERATIONS_BY_ID.get(value) if isinstance(value, int) else OPERATIONS.get(value)
    if found is None:
        raise UnknownOperation(f"LMCache {LMCACHE_RELEASE} has no operation {value!r}")
    return found


def is_uid(frame: Frame) -> bool:
    """Tell whether a frame can be a request uid: one msgpack integer and nothing after it."""
    if len(frame) > LIMITS.scalar_bytes:
        return False
    try:
        _integer.decode(frame)
    except msgspec.DecodeError:
        return False
    return True


def read_uid(frame: bytes) -> int:
    """Read a frame that `is_uid`."""
    return _integer.decode(frame)


def head_frames(operation: Operation, uid: int) -> tuple[bytes, bytes]:
    """Encode uid and operation of a reply to a request whose own frames nobody has."""
    return msgspec.msgpack.encode(uid), msgspec.msgpack.encode(operation.wire_id)


def peek_instance_id(operation: Operation, frames: Sequence[Frame]) -> InstanceId | None:
    """Read the instance id of a request and nothing else, in constant time.

    Args:
        operation: What the request asks for.
        frames: Its payload frames; a wrong number of them is left to `decode_payload`.

    Returns:
        None for operations without an instance, a nil id, or a missing frame.

    Raises:
        MalformedRequest: Not an integer in 0..2**63-1.
    """
    index = operation.instance_frame
    if index is None or index >= len(frames):
        return None
    field, frame = operation.payload[index], frames[index]
    _check_size(operation, field, frame)
    value = _decode_field(operation, field, frame, only_instance=True)
    return None if value is None else InstanceId(cast("int", value))


def decode_payload(operation: Operation, frames: Sequence[Frame]) -> tuple[object, ...]:
    """Decode a request's payload frames into the types of `operation.payload`, in their order.

    Raises:
        MalformedRequest: Frame count, a size, a type or a rule of the message is wrong; the text
            names operation and field.
    """
    fields = operation.payload
    if len(frames) != len(fields):
        names = ", ".join(field.name for field in fields) or "none"
        raise MalformedRequest(
            f"{operation.name} takes {len(fields)} payload frames ({names}), got {len(frames)}"
        )
    pairs = list(zip(fields, frames, strict=True))
    for field, frame in pairs:
        _check_size(operation, field, frame)
    return tuple(_decode_field(operation, field, frame) for field, frame in pairs)


def encode_reply(operation: Operation, value: object) -> Frame | None:
    """Encode a reply document; None stands for a reply without a payload frame.

    One that is encoded already stays as it is.

    Raises:
        AgentError: The value is not what the operation answers. Stock clients must not see it:
            they cannot decode it either.
    """
    if isinstance(value, EncodedReply):
        return value.document
    if type(value) is operation.reply:  # a plain bool, int or str needs no look inside
        return None if value is None else msgspec.msgpack.encode(value)
    try:
        # bytes are msgpack's own: without saying so, text would pass as base64.
        checked = msgspec.convert(
            value, cast("type[object]", operation.reply), builtin_types=(bytes,)
        )
    except msgspec.ValidationError as error:
        raise AgentError(f"reply of {operation.name}: {error}") from error
    return None if checked is None else msgspec.msgpack.encode(checked)


def mismatched_operation(text: str) -> bytes:
    """Encode the operation frame of a refusal.

    A stock client completes its future with an error that shows this frame when it is not the
    operation it asked for, so the frame carries the reason. Use it only for operations whose
    `negative` is None.
    """
    reason = " ".join(text.split())[:_MAX_REASON_CHARS]
    printable = reason.encode("utf-8", "replace").decode()
    return msgspec.msgpack.encode(f"refused: {printable}")


def _check_size(operation: Operation, field: PayloadField, frame: Frame) -> None:
    if len(frame) > field.max_bytes:
        raise MalformedRequest(
            f"{operation.name}: {field.name}: frame of {len(frame)} bytes;"
            f" at most {field.max_bytes}"
        )


def _decode_field(
    operation: Operation, field: PayloadField, frame: Frame, *, only_instance: bool = False
) -> object:
    try:
        if field.type is memoryview:
            return _data.decode(frame)  # a view of the frame: nothing is copied
        frame = bytes(frame)
        if field.type is TENSORS:
            return _decode_tensors(frame)
        if field.type is bool:
            # 0 and 1 count as well, as upstream; other numbers and strings do not.
            return bool(_flag.decode(frame))
        if only_instance and field.type is EngineDrivenRegistration:
            return _instance_only.decode(frame).instance_id
        if field.type is CacheKey:
            return _keys.decode(frame)
        return _decoders[id(field.type)].decode(frame)
    except RecursionError:
        reason = "nested too deeply"
    except ValueError as error:  # msgspec's errors are ValueErrors too
        reason = str(error)
    raise MalformedRequest(f"{operation.name}: {field.name}: {reason}")


def _decode_tensors(frame: bytes) -> list[TensorDescriptor]:
    tensors = []
    for index, document in enumerate(_tensors.decode(frame)):
        try:
            tensors.append(decode_tensor(document))
        except ValueError as error:
            raise ValueError(f"[{index}]: {error}") from error
    return tensors
