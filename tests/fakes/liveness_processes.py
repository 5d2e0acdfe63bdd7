"""Workers and their connections as they are, whatever an agent knows of them."""

from __future__ import annotations

from dataclasses import dataclass

from lmcache_nodeagent.ids import InstanceId
from lmcache_nodeagent.liveness.evidence import Connection, Link
from tests.fakes.liveness_parts import FakeEntry


@dataclass(eq=False)
class Pipe:
    """A connection as it is, whatever the agent knows of it."""

    address: str
    next_uid: int
    descriptor: int
    is_open: bool = True
    ended: bool = False  # the router has read its end
    opened_at: float = 0.0
    closed_at: float = -1.0
    tells: bool = False  # has said something that a worker come back would not
    link: Link | None = None
    connection: Connection | None = None


@dataclass(eq=False)
class Worker:
    """A worker process. `interval` None: it never pings."""

    instance_id: InstanceId
    address: str
    interval: float | None
    pipe: Pipe
    container: str
    entry: FakeEntry | None = None
    next_uid: int = 0
    alive: bool = True
    frozen: bool = False
    last_sent: float = 0.0
    down_since: float = 0.0
    killed_at: float = 0.0
    finished_at: float = 0.0  # as the kubelet reports it
    proven_at: float | None = None  # the kubelet's word about this very run reached the agent
    unsent: bool = False

    def __repr__(self) -> str:
        """Be short: a failing example shows many."""
        return f"<worker {self.instance_id} at {self.address}>"
