"""Which pods are workers of a server, as the API server is asked for them. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

from lmcache_operator.api.workers import PodSelector, Requirement, Workers
from lmcache_operator.names import WORKER_LABEL


@dataclass(frozen=True, slots=True, order=True)
class Selection:
    """The pods of one namespace that carry certain labels.

    Servers that select the same share it, and so one watch.
    """

    namespace: str
    label_selector: str


def selections_of(namespace: str, name: str, workers: Workers) -> frozenset[Selection]:
    """Return where the workers of a server are: one selection for each namespace."""
    labels = label_selector(name, workers.pod_selector)
    return frozenset(Selection(each, labels) for each in workers.namespaces or (namespace,))


def label_selector(name: str, selector: PodSelector | None) -> str:
    """Write the selector of a server as the query parameter that lists and watches take."""
    if selector is None:
        return f"{WORKER_LABEL}={name}"
    equal = [f"{key}={value}" for key, value in sorted(selector.match_labels.items())]
    return ",".join([*equal, *sorted(map(_condition, selector.match_expressions))])


def _condition(requirement: Requirement) -> str:
    values = ",".join(sorted(requirement.values))
    match requirement.operator:
        case "In":
            return f"{requirement.key} in ({values})"
        case "NotIn":
            return f"{requirement.key} notin ({values})"
        case "Exists":
            return requirement.key
        case "DoesNotExist":
            return f"!{requirement.key}"
        case _:
            assert_never(requirement.operator)
