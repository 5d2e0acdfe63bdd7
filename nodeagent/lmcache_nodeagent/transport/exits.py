"""Which processes at Unix sockets have exited. Thread: zmq-router, all of it."""

from __future__ import annotations

import os
import select
from typing import TYPE_CHECKING

from lmcache_nodeagent.transport.peers import has_exited

if TYPE_CHECKING:
    from lmcache_nodeagent.liveness.evidence import Connection

_WATCH_EXIT_SECONDS = 60.0
"""A process may exit after its connection closed; later than this, its exit proves nothing."""


class ExitWatch:
    """Owns the pidfds of the peers, each readable once its process is gone."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._watched: dict[int, Connection] = {}

    def fileno(self) -> int:
        """Readable when a process has exited."""
        return self._epoll.fileno()

    def add(self, pidfd: int, connection: Connection) -> None:
        """Watch the process at the other end of an open connection; the pidfd is ours now."""
        self._watched[pidfd] = connection
        self._epoll.register(pidfd, select.EPOLLIN)

    def closed(self, connection: Connection) -> None:
        """A connection has ended: note its process's exit now, or watch it a little longer.

        The close may reach us before the exit. One descriptor for each process, however often it
        comes and goes, and none for those that never spoke for an instance: their exit proves
        nothing.
        """
        pidfd = next((fd for fd, its in self._watched.items() if its is connection), None)
        if pidfd is None:
            return  # its exit has been noted, or the kernel gave no pidfd
        if has_exited(pidfd):
            connection.process_gone = True
            self._forget(pidfd)
        elif not connection.spoke_for:
            self._forget(pidfd)
        else:
            for other, watched in tuple(self._watched.items()):
                if other != pidfd and not watched.is_open and watched.same_peer(connection):
                    self._forget(other)

    def read(self) -> bool:
        """Note the processes that have exited; True if there are any."""
        exited = [pidfd for pidfd, _ in self._epoll.poll(0) if pidfd in self._watched]
        for pidfd in exited:
            self._watched[pidfd].process_gone = True
            self._forget(pidfd)
        return bool(exited)

    def tidy(self, now: float) -> None:
        """Stop watching processes whose connection has been closed for long."""
        for pidfd, watched in tuple(self._watched.items()):
            if watched.closed_at is not None and now - watched.closed_at >= _WATCH_EXIT_SECONDS:
                self._forget(pidfd)

    def _forget(self, pidfd: int) -> None:
        del self._watched[pidfd]
        self._epoll.unregister(pidfd)
        os.close(pidfd)

    def close(self) -> None:
        """Close every pidfd."""
        for pidfd in tuple(self._watched):
            self._forget(pidfd)
        self._epoll.close()
