"""Which counts of which part are shown under which name."""

from __future__ import annotations

from lmcache_operator.agents.registry import AgentRegistry
from lmcache_operator.agents.server import AgentServer
from lmcache_operator.certs.trust import LinkTrust
from lmcache_operator.lease import Lease
from lmcache_operator.metrics import CountSource, GaugeSource
from lmcache_operator.worker_flow import WorkerFlow

_ABOUT_FLOW = {
    "told": "Messages to agents about workers, by what they are.",
    "pods": "Lists, watches and checks of worker pods, by what happened.",
    "annotations": "Writes of the annotation with instance ids, by outcome.",
    "events": "Journal entries of agents that were posted as Events, by outcome.",
}


def lease_gauges(lease: Lease) -> list[GaugeSource]:
    """Return what says who acts."""
    about = "1 if this operator holds the Lease and acts, else 0."
    return [GaugeSource("leader", about, lambda: float(lease.is_held()))]


def link_counts(link: AgentServer, trust: LinkTrust) -> list[CountSource]:
    """Return what the agents' streams are counted by."""
    return [
        CountSource(
            "streams_refused",
            "Streams that were refused, by reason.",
            "reason",
            lambda: link.refusals.counts,
        ),
        CountSource(
            "streams_ended",
            "Streams of agents that ended, by cause.",
            "cause",
            lambda: {str(cause): count for cause, count in link.ended.items()},
        ),
        CountSource(
            "certificates",
            "What was done with the certificates of the streams.",
            "event",
            lambda: trust.counts,
        ),
    ]


def flow_counts(flow: WorkerFlow) -> list[CountSource]:
    """Return what is counted of workers."""
    unmapped = CountSource(
        "instances_unmapped",
        "Registered workers whose pod is not known, by reason: agents judge them alone.",
        "reason",
        flow.unmapped,
        is_now=True,
    )
    return [*(_flow_count(flow, subject) for subject in _ABOUT_FLOW), unmapped]


def flow_gauges(flow: WorkerFlow, agents: AgentRegistry, trust: LinkTrust) -> list[GaugeSource]:
    """Return what is so of agents and workers now."""
    return [
        GaugeSource(
            "agents_connected", "Agents with an open stream.", lambda: len(agents.sessions())
        ),
        GaugeSource(
            "pods_tracked", "Worker pods that are followed.", lambda: flow.gauges()["pods_tracked"]
        ),
        GaugeSource(
            "events_waiting",
            "Journal entries of agents that are not posted yet.",
            lambda: flow.gauges()["events_waiting"],
        ),
        GaugeSource(
            "link_certificate_expires_timestamp_seconds",
            "When the certificate of the streams ends, in seconds since 1970.",
            trust.server_expires_at,
        ),
    ]


def _flow_count(flow: WorkerFlow, subject: str) -> CountSource:
    return CountSource(
        f"worker_{subject}", _ABOUT_FLOW[subject], "what", lambda: flow.counts()[subject]
    )
