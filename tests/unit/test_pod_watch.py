"""A selection is followed through cuts, gaps and refusals, at a pace the API server can bear."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_operator.errors import ApiError, Forbidden, PodError
from lmcache_operator.workers.absences import Absence
from lmcache_operator.workers.pacing import Backoff, ListPace
from lmcache_operator.workers.pod import Pod, read_pod
from lmcache_operator.workers.pods import PodWatch
from lmcache_operator.workers.selection import Selection
from lmcache_operator.workers.selection_watch import RESYNC_SECONDS, Listing, PodEvent
from tests.fakes.pod_store import PodStore
from tests.fakes.pods import Json, pod
from tests.fakes.virtual_loop import in_virtual_time

MINE = Selection("default", "app=a")
ALSO_MINE = Selection("default", "team=x")
OTHERS = Selection("default", "app=b")


class ForgetfulStore(PodStore):
    """Knows no version that a watch begins at."""

    def __init__(self) -> None:
        super().__init__()
        self.listed_at: list[float] = []

    async def list(self, selection: Selection) -> Listing:
        """List, and keep when."""
        self.listed_at.append(asyncio.get_running_loop().time())
        return await super().list(selection)

    async def watch(
        self, selection: Selection, version: str, seconds: int
    ) -> AsyncGenerator[PodEvent, None]:
        """Refuse every version there can be."""
        del selection, seconds
        await asyncio.sleep(0)
        if version:
            raise ApiError.of(410, "Expired", "too old resource version")
        yield PodEvent(version)


class BriefStore(PodStore):
    """Ends every watch at once."""

    async def watch(
        self, selection: Selection, version: str, seconds: int
    ) -> AsyncGenerator[PodEvent, None]:
        """Say that it has begun."""
        del selection, seconds
        self.watches += 1
        await asyncio.sleep(0)
        yield PodEvent(version)


def document(name: str, *, label: str = "a", uid: str = "", **fields: object) -> Json:
    """Make a pod with a label."""
    found = pod(uid=uid or f"uid-{name}")
    found["metadata"] |= {"name": name, "labels": {"app": label}, **fields}
    return found


class Ear:
    """Keeps what is told."""

    def __init__(self) -> None:
        self.changed: list[str] = []
        self.missing: list[str] = []
        self.absences: list[Absence] = []
        self.on_missing: Callable[[Selection, Pod], None] = lambda _, __: None

    def pods_changed(
        self, selection: Selection, changed: Sequence[Pod], missing: Sequence[Pod]
    ) -> None:
        """Keep uids."""
        self.changed += [each.uid for each in changed]
        self.missing += [each.uid for each in missing]
        for each in missing:
            self.on_missing(selection, each)

    def pod_absent(self, selection: Selection, absence: Absence) -> None:
        """Keep it."""
        assert selection == MINE
        self.absences.append(absence)


@asynccontextmanager
async def watching(store: PodStore, *selections: Selection) -> AsyncGenerator[tuple[PodWatch, Ear]]:
    """Watch selections until it is left."""
    ear, loop = Ear(), asyncio.get_running_loop()
    watch = PodWatch(store, ear, now=loop.time, spread=lambda: 0.0)
    ear.on_missing = watch.check_absence
    watch.select(selections or (MINE,))
    task = loop.create_task(watch.run())
    await asyncio.sleep(0.1)
    yield watch, ear
    assert not task.done()
    task.cancel()
    await asyncio.wait([task])


def uids(watch: PodWatch, selection: Selection = MINE) -> set[str]:
    """Return the pods that are known."""
    return {each.uid for each in watch.pods(selection) or ()}


class TestFollowing:
    """What is told, and when."""

    @in_virtual_time
    async def test_changes_that_matter(self) -> None:
        """Pods that come and change; not those that are as they were, nor other ones."""
        store = PodStore()
        store.put(document("a"))
        async with watching(store) as (watch, ear):
            store.put(document("b"))
            store.put(document("other", label="b"))
            store.put(document("a", generation=5))
            await asyncio.sleep(0.1)
            assert ear.changed == ["uid-a", "uid-b"]
            assert uids(watch) == {"uid-a", "uid-b"}
            assert watch.is_current(MINE)

    @in_virtual_time
    async def test_a_pod_is_bound_to_a_node(self) -> None:
        """Then it is found there."""
        store = PodStore()
        unbound = document("a")
        unbound["spec"]["nodeName"] = ""
        store.put(unbound)
        async with watching(store) as (watch, _):
            pods = watch.pods(MINE)
            assert pods is not None
            assert (len(pods.on_node("n1")), len(pods.on_node(""))) == (0, 1)
            store.put(document("a"))
            await asyncio.sleep(0.1)
            assert (len(pods.on_node("n1")), len(pods.on_node(""))) == (1, 0)
            assert set(pods.nodes()) == {"n1"}

    @in_virtual_time
    async def test_everything_is_listed_again_every_few_minutes(self) -> None:
        """And nothing is told if nothing has changed."""
        store = PodStore()
        store.put(document("a"))
        async with watching(store) as (_, ear):
            await asyncio.sleep(2 * RESYNC_SECONDS + 10)
            assert store.lists == 3
            assert ear.changed == ["uid-a"]

    @in_virtual_time
    async def test_a_list_tells_what_the_watch_has_missed(self) -> None:
        """A pod that vanished without an event, as behind a broken proxy."""
        store = PodStore()
        store.put(document("a"))
        store.put(document("b"))
        async with watching(store) as (_, ear):
            del store._objects["default", "a"]
            await asyncio.sleep(RESYNC_SECONDS + 1)
            assert ear.missing == ["uid-a"]
            (absence,) = ear.absences
            assert absence.live is None

    @in_virtual_time
    async def test_equal_selections_share_a_watch(self) -> None:
        """Chosen twice, it is one; chosen no more, it ends."""
        store = PodStore()
        async with watching(store, MINE, Selection("default", "app=a")) as (watch, _):
            assert (store.lists, store.watches) == (1, 1)
            other = Selection("default", "app=b")
            watch.select([other])
            await asyncio.sleep(0.1)
            assert watch.pods(MINE) is None
            assert not watch.is_settled([MINE])
            assert watch.is_settled([other])
            store.put(document("a"))
            await asyncio.sleep(0.1)
            assert watch.tracked() == 0


class TestGaps:
    """What happens while it is cut off."""

    @in_virtual_time
    async def test_a_cut_costs_no_list(self) -> None:
        """The watch resumes where it was."""
        store = PodStore()
        store.put(document("a"))
        async with watching(store) as (watch, ear):
            for _ in range(10):
                store.cut()
                await asyncio.sleep(0.05)
                store.delete("default", "a")
                store.put(document("a"))
                await asyncio.sleep(4)
            assert store.lists == 1
            assert watch.counts["cut"] == 10
            assert ear.missing == ["uid-a"] * 10

    @in_virtual_time
    async def test_an_outage(self) -> None:
        """It is tried again every few seconds, and known seconds after its end."""
        store = PodStore()
        store.put(document("a"))
        async with watching(store) as (watch, ear):
            store.reachable = False
            store.cut()
            await asyncio.sleep(300)
            assert not watch.is_current(MINE)
            assert store.watches < 130
            assert store.lists == 1
            store.delete("default", "a")
            store.expire()
            store.reachable = True
            await asyncio.sleep(4)
            assert ear.missing == ["uid-a"]
            assert watch.is_current(MINE)
            assert store.lists == 2

    @in_virtual_time
    async def test_an_outage_at_the_start(self) -> None:
        """The first list is there seconds after its end."""
        store = PodStore()
        store.reachable = False
        store.put(document("a"))
        async with watching(store) as (watch, _):
            await asyncio.sleep(300)
            store.reachable = True
            await asyncio.sleep(4)
            assert uids(watch) == {"uid-a"}

    @in_virtual_time
    async def test_history_that_is_always_gone(self) -> None:
        """Fewer than five lists in any minute, however long it goes on."""
        store = ForgetfulStore()
        async with watching(store):
            await asyncio.sleep(600)
        moments = store.listed_at
        assert len(moments) > 10
        for moment in moments:
            assert sum(moment <= each < moment + 60 for each in moments) < 5

    @in_virtual_time
    async def test_a_watch_that_ends_at_once(self) -> None:
        """It is not opened again at once for ever."""
        store = BriefStore()
        async with watching(store) as (watch, _):
            await asyncio.sleep(60)
            assert watch.is_current(MINE)
        assert store.lists == 1
        assert store.watches < 30

    @in_virtual_time
    async def test_a_version_that_the_server_never_had(self) -> None:
        """As after etcd was restored: the refusals end with a list."""
        store = PodStore()
        async with watching(store) as (watch, _):
            store.refusal = ApiError(504, "Timeout", "Too large resource version")
            store.cut()
            await asyncio.sleep(3)
            lists = store.lists
            store.refusal = None
            store.put(document("a"))
            await asyncio.sleep(60)
            assert uids(watch) == {"uid-a"}
            assert store.lists > lists - 1


class TestRefusals:
    """What we may not see."""

    @in_virtual_time
    async def test_it_is_known_that_nothing_is_known(self) -> None:
        """What was known before says nothing any more, not even by its absence."""
        store = PodStore()
        store.put(document("a"))
        async with watching(store) as (watch, ear):
            store.refusal = Forbidden(403, "Forbidden", "pods is forbidden")
            store.cut()
            await asyncio.sleep(60)
            assert watch.is_settled([MINE])
            assert not watch.is_current(MINE)
            assert uids(watch) == set()
            assert ear.missing == []
            store.refusal = None
            await asyncio.sleep(31)
            assert uids(watch) == {"uid-a"}
            assert watch.is_current(MINE)

    @in_virtual_time
    async def test_it_is_asked_for_rarely(self) -> None:
        """A right that is missing is not given within seconds."""
        store = PodStore()
        store.refusal = Forbidden(403, "Forbidden", "no")
        async with watching(store):
            await asyncio.sleep(600)
        assert store.lists < 25


class TestAbsences:
    """What became of a pod that is missing."""

    @in_virtual_time
    async def test_a_pod_of_two_selections_is_told_of_in_both(self) -> None:
        """Workers of two servers: the agent of each waits for it."""
        store, told = PodStore(), list[tuple[Selection, Pod | None]]()
        store.put(document("a", labels={"app": "a", "team": "x"}))
        async with watching(store, MINE, ALSO_MINE) as (_, ear):
            ear.pod_absent = lambda selection, absence: told.append(  # type: ignore[method-assign]
                (selection, absence.live)
            )
            store.delete("default", "a")
            await asyncio.sleep(1)
        assert sorted(told) == [(MINE, None), (ALSO_MINE, None)]

    @in_virtual_time
    async def test_one_that_moves_to_another_selection_has_left_its_own(self) -> None:
        """Its label names another server now: the first one's agent is told so."""
        store, told = PodStore(), list[tuple[Selection, bool]]()
        store.put(document("a"))
        async with watching(store, MINE, OTHERS) as (_, ear):
            ear.pod_absent = lambda selection, absence: told.append(  # type: ignore[method-assign]
                (selection, absence.live is not None)
            )
            store.change("default", "a", lambda found: found["metadata"]["labels"].update(app="b"))
            await asyncio.sleep(1)
        assert told == [(MINE, True)]

    @in_virtual_time
    async def test_it_is_back_before_the_answer(self) -> None:
        """Then there is nothing to tell."""
        store = PodStore()
        store.put(document("a"))
        async with watching(store) as (watch, ear):
            seen = watch.pods(MINE)
            assert seen is not None
            last = seen.get("uid-a")
            assert last is not None
            watch.check_absence(MINE, last)
            store.put(document("a", label="b"))
            store.put(document("a"))
            store.put(document("a", label="b"))
            store.put(document("a"))
            await asyncio.sleep(1)
            assert uids(watch) == {"uid-a"}
            assert ear.absences == []

    @in_virtual_time
    async def test_nobody_answers(self) -> None:
        """It is asked again until somebody does."""
        store = PodStore()
        store.put(document("a"))
        async with watching(store) as (watch, ear):
            store.reachable = False
            watch.check_absence(MINE, read_pod(document("x")))
            await asyncio.sleep(60)
            assert ear.absences == []
            assert 10 < store.reads < 40
            store.reachable = True
            await asyncio.sleep(4)
            (absence,) = ear.absences
            assert absence.live is None

    @pytest.mark.parametrize("deleting", [False, True])
    @in_virtual_time
    async def test_we_may_not_ask(self, deleting: bool) -> None:  # noqa: FBT001
        """A pod that was being deleted counts as gone; of others nothing is known."""
        store = PodStore()
        mark = {"deletionTimestamp": "2030-01-01T00:00:00Z"} if deleting else {}
        async with watching(store) as (watch, ear):
            store.refusal = Forbidden(403, "Forbidden", "no")
            watch.check_absence(MINE, read_pod(document("x", **mark)))
            await asyncio.sleep(100)
            assert len(ear.absences) == deleting
            assert store.reads == (1 if deleting else 4)

    @in_virtual_time
    async def test_what_is_there_cannot_be_read(self) -> None:
        """Then it is not known, and asked again later."""
        store = PodStore()
        async with watching(store) as (watch, ear):

            async def broken(namespace: str, name: str) -> Pod | None:
                raise PodError(f"{namespace}/{name} is no pod")

            store.read = broken  # type: ignore[method-assign]
            watch.check_absence(MINE, read_pod(document("x")))
            await asyncio.sleep(100)
            assert ear.absences == []
            assert watch.counts["absence_check"] == 4


class TestPace:
    """Delays."""

    @given(st.lists(st.integers(0, 160), min_size=1, max_size=60))
    def test_never_five_lists_in_a_minute(self, quarters: list[int]) -> None:
        """Whenever somebody wants one. Quarters of a second add up without rounding."""
        pace, now, moments = ListPace(), 0.0, []
        for quarter in quarters:
            now += quarter / 4
            now += pace.wait_seconds(now)
            assert pace.wait_seconds(now) == 0
            pace.listed(now)
            moments.append(now)
        for moment in moments:
            assert sum(moment <= each < moment + 60 for each in moments) < 5

    def test_the_first_lists_do_not_wait(self) -> None:
        """One at the start, one a second later, and one whenever a minute has passed."""
        pace = ListPace()
        assert pace.wait_seconds(0) == 0
        pace.listed(0)
        assert pace.wait_seconds(0.25) == 0.75
        pace.listed(1)
        assert pace.wait_seconds(100) == 0

    def test_backoff(self) -> None:
        """Growing, bounded, and begun again after a success."""
        backoff = Backoff((1, 2, 3))
        assert [backoff.next_seconds() for _ in range(5)] == [1, 2, 3, 3, 3]
        backoff.reset()
        assert backoff.next_seconds() == 1
