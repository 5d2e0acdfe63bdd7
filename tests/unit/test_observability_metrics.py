"""Counters follow events, gauges the moment of the scrape, labels stay few."""

from __future__ import annotations

import dataclasses
import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from lmcache_nodeagent import events
from lmcache_nodeagent.ids import InstanceId
from lmcache_nodeagent.observability import metric_catalog as catalog
from lmcache_nodeagent.observability.metric_catalog import COUNTED, PREFIX, SAMPLED, Counted
from lmcache_nodeagent.observability.metrics import Metrics

ID = InstanceId(5)


def samples(metrics: Metrics) -> dict[tuple[str, tuple[str, ...]], float]:
    """Parse the exposition: value by (name, label values)."""
    return {
        (sample.name.removeprefix(PREFIX), tuple(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(metrics.text().decode())
        for sample in family.samples
    }


def test_events_are_counted_by_their_labels() -> None:
    """One event may feed several metrics."""
    metrics = Metrics()
    for reason in ("connection_closed", "connection_closed", "process_exit"):
        metrics(events.InstanceReaped(ID, "m", reason, (), 1.0, 10))
    metrics(events.InstanceReleased(ID, released_bytes=4096, release_seconds=0.01))
    metrics(events.Stored(ID, "m", 4, 3, 300, 0.2, ok=True))
    metrics(events.Stored(ID, "m", 4, 0, 0, 0.2, ok=False))
    found = samples(metrics)
    assert found["instances_reaped_total", ("connection_closed",)] == 2
    assert found["instances_reaped_total", ("process_exit",)] == 1
    assert found["released_bytes_total", ()] == 4096
    assert found["release_seconds_sum", ()] == 0.01
    assert found["stores_total", ("true",)] == found["stores_total", ("false",)] == 1
    assert found["stored_chunks_total", ()] == 3
    assert found["store_seconds_count", ()] == 2


def test_operations_that_a_peer_made_up_share_one_label() -> None:
    """Otherwise a peer could make as many time series as it likes."""
    metrics = Metrics()
    for name in ("store", "made-up-1", "made-up-2"):
        metrics(events.RequestRefused(name, "unknown_operation", "p", ""))
    found = samples(metrics)
    assert found["requests_refused_total", ("store", "unknown_operation")] == 1
    assert found["requests_refused_total", ("unknown", "unknown_operation")] == 2


def test_events_without_a_metric_are_fine() -> None:
    """Not every fact is counted."""
    Metrics()(events.Event())


def test_gauges_are_read_at_each_scrape() -> None:
    """Nothing is remembered between two."""
    used = iter([1.0, 2.0])
    metrics = Metrics(
        [
            lambda: {catalog.L1_USED_BYTES: next(used), catalog.L1_EVICTED_TOTAL: 7},
            lambda: {catalog.INSTANCES: {"active": 2, "idle": 0}},
        ]
    )
    assert samples(metrics)["l1_used_bytes", ()] == 1
    found = samples(metrics)
    assert found["l1_used_bytes", ()] == 2
    assert found["l1_evicted_total", ()] == 7
    assert found["instances", ("active",)] == 2
    assert found["instances", ("idle",)] == 0


def test_two_agents_of_one_process_count_apart() -> None:
    """The registry is not the library's global one."""
    one, other = Metrics(), Metrics()
    one(events.LookedUp("m", 2, 1))
    assert samples(one)["lookups_total", ()] == 1
    assert samples(other)["lookups_total", ()] == 0


def test_the_process_is_measured_too() -> None:
    """Resident memory beside L1 is a promise of the agent."""
    assert samples(Metrics())["process_resident_memory_bytes", ()] > 0


@pytest.mark.parametrize("counted", COUNTED, ids=lambda counted: counted.name)
def test_a_counted_metric_names_fields_that_its_event_has(counted: Counted) -> None:
    """The table refers to fields by name, which no type checker sees."""
    fields = {field.name: field.type for field in dataclasses.fields(counted.event)}
    assert set(counted.labels) <= fields.keys()
    assert not counted.amount or fields[counted.amount] in {"int", "float"}
    assert (counted.kind == "counter") == counted.name.endswith("_total")


def test_no_label_is_an_id_or_a_peer() -> None:
    """Labels have few values by design."""
    labels = {label for metric in COUNTED for label in metric.labels}
    labels |= {label for metric in SAMPLED for label in metric.labels}
    words = {"reason", "window", "trigger", "kind", "outcome"}
    assert labels <= {"operation", "ok", "state", "pool", *words}


def test_names_are_unique_and_carry_their_unit() -> None:
    """Bytes and seconds are the base units of Prometheus."""
    names = [metric.name for metric in COUNTED] + [metric.name for metric in SAMPLED]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[a-z0-9_]+", name) for name in names)
    assert not [name for name in names if re.search(r"_(ms|mb|gb|kb)\b", name)]
