"""Makes the CustomResourceDefinition of the API's types and rules.

`make generate` writes it to `crds/`. Kubernetes takes a *structural* schema: no references, every
object spelled out. Defaults are full literals at each level, since a default is checked against
the rules of its object before the defaults below it are filled in.
"""

from __future__ import annotations

from typing import cast

import msgspec

from lmcache_operator.api.fields import FreeForm
from lmcache_operator.api.root import Spec
from lmcache_operator.api.rules import all_rules
from lmcache_operator.api.status import Status

GROUP = "lmcache-kube.dev"
VERSION = "v1alpha1"
KIND = "LMCacheServer"
PLURAL = "lmcacheservers"

LONGEST_NAME = 40

_RULES = "x-kubernetes-validations"

# A DNS-1035 label: Services are named after the object, and their names may not begin with a digit.
_NAME = {
    "type": "string",
    "description": f"A DNS label of at most {LONGEST_NAME} characters that begins with a letter, "
    "since Services are named after it.",
    "maxLength": LONGEST_NAME,
    "pattern": "^[a-z]([-a-z0-9]*[a-z0-9])?$",
}
_ABOUT = (
    "One LMCache server for the nodes it selects: an agent on each of them keeps the KV cache of "
    "the vLLM workers there, and releases the memory of workers that died."
)
_COLUMNS = (
    ("Desired", "integer", ".status.desiredNodes"),
    ("Ready", "integer", ".status.readyNodes"),
    ("Workers", "integer", ".status.registeredWorkers"),
    ("Reaps", "integer", ".status.reaping.total"),
    ("Last-Reap", "date", ".status.reaping.lastReapTime"),
    ("Status", "string", '.status.conditions[?(@.type=="Ready")].reason'),
    ("Age", "date", ".metadata.creationTimestamp"),
)


def definition() -> FreeForm:
    """Return the CustomResourceDefinition as an object to apply."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": KIND.lower(),
                "shortNames": ["lmcs"],
            },
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "subresources": {"status": {}},
                    "additionalPrinterColumns": [
                        {"name": name, "type": kind, "jsonPath": path}
                        for name, kind, path in _COLUMNS
                    ],
                    "schema": {"openAPIV3Schema": root_schema()},
                }
            ],
        },
    }


def root_schema() -> FreeForm:
    """Return the structural schema of the whole object, rules included."""
    (spec, status), types = msgspec.json.schema_components([Spec, Status])
    schema: FreeForm = {
        "description": _ABOUT,
        "type": "object",
        "required": ["spec"],
        "properties": {
            "metadata": {"type": "object", "properties": {"name": _NAME}},
            "spec": _structural(spec, types, with_defaults=True),
            "status": _structural(status, types, with_defaults=False),
        },
    }
    for rule in all_rules():
        place = at_path(schema, rule.path)
        place[_RULES] = [*place.get(_RULES, ()), rule.schema()]
    return schema


def at_path(schema: FreeForm, path: str) -> FreeForm:
    """Return the part of a schema at a path such as `spec.env[]`."""
    for step in path.split("."):
        schema = schema["properties"][step.removesuffix("[]")]
        if step.endswith("[]"):
            schema = schema["items"]
    return schema


def _structural(node: FreeForm, types: FreeForm, *, with_defaults: bool) -> FreeForm:
    """Turn a JSON schema with references into a structural one.

    Args:
        node: the schema of one value.
        types: what references name.
        with_defaults: keep defaults; status has none, since absence there means not known.
    """
    found = _merged(node, types)
    default = _given_default(found.pop("default", None)) if with_defaults else None
    found.pop("default", None)
    found.pop("title", None)
    if found.pop("additionalProperties", None) not in (None, False):
        found["additionalProperties"] = _structural(
            _merged(node, types)["additionalProperties"], types, with_defaults=with_defaults
        )
    if "enum" in found:  # msgspec leaves the type of a Literal unsaid
        found["type"] = "string"
    if "items" in found:
        found["items"] = _structural(found["items"], types, with_defaults=with_defaults)
    if "properties" in found:
        found["properties"] = {
            name: _structural(part, types, with_defaults=with_defaults)
            for name, part in found["properties"].items()
        }
    if not found.get("required", True):
        del found["required"]
    if default is not None:
        found["default"] = default
    return _with_facts(found)


def _merged(node: FreeForm, types: FreeForm) -> FreeForm:
    """Follow references, and join the one real alternative of an optional value into it."""
    merged = {key: value for key, value in node.items() if key not in {"$ref", "anyOf"}}
    if "$ref" in node:
        merged = {**types[node["$ref"].removeprefix("#/$defs/")], **merged}
    alternatives = [part for part in node.get("anyOf", ()) if part != {"type": "null"}]
    if len(alternatives) == 1:
        return {**_merged(alternatives[0], types), **merged}
    if alternatives:
        merged["x-kubernetes-int-or-string"] = True
    return merged


def _given_default(value: object) -> object:
    """Drop what is left out by default: nothing, empty lists and maps."""
    if isinstance(value, dict):
        members = cast("FreeForm", value).items()
        value = {name: kept for name, part in members if (kept := _given_default(part)) is not None}
    return value if value or isinstance(value, bool | int) else None


def _with_facts(found: FreeForm) -> FreeForm:
    """Add default and bounds to the words: `kubectl explain` shows neither."""
    words = [" ".join(found.get("description", "").split())]
    if "maximum" in found and "Allowed:" not in words[0]:
        words.append(f"Allowed: {found['minimum']} to {found['maximum']}.")
    default = found.get("default")
    if default is not None and not isinstance(default, dict):
        shown = str(default).lower() if isinstance(default, bool) else str(default)
        words.append(f"Default: {shown}.")
    found["description"] = " ".join(words)
    # What people look for first stands first.
    order = ("description", "type", "default", "enum")
    return {key: found[key] for key in (*order, *found) if key in found}
