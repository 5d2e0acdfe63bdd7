"""Registering, replacing and leaving: which context an id has, and who may say so."""

from __future__ import annotations

import pytest

from lmcache_nodeagent.errors import (
    LayoutError,
    MalformedRequest,
    NotRegistered,
    NotTheSpeaker,
    StillReleasing,
    TooManyRegistered,
)
from lmcache_nodeagent.events import InstanceRegistered, InstanceUnregistered
from lmcache_nodeagent.ids import InstanceId
from lmcache_nodeagent.liveness.entry import Speaker
from lmcache_nodeagent.liveness.targets import ReapableEntry
from lmcache_nodeagent.liveness.testimony import Hint
from lmcache_nodeagent.modules import context_table
from lmcache_nodeagent.modules.calls import Call, Pending
from lmcache_nodeagent.modules.context_entry import ContextEntry
from lmcache_nodeagent.modules.context_table import Installed
from tests.fakes.liveness_parts import close, connection
from tests.fakes.module_bench import MODEL, SHAPE, Engine, ModuleBench, blocks
from tests.fakes.paged_memory import kv_tensor


def entry_of(bench: ModuleBench) -> ContextEntry:
    """The one entry."""
    (entry,) = bench.transfer.context_entries_snapshot()
    return entry


def test_a_registration_maps_the_memory_and_says_so() -> None:
    """The entry answers for what it holds."""
    bench = ModuleBench()
    engine = Engine(bench)
    entry = entry_of(bench)
    assert (entry.model, entry.world_size, entry.mode) == (MODEL, 1, "lmcache_driven/cpu_shm")
    assert entry.nbytes == len(engine.memory)
    assert entry.handles == {engine.segment}
    assert (entry.shard, entry.transfers_in_flight) == (None, 0)
    assert bench.facts == [
        InstanceRegistered(engine.instance_id, MODEL, "10.0.0.1", entry.nbytes, replaced=False)
    ]
    assert bench.transfer.tracked_instance_count() == 1
    engine.store(end=1)
    assert entry.shard == 0
    assert set(bench.transfer.handlers()) == {
        "register_kv_cache",
        "unregister_kv_cache",
        "store",
        "retrieve",
    }


def test_the_same_content_again_only_refreshes() -> None:
    """The context in use stays; the one opened for comparison is closed."""
    bench = ModuleBench()
    engine = Engine(bench)
    bench.now.advance(50.0)
    again = connection("10.0.0.1")
    engine.register(by=again)
    entry = entry_of(bench)
    assert (entry.last_seen, entry.registrant) == (bench.now(), again)
    assert [context.closed for context in bench.opener.contexts] == [False, True]
    assert len([fact for fact in bench.facts if isinstance(fact, InstanceRegistered)]) == 1
    assert engine.store(end=1)


def test_other_content_replaces_the_context_as_a_whole() -> None:
    """A recovery sends fresh handles: the old ones are closed, the heartbeat is the same."""
    bench = ModuleBench()
    engine = Engine(bench)
    bench.transfer.touch_instance(engine.instance_id, engine.worker, ping=True)
    old, again = engine.segment, connection("10.0.0.1")
    engine.segment = "/lmcache_kv_1_1"
    engine.register(by=again)
    bench.threads.run_all()
    entry = entry_of(bench)
    assert entry.handles == {engine.segment}
    assert entry.has_liveness_signal
    assert entry.superseded == [engine.worker]
    assert bench.opener.counts.open_handles == {engine.segment: 1}
    assert old not in bench.opener.counts.open_handles
    replaced = [fact for fact in bench.facts if isinstance(fact, InstanceRegistered)][-1]
    assert replaced.replaced
    assert len(bench.layouts) == 1


def test_the_same_content_replaces_memory_that_was_taken_away() -> None:
    """The worker cut its file short and made it whole again: what is mapped is not that."""
    bench = ModuleBench()
    engine = Engine(bench)
    bench.opener.contexts[0].is_usable = False
    engine.register()
    bench.threads.run_all()
    assert [context.closed for context in bench.opener.contexts] == [True, False]
    assert engine.store(end=1)


