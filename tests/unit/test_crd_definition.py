"""What holds for the definition as a document, before any API server reads it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from lmcache_nodeagent.config import OPTIONS
from lmcache_operator.api.crd import definition, root_schema

CLIENT_SIDE_APPLY_BYTES = 262_144  # `kubectl apply` keeps the whole object in an annotation

FIELD_OF_FLAG = {
    "port": "server.port",
    "http_port": "server.httpPort",
    "chunk_size": "server.chunkSize",
    "max_cpu_workers": "server.maxCPUWorkers",
    "max_gpu_workers": "server.maxGPUWorkers",
    "worker_reap_timeout_seconds": "reaping.reapTimeoutSeconds",
    "worker_registration_grace_seconds": "reaping.registrationGraceSeconds",
    "worker_heartbeat_interval_seconds": "reaping.heartbeatIntervalSeconds",
    "hint_confirm_seconds": "reaping.hints.confirmSeconds",
    "close_confirm_seconds": "reaping.hints.closeConfirmSeconds",
    "device_plugin_slots": "transport.devicePlugin.slots",
    "prestart_wait_seconds": "transport.devicePlugin.preStartWaitSeconds",
}

ZERO_COUNTS = {"prestart_wait_seconds"}
"""Flags whose 0 is a figure like any other."""


def below(path: str, schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a schema and everything in it, each with its path."""
    yield path, schema
    for name, part in schema.get("properties", {}).items():
        yield from below(f"{path}.{name}", part)
    for key in ("items", "additionalProperties"):
        if key in schema:
            yield from below(f"{path}[]", schema[key])


def spec_and_status() -> list[tuple[str, dict[str, Any]]]:
    """Return every part of spec and status."""
    root = root_schema()["properties"]
    return [*below("spec", root["spec"]), *below("status", root["status"])]


def test_everything_is_described_and_typed() -> None:
    """A structural schema has a type everywhere; a person needs words everywhere."""
    for path, schema in spec_and_status():
        assert schema["description"], path
        assert "type" in schema or schema["x-kubernetes-int-or-string"], path


def test_nothing_is_unbounded() -> None:
    """CEL's cost estimate needs the length of every list, map and text that a rule may read."""
    for path, schema in spec_and_status():
        match schema.get("type"):
            case "array":
                assert "maxItems" in schema, path
            case "string":
                assert {"maxLength", "enum", "format"} & schema.keys(), path
            case "object" if "additionalProperties" in schema:
                assert "maxProperties" in schema, path
            case "integer" if path.startswith("spec"):
                assert {"minimum", "maximum"} <= schema.keys(), path


def test_defaults_are_full_literals() -> None:
    """An object's default says what its fields' defaults say."""
    for path, schema in spec_and_status():
        parts = schema.get("properties", {})
        if "default" in schema and parts:
            given = {name: part["default"] for name, part in parts.items() if "default" in part}
            assert schema["default"] == given, path


def test_status_has_no_defaults() -> None:
    """There, absence means not known."""
    assert not [path for path, part in spec_and_status() if "default" in part and "status" in path]


def test_bounds_and_defaults_are_those_of_the_flags() -> None:
    """A field that sets a flag takes what the flag takes, in whole numbers and above nothing."""
    schemas = dict(spec_and_status())
    options = {option.field_name: option for option in OPTIONS}
    for name, path in FIELD_OF_FLAG.items():
        schema, option = schemas[f"spec.{path}"], options[name]
        assert option.flag.bounds is not None
        bounds = option.flag.bounds
        least = 0 if bounds.zero_is_off or name in ZERO_COUNTS else max(bounds.low, 1)
        assert (schema["minimum"], schema["maximum"]) == (least, option.flag.bounds.high), path
        assert schema.get("default") == option.default, path


def test_it_can_be_applied_by_any_client() -> None:
    """Also by those that keep what they applied in an annotation."""
    assert len(json.dumps(definition())) < CLIENT_SIDE_APPLY_BYTES
