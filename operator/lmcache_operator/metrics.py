"""What the operator counts, in the form that Prometheus scrapes.

The parts count in plain mappings of their own; those are read at each scrape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics import disable_created_metrics
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

_PREFIX = "lmcache_kube_operator"


@dataclass(frozen=True, slots=True)
class CountSource:
    """Counts of one subject, told apart by one label.

    Attributes:
        name: without prefix and `_total`.
        about: in words.
        label: what the keys of the mapping are.
        read: the counts since the start.
        is_now: they are of this moment instead.
    """

    name: str
    about: str
    label: str
    read: Callable[[], Mapping[str, int]]
    is_now: bool = False


@dataclass(frozen=True, slots=True)
class GaugeSource:
    """Something that is so now; None while it is not known."""

    name: str
    about: str
    read: Callable[[], float | None]


class Metrics:
    """Everything counted in this process, on a registry of its own."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        self._sources = _Sources()
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self._registry)
        self._registry.register(self._sources)
        self._passes = Counter(
            f"{_PREFIX}_passes",
            "Passes over one server, by outcome: done, refused, unreachable or crashed.",
            ["outcome"],
            registry=self._registry,
        )
        self._writes = Counter(
            f"{_PREFIX}_writes",
            "Objects written because they differed, by kind; LMCacheServer stands for its status.",
            ["kind"],
            registry=self._registry,
        )

    def read_at_scrape(self, counts: Sequence[CountSource], gauges: Sequence[GaugeSource]) -> None:
        """Have these read from now on, too."""
        self._sources.counts += counts
        self._sources.gauges += gauges

    def count_write(self, kind: str) -> None:
        """Count an object of a kind that was written because it differed."""
        self._writes.labels(kind).inc()

    def count_pass(self, outcome: str) -> None:
        """Count a pass over a server."""
        self._passes.labels(outcome).inc()

    def exposition(self) -> tuple[bytes, str]:
        """Return the page and its content type."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST


class _Sources(Collector):
    def __init__(self) -> None:
        self.counts: list[CountSource] = []
        self.gauges: list[GaugeSource] = []

    def collect(self) -> Iterator[Metric]:
        for counted in self.counts:
            kind = GaugeMetricFamily if counted.is_now else CounterMetricFamily
            family = kind(f"{_PREFIX}_{counted.name}", counted.about, labels=[counted.label])
            for value, count in sorted(counted.read().items()):
                family.add_metric([str(value)], count)
            yield family
        for gauge in self.gauges:
            if (now := gauge.read()) is not None:
                yield GaugeMetricFamily(f"{_PREFIX}_{gauge.name}", gauge.about, value=now)