def test_a_replaced_owner_has_no_say() -> None:
    """Its late goodbye and its pings are a stranger's."""
    bench = ModuleBench()
    first = Engine(bench)
    second = Engine(bench, register=False)
    second.segment = "/lmcache_kv_9_0"
    second.register()
    touched = bench.transfer.touch_instance(first.instance_id, first.worker, ping=True)
    assert touched.speaker is Speaker.STRANGER
    with pytest.raises(NotTheSpeaker):
        first.unregister()
    assert entry_of(bench).handles == {second.segment}


@pytest.mark.parametrize("same_content", [True, False])
def test_a_strangers_registration_is_refused_while_the_owner_is_open(*, same_content: bool) -> None:
    """With the reason; what it mapped is unmapped again. Once the owner is gone, it may."""
    bench = ModuleBench()
    owner = Engine(bench)
    stranger = Engine(bench, address="10.0.0.2", register=False)
    if not same_content:
        stranger.segment = "/lmcache_kv_other"
    with pytest.raises(NotTheSpeaker, match=r"instance 1 belongs to 10\.0\.0\.1"):
        stranger.register()
    assert entry_of(bench).registrant is owner.worker
    assert bench.opener.counts.open_handles == {owner.segment: 1}
    close(owner.worker, bench.now())
    stranger.register()
    assert entry_of(bench).registrant is stranger.worker


def test_memory_that_cannot_be_mapped_registers_nobody() -> None:
    """The opener's reason goes to the caller."""
    bench = ModuleBench()
    engine = Engine(bench, register=False)
    with pytest.raises(LayoutError):
        engine.register([kv_tensor("/x", [3], dtype="float16")])
    assert bench.transfer.tracked_instance_count() == 0


def test_a_goodbye_is_answered_once_the_memory_is_unmapped() -> None:
    """Not before; and the id is fenced at once."""
    bench = ModuleBench()
    engine = Engine(bench)
    done = engine.unregister()
    assert isinstance(done, Pending)
    answers = list[object]()
    done.when_settled(answers.append)
    with pytest.raises(NotRegistered):
        engine.store(end=1)
    with pytest.raises(StillReleasing):
        engine.register()
    assert answers == []
    bench.threads.run_all()
    assert answers == [None]
    assert bench.opener.counts.open_handles == {}
    assert any(isinstance(fact, InstanceUnregistered) for fact in bench.facts)
    engine.register()
    assert bench.transfer.tracked_instance_count() == 1


def test_a_goodbye_of_nobody_is_fine() -> None:
    """Also the second one of somebody."""
    bench = ModuleBench()
    engine = Engine(bench)
    engine.unregister()
    assert engine.unregister() is None


def test_a_strangers_goodbye_is_refused() -> None:
    """Ids are identifiers, not secrets."""
    bench = ModuleBench()
    engine = Engine(bench)
    with pytest.raises(NotTheSpeaker):
        engine.unregister(by=connection("10.0.0.2"))
    assert bench.transfer.tracked_instance_count() == 1


@pytest.mark.parametrize(
    ("limit", "words"),
    [
        ("MAX_PEER_INSTANCES", "2 instances with 2 tensors; at most 2 with 8192"),
        ("MAX_PEER_TENSORS", "4096 with 2 are taken"),
    ],
)
def test_what_one_peer_may_hold_is_bounded(
    monkeypatch: pytest.MonkeyPatch, limit: str, words: str
) -> None:
    """Also while it is being released; what it has may be renewed, and others may come."""
    monkeypatch.setattr(context_table, limit, 2)
    bench = ModuleBench()
    first, _ = Engine(bench), Engine(bench, 2)
    third = Engine(bench, 3, register=False)
    with pytest.raises(TooManyRegistered, match=words):
        third.register()
    assert bench.opener.counts.open_handles.keys() == {first.segment, "/lmcache_kv_2_0"}
    first.register()
    Engine(bench, 4, address="10.0.0.2")
    first.unregister()
    with pytest.raises(TooManyRegistered):
        third.register()
    bench.threads.run_all()
    third.register()
    assert bench.transfer.tracked_instance_count() == 3


