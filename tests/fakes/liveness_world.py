"""A node on a fake clock: workers that live and die, strangers, a router and a reaper that stall.

The router's books, the policy and the reaper are the real ones. The world knows the truth and says
when the reaper gets it wrong: a living worker reaped, or a dead one kept beyond its window.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count

from lmcache_nodeagent.events import discard
from lmcache_nodeagent.ids import InstanceId, RoutingId
from lmcache_nodeagent.liveness.evidence import (
    CloseKind,
    Connection,
    ConnectionLedger,
    Peer,
)
from lmcache_nodeagent.liveness.journal import Journal
from lmcache_nodeagent.liveness.operator_word import OperatorWord
from lmcache_nodeagent.liveness.reaped_lately import ReapedLately
from lmcache_nodeagent.liveness.reaper import Reaper
from lmcache_nodeagent.liveness.release import Releaser
from lmcache_nodeagent.liveness.stalls import STALL_SECONDS, Stalls
from lmcache_nodeagent.liveness.testimony import Registered
from lmcache_nodeagent.liveness.windows import LivenessSettings
from tests.fakes.liveness_parts import FakeClock, FakeEntry, FakeRouter, FakeTarget
from tests.fakes.liveness_processes import Pipe, Worker
from tests.fakes.liveness_truth import Truth

_POLL_SECONDS = 0.5
"""A stalled router notices it from the moment its poll should have returned."""


@dataclass
class World:
    """Everything at once. Time passes only in `run`."""

    settings: LivenessSettings
    now: FakeClock = field(default_factory=lambda: FakeClock(1000.0))
    workers: list[Worker] = field(default_factory=list)
    strangers: list[Pipe] = field(default_factory=list)
    pipes: list[Pipe] = field(default_factory=list)
    reaped: list[Worker] = field(default_factory=list)
    ended: list[Worker] = field(default_factory=list)  # all whose process has ended
    clock_offset: float = 1_800_000_000.25

    def __post_init__(self) -> None:
        """Build the agent's parts."""
        self.ledger, self.stalls = ConnectionLedger(), Stalls()
        self.target, self.router = FakeTarget(self.now), FakeRouter(read_at=self.now())
        releaser = Releaser(
            lambda _, work: work(),
            discard,
            self.now,
            self.target.drop_instance_state,
            30.0,
            self._wake,
        )
        self.journal = Journal("boot")
        self.word = OperatorWord(
            "boot",
            [self.target],
            lambda: self.settings,
            self.stalls,
            self._wake,
            discard,
            self.now,
            self.wall,
        )
        self.reaper = Reaper(
            [self.target],
            self.ledger,
            self.stalls,
            lambda: self.settings,
            releaser,
            self.journal,
            ReapedLately(),
            discard,
            self.now,
            lambda _: math.inf,
        )
        self.reaper.watch(self.router)
        self._numbers, self._serials = count(1), count(1)
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._next_scan = self.now()
        self._clock_set_at = -1e9
        self._asleep_until = self._stalled_until = 0.0
        self._stalled_from = self._last_disturbance = 0.0
        self._disturbed_seconds = 0.0
        self._truth = Truth(self)
        self._monitor: list[Callable[[], None]] = []
        self._messages: list[Callable[[], None]] = []

    # What happens

    def wall(self) -> float:
        """Tell the time by the node's clock, which is the kubelet's."""
        return self.now() + self.clock_offset

    def set_clock(self, seconds: float) -> None:
        """Set the node's clock."""
        self.clock_offset += seconds
        self._clock_set_at = self.now()

    def start_worker(
        self,
        address: str,
        interval: float | None,
        instance_id: InstanceId | None = None,
        container: str = "",
    ) -> Worker:
        """Start a worker: it connects, registers, and pings from then on, or never."""
        number = next(self._numbers)
        worker = Worker(
            instance_id or InstanceId(number),
            address,
            interval,
            self._connect(address, 0),
            container or f"c{number}",
        )
        worker.last_sent = self.now()
        self.workers.append(worker)
        pipe = worker.pipe
        self._send(pipe, lambda: self._register(worker, pipe), worker.instance_id)
        worker.next_uid = worker.pipe.next_uid
        if interval is not None:
            self._at(self.now(), lambda: self._heartbeat(worker, interval))
        return worker

    def kill(self, worker: Worker) -> None:
        """End a process: the kernel closes its connection."""
        worker.alive = False
        worker.killed_at, worker.finished_at = self.now(), float(int(self.wall()))
        self.ended.append(worker)
        self._close(worker.pipe)
        worker.down_since = worker.down_since or self.now()

    def restart(self, earlier: Worker, *, same_id: bool) -> Worker:
        """Run a container again whose process has ended a second or more ago."""
        ends = (w.killed_at for w in self.ended if w.container == earlier.container)
        assert self.now() >= max(ends) + 1.0, "kubelet, runtime and interpreter take longer"
        instance_id = earlier.instance_id if same_id else None
        return self.start_worker(earlier.address, earlier.interval, instance_id, earlier.container)

    def drop(self, worker: Worker, back_after: float) -> None:
        """Cut a connection; a living worker is back after a while."""
        self._close(worker.pipe)
        worker.down_since = worker.down_since or self.now()
        self._at(self.now() + back_after, lambda: self._reconnect(worker))

    def connect_stranger(self, address: str, says: str) -> None:
        """Somebody connects and says nothing, or something that tells who it is not."""
        pipe = self._connect(address, 0 if says == "uid 0" else 5)
        self.strangers.append(pipe)
        if says == "other id":
            self._send(pipe, lambda: None, InstanceId(999))
        elif says != "nothing":
            self._send(pipe, lambda: None, None, lookups=says == "lookup")
        pipe.tells = says in {"uid 0", "other id", "lookup"}

    def disconnect_stranger(self, pipe: Pipe) -> None:
        """Somebody leaves."""
        self.strangers.remove(pipe)
        self._close(pipe)

    def stall(self, seconds: float, *, router: bool, reaper: bool) -> None:
        """Let the router, the reaper or both (a stopped process) do nothing for a while."""
        end = self.now() + seconds
        if router and not self._stalled_until:
            self._stalled_from, self._stalled_until = self.now(), end
            self.router.catches_up = False
        if reaper:
            self._asleep_until = max(self._asleep_until, end)
        self._last_disturbance = max(self._last_disturbance, end)
        self._disturbed_seconds += seconds

    def run(self, seconds: float) -> None:
        """Let time pass, and check after each scan."""
        end = self.now() + seconds
        while True:
            scan_at = max(self._next_scan, self._asleep_until, self.now())
            agenda_at = self._agenda[0][0] if self._agenda else end + 1
            moment = min(scan_at, agenda_at, self._stalled_until or end + 1)
            if moment > end:
                break
            self.now.seconds = moment
            if self._stalled_until and moment >= self._stalled_until:
                self._resume()
            elif moment == agenda_at:
                heapq.heappop(self._agenda)[2]()
            else:
                self._scan()
        self.now.seconds = end
        if end >= self._asleep_until:
            self._check_the_dead()

    # The reaper

    def _wake(self) -> None:
        self._next_scan = min(self._next_scan, self.now())

    def _scan(self) -> None:
        self.reaper._note_lateness(self._next_scan)
        planned = self.reaper.scan()
        self._next_scan = max(planned, self.now() + 0.01)
        for worker in [w for w in self.workers if w.entry and w.entry.closes]:
            self.workers.remove(worker)
            self.reaped.append(worker)
            self._truth.check_reap(worker)
        self._check_the_dead()

    def _check_the_dead(self) -> None:
        for worker in self.workers:
            if not worker.alive and worker.entry and not self._stalled_until:
                self._truth.check_kept(worker, worker.entry)

    # The router

    def _resume(self) -> None:
        """Take in what the sockets have kept, the monitor's first, as the router does."""
        start, end = self._stalled_from + _POLL_SECONDS, self.now()
        self._stalled_until = 0.0
        if end - start > STALL_SECONDS:
            self.stalls.record(start, end)
            self.ledger.router_stalled(end)
        events, self._monitor = self._monitor, []
        messages, self._messages = self._messages, []
        for take_in in [*events, *messages]:
            take_in()
        self.router.catches_up = True

    def _monitored(self, take_in: Callable[[], None]) -> None:
        self._monitor.append(take_in) if self._stalled_until else take_in()

    def _sent(self, take_in: Callable[[], None]) -> None:
        self._messages.append(take_in) if self._stalled_until else take_in()

    def _connect(self, address: str, uid: int) -> Pipe:
        pipe = Pipe(address, uid, descriptor=next(self._numbers), opened_at=self.now())
        self.pipes.append(pipe)

        def accepted() -> None:
            pipe.link = self.ledger.accepted(pipe.descriptor, self.now())

        self._monitored(accepted)
        return pipe

    def _close(self, pipe: Pipe) -> None:
        if not pipe.is_open:
            return
        pipe.is_open, pipe.closed_at = False, self.now()

        def ended() -> None:
            pipe.ended = True
            self.ledger.link_closed(pipe.descriptor, self.now(), may_have_been_a_worker=True)
            if pipe.connection is not None:
                self.ledger.connection_closed(pipe.connection, self.now(), CloseKind.PEER)
            self._wake()

        self._monitored(ended)

    def _send(
        self,
        pipe: Pipe,
        handle: Callable[[], None],
        instance_id: InstanceId | None,
        *,
        lookups: bool = False,
    ) -> None:
        """Send a message; the router reads it now, or when it can."""
        uid, pipe.next_uid = pipe.next_uid, pipe.next_uid + 1

        def read() -> None:
            made = pipe.connection or self._first_message(pipe, uid)
            self.router.read_at = self.now()
            if instance_id is not None:
                made.spoke_for |= {instance_id}
            made.asked_lookups |= lookups
            handle()
            if pipe.ended:
                self.ledger.connection_closed(made, self.now(), CloseKind.PEER)
                self._wake()

        self._sent(read)

    def _first_message(self, pipe: Pipe, uid: int) -> Connection:
        """Name the connection; its link is proven by the reply, unless it has ended."""
        made = pipe.connection = Connection(
            routing_id=RoutingId(pipe.descriptor.to_bytes(5)),
            peer=Peer(identity=f"ip:{pipe.address}", text=pipe.address),
            opened_at=self.now(),
            first_uid=uid,
        )
        if not pipe.ended and pipe.link is not None:
            made.link, pipe.link.connection = pipe.link, made
        return made

    # The workers

    def _register(self, worker: Worker, pipe: Pipe) -> None:
        assert pipe.connection is not None
        worker.entry = FakeEntry(
            instance_id=worker.instance_id,
            engine_type="vllm",
            registered_at=self.now(),
            registered=Registered(next(self._serials), self.wall()),
            last_seen=self.now(),
            registrant=pipe.connection,
        )
        if worker.interval is not None and 3 * worker.interval > self.settings.reap_timeout_seconds:
            worker.entry.ping_intervals = [worker.interval]  # known from before
        for earlier in [w for w in self.workers if w is not worker and _share_id(w, worker)]:
            self.workers.remove(earlier)  # its context gives way to this one
        self.target.add(worker.entry)

    def _heartbeat(self, worker: Worker, interval: float) -> None:
        if not worker.alive:
            return
        self._at(self.now() + interval, lambda: self._heartbeat(worker, interval))
        if worker.frozen:
            return
        if worker.pipe.is_open:
            self._ping(worker)
        else:
            worker.unsent = True

    def _ping(self, worker: Worker) -> None:
        pipe = worker.pipe
        worker.last_sent = self.now()

        def handle() -> None:
            assert pipe.connection is not None
            self.target.touch_instance(worker.instance_id, pipe.connection, ping=True)

        self._send(pipe, handle, worker.instance_id)
        worker.next_uid = pipe.next_uid
        worker.unsent = False

    def _reconnect(self, worker: Worker) -> None:
        """Come back with the next uid; what could not be sent meanwhile is sent now."""
        if not worker.alive or worker.pipe.is_open:
            return
        worker.pipe = self._connect(worker.address, worker.next_uid)
        worker.down_since = 0.0
        if worker.unsent and not worker.frozen:
            self._ping(worker)

    def _at(self, moment: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (moment, next(self._numbers), action))

    def living(self) -> Iterator[Worker]:
        """Workers whose process runs and whose connection is up."""
        return (worker for worker in self.workers if worker.alive and worker.pipe.is_open)


def _share_id(earlier: Worker, later: Worker) -> bool:
    return earlier.instance_id == later.instance_id and earlier.entry is not None
