"""The agent as a whole: its threads, and the order in which they start and stop.

Threads, all made here:

| thread | runs | woken by |
|---|---|---|
| `main` | `App.run`: starts everything, waits, gives back freed memory, stops everything | signal, a thread's death, every 0.5 s |
| `zmq-router` | `Router.run`: reads, stamps liveness, routes, replies; answers ping, noop, get_chunk_size and get_experimental itself; pyzmq's own thread lets go of large replies that are sent | socket, reply queue |
| `sync` | `OrderedPool.work`: registrations, in order | its queue |
| `normal-<n>` | `OrderedPool.work`: lookups, their status, locks, sessions, clear | bounded queue |
| `transfer-<n>` | `LanePool.work`: store and retrieve, prepare and commit, first in first out per connection | lanes |
| `transfer-watch` | `LanePool.watch`: answers transfers at their deadline | every second |
| `transfer-again-<n>` | takes the place of a `transfer-<n>` whose copy hangs, until that one returns | lanes |
| `reaper` | `Reaper.run` | earliest deadline, new evidence |
| `release-<instance>` | `Releaser`: drains and closes one context | - |
| `events` | `EventBus.run`: logs and counters | bounded queue |
| `kv-events` | `KvEventModule.run`: batches for engines that follow KV events | subscriptions, acknowledgements, 20 times a second while one waits |
| `http` | `HttpServer.run`, and waitress' own two (`waitress-<n>`) | socket |
| `settings` | `LiveSettings.run`: follows the file of the reaping settings, if there is one | every 2 s |
| `operator-link` | `OperatorLink.run`, if there is a link, and two of websockets' own while a stream is open | the operator's messages, whatever is to be said |
| `device-plugin` | `DevicePlugin.run`, if there is a plugin, and gRPC's own: `kubelet-call_<n>` for each call of the kubelet, several of which may wait in `PreStartContainer` | every 0.5 s, connections that come and go |

A thread of this table that ends by an
exception ends the process, with the reason in the log: half an agent is worse than none.
"""  # noqa: E501  # a table

from __future__ import annotations

import contextlib
import logging
import resource
import time
import uuid
from dataclasses import replace
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING

from lmcache_nodeagent.agent_view import RunningAgent, metrics_snapshot
from lmcache_nodeagent.assembly import Assembled, Environment, assemble
from lmcache_nodeagent.clock import monotonic
from lmcache_nodeagent.contexts.host import open_host_context
from lmcache_nodeagent.device_plugin.folders import SlotFolders
from lmcache_nodeagent.errors import ConfigError
from lmcache_nodeagent.events import (
    HintCancelled,
    InstanceReaped,
    InstanceRegistered,
    InstanceReleased,
    InstanceUnregistered,
)
from lmcache_nodeagent.freed_memory import FreedMemory
from lmcache_nodeagent.observability.bus import EventBus, Subscriber
from lmcache_nodeagent.observability.http import HttpServer, listen
from lmcache_nodeagent.observability.logs import LogSubscriber
from lmcache_nodeagent.observability.metrics import Metrics
from lmcache_nodeagent.storage.pool import SHM_DIRECTORY, SharedPool
from lmcache_nodeagent.transport.sockets import bind_sockets

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from lmcache_nodeagent.config import AgentConfig
    from lmcache_nodeagent.contexts.base import ContextOpener
    from lmcache_nodeagent.events import Event
    from lmcache_nodeagent.observability.metrics import Reading

_log = logging.getLogger(__name__)

_DRAIN_SECONDS = 4.0
"""Time that requests in flight get at a stop; with the joins below a stop takes less than 10 s."""

_JOIN_SECONDS = 1.5

_OTHERS_JOIN_SECONDS = 0.5
"""They have had the time of the others; an attempt to reach the operator ends by itself."""

_SIGNAL_CHECK_SECONDS = 0.5

_COMING_AND_GOING = (
    InstanceRegistered,
    InstanceUnregistered,
    InstanceReaped,
    InstanceReleased,
    HintCancelled,
)


