"""Which operator acts: decided by the change of a Lease, not by anybody's clock."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager

import pytest

from lmcache_operator.errors import Forbidden, LeaseLost, Unreachable
from lmcache_operator.lease import Lease, LeaseTimes
from tests.fakes.kube_objects import KubeObject, KubeObjects
from tests.fakes.loop_clock import LoopClock

DOWN = Unreachable("no answer")


def lease(
    objects: KubeObjects, clock: LoopClock, identity: str, *, wall: float = 1_700_000_000.0
) -> Lease:
    """Make a candidate with the default times."""
    return Lease(
        objects,
        namespace="ops",
        name="lmcache-operator",
        identity=identity,
        now=clock.now,
        wall_now=lambda: wall + clock.now(),
        sleep=clock.sleep,
    )


def stored(objects: KubeObjects) -> KubeObject:
    """Return the spec of the Lease."""
    spec: KubeObject = objects.peek("Lease", "ops", "lmcache-operator")["spec"]
    return spec


@asynccontextmanager
async def running(*candidates: Lease) -> AsyncGenerator[list[asyncio.Task[None]]]:
    """Run candidates, and cancel those that still run afterwards."""
    tasks = [asyncio.create_task(candidate.run()) for candidate in candidates]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def on_loop(test: Callable[[], Coroutine[object, object, None]]) -> Callable[[], None]:
    """Run an asynchronous test."""

    def run() -> None:
        asyncio.run(test())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


@on_loop
async def test_a_free_lease_is_taken_and_renewed() -> None:
    """The first candidate holds it for as long as it runs."""
    objects, clock = KubeObjects(), LoopClock()
    candidate = lease(objects, clock, "a")
    assert not candidate.is_held()
    async with running(candidate):
        await clock.advance(0)
        assert candidate.held.is_set()
        first = stored(objects)
        assert first["holderIdentity"] == "a"
        assert first["leaseDurationSeconds"] == 15
        await clock.advance(600)
        assert candidate.is_held()
        later = stored(objects)
        assert later["renewTime"] > first["renewTime"]
        assert later["acquireTime"] == first["acquireTime"]
        assert later["leaseTransitions"] == 0


@on_loop
async def test_only_one_of_many_holds_it() -> None:
    """The others wait for as long as it renews."""
    objects, clock = KubeObjects(), LoopClock()
    candidates = [lease(objects, clock, name) for name in "abcde"]
    async with running(*candidates):
        for _ in range(100):
            await clock.advance(3)
            assert sum(candidate.is_held() for candidate in candidates) == 1


@on_loop
async def test_a_process_of_the_same_name_goes_on_at_once() -> None:
    """The container of a pod that runs again after a crash: its predecessor has ended."""
    objects, clock = KubeObjects(), LoopClock()
    async with running(lease(objects, clock, "pod-a")):
        await clock.advance(0)
    again = lease(objects, clock, "pod-a")
    async with running(again):
        await clock.advance(0)
        assert again.is_held()
    assert stored(objects)["leaseTransitions"] == 0


@on_loop
async def test_a_holder_that_is_gone_is_followed_within_its_duration_and_a_try() -> None:
    """15 s and a pause of at most 2.4 s after its last renewal; counted as a transition."""
    objects, clock = KubeObjects(), LoopClock()
    gone, next_one = lease(objects, clock, "gone"), lease(objects, clock, "next")
    async with running(gone):
        await clock.advance(0)
    async with running(next_one):
        await clock.advance(14.9)
        assert not next_one.is_held()
        await clock.advance(2.6)
        assert next_one.is_held()
    assert stored(objects)["holderIdentity"] == "next"
    assert stored(objects)["leaseTransitions"] == 1


@pytest.mark.parametrize("skew", [-120.0, 120.0, 86_400.0])
def test_clocks_are_not_compared(skew: float) -> None:
    """A candidate whose clock is off neither takes a held Lease early nor waits longer for it."""

    async def story() -> None:
        objects, clock = KubeObjects(), LoopClock()
        holder = lease(objects, clock, "holder")
        skewed = lease(objects, clock, "skewed", wall=1_700_000_000.0 + skew)
        async with running(skewed):
            async with running(holder):
                await clock.advance(0)
                for _ in range(60):
                    await clock.advance(5)
                    assert holder.is_held() != skewed.is_held()
            held_before = skewed.is_held()
            await clock.advance(18)
            assert skewed.is_held()
            assert held_before or stored(objects)["leaseTransitions"] == 1

    asyncio.run(story())


@on_loop
async def test_a_holder_that_cannot_renew_ends_before_another_starts() -> None:
    """It stops holding after 10 s; the other takes it after 15 s at the earliest."""
    objects, clock = KubeObjects(), LoopClock()
    holder = lease(objects, clock, "holder")
    async with running(holder) as (task,):
        await clock.advance(0)
        objects.failure = DOWN
        await clock.advance(9.9)
        assert holder.is_held()
        await clock.advance(0.2)
        assert not holder.is_held()
        await clock.advance(2.4)
        with pytest.raises(LeaseLost, match=r"ops/lmcache-operator was not renewed for 10 s"):
            task.result()
        assert not holder.held.is_set()


@on_loop
async def test_trouble_that_passes_in_time_is_survived() -> None:
    """Some failed tries do not lose the Lease, nor does a write whose answer is lost."""
    objects, clock = KubeObjects(), LoopClock()
    holder = lease(objects, clock, "holder")
    async with running(holder):
        await clock.advance(0)
        for _ in range(20):
            objects.failure = DOWN
            await clock.advance(5)
            objects.failure = None
            await clock.advance(3)
            assert holder.is_held()
        objects.failure, objects.lost_answers = DOWN, 2
        await clock.advance(6)
        objects.failure = None
        await clock.advance(3)
        assert holder.is_held()


@on_loop
async def test_a_process_that_stood_still_knows_at_once() -> None:
    """Before its next try to renew, it is not the holder any more, and does not try."""
    objects, clock = KubeObjects(), LoopClock()
    holder = lease(objects, clock, "holder")
    async with running(holder) as (task,):
        await clock.advance(0)
        writes = len(objects.writes)
        clock.jump(60)
        assert not holder.is_held()
        await clock.advance(0)
        with pytest.raises(LeaseLost, match="stood still"):
            task.result()
        assert len(objects.writes) == writes


@on_loop
async def test_a_lease_that_another_has_is_lost_at_once() -> None:
    """Whoever wrote it: there must not be two."""
    objects, clock = KubeObjects(), LoopClock()
    holder = lease(objects, clock, "holder")
    async with running(holder) as (task,):
        await clock.advance(0)
        found = objects.peek("Lease", "ops", "lmcache-operator")
        found["spec"]["holderIdentity"] = "usurper"
        objects.put(found)
        await clock.advance(2.4)
        with pytest.raises(LeaseLost, match="is held by usurper"):
            task.result()
        assert not holder.is_held()


@on_loop
async def test_a_deleted_lease_is_made_again() -> None:
    """By its holder at the next renewal."""
    objects, clock = KubeObjects(), LoopClock()
    holder = lease(objects, clock, "holder")
    async with running(holder):
        await clock.advance(0)
        objects.drop("Lease", "ops", "lmcache-operator")
        await clock.advance(2.4)
        assert holder.is_held()
        assert stored(objects)["holderIdentity"] == "holder"


@on_loop
async def test_a_clean_stop_lets_the_next_in_at_once() -> None:
    """Released, it is free; releasing twice, or what is not held, does nothing."""
    objects, clock = KubeObjects(), LoopClock()
    holder, next_one = lease(objects, clock, "holder"), lease(objects, clock, "next")
    await next_one.release()
    async with running(holder):
        await clock.advance(0)
    await holder.release()
    await holder.release()
    assert not holder.is_held()
    assert stored(objects)["holderIdentity"] == ""
    async with running(next_one):
        await clock.advance(0)
        assert next_one.is_held()
        await holder.release()
        assert next_one.is_held()
        objects.failure = DOWN
        await next_one.release()  # in vain, but the stop goes on


@on_loop
async def test_a_refusal_is_waited_out() -> None:
    """A candidate without rights goes on trying: somebody may grant them."""
    objects, clock = KubeObjects(), LoopClock()
    objects.failure = Forbidden(403, "Forbidden", "cannot get leases")
    candidate = lease(objects, clock, "a")
    async with running(candidate):
        await clock.advance(60)
        assert not candidate.is_held()
        objects.failure = None
        await clock.advance(2.4)
        assert candidate.is_held()


@pytest.mark.parametrize(
    ("promised", "taken_after"), [(1, 2.4), (30, 32.4), (86_400, 62.4), (None, 17.4), (-5, 17.4)]
)
def test_what_a_holder_promised_counts(promised: int | None, taken_after: float) -> None:
    """Its own duration holds, within a minute: it may be of another release."""

    async def story() -> None:
        objects, clock = KubeObjects(), LoopClock()
        spec = {"holderIdentity": "old", "leaseDurationSeconds": promised}
        metadata = {"namespace": "ops", "name": "lmcache-operator", "labels": {"kept": "yes"}}
        objects.put({"kind": "Lease", "metadata": metadata, "spec": spec})
        candidate = lease(objects, clock, "new")
        async with running(candidate):
            await clock.advance(taken_after - 2.5)
            assert not candidate.is_held()
            await clock.advance(2.6)
            assert candidate.is_held()
        kept = objects.peek("Lease", "ops", "lmcache-operator")["metadata"]["labels"]
        assert kept == {"kept": "yes"}

    asyncio.run(story())


@pytest.mark.parametrize(
    ("times", "words"),
    [((15, 15, 2), "must be below duration_seconds 15"), ((15, 2, 2), "a second try")],
)
def test_times_that_cannot_be(times: tuple[float, float, float], words: str) -> None:
    """They would let two hold it, or lose it by one lost answer."""
    with pytest.raises(ValueError, match=words):
        LeaseTimes(*times)
