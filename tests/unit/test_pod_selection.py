"""Which pods the API server is asked for."""

from __future__ import annotations

from typing import Any

import pytest

from lmcache_operator.workers.selection import Selection, label_selector, selections_of
from tests.fakes.flow_world import read_server


def workers(**fields: object) -> Any:  # noqa: ANN401  # a part of a spec
    """Read the part of a spec that says which pods are workers."""
    return read_server(workers=fields).workers


def test_without_a_selector_the_label_with_the_servers_name() -> None:
    """In the server's own namespace."""
    assert selections_of("serving", "kv", workers()) == {
        Selection("serving", "lmcache-kube.dev/server=kv")
    }


def test_one_selection_for_each_namespace() -> None:
    """And none for the server's own, unless it is named."""
    found = selections_of("serving", "kv", workers(namespaces=["a", "b"]))
    assert {selection.namespace for selection in found} == {"a", "b"}


@pytest.mark.parametrize(
    ("selector", "written"),
    [
        ({"matchLabels": {"b": "2", "a": "1"}}, "a=1,b=2"),
        ({"matchLabels": {"a": ""}}, "a="),
        (
            {"matchExpressions": [{"key": "a", "operator": "In", "values": ["y", "x"]}]},
            "a in (x,y)",
        ),
        (
            {"matchExpressions": [{"key": "a", "operator": "NotIn", "values": ["x"]}]},
            "a notin (x)",
        ),
        ({"matchExpressions": [{"key": "a", "operator": "Exists"}]}, "a"),
        ({"matchExpressions": [{"key": "a", "operator": "DoesNotExist"}]}, "!a"),
        (
            {
                "matchLabels": {"app": "vllm"},
                "matchExpressions": [
                    {"key": "role", "operator": "Exists"},
                    {"key": "canary", "operator": "DoesNotExist"},
                ],
            },
            "app=vllm,!canary,role",
        ),
    ],
)
def test_selectors_as_the_api_takes_them(selector: dict[str, object], written: str) -> None:
    """All conditions hold together; equal ones are written alike, so that watches are shared."""
    assert label_selector("kv", workers(podSelector=selector).pod_selector) == written
