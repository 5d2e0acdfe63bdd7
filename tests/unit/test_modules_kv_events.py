"""KV event streams: what is told, in which order, how much at a time, and what was lost."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from msgspec.msgpack import decode

from lmcache_nodeagent.errors import Overloaded
from lmcache_nodeagent.events import KvEventStreamEnded
from lmcache_nodeagent.hashing import ChunkHasher
from lmcache_nodeagent.ids import InstanceId
from lmcache_nodeagent.liveness.evidence import Connection
from lmcache_nodeagent.modules.calls import STREAMING, Call
from lmcache_nodeagent.modules.kv_events import MAX_STREAMS, KvEventModule
from lmcache_nodeagent.protocol.operations import OPERATIONS
from lmcache_nodeagent.protocol.optional_messages import KvEventBatch
from lmcache_nodeagent.storage.changes import MAX_KEYS_PER_CHANGE, ChangeLog
from lmcache_nodeagent.storage.objects import ObjectKey, kv_rank
from lmcache_nodeagent.transport.requests import Reply, Request
from tests.fakes.copying_engine import CopyingEngine
from tests.fakes.liveness_parts import close, connection
from tests.fakes.module_bench import CHUNK, MODEL, Engine, ModuleBench, key, tokens

HASHES = ChunkHasher(CHUNK).hashes(tokens(), 8 * CHUNK)


@dataclass(eq=False)
class Client:
    """One subscriber; `batches` is what it got, `ended` whether its stream did."""

    module: KvEventModule
    link: Connection = field(default_factory=connection)
    batches: list[KvEventBatch] = field(default_factory=list)
    ended: bool = False
    uid: bytes = b"\x07"

    def send(self, value: object) -> None:
        """Take a batch."""
        assert isinstance(value, KvEventBatch)
        assert not self.ended
        self.batches.append(value)

    def end(self) -> None:
        """The stream is over."""
        self.ended = True

    @property
    def connection(self) -> Connection:
        """The stream's."""
        return self.link

    def subscribe(
        self, number: int = 1, cursor: int = 0, most: int = 64, model: str = MODEL
    ) -> None:
        """Begin."""
        call = Call(self.link, stream=self)
        assert self.module.subscribe(call, InstanceId(number), model, cursor, most) is STREAMING

    def next(self) -> KvEventBatch | None:
        """Let the module look, then acknowledge; the batch, if there was one."""
        before = len(self.batches)
        self.module.send_what_is_due()
        if len(self.batches) == before:
            return None
        (batch,) = self.batches[before:]
        self.module.control(self.link, self.uid, b"ack")
        return batch


@pytest.fixture
def bench() -> ModuleBench:
    """Eight objects fit; the log keeps six changes."""
    return ModuleBench(objects=8, log_size=6)


@pytest.fixture
def client(bench: ModuleBench) -> Client:
    """Nobody yet."""
    return Client(bench.kv_events)


def test_stored_chunks_come_with_their_tokens_and_parents(
    bench: ModuleBench, client: Client
) -> None:
    """One record each, in order, from the beginning."""
    Engine(bench).store(end=2)
    client.subscribe()
    batch = client.next()
    assert batch is not None
    assert (batch.enabled, batch.lost, batch.next_cursor) == (True, False, 2)
    assert batch.incarnation == bench.kv_events.incarnation > 1_700_000_000_000_000_000
    assert [
        (e.seq, e.kind, e.medium, e.model_name, e.block_hashes, e.parent_block_hash, e.token_ids)
        for e in batch.events
    ] == [
        (1, "stored", "CPU", MODEL, [HASHES[0]], None, tokens()[:CHUNK]),
        (2, "stored", "CPU", MODEL, [HASHES[1]], HASHES[0], tokens()[CHUNK : 2 * CHUNK]),
    ]


