"""The check that every test passes through, itself under test."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests import leaks
from tests.leaks import Holdings, leaks_since


def test_nothing_held_is_no_leak() -> None:
    """A test that takes nothing leaves nothing."""
    assert leaks_since(Holdings.now()) == []


def test_an_open_descriptor_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the file, so that the test at fault is found."""
    monkeypatch.setattr(leaks, "_PATIENCE_SECONDS", 0.0)
    before = Holdings.now()
    descriptor = os.open(tmp_path / "kept", os.O_CREAT)
    found = leaks_since(before)
    os.close(descriptor)
    assert found == [f"descriptor {descriptor} -> {tmp_path / 'kept'}"]


def test_each_kind_is_told_apart() -> None:
    """Threads, processes, descriptors and shared memory are all looked at."""
    nothing = Holdings(frozenset(), frozenset(), frozenset(), frozenset())
    held = Holdings(frozenset({"t"}), frozenset({"p"}), frozenset({"d"}), frozenset({"s"}))
    assert held.beyond(nothing) == ["thread t", "process p", "descriptor d", "/dev/shm/s"]


def test_shared_memory_of_a_living_worker_elsewhere_is_not_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test runs side by side do not blame each other; what this process made counts."""
    monkeypatch.setattr(leaks, "_SHARED_MEMORY", tmp_path)
    for name in ("lmcache_kv_1_0", f"lmcache_kv_{os.getpid()}_0", "lmcache-kube.l1.x", "other"):
        (tmp_path / name).touch()
    assert Holdings.now().shared_memory == {f"lmcache_kv_{os.getpid()}_0"}


def test_of_the_dead_only_what_our_children_made_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their killed workers and agents leave things for a moment, too."""
    monkeypatch.setattr(leaks, "_SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(leaks, "_made_for_us", set())
    dead = 2**22 + 1  # above the kernel's largest process id
    leaks.made_for_us("lmcache-kube.l1.1", f"lmcache_kv_{dead}")
    for name in ("lmcache-kube.l1.1", "lmcache-kube.l1.2", f"lmcache_kv_{dead}_0"):
        (tmp_path / name).touch()
    (tmp_path / f"lmcache_kv_{dead + 1}_0").touch()
    assert Holdings.now().shared_memory == {"lmcache-kube.l1.1", f"lmcache_kv_{dead}_0"}
