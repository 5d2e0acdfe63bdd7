"""The flags of `lmcache server` 0.5.6 that this agent does not have, and what to do instead.

They are known, so that a command line that worked there fails with a reason and not with a riddle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class UpstreamFlag:
    """One foreign flag. `same_here`: values that ask for what this agent does anyway."""

    name: str
    advice: str
    same_here: tuple[str, ...] = ()

    def problem(self, given: Sequence[str]) -> str | None:
        """Say why the flag with these values is refused; `None` where it changes nothing."""
        if given and all(value in self.same_here for value in given):
            return None
        shown = " ".join([self.name, *given])
        return (
            f"{shown}: {self.name} is a flag of `lmcache server` that this agent does not support: "
            f"{self.advice}"
        )


ACCEPTED_SWITCHES = (
    "--no-gds-l1-use-direct-io",
    "--no-isolated-ipc",
    "--no-l1-use-hugepages",
    "--no-l1-use-lazy",
    "--no-run-script-api-enabled",
    "--no-separate-object-groups",
    "--disable-grpc-metrics",
)
"""Switches that ask for what this agent does anyway; accepted without a word."""


def _each(names: Sequence[str], advice: str) -> tuple[UpstreamFlag, ...]:
    return tuple(UpstreamFlag(name, advice) for name in names)


REFUSED_FLAGS: tuple[UpstreamFlag, ...] = (
    UpstreamFlag("--transport", "workers connect over ZeroMQ; leave it out", ("zmq",)),
    UpstreamFlag("--engine-type", "blending is not built; leave it out", ("default",)),
    UpstreamFlag("--l1-align-bytes", "objects are aligned to 4096 bytes; leave it out", ("4096",)),
    *_each(
        ["--enable-segmented-prefix", "--enable-dedup-content", "--enable-blend-reorder"],
        "blending is not built; leave it out",
    ),
    *_each(["--enable"], "there are no experimental features; leave it out"),
    *_each(["--grpc-server-workers"], "there is no gRPC transport; leave it out"),
    *_each(["--isolated-ipc"], "CUDA memory is not built; leave it out and use host memory"),
    *_each(["--separate-object-groups"], "one object holds all layers of a chunk; leave it out"),
    *_each(
        ["--run-script-api-enabled", "--script-allowed-imports"],
        "the agent never runs code that it was sent; leave it out",
    ),
    *_each(
        ["--runtime-plugin-locations", "--runtime-plugin-config", "--server-module"],
        "the agent loads no foreign code; run it as a process or container of its own",
    ),
    *_each(
        ["--l1-use-lazy", "--l1-init-size-gb"],
        "L1 is allocated in full before the agent is ready; set --l1-size-gb alone",
    ),
    *_each(["--l1-manager"], "L1 is one region of host memory; set --l1-size-gb"),
    *_each(["--l1-use-hugepages"], "L1 uses ordinary pages; leave it out"),
    *_each(
        ["--l1-devdax-path", "--gds-l1-path", "--gds-l1-use-direct-io", "--gds-l1-backend"],
        "L1 is host memory only; set --l1-size-gb",
    ),
    *_each(
        [
            "--l2-adapter",
            "--l2-store-policy",
            "--l2-prefetch-policy",
            "--l2-prefetch-max-in-flight",
            "--periodic-notifier-interval-ms",
        ],
        "there is no second cache level yet; leave it out, or size L1 with --l1-size-gb",
    ),
    *_each(
        [
            "--p2p-advertise-url",
            "--p2p-listen-url",
            "--p2p-lookup-timeout",
            "--p2p-load-timeout",
            "--p2p-transfer-engine",
        ],
        "agents do not talk to each other; leave it out",
    ),
    *_each(
        [
            "--coordinator-url",
            "--coordinator-advertise-ip",
            "--coordinator-heartbeat-interval",
            "--coordinator-event-reporting",
            "--coordinator-event-flush-interval",
            "--coordinator-event-transport",
            "--coordinator-kafka-bootstrap-servers",
            "--coordinator-kafka-topic",
            "--coordinator-kafka-delivery-timeout",
            "--coordinator-blend-timeout",
            "--coordinator-blend-match-concurrency",
        ],
        "there is no coordinator; Kubernetes runs one agent per node instead",
    ),
    *_each(
        ["--prometheus-port", "--disable-metrics", "--metrics-sample-rate"],
        "metrics are counted in full and served at /metrics on --http-port; leave it out",
    ),
    *_each(
        ["--enable-tracing", "--otlp-endpoint"],
        "tracing is not built; scrape /metrics on --http-port",
    ),
    *_each(
        ["--disable-observability", "--disable-logging", "--event-bus-queue-size"],
        "events are always on and cost little; set --log-level error for fewer logs",
    ),
    *_each(
        ["--enable-extra-logging", "--extra-logging-interval"],
        "throughput and L1 use are metrics; scrape /metrics on --http-port",
    ),
    *_each(
        ["--enable-gc-monitor", "--gc-monitor-min-pause-ms", "--gc-monitor-top-objects"],
        "garbage collections are not logged; leave it out",
    ),
    *_each(
        [
            "--lookup-hash-log-dir",
            "--lookup-hash-log-rotation-interval",
            "--lookup-hash-log-rotation-max-size",
            "--lookup-hash-log-max-files",
        ],
        "lookups are logged at --log-level debug only; leave it out",
    ),
    *_each(["--trace-level", "--trace-output"], "operations are not recorded; leave it out"),
    *_each(
        ["--format", "--output", "--quiet"],
        "logs go to standard error; set --log-format or --log-level",
    ),
)
"""Every other flag of `lmcache server --help`."""
