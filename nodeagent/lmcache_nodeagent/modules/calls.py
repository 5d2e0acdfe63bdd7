"""How the transport hands a request to a module, and how a module answers later than now."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING, Protocol

from lmcache_nodeagent.errors import TransferOverdue
from lmcache_nodeagent.liveness.targets import UNTOUCHED, Touched

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lmcache_nodeagent.liveness.evidence import Connection


class Cancellation:
    """Whether a transfer has run out of time, and what then gives back what it holds.

    A copy asks at every chunk (`check`). One that hangs cannot ask; its caller is answered all the
    same, and `on_cancel` says what others need not wait for any more. Threads: any.
    """

    def __init__(self) -> None:
        self._lock = Lock()  # guards: everything below
        self._cancelled = False
        self._callbacks: list[Callable[[], None]] = []

    def check(self) -> None:
        """Stop a transfer that nobody waits for any more.

        Raises:
            TransferOverdue: it was cancelled.
        """
        if self._cancelled:
            raise TransferOverdue("the transfer's deadline has passed")

    def on_cancel(self, callback: Callable[[], None]) -> None:
        """Call back when cancelled; at once if that has happened. Must return at once."""
        with self._lock:
            if not self._cancelled:
                self._callbacks.append(callback)
                return
        callback()

    def cancel(self) -> None:
        """Cancel; the second time does nothing."""
        with self._lock:
            self._cancelled = True
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()


class Stream(Protocol):
    """Replies to one request for as long as its client wants more. Threads: any."""

    @property
    def connection(self) -> Connection:
        """Who follows it."""

    @property
    def uid(self) -> bytes:
        """What its client calls it by."""

    def send(self, value: object) -> None:
        """Send one document of the operation's reply type."""

    def end(self) -> None:
        """Send the reply without a document that ends the stream; after that nothing is sent."""


class Streaming:
    """What a handler returns that goes on answering by `Call.stream`."""


STREAMING = Streaming()


@dataclass(frozen=True, slots=True)
class Call:
    """Who asks. `touched` is what the router's look at the message found for its instance."""

    connection: Connection
    touched: Touched = UNTOUCHED
    cancellation: Cancellation = field(default_factory=Cancellation, compare=False)
    stream: Stream | None = field(default=None, compare=False)  # of streaming operations


class Pending:
    """A reply that comes later: a continuation, so that no pool thread waits for it.

    The first `settle` counts, later ones do nothing. Threads: any.
    """

    def __init__(self) -> None:
        self._lock = Lock()  # guards: everything below
        self._settled = False
        self._value: object = None
        self._listener: Callable[[object], None] | None = None

    def settle(self, value: object) -> None:
        """Give the reply."""
        with self._lock:
            if self._settled:
                return
            self._settled, self._value = True, value
            listener = self._listener
        if listener is not None:
            listener(value)

    def when_settled(self, listener: Callable[[object], None]) -> None:
        """Call `listener` with the reply once, now if it is there already."""
        with self._lock:
            self._listener = listener
            if not self._settled:
                return
            value = self._value
        listener(value)


class Module(Protocol):
    """A part that serves operations."""

    def handlers(self) -> Mapping[str, Callable[..., object]]:
        """Return the handlers by operation name."""
        ...
