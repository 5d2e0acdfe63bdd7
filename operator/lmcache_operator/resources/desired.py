"""Everything that a server owns, in the order in which it is needed."""

from __future__ import annotations

from dataclasses import dataclass

from lmcache_operator.agents.registry import ServerRef
from lmcache_operator.api.root import Spec
from lmcache_operator.cluster import KubeObject
from lmcache_operator.resources.config_maps import build_connections, build_link, build_reaping
from lmcache_operator.resources.daemon_set import build_daemon_set
from lmcache_operator.resources.service import build_service, build_service_account


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What owned objects are made of beside the spec.

    Attributes:
        agent_image: image of agents whose spec leaves something out.
        link_url: where agents find the operator.
        link_authorities: certificates in PEM form that they believe it by, the new and the old.
            Empty while there are none: what agents were told earlier is then left as it is.
    """

    agent_image: str
    link_url: str
    link_authorities: str


def desired_objects(server: ServerRef, spec: Spec, surroundings: Surroundings) -> list[KubeObject]:
    """Return the objects; the pods' needs stand before the pods.

    Raises:
        SpecError: the spec asks for what cannot be; then nothing of it is wanted.
    """
    url, authorities = surroundings.link_url, surroundings.link_authorities
    link = [build_link(server, url=url, authorities=authorities)] if authorities else []
    return [
        build_service_account(server),
        build_reaping(server, spec),
        *link,
        build_service(server, spec),
        build_daemon_set(server, spec, default_image=surroundings.agent_image),
        *build_connections(server, spec),
    ]
