"""Metrics: counters that events feed, gauges that are read at the scrape."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics import disable_created_metrics
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from lmcache_nodeagent.events import Event
from lmcache_nodeagent.observability.metric_catalog import COUNTED, PREFIX, Counted, Sampled
from lmcache_nodeagent.protocol.operations import OPERATIONS

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
"""Media type of `Metrics.text`."""

Reading = Mapping[Sampled, float | Mapping[str, float]]
"""One snapshot: a number per metric, or a number per value of its label."""

Source = Callable[[], Reading]
"""Takes a snapshot; called at each scrape, on the thread that asked."""


class Metrics:
    """A registry of its own, so that several agents can live in one process.

    Threads: any; `__call__` mostly on `events`.
    """

    def __init__(self, sources: Sequence[Source] = ()) -> None:
        # Otherwise each counter brings a gauge of its birth that nobody reads.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        self._fed: defaultdict[type[Event], list[tuple[Counted, Counter | Histogram]]]
        self._fed = defaultdict(list)
        for counted in COUNTED:
            self._fed[counted.event].append((counted, _metric(counted, self._registry)))
        self._registry.register(_SnapshotCollector(sources))
        ProcessCollector(registry=self._registry)

    def __call__(self, event: Event) -> None:
        """Count one event."""
        for counted, metric in self._fed.get(type(event), ()):
            amount = float(getattr(event, counted.amount)) if counted.amount else 1.0
            labels = {name: _label(name, getattr(event, name)) for name in counted.labels}
            child = metric.labels(**labels) if labels else metric
            if isinstance(child, Histogram):
                child.observe(amount)
            else:
                child.inc(amount)

    def text(self) -> bytes:
        """Return everything in the text format that `CONTENT_TYPE` names."""
        return generate_latest(self._registry)


class _SnapshotCollector(Collector):
    """Reads the sources at each scrape; nothing is kept in between."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = tuple(sources)

    def describe(self) -> list[Metric]:
        """Return nothing, so that registering does not read a snapshot."""
        return []

    def collect(self) -> Iterator[Metric]:
        for source in self._sources:
            for sampled, reading in source().items():
                yield _family(sampled, reading)


def _metric(counted: Counted, registry: CollectorRegistry) -> Counter | Histogram:
    name = PREFIX + counted.name
    if counted.buckets:
        return Histogram(
            name, counted.about, counted.labels, buckets=counted.buckets, registry=registry
        )
    return Counter(name, counted.about, counted.labels, registry=registry)


def _family(sampled: Sampled, reading: float | Mapping[str, float]) -> Metric:
    kind = GaugeMetricFamily if sampled.kind == "gauge" else CounterMetricFamily
    family = kind(PREFIX + sampled.name, sampled.about, labels=sampled.labels)
    if isinstance(reading, Mapping):
        for label, value in reading.items():
            family.add_metric([label], value)
    else:
        family.add_metric([], reading)
    return family


def _label(name: str, value: object) -> str:
    """Write a label's value; a name of an operation that a peer made up becomes `unknown`."""
    if isinstance(value, bool):
        return str(value).lower()
    text = str(value)
    return "unknown" if name == "operation" and text not in OPERATIONS else text
