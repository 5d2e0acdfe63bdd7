"""What holds for every test: it leaves nothing behind, and draws the same examples every time.

A change is refused for what it does, not for what was drawn this once. `make explore` draws others.
No test has a time limit for each example: a busy machine would break it.
"""

from __future__ import annotations

from collections.abc import Generator

import pytest
from hypothesis import HealthCheck, settings

from tests.leaks import Holdings, leaks_since

settings.register_profile(
    "repeatable",
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "exploring",
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("repeatable")

_BEFORE = pytest.StashKey[Holdings]()


@pytest.fixture(autouse=True)
def _held_before(request: pytest.FixtureRequest) -> None:
    """Remember what is held; fixtures of a wider scope are there already and may stay."""
    request.node.stash[_BEFORE] = Holdings.now()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None]:
    """Fail a test that leaks a thread, a child process, a descriptor or shared memory.

    A hook and not a fixture: pytest itself keeps the values of fixtures until all are torn down.
    """
    yield
    before = item.stash.get(_BEFORE, None)
    if before is None:
        return  # the set-up failed, and says so
    if isinstance(item, pytest.Function):
        item.funcargs.clear()
    if leaks := leaks_since(before):
        pytest.fail("left behind:\n  " + "\n  ".join(leaks), pytrace=False)
