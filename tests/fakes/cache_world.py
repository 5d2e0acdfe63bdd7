"""Workers and schedulers around one small L1, and all that was ever stored or promised.

What `tests/unit/test_cache_model.py` drives and compares with.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from lmcache_nodeagent.errors import NotRegistered
from lmcache_nodeagent.hashing import ChunkHasher
from lmcache_nodeagent.modules.object_keys import object_keys
from lmcache_nodeagent.protocol.messages import PoolSlot
from lmcache_nodeagent.protocol.pickled_tensors import read_tensors
from tests.fakes.copying_engine import CopyingEngine
from tests.fakes.liveness_parts import connection
from tests.fakes.module_bench import CHUNK, PER_CHUNK, SHAPE, Engine, ModuleBench, blocks, key

OBJECTS = 14
MAPPED_MODEL, COPYING_MODEL = "demo/mapped", "demo/copying"
BLOCK_BYTES = 32
PLANE_BYTES = SHAPE[1] * BLOCK_BYTES
CHUNK_BYTES = 2 * PER_CHUNK * BLOCK_BYTES
STORE_AT, LOAD_AT = 0, 4
"""Where in a mapped worker's memory, in chunks."""

Place = tuple[int, int, int, str]
"""Prompt, first and last chunk, salt."""


def placed(place: Place, request: str) -> dict[str, Any]:
    """The place as arguments of the engines' methods."""
    prompt, start, end, salt = place
    return {"prompt": prompt, "start": start, "end": end, "salt": salt, "request": request}


@dataclass(eq=False)
class Promise:
    """What a look-up found and nobody has loaded, freed or ended yet."""

    prompt: int
    salt: str
    chunks: set[int]
    until: float

    def covers(self, place: Place, now: float) -> bool:
        """Whether a load of the place cannot miss."""
        prompt, start, end, salt = place
        same = (prompt, salt) == (self.prompt, self.salt)
        return same and now < self.until and set(range(start, end)) <= self.chunks


