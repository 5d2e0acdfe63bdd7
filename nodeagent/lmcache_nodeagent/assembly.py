"""Which part gets which: builds an agent's parts from its configuration. Starts nothing."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lmcache_nodeagent.agent_view import Parts
from lmcache_nodeagent.clock import wall
from lmcache_nodeagent.device_plugin.gate import StartGate
from lmcache_nodeagent.device_plugin.memory_watch import SharedMemoryWatch
from lmcache_nodeagent.device_plugin.plugin import DevicePlugin
from lmcache_nodeagent.device_plugin.service import SlotService
from lmcache_nodeagent.hashing import ChunkHasher
from lmcache_nodeagent.link_view import LinkView
from lmcache_nodeagent.liveness.evidence import ConnectionLedger
from lmcache_nodeagent.liveness.journal import Journal, stuck_release
from lmcache_nodeagent.liveness.live_settings import LiveSettings
from lmcache_nodeagent.liveness.operator_word import OperatorWord
from lmcache_nodeagent.liveness.reaped_lately import ReapedLately
from lmcache_nodeagent.liveness.reaper import Reaper
from lmcache_nodeagent.liveness.release import Releaser, Spawn
from lmcache_nodeagent.liveness.slots import SlotBook
from lmcache_nodeagent.liveness.stalls import Stalls
from lmcache_nodeagent.memory_limits import free_memory_bytes
from lmcache_nodeagent.modules.absent_pings import AbsentPings
from lmcache_nodeagent.modules.chunk_copies import ChunkCopies
from lmcache_nodeagent.modules.engine_driven_transfer import EngineDrivenTransferModule
from lmcache_nodeagent.modules.housekeeping import Housekeeping
from lmcache_nodeagent.modules.instance_holder import HolderParts
from lmcache_nodeagent.modules.kv_events import CAPABILITY, KvEventModule, TokenBindings, no_stream
from lmcache_nodeagent.modules.layouts import LayoutRegistry
from lmcache_nodeagent.modules.lmcache_driven_transfer import LMCacheDrivenTransferModule
from lmcache_nodeagent.modules.lookup import LookupModule
from lmcache_nodeagent.modules.management import ManagementModule
from lmcache_nodeagent.modules.pickled_transfer import PickledTransfer
from lmcache_nodeagent.modules.shared_pool_transfer import SharedPoolTransfer
from lmcache_nodeagent.modules.slot_quarantine import SlotQuarantine
from lmcache_nodeagent.operator_link.client import OperatorLink
from lmcache_nodeagent.protocol.messages import SharedPoolInfo
from lmcache_nodeagent.protocol.operations import Pool as PoolKind
from lmcache_nodeagent.sessions import SessionTable
from lmcache_nodeagent.storage.changes import ChangeLog
from lmcache_nodeagent.storage.eviction import LruPolicy, NoEvictionPolicy
from lmcache_nodeagent.storage.objects import L1Store
from lmcache_nodeagent.transport.dispatch import Dispatcher
from lmcache_nodeagent.transport.lanes import LanePool
from lmcache_nodeagent.transport.lost_commits import LostCommits
from lmcache_nodeagent.transport.pools import OrderedPool
from lmcache_nodeagent.transport.router import Router
from lmcache_nodeagent.transport.waiting_bytes import Waiting

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lmcache_nodeagent.clock import Now
    from lmcache_nodeagent.config import AgentConfig
    from lmcache_nodeagent.contexts.base import ContextOpener
    from lmcache_nodeagent.device_plugin.folders import SlotFolders
    from lmcache_nodeagent.ids import InstanceId
    from lmcache_nodeagent.liveness.targets import InstanceLivenessTarget
    from lmcache_nodeagent.modules.calls import Module
    from lmcache_nodeagent.observability.bus import EventBus
    from lmcache_nodeagent.storage.eviction import EvictionPolicy
    from lmcache_nodeagent.storage.objects import ObjectKey
    from lmcache_nodeagent.transport.requests import Reply, Request
    from lmcache_nodeagent.transport.sockets import BoundSockets

_SYNC_QUEUE_SIZE = 1024


@dataclass(frozen=True, slots=True)
class Environment:
    """What an agent is built on: everything that touches the machine."""

    config: AgentConfig
    boot_id: str
    sockets: BoundSockets
    region: memoryview
    region_name: str
    opener: ContextOpener
    folders: SlotFolders
    bus: EventBus
    spawn: Spawn
    now: Now
    is_ready: Callable[[], bool] = lambda: True


@dataclass(frozen=True, slots=True)
class Assembled:
    """The parts that have threads, and those that have something to show."""

    parts: Parts
    dispatcher: Dispatcher


@dataclass(slots=True)
class _Late:
    """Parts that know each other both ways get their second half here, before anything runs."""

    dispatcher: Dispatcher | None = None
    targets: tuple[InstanceLivenessTarget, ...] = ()
    reaper: Reaper | None = None
    link: OperatorLink | None = None
    router: Router | None = None
    plugin: DevicePlugin | None = None

    def run(self, request: Request) -> None:
        assert self.dispatcher is not None
        self.dispatcher.run(request)

    def overdue(self, request: Request, seconds: float) -> None:
        assert self.dispatcher is not None
        self.dispatcher.overdue(request, seconds)

    def send(self, reply: Reply) -> None:
        assert self.router is not None
        self.router.send(reply)

    def evidence_seen(self) -> None:
        """The router saw a connection come, go or be named."""
        self.wake_reaper()
        self.wake_plugin()

    def wake_reaper(self) -> None:
        assert self.reaper is not None
        self.reaper.wake()

    def settings_changed(self) -> None:
        self.wake_reaper()
        self.wake_link()

    def wake_link(self) -> None:
        if self.link is not None:
            self.link.wake()

    def wake_plugin(self) -> None:
        if self.plugin is not None:
            self.plugin.wake()

    def slots_changed(self) -> None:
        """The kubelet has said something about slots; it is asked for its list as well."""
        self.wake_reaper()
        self.wake_link()
        self.wake_plugin()

    def slots_listed(self) -> None:
        self.wake_reaper()
        self.wake_link()

    def run_began(self) -> None:
        assert self.router is not None
        self.router.run_ended()
        self.slots_changed()

    def drop_instance_state(self, instance_id: InstanceId) -> None:
        for target in self.targets:
            target.drop_instance_state(instance_id)


def assemble(env: Environment) -> Assembled:
    """Build and wire all parts."""
    config, publish, now = env.config, env.bus.publish, env.now
    late = _Late()
    sync_pool = OrderedPool(late.run, _SYNC_QUEUE_SIZE)
    normal_pool = OrderedPool(late.run, config.normal_queue_size)
    transfer_pool = LanePool(
        late.run,
        config.affinity_queue_size,
        now,
        deadline_seconds=config.transfer_deadline_seconds,
        overdue=late.overdue,
        replace_thread=env.spawn,
    )

    changes = ChangeLog(config.kv_event_log_size)
    store = L1Store(
        env.region,
        _eviction_policy(config),
        now=now,
        write_ttl_seconds=config.l1_write_ttl_seconds,
        changes=changes,
    )
    bindings = TokenBindings(config.kv_event_log_size, config.chunk_size)
    kv_events = KvEventModule(store, bindings, publish) if config.kv_event_log_size else None
    sessions = SessionTable(config.session_ttl_seconds, config.l1_read_ttl_seconds, now)
    layouts = LayoutRegistry()
    hasher = ChunkHasher(config.chunk_size)
    lookup = LookupModule(
        store, sessions, layouts, hasher, transfer_pool.after_current, publish, now
    )

    book = SlotBook(config.slot_names, now)
    ledger = ConnectionLedger(book.words if config.slot_names else dict)
    stalls, journal = Stalls(), Journal(env.boot_id)
    settings = LiveSettings(config, late.settings_changed, publish)
    reaped_lately = ReapedLately()
    journal.tell(late.wake_link)
    releaser = Releaser(
        env.spawn,
        publish,
        now,
        late.drop_instance_state,
        config.release_deadline_seconds,
        late.wake_reaper,
        lambda entry, seconds: journal.append(stuck_release(entry, seconds, wall())),
    )
    absent_pings = AbsentPings()
    copies = ChunkCopies(
        store, sessions, layouts, hasher, config.null_block_id, publish, now, bindings
    )
    holder = HolderParts(
        layouts,
        releaser,
        absent_pings,
        reaped_lately,
        itertools.count(1),
        publish,
        now,
        wall,
        book.is_over,
    )
    quarantine = SlotQuarantine(
        store,
        lambda: settings().close_confirm_seconds,
        config.l1_write_ttl_seconds,
        publish,
        now,
    )
    lost = LostCommits(late.send, now)
    transfers = _transfer_modules(
        env, holder, copies, store, sessions, hasher, quarantine, bindings, lost
    )
    late.targets = transfers
    _limit_hits(lookup, transfers)

    reaper = Reaper(
        late.targets,
        ledger,
        stalls,
        settings,
        releaser,
        journal,
        reaped_lately,
        publish,
        now,
        Housekeeping(lookup, sessions, quarantine, ledger, settings, publish),
    )
    late.reaper = reaper
    management = ManagementModule(
        late.targets,
        reaper,
        store,
        absent_pings,
        reaped_lately,
        journal,
        config.chunk_size,
        publish,
        now,
        () if kv_events is None else (CAPABILITY,),
    )
    word = OperatorWord(
        env.boot_id, late.targets, settings, stalls, late.wake_reaper, publish, now, wall
    )
    if config.device_plugin_resource:
        late.plugin = _device_plugin(env, late, book, settings, journal)
    if config.operator_link:
        late.link = OperatorLink(
            Path(config.operator_link),
            Path(config.operator_token_file) if config.operator_token_file else None,
            LinkView(env.boot_id, settings, reaper, releaser, journal, word, book, late.plugin),
            publish,
            now,
        )
    router = Router(env.sockets, ledger, stalls, late.evidence_seen, publish, now, book)
    late.router = router
    reaper.watch(router)
    waiting = Waiting.for_config(config, free_memory_bytes())  # L1 is taken
    modules: list[Module] = [management, lookup, *transfers]
    if kv_events is not None:
        modules.append(kv_events)
    late.dispatcher = Dispatcher(
        handlers={
            name: handler for module in modules for name, handler in module.handlers().items()
        },
        pools={
            PoolKind.SYNC: sync_pool,
            PoolKind.NORMAL: normal_pool,
            PoolKind.AFFINITY: transfer_pool,
        },
        hear=management.hear,
        send=router.send,
        publish=publish,
        control=no_stream if kv_events is None else kv_events.control,
        lost=lost,
        run_is_over=book.is_over,
        waiting=waiting,
    )
    router.serve(late.dispatcher.receive)
    parts = Parts(
        config=config,
        boot_id=env.boot_id,
        settings=settings,
        router=router,
        reaper=reaper,
        releaser=releaser,
        journal=journal,
        store=store,
        quarantine=quarantine,
        sessions=sessions,
        layouts=layouts,
        sync_pool=sync_pool,
        normal_pool=normal_pool,
        transfer_pool=transfer_pool,
        waiting=waiting,
        bus=env.bus,
        link=late.link,
        kv_events=kv_events,
        plugin=late.plugin,
        slots=book,
    )
    return Assembled(parts, late.dispatcher)


def _transfer_modules(
    env: Environment,
    holder: HolderParts,
    copies: ChunkCopies,
    store: L1Store,
    sessions: SessionTable,
    hasher: ChunkHasher,
    quarantine: SlotQuarantine,
    bindings: TokenBindings,
    lost: LostCommits,
) -> tuple[LMCacheDrivenTransferModule | EngineDrivenTransferModule, ...]:
    """Make a module for each transfer mode that is served."""
    config, publish, now = env.config, env.bus.publish, env.now
    lmcache_driven = LMCacheDrivenTransferModule(
        holder, env.opener, copies, config.chunk_size, env.folders.segments_of
    )
    if not config.serves_engine_driven:
        return (lmcache_driven,)
    pool = SharedPoolInfo(env.region_name, config.l1_size_bytes)
    engine_driven = EngineDrivenTransferModule(
        holder,
        pool if config.shm_name else SharedPoolInfo(),
        SharedPoolTransfer(store, quarantine, publish, now),
        PickledTransfer(store, config.max_message_bytes, publish, now),
        quarantine,
        store,
        sessions,
        hasher,
        copies.give_back_share,
        bindings,
        lost.expect,
    )
    if not config.serves_lmcache_driven:
        return (engine_driven,)
    lmcache_driven.rivals, engine_driven.rivals = (engine_driven,), (lmcache_driven,)
    return lmcache_driven, engine_driven


def _limit_hits(lookup: LookupModule, modules: Sequence[InstanceLivenessTarget]) -> None:
    """Some workers get their chunks in one message."""
    for module in modules:
        if isinstance(module, EngineDrivenTransferModule):
            lookup.longest_hit = module.longest_hit


def _device_plugin(
    env: Environment, late: _Late, book: SlotBook, settings: LiveSettings, journal: Journal
) -> DevicePlugin:
    config, publish, now = env.config, env.bus.publish, env.now
    gate = StartGate(late.targets, settings, journal, publish, now, config.prestart_wait_seconds)
    service = SlotService(book, env.folders, gate, late.slots_changed, late.run_began)
    return DevicePlugin(
        config,
        book,
        env.folders,
        service,
        SharedMemoryWatch(book, env.folders, late.targets, journal, publish),
        late.targets,
        env.is_ready,
        late.slots_listed,
        publish,
        now,
    )


def _eviction_policy(config: AgentConfig) -> EvictionPolicy[ObjectKey]:
    if config.eviction_policy == "noop":
        return NoEvictionPolicy()
    return LruPolicy(config.eviction_trigger_watermark, config.eviction_ratio)
