"""How much memory and CPU the agent's container asks for. The cache is part of the memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lmcache_operator.api.root import Spec
from lmcache_operator.errors import SpecError
from lmcache_operator.quantity import whole_units

_DEFAULT_CPU = "500m"
_DEFAULT_OVERHEAD_BYTES = 512 << 20

_BINARY = ((1 << 30, "Gi"), (1 << 20, "Mi"), (1 << 10, "Ki"))


def cache_bytes(spec: Spec) -> int:
    """Return the size of the cache."""
    return whole_units(spec.cache.size)


def quantity_text(size_bytes: int) -> str:
    """Write bytes in the largest binary unit that leaves no rest."""
    for unit_bytes, name in _BINARY:
        if size_bytes % unit_bytes == 0:
            return f"{size_bytes // unit_bytes}{name}"
    return str(size_bytes)


def agent_resources(spec: Spec) -> dict[str, Any]:
    """Return requests and limits of the container.

    The cache is taken in full at the start and is charged to whoever touches its pages first, so
    it is added to every figure for memory. A limit is only set if the spec has one.

    Raises:
        SpecError: a figure for memory is no quantity.
    """
    given = spec.resources or {}
    requests = dict(_section(given, "requests"))
    limits = dict(_section(given, "limits"))
    if "memory" not in requests:
        requests["memory"] = limits.get("memory", _DEFAULT_OVERHEAD_BYTES)
    if spec.resources is None:
        requests["cpu"] = _DEFAULT_CPU
    for name, section in (("requests", requests), ("limits", limits)):
        if "memory" in section:
            overhead = _overhead_bytes(name, section["memory"])
            section["memory"] = quantity_text(overhead + cache_bytes(spec))
    return {**given, "requests": requests, **({"limits": limits} if limits else {})}


def _section(given: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = given.get(name) or {}
    if not isinstance(section, dict):
        raise SpecError([f"spec.resources.{name}: must be a map such as memory: 1Gi: correct it"])
    return section


def _overhead_bytes(section: str, given: object) -> int:
    where = f"spec.resources.{section}.memory"
    if not isinstance(given, str | int) or isinstance(given, bool):
        raise SpecError([f"{where}: {given!r} is no quantity: write 1Gi or a plain number"])
    try:
        return whole_units(given)
    except ValueError as error:
        raise SpecError([f"{where}: {error}"]) from None