class App:
    """One agent. Making it takes the ports and the memory; `run` serves until `stop`.

    `opener` maps the memory of registrations; tests pass their own.

    Raises:
        ConfigError: a port that cannot be had, or an L1 name that a living agent holds.
        CapacityError: an L1 that does not fit.
    """

    def __init__(self, config: AgentConfig, opener: ContextOpener = open_host_context) -> None:
        self.boot_id = uuid.uuid4().hex
        self._failed = False
        self._serving = False
        self._stop_requests: SimpleQueue[None] = SimpleQueue()  # an Event is not safe in a signal
        _raise_descriptor_limit()
        self._metrics = Metrics([self._reading])
        subscribers: list[Subscriber] = [LogSubscriber(monotonic), self._metrics, self._wake_link]
        self._bus = EventBus(subscribers, when_full=self._metrics)
        with contextlib.ExitStack() as undo:
            sockets = bind_sockets(config)
            undo.callback(sockets.close)
            listener = listen(config.http_host, config.http_port)
            undo.callback(listener.close)
            self.config = replace(config, port=sockets.port)
            self._folders = SlotFolders(self.config)
            _prepare(self._folders)
            self._region = SharedPool.create(self.config.pool_name, config.l1_size_bytes)
            undo.callback(self._region.close)
            if self.config.shm_name:
                self._folders.offer_pool(SHM_DIRECTORY / self._region.name)
                undo.callback(self._folders.withdraw_pool)
            self._agent: Assembled = assemble(
                Environment(
                    config=self.config,
                    boot_id=self.boot_id,
                    sockets=sockets,
                    region=self._region.buffer,
                    region_name=self._region.name,
                    opener=opener,
                    folders=self._folders,
                    bus=self._bus,
                    spawn=_spawn,
                    now=monotonic,
                    is_ready=lambda: self._view.ready()[0],
                )
            )
            self._view = RunningAgent(
                self._agent.parts, self._metrics, lambda: self._serving, monotonic
            )
            self._http = HttpServer(listener, self._view)
            undo.pop_all()
        self.http_port = self._http.port

    def _reading(self) -> Reading:
        return metrics_snapshot(self._agent.parts)

    def _wake_link(self, event: Event) -> None:
        """Say at once who came and who went. Thread: events."""
        link = self._agent.parts.link
        if link is not None and isinstance(event, _COMING_AND_GOING):
            link.wake()

    def run(self, when_serving: Callable[[], None] = lambda: None) -> int:
        """Serve until stopped; return the exit status, 1 if a thread failed. Thread: main."""
        parts, config = self._agent.parts, self.config
        parts.settings.check()  # before anybody is judged by what the flags say
        events = self._start("events", self._bus.run)
        workers = [self._start("sync", parts.sync_pool.work)]
        workers += [
            self._start(f"normal-{number}", parts.normal_pool.work)
            for number in range(config.normal_threads)
        ]
        workers += [
            self._start(f"transfer-{number}", parts.transfer_pool.work)
            for number in range(config.transfer_threads)
        ]
        reaper = self._start("reaper", parts.reaper.run)
        router = self._start("zmq-router", parts.router.run)
        http = self._start("http", self._http.run)
        others = self._start_others()
        self._serving = True
        when_serving()
        self._wait_for_stop()
        self._serving = False
        self._stop_others()
        self._stop_in_order(workers, reaper=reaper, router=router, http=http, events=events)
        for thread in others:
            thread.join(_OTHERS_JOIN_SECONDS)
        return 1 if self._failed else 0

    def _start_others(self) -> list[Thread]:
        """Start what only some agents have."""
        parts, started = self._agent.parts, []
        if self.config.transfer_deadline_seconds:
            started.append(self._start("transfer-watch", parts.transfer_pool.watch))
        if parts.kv_events is not None:
            started.append(self._start("kv-events", parts.kv_events.run))
        if self.config.reaping_settings:
            started.append(self._start("settings", parts.settings.run))
        if parts.link is not None:
            started.append(self._start("operator-link", parts.link.run))
        if parts.plugin is not None:
            started.append(self._start("device-plugin", parts.plugin.run))
        return started

    def _stop_others(self) -> None:
        parts = self._agent.parts
        if parts.plugin is not None:
            parts.plugin.stop()
        parts.settings.stop()
        if parts.kv_events is not None:
            parts.kv_events.stop()
        if parts.link is not None:
            parts.link.stop()

    def stop(self) -> None:
        """Ask `run` to end. Threads: any, and signal handlers."""
        self._stop_requests.put(None)

    def _wait_for_stop(self) -> None:
        """Wait, with a bound: a signal that comes just before a wait begins does not end it."""
        with FreedMemory.of_this_process() as freed:
            while True:
                freed.give_back()
                with contextlib.suppress(Empty):
                    return self._stop_requests.get(timeout=_SIGNAL_CHECK_SECONDS)

    def _stop_in_order(
        self,
        workers: Sequence[Thread],
        *,
        reaper: Thread,
        router: Thread,
        http: Thread,
        events: Thread,
    ) -> None:
        """New requests are refused, those in flight finish or are given up, then all ends."""
        self._agent.dispatcher.close()
        with contextlib.ExitStack() as whatever_happens:
            whatever_happens.callback(self._region.close)
            whatever_happens.callback(self._folders.withdraw_pool)
            self._stop_requests_in_flight(workers, reaper=reaper, router=router)
        self._http.stop()
        self._bus.stop()
        _join([http, events], _JOIN_SECONDS)

    def _stop_requests_in_flight(
        self, workers: Sequence[Thread], *, reaper: Thread, router: Thread
    ) -> None:
        parts = self._agent.parts
        for pool in (parts.sync_pool, parts.normal_pool, parts.transfer_pool):
            pool.stop()
        _join(workers, _DRAIN_SECONDS)
        self._agent.dispatcher.give_up()
        parts.reaper.stop()
        _join([reaper], _JOIN_SECONDS)
        parts.router.stop()
        _join([router], _JOIN_SECONDS)

    def _start(self, name: str, work: Callable[[], None]) -> Thread:
        thread = Thread(target=self._guarded, args=(name, work), name=name, daemon=True)
        thread.start()
        return thread

    def _guarded(self, name: str, work: Callable[[], None]) -> None:
        """Run a thread's work; its failure stops the process."""
        try:
            work()
        except Exception:  # noqa: BLE001  # thread main: the process ends, with the reason in the log
            _log.exception("thread_failed", extra={"failed_thread": name})
            self._failed = True
            self.stop()


def _spawn(name: str, work: Callable[[], None]) -> None:
    """Start a release thread. A daemon: one that never returns must not hold up a stop."""
    Thread(target=work, name=name, daemon=True).start()


def _join(threads: Iterable[Thread], seconds: float) -> None:
    """Wait for threads under one deadline; name those that did not end."""
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            _log.warning("thread_did_not_end", extra={"late_thread": thread.name})


def _prepare(folders: SlotFolders) -> None:
    try:
        folders.prepare()
    except OSError as error:
        raise ConfigError(
            [f"the folders of --slots-folder cannot be made: {error}; choose one that can be"]
        ) from error


def _raise_descriptor_limit() -> None:
    """Each connection takes two descriptors: libzmq's, and the one we watch the peer by."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