@pytest.mark.parametrize("way", ["mapped", "sent"])
def test_stores_of_workers_that_copy_themselves_are_told_too(
    bench: ModuleBench, client: Client, way: str
) -> None:
    """Whether they map L1 or send the bytes; upstream tells of neither."""
    engine = CopyingEngine(bench)
    assert engine.store(end=2) if way == "mapped" else engine.send(end=2)
    client.subscribe()
    batch = client.next()
    assert batch is not None
    assert [(e.block_hashes, e.parent_block_hash, e.token_ids[0]) for e in batch.events] == [
        ([HASHES[0]], None, 0),
        ([HASHES[1]], HASHES[0], CHUNK),
    ]


def test_a_store_in_the_middle_of_a_prompt_knows_its_parent(
    bench: ModuleBench, client: Client
) -> None:
    """Chunks that were there already are not told again."""
    engine = Engine(bench)
    engine.store(end=2)
    client.subscribe(cursor=2)
    engine.store(start=1, end=3)
    batch = client.next()
    assert batch is not None
    assert [(e.block_hashes, e.parent_block_hash) for e in batch.events] == [
        ([HASHES[2]], HASHES[1])
    ]


@pytest.mark.parametrize("way", ["clear", "evict"])
def test_what_goes_is_told(bench: ModuleBench, client: Client, way: str) -> None:
    """After it was told to be there."""
    engine = Engine(bench)
    engine.store(end=2)
    client.subscribe()
    client.next()
    if way == "clear":
        bench.store_.clear(force=False)
    else:
        Engine(bench, 2, rank=1, world=2).store(end=8, prompt=5)
    batch = client.next()
    assert batch is not None
    for event in batch.events:  # evictions may take turns
        assert (event.kind, event.parent_block_hash, event.token_ids) == ("removed", None, [])
    gone = [chunk_hash for event in batch.events for chunk_hash in event.block_hashes]
    assert sorted(gone) == sorted(HASHES[:2])


def test_nothing_is_sent_without_news_or_without_credit(bench: ModuleBench, client: Client) -> None:
    """A client that does not acknowledge costs one batch."""
    engine = Engine(bench)
    client.subscribe()
    assert bench.kv_events.send_what_is_due()
    assert client.batches == []
    engine.store(end=1)
    assert client.module.send_what_is_due()
    engine.store(start=1, end=3)
    assert not client.module.send_what_is_due(), "nobody waits"
    assert len(client.batches) == 1
    client.module.control(client.link, client.uid, b"ack")
    batch = client.next()
    assert batch is not None
    assert [event.seq for event in batch.events] == [2, 3]


def test_a_batch_has_as_many_events_as_were_asked_for(bench: ModuleBench, client: Client) -> None:
    """The next one goes on behind it."""
    Engine(bench).store(end=5)
    client.subscribe(most=2)
    seen = [
        [event.seq for event in batch.events]
        for batch in (client.next(), client.next(), client.next())
        if batch
    ]
    assert seen == [[1, 2], [3, 4], [5]]


def test_who_falls_behind_the_log_is_told_so(bench: ModuleBench, client: Client) -> None:
    """And gets what is left; a cursor of an earlier life as well."""
    engine = Engine(bench)
    engine.store(end=8)
    client.subscribe()
    batch = client.next()
    assert batch is not None
    assert (batch.lost, [event.seq for event in batch.events]) == (True, [3, 4, 5, 6, 7, 8])
    assert client.next() is None
    late = Client(bench.kv_events)
    late.subscribe(2, cursor=1000)
    batch = late.next()
    assert batch is not None
    assert (batch.lost, batch.next_cursor) == (True, 8)


def test_other_models_and_other_ranks_are_not_told(bench: ModuleBench, client: Client) -> None:
    """The cursor passes them."""
    Engine(bench, 1, rank=1, world=2).store(end=2)
    Engine(bench, 2).store(end=1, prompt=3)
    client.subscribe(model="other/model")
    assert client.next() is None
    mine = Client(bench.kv_events)
    mine.subscribe(2)
    batch = mine.next()
    assert batch is not None
    assert [event.seq for event in batch.events] == [1]


