"""Identifiers used across the agent, and the one way an instance id is written for people."""

from __future__ import annotations

from typing import NewType

InstanceId = NewType("InstanceId", int)
"""One registered engine worker: an integer in 0..2**63-1, chosen by the worker."""

RoutingId = NewType("RoutingId", bytes)
"""ROUTER routing id of one connection; libzmq makes a new one for each connection."""

MAX_INSTANCE_ID = 2**63 - 1
"""Largest instance id: stock clients mask a UUID to 63 bits (worker-liveness design, section 4)."""


def render_instance_id(instance_id: InstanceId) -> str:
    """Write an id as a decimal string: JSON readers in JavaScript and jq round 63-bit numbers."""
    return str(int(instance_id))
