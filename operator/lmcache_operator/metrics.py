"""What the operator counts, in the form that Prometheus scrapes."""

from __future__ import annotations

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)

_PREFIX = "lmcache_kube_operator"


class Metrics:
    """Every counter and gauge of the process, on a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        GCCollector(registry=self.registry)
        self.leader = Gauge(
            f"{_PREFIX}_leader",
            "1 if this operator holds the Lease and acts.",
            registry=self.registry,
        )
        self.reconciles = Counter(
            f"{_PREFIX}_reconciles",
            "Passes over one LMCacheServer, by outcome.",
            ["outcome"],
            registry=self.registry,
        )
        self.writes = Counter(
            f"{_PREFIX}_writes",
            "Objects written because they differed, by kind.",
            ["kind"],
            registry=self.registry,
        )

    def count_write(self, kind: str) -> None:
        """Count an object of a kind that was written because it differed."""
        self.writes.labels(kind).inc()

    def count_pass(self, outcome: str) -> None:
        """Count a pass over a server."""
        self.reconciles.labels(outcome).inc()

    def exposition(self) -> tuple[bytes, str]:
        """Return the page and its content type."""
        return generate_latest(self.registry), CONTENT_TYPE_LATEST