def test_chunks_whose_tokens_are_forgotten_are_left_out(bench: ModuleBench, client: Client) -> None:
    """Their removal is told all the same."""
    hasher = ChunkHasher(CHUNK)
    Engine(bench).store(end=1)
    for prompt in range(1, 7):
        bench.bindings.bind(key(prompt=prompt, end=1), hasher.hashes(tokens(prompt), CHUNK), [0])
    client.subscribe()
    assert client.next() is None
    bench.store_.clear(force=False)
    batch = client.next()
    assert batch is not None
    assert [event.kind for event in batch.events] == ["removed"]


def test_a_second_subscription_of_an_instance_ends_the_first(
    bench: ModuleBench, client: Client
) -> None:
    """So does a cancel, and a connection that closes; words about unknown streams are fine."""
    client.subscribe()
    second = Client(bench.kv_events)
    second.subscribe()
    assert (client.ended, second.ended, bench.kv_events.streams()) == (True, False, 1)
    for word in (b"ack", b"cancel"):
        bench.kv_events.control(client.link, client.uid, word)
        bench.kv_events.control(second.link, b"\x08", word)
    bench.kv_events.control(second.link, second.uid, b"what")
    assert bench.kv_events.streams() == 1
    bench.kv_events.control(second.link, second.uid, b"cancel")
    assert bench.kv_events.streams() == 0
    third = Client(bench.kv_events)
    third.subscribe()
    close(third.link, 1.0)
    assert not bench.kv_events.send_what_is_due()
    assert bench.kv_events.streams() == 0
    reasons = [fact.reason for fact in bench.facts if isinstance(fact, KvEventStreamEnded)]
    assert reasons == ["replaced", "cancelled", "connection_closed"]


def test_streams_are_bounded(bench: ModuleBench) -> None:
    """Whoever has one may have another one in its place."""
    for number in range(MAX_STREAMS):
        Client(bench.kv_events).subscribe(number)
    with pytest.raises(Overloaded):
        Client(bench.kv_events).subscribe(MAX_STREAMS)
    Client(bench.kv_events).subscribe(0)


def test_a_stream_is_answered_until_its_end() -> None:
    """Each document with the frames of the request; the last one without a document."""
    replies: list[Reply] = []
    request = Request(
        connection(),
        OPERATIONS["subscribe_kv_events"],
        b"\x05",
        b"op",
        (),
        replies.append,
        lambda _: None,
    )
    batch = KvEventBatch(enabled=True, incarnation=1, next_cursor=0, lost=False, events=[])
    request.send(batch)
    request.end()
    request.end()
    request.send(batch)
    assert [(reply.uid, reply.operation_frame, reply.document is None) for reply in replies] == [
        (b"\x05", b"op", False),
        (b"\x05", b"op", True),
    ]
    assert decode(replies[0].document or b"")["events"] == []


def test_a_large_removal_is_cut_up() -> None:
    """So that no batch grows with the size of L1; models are told apart."""
    log = ChangeLog(10)
    keys = [
        ObjectKey(number.to_bytes(4), model, kv_rank(1, 0), 0, "")
        for model in ("a", "b")
        for number in range(MAX_KEYS_PER_CHANGE + 1)
    ]
    log.removed(keys)
    records = log.since(0, 10).records
    assert [len(record.keys) for record in records] == [MAX_KEYS_PER_CHANGE, 1] * 2
    assert [record.keys[0].model_name for record in records] == ["a", "a", "b", "b"]


def test_without_a_log_nothing_is_kept() -> None:
    """A size of 0."""
    log = ChangeLog(0)
    log.stored(ObjectKey(b"x", "a", kv_rank(1, 0), 0, ""))
    changes = log.since(1, 10)
    assert (changes.records, changes.next_cursor, changes.lost) == ([], 1, False)