def test_memory_that_is_being_released_is_refused_to_another_id() -> None:
    """A restarted worker may offer the same segment under a new id."""
    bench = ModuleBench()
    engine = Engine(bench)
    engine.unregister()
    restarted = Engine(bench, 2, register=False)
    restarted.segment = engine.segment
    with pytest.raises(StillReleasing, match="instance 1"):
        restarted.register()
    assert bench.opener.counts.open_handles == {engine.segment: 1}
    bench.threads.run_all()
    restarted.register()


def test_a_reap_fences_drains_and_releases() -> None:
    """The last user lets the release go on; opens equal closes."""
    bench = ModuleBench()
    engine = Engine(bench)
    engine.store(end=1)
    drained = list[bool]()

    def reap() -> None:
        (condemned,) = bench.transfer.reap_stale_instances(lambda _: True)
        assert isinstance(condemned, ContextEntry)
        assert condemned.transfers_in_flight == 1
        drained.append(condemned.drained.is_set())
        bench.releaser.start(condemned)
        with pytest.raises(NotRegistered):
            engine.store(end=1)

    bench.hooks.before_scatter = reap
    assert engine.retrieve(end=1)
    bench.threads.run_all()
    assert drained == [False]
    assert bench.opener.counts.opened == bench.opener.counts.closed == 1
    assert len(bench.layouts) == 0


def test_a_context_that_fails_to_close_frees_its_id() -> None:
    """Its memory may stay mapped; that is told elsewhere."""
    bench = ModuleBench()
    engine = Engine(bench)

    def fail() -> None:
        raise OSError("no")

    bench.hooks.before_close = fail
    done = engine.unregister()
    bench.threads.run_all()
    assert isinstance(done, Pending)
    engine.register([kv_tensor("/lmcache_kv_new", SHAPE, dtype="float16")])


def test_one_release_of_several_of_an_id_ends_that_one() -> None:
    """An id that is replaced while its previous memory is still being released."""
    bench = ModuleBench()
    engine = Engine(bench)
    engine.segment = "/lmcache_kv_1_1"
    engine.register()
    with pytest.raises(StillReleasing):
        engine.register([kv_tensor("/lmcache_kv_1_2", SHAPE, dtype="float16")])
    engine.unregister()
    (_, first), second = bench.threads.started[0], bench.threads.started[1]
    bench.threads.started.clear()
    first()
    with pytest.raises(StillReleasing):
        engine.register()
    second[1]()
    engine.register()


def test_signs_of_life_reach_the_entry() -> None:
    """From the rightful speaker; strangers and unknown ids are told apart."""
    bench = ModuleBench()
    engine = Engine(bench)
    bench.now.advance(5.0)
    touched = bench.transfer.touch_instance(engine.instance_id, engine.worker, ping=False)
    assert touched.speaker is Speaker.RIGHTFUL
    entry = entry_of(bench)
    assert (entry.last_seen, entry.has_liveness_signal) == (bench.now(), False)
    bench.now.advance(5.0)
    stranger = bench.transfer.touch_instance(engine.instance_id, connection("10.0.0.2"), ping=True)
    assert (stranger.speaker, stranger.bound_peer) == (Speaker.STRANGER, "10.0.0.1")
    assert (entry.last_seen, entry.has_liveness_signal) == (bench.now() - 5.0, False)
    engine.unregister()
    gone = bench.transfer.touch_instance(engine.instance_id, engine.worker, ping=True)
    assert gone.speaker is Speaker.UNKNOWN_INSTANCE


def test_a_rhythm_that_was_heard_before_the_registration_counts() -> None:
    """A slow heartbeat that was reaped once is not reaped again for the same reason."""
    bench = ModuleBench()
    engine = Engine(bench, register=False)
    for moment in (0.0, 60.0):
        bench.absent.pinged(engine.instance_id, moment)
    engine.register()
    entry = entry_of(bench)
    assert entry.observed_interval_seconds == 60.0
    entry.pinged(140.0)
    assert entry.ping_intervals == [60.0, 80.0]


