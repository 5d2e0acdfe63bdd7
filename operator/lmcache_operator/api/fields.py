"""How a field of the API says what it is: words, bounds, and the agent's flag it stands for.

A field's annotation is the one place for its description and bounds; the CRD is made of it
(`crd.py`) and stored objects are read by it (`spec.py`). Bounds of a field that sets a flag are the
flag's. They are left to the agent's own check when an object is read, which words them better.
"""

from __future__ import annotations

import math
from typing import Any, Literal

from msgspec import Meta

from lmcache_nodeagent.config import OPTIONS

FreeForm = dict[str, Any]
"""An object of another API (a Kubernetes type) that is passed on as it is and not looked into."""

Scalar = int | str
"""A quantity or int-or-string: Kubernetes takes either form."""

DNS_LABEL = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
ENV_NAME = r"^[A-Za-z_][A-Za-z0-9_.-]*$"

FLAGS = {option.field_name: option for option in OPTIONS}


def flag(name: str, about: str, *, low: int | None = None, per_unit: int = 1) -> Meta:
    """Describe a whole number that sets the agent's `name`, with the bounds of that flag.

    Where 0 switches off, the rule that refuses what lies between stands in `rules.py`.

    Args:
        name: field of the agent's configuration.
        about: what the field is for.
        low: least value, where the API allows less than the flag.
        per_unit: how many of the field's units make one of the flag's, 100 for per cent.
    """
    bounds = FLAGS[name].flag.bounds
    assert bounds is not None, f"{name} has no bounds"
    least = max(math.ceil(bounds.low * per_unit), 1) if low is None else low
    most = math.floor(bounds.high * per_unit)
    off = "0, or " if bounds.zero_is_off else ""
    schema = {"minimum": 0 if bounds.zero_is_off else least, "maximum": most}
    return Meta(description=f"{about} Allowed: {off}{least} to {most}.", extra_json_schema=schema)


def text(about: str, *, pattern: str | None = None, longest: int = 253) -> Meta:
    """Describe a text that is not empty."""
    return Meta(description=about, pattern=pattern, min_length=1, max_length=longest)


def free(about: str) -> Meta:
    """Describe an object of another API, which this one does not look into."""
    schema = {"x-kubernetes-preserve-unknown-fields": True}
    return Meta(description=about, extra_json_schema=schema)


def free_with(about: str, **required: str) -> Meta:
    """Describe an object of another API of which a few texts are known and required."""
    return Meta(
        description=about,
        extra_json_schema={
            "x-kubernetes-preserve-unknown-fields": True,
            "properties": {
                name: {"type": "string", "description": words, "minLength": 1, "maxLength": 4096}
                for name, words in required.items()
            },
            "required": list(required),
        },
    )


def listed(
    about: str,
    *,
    most: int,
    kind: Literal["atomic", "set", "map"] = "atomic",
    key: str | None = None,
) -> Meta:
    """Describe a list. `set` items are unique, `map` items are told apart by `key`."""
    schema: FreeForm = {"x-kubernetes-list-type": kind}
    if key is not None:
        schema["x-kubernetes-list-map-keys"] = [key]
    return Meta(description=about, max_length=most, extra_json_schema=schema)


def mapped(about: str, *, most: int = 64) -> Meta:
    """Describe a map of texts."""
    return Meta(description=about, max_length=most)