class CacheWorld:
    """Two workers whose memory the agent maps, two that copy themselves."""

    def __init__(self) -> None:
        self.bench = ModuleBench(objects=OBJECTS)
        self.numbers = itertools.count(1)
        self.mapped = [
            Engine(self.bench, n + 1, address=f"10.0.0.{n}", register=False) for n in range(2)
        ]
        self.copying = [
            CopyingEngine(self.bench, (1 << 40) + n, address=f"10.0.1.{n}", register=False)
            for n in range(2)
        ]
        for worker in range(2):
            self.register_mapped(worker)
            self.register_copying(worker)
        self._identities = {
            model: self.bench.layouts.find(model, 1)[0] for model in (MAPPED_MODEL, COPYING_MODEL)
        }
        # What was stored: whole chunks by (model, prompt, chunk, salt).
        self.stored: defaultdict[tuple[str, int, int, str], set[bytes]] = defaultdict(set)
        self.promises: dict[tuple[str, int, str], Promise] = {}

    def register_mapped(self, worker: int) -> None:
        """Register, over a new connection."""
        engine = self.mapped[worker]
        engine.worker = connection(engine.worker.peer.text)
        engine.register(model=MAPPED_MODEL)

    def register_copying(self, worker: int) -> None:
        """Register, over a new connection."""
        engine = self.copying[worker]
        engine.worker = connection(engine.worker.peer.text)
        engine.register(model_name=COPYING_MODEL)

    def is_registered(self, engine: CopyingEngine) -> bool:
        """Tell whether the agent knows it now."""
        entries = self.bench.engine_driven.context_entries_snapshot()
        return engine.instance_id in {entry.instance_id for entry in entries}

    # What workers have in their memory

    def fresh(self, model: str, place: Place, count: int | None = None) -> list[bytes]:
        """New bytes for each chunk: no two stores, chunks or tenants have the same."""
        prompt, start, end, salt = place
        made = []
        for chunk in range(start, end)[:count]:
            text = f"{model} {prompt} {chunk} {salt} {next(self.numbers)}".encode()
            made.append(hashlib.shake_128(text).digest(CHUNK_BYTES))
        return made

    def note(self, model: str, place: Place, contents: list[bytes]) -> None:
        """Remember what may be found there from now on."""
        prompt, start, _, salt = place
        for chunk, content in enumerate(contents, start):
            self.stored[model, prompt, chunk, salt].add(content)

    def check(self, model: str, place: Place, contents: list[bytes]) -> None:
        """Fail unless each chunk was once stored there."""
        prompt, start, end, salt = place
        assert len(contents) == end - start
        for chunk, content in enumerate(contents, start):
            assert content in self.stored[model, prompt, chunk, salt]

    @staticmethod
    def _parts(position: int) -> list[slice]:
        """Where a chunk lies in a mapped worker's memory: one part for each plane."""
        first = (1 + position * PER_CHUNK) * BLOCK_BYTES
        size = PER_CHUNK * BLOCK_BYTES
        return [
            slice(plane * PLANE_BYTES + first, plane * PLANE_BYTES + first + size)
            for plane in (0, 1)
        ]

    def put(self, engine: Engine, position: int, content: bytes) -> None:
        """Write a chunk into a mapped worker's memory."""
        half = CHUNK_BYTES // 2
        for part, data in zip(self._parts(position), (content[:half], content[half:]), strict=True):
            engine.memory[part] = data

    def get(self, engine: Engine, position: int) -> bytes:
        """Read a chunk of a mapped worker's memory."""
        return b"".join(bytes(engine.memory[part]) for part in self._parts(position))

    def load_mapped(self, engine: Engine, place: Place, request: str) -> bool | None:
        """Load and check; None for a worker that is not here."""
        chunks = place[2] - place[1]
        for position in range(LOAD_AT, LOAD_AT + chunks):
            self.put(engine, position, b"\xee" * CHUNK_BYTES)
        try:
            found = engine.retrieve(
                blocks(LOAD_AT, chunks), model=MAPPED_MODEL, **placed(place, request)
            )
        except NotRegistered:
            return None
        if found:
            loaded = [self.get(engine, LOAD_AT + chunk) for chunk in range(chunks)]
            self.check(MAPPED_MODEL, place, loaded)
        return found

    def load_copying(self, engine: CopyingEngine, place: Place, request: str) -> bool:
        """Load and check; True if it was there."""
        reply = engine.prepare_retrieve(model=COPYING_MODEL, **placed(place, request))
        if reply.success and reply.data:
            tensors = read_tensors(reply.data, place[2] - place[1])
            self.check(COPYING_MODEL, place, [bytes(tensor.data) for tensor in tensors])
        elif reply.success:
            self.check(COPYING_MODEL, place, self.bytes_of(engine, reply.context.slots or []))
        engine.commit_retrieve(model=COPYING_MODEL, **placed(place, request))
        return reply.success

    @staticmethod
    def bytes_of(engine: CopyingEngine, slots: list[PoolSlot]) -> list[bytes]:
        """What the slots have now."""
        return [bytes(engine.bytes_of(slot)) for slot in slots]

    def take_promise(self, model: str, worker: int, request: str, place: Place) -> bool:
        """Whether the load cannot miss; it uses up its chunks' pins."""
        promise = self.promises.get((model, worker, request))
        if promise is None:
            return False
        kept = promise.covers(place, self.bench.now())
        prompt, start, end, salt = place
        if (prompt, salt) == (promise.prompt, promise.salt):
            promise.chunks -= set(range(start, end))
        return kept

    def broken_promises(self) -> list[Promise]:
        """What was promised and cannot be loaded any more."""
        return [
            promise
            for (model, _, _), promise in self.promises.items()
            if self.bench.now() < promise.until and not self._has(model, promise)
        ]

    def _has(self, model: str, promise: Promise) -> bool:
        last = max(promise.chunks, default=-1) + 1
        made = key(prompt=promise.prompt, end=last, salt=promise.salt, model=model)
        hashes = ChunkHasher(CHUNK).hashes(made.token_ids, made.end)
        names = object_keys(made, hashes, 0, self._identities[model])
        return all(self.bench.store_.contains(names[chunk]) for chunk in promise.chunks)
