"""Connections, entries, a holder and a router for liveness tests: no sockets, time by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

from lmcache_nodeagent.ids import InstanceId, RoutingId
from lmcache_nodeagent.liveness.entry import Speaker
from lmcache_nodeagent.liveness.evidence import CloseKind, Connection, Link, Peer
from lmcache_nodeagent.liveness.targets import (
    UNTOUCHED,
    Decide,
    InstanceLivenessTarget,
    ReapableEntry,
    Touched,
)

MODEL = "demo/model"
_ROUTING_NUMBERS = count(1)


@dataclass
class FakeClock:
    """Monotonic seconds that pass only when told."""

    seconds: float = 0.0

    def __call__(self) -> float:
        """Tell the time."""
        return self.seconds

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.seconds += seconds


def connection(
    address: str = "10.0.0.1", *, serial: int = 0, first_uid: int = 7, local: bool = False
) -> Connection:
    """An open connection; with a serial its link is known."""
    number = next(_ROUTING_NUMBERS)
    made = Connection(
        routing_id=RoutingId(b"\0" + number.to_bytes(4)),
        peer=Peer(identity=f"ip:{address}" if address else "", text=address, local=local),
        opened_at=0.0,
        first_uid=first_uid,
    )
    if serial:
        made.link = Link(serial=serial, descriptor=1000 + serial, accepted_at=0.0, connection=made)
    return made


def close(made: Connection, at: float, kind: CloseKind = CloseKind.PEER) -> None:
    """Note the end of a connection, as the router does."""
    made.close_kind = kind
    made.closed_at = at
    if made.link is not None:
        made.link.closed_at = at


@dataclass(slots=True, eq=False, kw_only=True)
class FakeEntry(ReapableEntry):
    """An entry without memory. `on_close` stands for unmapping; it may raise."""

    shard: int | None = None
    mapped_bytes: int = 4096
    on_close: Callable[[], None] = lambda: None
    on_drain: Callable[[], None] = lambda: None
    closes: int = 0

    @property
    def model(self) -> str:
        """Always the same one."""
        return MODEL

    @property
    def world_size(self) -> int:
        """One rank."""
        return 1

    @property
    def mode(self) -> str:
        """As of LMCache-driven transfer over host memory."""
        return "lmcache_driven/cpu_shm"

    @property
    def nbytes(self) -> int:
        """As told."""
        return self.mapped_bytes

    @property
    def handles(self) -> frozenset[str]:
        """One segment of its own."""
        return frozenset({f"segment-{self.instance_id}"})

    @property
    def transfers_in_flight(self) -> int:
        """None."""
        return 0

    def wait_drained(self) -> None:
        """Run the hook."""
        self.on_drain()

    def close(self) -> None:
        """Count, and run the hook."""
        self.closes += 1
        self.on_close()


def entry(
    registrant: Connection | None = None,
    *,
    number: int = 1,
    at: float = 0.0,
    pinged: bool = True,
    engine: str = "vllm",
) -> FakeEntry:
    """An instance that registered at `at`, and has pinged at that moment unless told otherwise."""
    made = FakeEntry(
        instance_id=InstanceId(number),
        engine_type=engine,
        registered_at=at,
        last_seen=at,
        registrant=registrant or connection(serial=1),
    )
    if pinged:
        made.pinged(at)
    return made


@dataclass
class FakeTarget(InstanceLivenessTarget):
    """A holder of instance state as the transfer modules are, without their lock."""

    now: Callable[[], float]
    entries: dict[InstanceId, FakeEntry] = field(default_factory=dict)
    dropped: list[InstanceId] = field(default_factory=list)

    def add(self, *made: FakeEntry) -> None:
        """Register."""
        self.entries.update({one.instance_id: one for one in made})

    def touch_instance(
        self, instance_id: InstanceId, connection: Connection, *, ping: bool
    ) -> Touched:
        """As the modules do it."""
        found = self.entries.get(instance_id)
        if found is None:
            return UNTOUCHED
        if found.speaker(connection) is Speaker.STRANGER:
            return Touched(Speaker.STRANGER, bound_peer=found.last_connection.peer.text)
        cancelled = found.seen(connection, self.now())
        if ping:
            found.pinged(self.now())
        return Touched(Speaker.RIGHTFUL, cancelled, found.last_connection.peer.text, found)

    def reap_stale_instances(self, decide: Decide) -> Sequence[ReapableEntry]:
        """Take out the condemned."""
        condemned = [found for found in self.entries.values() if decide(found)]
        for found in condemned:
            del self.entries[found.instance_id]
        return condemned

    def visit_entries(self, visit: Callable[[ReapableEntry], None]) -> None:
        """Show all."""
        for found in self.entries.values():
            visit(found)

    def visit_entry(self, instance_id: InstanceId, visit: Callable[[ReapableEntry], None]) -> bool:
        """Show one."""
        found = self.entries.get(instance_id)
        if found is not None:
            visit(found)
        return found is not None

    def tracked_instance_count(self) -> int:
        """Count."""
        return len(self.entries)

    def drop_instance_state(self, instance_id: InstanceId) -> None:
        """Note."""
        self.dropped.append(instance_id)


@dataclass
class FakeRouter:
    """What the reaper asks of the router. `on_caught_up` runs before the answer is given."""

    read_at: float = 0.0
    catches_up: bool = True
    asked: int = 0
    on_caught_up: Callable[[], None] = lambda: None

    def caught_up(self, timeout_seconds: float) -> bool:
        """Answer as told."""
        del timeout_seconds
        self.asked += 1
        self.on_caught_up()
        return self.catches_up

    def last_read_at(self) -> float:
        """Answer as told."""
        return self.read_at


@dataclass
class ThreadsByHand:
    """Stands for thread starts: the work runs when the test says so; `left` more can start."""

    started: list[tuple[str, Callable[[], None]]] = field(default_factory=list)
    left: int = 1_000_000

    def __call__(self, name: str, work: Callable[[], None]) -> None:
        """Remember the thread."""
        if not self.left:
            raise RuntimeError("can't start new thread")
        self.left -= 1
        self.started.append((name, work))

    def run_all(self) -> None:
        """Run every thread to its end."""
        started, self.started = self.started, []
        for _, work in started:
            work()
