"""Eviction policies: order, batch size, watermark."""

from __future__ import annotations

import pytest

from lmcache_nodeagent.storage.eviction import LruPolicy, NoEvictionPolicy


def everything(_key: str) -> bool:
    """Allow any key to go."""
    return True


def test_the_least_recently_touched_go_first() -> None:
    """A touch makes a key the youngest; the batch is a share of what may go, rounded up."""
    policy: LruPolicy[str] = LruPolicy(evict_ratio=0.5)
    policy.touch("abcde")
    policy.touch("ab")
    assert policy.victims(everything, 5) == ["c", "d", "e"]


def test_keys_that_may_not_go_are_skipped() -> None:
    """The batch is filled with the next older ones instead."""
    policy: LruPolicy[str] = LruPolicy(evict_ratio=0.5)
    policy.touch("abcd")
    assert policy.victims(lambda key: key not in "ac", 2) == ["b"]
    assert policy.victims(lambda _key: False, 4) == []


def test_a_batch_has_at_least_one_key_while_there_is_one() -> None:
    """Rounding never makes eviction give up."""
    policy: LruPolicy[str] = LruPolicy(evict_ratio=0.2)
    policy.touch("a")
    assert policy.victims(everything, 1) == ["a"]
    assert policy.victims(everything, 0) == []


def test_a_forgotten_key_is_no_victim() -> None:
    """What left L1 is not chosen again."""
    policy: LruPolicy[str] = LruPolicy(evict_ratio=1.0)
    policy.touch("abc")
    policy.forget("b")
    assert policy.victims(everything, 2) == ["a", "c"]


def test_eviction_is_due_at_the_watermark() -> None:
    """Exactly at the mark counts as passed, as in LMCache."""
    policy: LruPolicy[str] = LruPolicy(trigger_ratio=0.8)
    assert not policy.is_due(799, 1000)
    assert policy.is_due(800, 1000)


@pytest.mark.parametrize("ratios", [(0.0, 0.2), (0.8, 0.0), (1.1, 0.2), (0.8, -1.0)])
def test_ratios_are_shares(ratios: tuple[float, float]) -> None:
    """A ratio outside (0, 1] is a programming error; flags are checked earlier."""
    with pytest.raises(ValueError, match=r"must lie in \(0, 1\]"):
        LruPolicy(*ratios)


def test_noop_never_evicts() -> None:
    """Nothing is due, nothing is a victim."""
    policy: NoEvictionPolicy[str] = NoEvictionPolicy()
    policy.touch("abc")
    policy.forget("a")
    assert not policy.is_due(1000, 1000)
    assert policy.victims(everything, 3) == []
