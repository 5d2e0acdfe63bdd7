"""An event loop whose sleeps take no time: its clock jumps to the next moment waited for."""

from __future__ import annotations

import asyncio
import functools
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")


class VirtualLoop(asyncio.SelectorEventLoop):
    """Starts at 1,000 seconds. For code that waits for its own tasks and for time, nothing else."""

    def __init__(self) -> None:
        self._moment = 1_000.0
        super().__init__(_InstantSelector(self._jump))

    def time(self) -> float:
        """Return the moment."""
        return self._moment

    def _jump(self, seconds: float) -> None:
        self._moment += seconds


class _InstantSelector(selectors.SelectSelector):
    def __init__(self, jump: Callable[[float], None]) -> None:
        super().__init__()
        self._jump = jump

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Return what is ready; if nothing is, let the time pass."""
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "everything waits for something that cannot come"
            self._jump(max(timeout, 0))
        return ready


def run_in_virtual_time(main: Coroutine[Any, Any, _T]) -> _T:
    """Run a coroutine on such a loop."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


def in_virtual_time(
    test: Callable[_P, Coroutine[Any, Any, None]],
) -> Callable[_P, None]:
    """Make a test of a coroutine function, which runs on such a loop."""

    @functools.wraps(test)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> None:
        run_in_virtual_time(test(*args, **kwargs))

    return run