def test_visitors_see_every_entry() -> None:
    """Under the lock."""
    bench = ModuleBench()
    Engine(bench, 1)
    Engine(bench, 2)
    seen = list[int]()
    bench.transfer.visit_entries(lambda entry: seen.append(entry.instance_id))
    assert seen == [1, 2]


def test_a_world_that_no_lookup_could_name_is_refused_before_anything_is_mapped() -> None:
    """Object keys have eight bits for a rank: served at registration, it would never be found."""
    bench = ModuleBench()
    engine = Engine(bench)
    opened = bench.opener.counts.opened
    engine.world = 256
    with pytest.raises(MalformedRequest, match="255"):
        engine.register()
    assert bench.opener.counts.opened == opened


def test_a_worker_that_is_reaped_the_moment_it_is_registered_leaves_nothing() -> None:
    """It died while its registration waited: the entry can be condemned as soon as it is seen."""
    bench = ModuleBench()
    engine = Engine(bench, register=False)
    table, reaped = bench.transfer._table, list[ReapableEntry]()
    install = table.install

    def install_and_reap(entry: ContextEntry, now: float) -> Installed[ContextEntry]:
        installed = install(entry, now)
        reaped.extend(bench.transfer.reap_stale_instances(lambda _: True))
        return installed

    table.install = install_and_reap  # type: ignore[method-assign]  # the reaper is this quick
    engine.register()
    assert [entry.instance_id for entry in reaped] == [engine.instance_id]
    assert len(bench.layouts) == 0


def test_a_transfer_that_was_read_for_a_replaced_context_does_not_touch_the_new_one() -> None:
    """Its block ids mean nothing in other memory: stored, they would be wrong bytes for all."""
    bench = ModuleBench()
    engine = Engine(bench)
    touched = bench.transfer.touch_instance(engine.instance_id, engine.worker, ping=False)
    assert touched.entry is entry_of(bench)
    engine.register([kv_tensor("/other", SHAPE, dtype="float16")])
    with pytest.raises(NotRegistered):
        bench.transfer.store(
            Call(engine.worker, touched), engine.key(end=1), engine.instance_id, blocks(0, 1), b""
        )
    assert bench.store_.stats().objects == 0


def test_a_transfer_of_somebody_else_that_was_read_before_the_registration_is_refused() -> None:
    """Nobody was registered when it was read, so nobody checked who may speak."""
    bench = ModuleBench()
    engine = Engine(bench)
    stranger = connection(address="10.0.0.9")
    with pytest.raises(NotRegistered):
        bench.transfer.store(
            Call(stranger), engine.key(end=1), engine.instance_id, blocks(0, 1), b""
        )


# Registrations are numbered


def test_each_registration_has_a_number_and_a_moment_of_its_own() -> None:
    """Also one with the same content: evidence about the one before is not about this one."""
    bench = ModuleBench()
    engine = Engine(bench)
    first = entry_of(bench).registered
    bench.wall.advance(60.0)
    engine.register(by=connection("10.0.0.1"))
    again = entry_of(bench).registered
    assert (first.serial, again.serial) == (1, 2)
    assert again.at == first.at + 60.0
    Engine(bench, 2)
    assert {entry.registered.serial for entry in bench.transfer.context_entries_snapshot()} == {
        2,
        3,
    }


def test_other_content_gives_up_what_the_operator_said_of_the_old_one() -> None:
    """Where it ran included."""
    bench = ModuleBench()
    engine = Engine(bench)
    old = entry_of(bench)
    old.hints.append(Hint("pod_gone", bench.now()))
    other = kv_tensor("/lmcache_kv_1_1", SHAPE, dtype="float16")
    engine.register([other])
    new = entry_of(bench)
    assert new is not old
    assert (new.registered.serial, new.registered.pod, new.hints) == (2, None, [])


def test_one_entry_can_be_visited_by_its_id() -> None:
    """Under the table's lock."""
    bench = ModuleBench()
    engine = Engine(bench, 7)
    seen: list[ReapableEntry] = []
    assert bench.transfer.visit_entry(engine.instance_id, seen.append)
    assert not bench.transfer.visit_entry(InstanceId(8), seen.append)
    assert seen == [entry_of(bench)]
