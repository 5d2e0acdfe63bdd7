"""The operation table: numbers, names and what each operation is allowed to be."""

from __future__ import annotations

import msgspec
import pytest

from lmcache_nodeagent.protocol.codec import encode_reply
from lmcache_nodeagent.protocol.operations import (
    LMCACHE_RELEASE,
    OPERATIONS,
    OPERATIONS_BY_ID,
    Operation,
    Pool,
)
from tests.fixtures.wire.recordings import SESSIONS, load

NUMBERED = {
    1: "register_kv_cache",
    2: "unregister_kv_cache",
    3: "register_q_cache",
    4: "unregister_q_cache",
    5: "store_q",
    6: "store",
    7: "retrieve",
    8: "lookup",
    9: "query_prefetch_status",
    10: "wait_prefetch_status",
    12: "free_lookup_locks",
    13: "end_session",
    14: "register_kv_cache_engine_driven_context",
    15: "unregister_kv_cache_engine_driven_context",
    16: "prepare_store",
    17: "commit_store",
    18: "prepare_retrieve",
    19: "commit_retrieve",
    20: "clear",
    21: "get_chunk_size",
    22: "ping",
    23: "report_block_allocation",
    24: "noop",
    25: "cb_register_rope",
    26: "cb_unregister_rope",
    27: "cb_retrieve_pre_computed",
    28: "cb_unified_lookup",
    29: "p2p_lookup_and_lock",
    30: "p2p_query_lookup_results",
    31: "p2p_unlock_objects",
    32: "get_experimental",
    33: "cb_protocol_handshake",
}
NAMED_ONLY = {"subscribe_kv_events", "server_module_call", "cb_reorder_plan"}
EVERY = pytest.mark.parametrize("operation", OPERATIONS.values(), ids=lambda entry: entry.name)


def test_numbers_are_those_of_the_release() -> None:
    """Each number means what LMCache means by it, and 11 means nothing."""
    assert {number: entry.name for number, entry in OPERATIONS_BY_ID.items()} == NUMBERED


def test_operations_without_a_number_travel_by_name() -> None:
    """The table holds nothing but the numbered operations and three named ones."""
    assert OPERATIONS.keys() == set(NUMBERED.values()) | NAMED_ONLY


@pytest.mark.parametrize("session", SESSIONS)
def test_release_is_the_recorded_one(session: str) -> None:
    """The release that the agent claims to speak is the one whose frames are tested."""
    assert load(session).release == LMCACHE_RELEASE


def test_only_constant_time_operations_run_on_the_router_thread() -> None:
    """A ping never waits behind a registration, a lookup or a copy."""
    inline = {entry.name for entry in OPERATIONS.values() if entry.pool is Pool.INLINE}
    assert inline == {"get_chunk_size", "get_experimental", "noop", "ping"}


def test_signs_of_life_come_from_workers() -> None:
    """Registrations, pings and transfers count; a goodbye or a scheduler's request does not."""
    signs = {entry.wire_id for entry in OPERATIONS.values() if entry.life_sign}
    assert signs == {1, 6, 7, 14, 16, 17, 18, 19, 22, 25, 27}
    assert all(OPERATIONS_BY_ID[sign].instance_frame is not None for sign in signs if sign)


@EVERY
def test_instance_frame_names_an_instance(operation: Operation) -> None:
    """The frame that the router peeks at is the instance id, or the map that holds it."""
    if operation.instance_frame is not None:
        field = operation.payload[operation.instance_frame]
        assert field.name in ("instance_id", "registration")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("store", (b"", False)),
        ("store_q", (b"", False)),
        ("retrieve", (b"", False)),
        ("cb_retrieve_pre_computed", (b"", False)),
        ("query_prefetch_status", 0),
        ("wait_prefetch_status", 0),
        ("prepare_store", {"context": {}}),
        ("commit_store", False),
        ("prepare_retrieve", {"success": False, "data": b"", "context": {}}),
        ("commit_retrieve", True),
        ("ping", False),
    ],
)
def test_hot_path_refusals_are_ordinary_replies(name: str, value: object) -> None:
    """Where stock clients let an exception escape, a refusal is a reply of the usual type."""
    negative = OPERATIONS[name].negative
    assert negative is not None
    decoded = msgspec.msgpack.decode(negative)
    assert decoded == (list(value) if isinstance(value, tuple) else value)
    assert encode_reply(OPERATIONS[name], value) == negative


def test_other_refusals_carry_a_reason() -> None:
    """Everything else is refused by a mismatched operation frame, which shows the reason."""
    in_band = {entry.wire_id for entry in OPERATIONS.values() if entry.negative is not None}
    assert in_band == {5, 6, 7, 9, 10, 16, 17, 18, 19, 22, 27}
