"""Opening the message port: addresses, limits and keepalive of the ROUTER socket."""

from __future__ import annotations

import contextlib
import math
import os
import resource
import socket as sockets_of_os
import stat
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import zmq

from lmcache_nodeagent.config import SOCKETS_FOLDER
from lmcache_nodeagent.config_rules import bare_host
from lmcache_nodeagent.errors import ConfigError
from lmcache_nodeagent.transport.monitor import SocketMonitor
from lmcache_nodeagent.transport.slot_sockets import SlotSockets
from lmcache_nodeagent.transport.waiting_bytes import COUNTED_BYTES

if TYPE_CHECKING:
    from lmcache_nodeagent.config import AgentConfig

_SEND_QUEUE_MESSAGES = 16_384
"""Replies kept for a peer that does not read; they are small. Beyond it they are dropped."""

RECEIVE_QUEUE_MESSAGES = 64
"""Messages that libzmq keeps of one connection before it stops reading from it. It knows no bytes,
and each may have `--max-message-bytes`; the router takes small ones faster than they come."""

_HANDSHAKE_SECONDS = 10.0
_LINGER_MS = 500
_KEEPALIVE_IDLE_SECONDS = 60
_KEEPALIVE_PROBES = 8
_BACKLOG = 1024
_FEWEST_LINKS = 16
_OTHER_DESCRIPTORS = 128
_ANYBODY_MAY_CONNECT = 0o666
"""A worker may run as any user; only its own container sees the slot's socket."""


@dataclass(frozen=True, slots=True)
class Keepalive:
    """When TCP gives a silent link up: after `idle + probes * interval` seconds, at least T."""

    idle_seconds: int
    interval_seconds: int
    probes: int

    @classmethod
    def for_reap_timeout(cls, timeout_seconds: float) -> Keepalive:
        """Stay above T, so that a link that is cut for less is never given up by us.

        Half of a small T is idle time, so that dead links are gone within 2 T.
        """
        idle = min(_KEEPALIVE_IDLE_SECONDS, math.ceil(timeout_seconds / 2) or 60)
        interval = max(1, math.ceil((timeout_seconds - idle) / _KEEPALIVE_PROBES))
        return cls(idle, interval, _KEEPALIVE_PROBES)

    @property
    def total_seconds(self) -> float:
        """A link over which nothing was acknowledged for this long is dead."""
        return self.idle_seconds + self.interval_seconds * self.probes

    @property
    def silence_seconds(self) -> float:
        """A living peer's last acknowledgement is never this old: one probe was not answered."""
        return self.idle_seconds + self.interval_seconds


@dataclass(slots=True, eq=False)
class BoundSockets:
    """The bound ROUTER and its context. Closed by the router thread."""

    context: zmq.Context[zmq.Socket[bytes]]
    router: zmq.Socket[bytes]
    monitor: SocketMonitor
    """Attached before the port was bound: workers may connect long before the router runs."""
    port: int
    ipc_path: str
    handshake_seconds: float
    keepalive_silence_seconds: float
    half_open_seconds: float
    max_links: int
    slots: SlotSockets | None = None

    def close(self) -> None:
        """Close at once; replies that nobody reads are given half a second.

        The context would wait for every socket of it, so it closes them: where a start fails, the
        monitor's is still open.
        """
        self.router.close()
        self.context.destroy()
        if self.ipc_path:
            with contextlib.suppress(OSError):
                Path(self.ipc_path).unlink()
        if self.slots is not None:
            self.slots.unlink()


def bind_sockets(config: AgentConfig) -> BoundSockets:
    """Bind TCP, and the Unix sockets that are asked for.

    Raises:
        ConfigError: an address that cannot be bound, with the reason.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    keepalive = Keepalive.for_reap_timeout(config.worker_reap_timeout_seconds)
    _set_options(router, config, keepalive)
    monitor = SocketMonitor(context, router)
    try:
        router.bind(f"tcp://{_address(config.host)}:{config.port or '*'}")
        endpoint = router.getsockopt_string(zmq.LAST_ENDPOINT)
        port = int(endpoint.rstrip("\0").rpartition(":")[2])
        if config.ipc_path:
            _bind_ipc(router, config.ipc_path)
        slots = _bind_slots(context, router, config)
    except (zmq.ZMQError, OSError) as error:
        monitor.close()
        router.close()
        context.destroy()
        where = f"--host {config.host} --port {config.port}"
        where += f" --ipc-path {config.ipc_path}" if config.ipc_path else ""
        where += f" --slots-folder {config.slots_folder}" if config.slots_folder else ""
        raise ConfigError(
            [f"the message port cannot be opened ({where}): {error}; choose a free one"]
        ) from error
    return BoundSockets(
        context=context,
        router=router,
        monitor=monitor,
        port=port,
        ipc_path=config.ipc_path,
        handshake_seconds=_HANDSHAKE_SECONDS,
        keepalive_silence_seconds=keepalive.silence_seconds,
        half_open_seconds=keepalive.total_seconds,
        max_links=_max_links(len(config.slot_names)),
        slots=slots,
    )


def _bind_slots(
    context: zmq.Context[zmq.Socket[bytes]], router: zmq.Socket[bytes], config: AgentConfig
) -> SlotSockets | None:
    """Bind a socket for each slot, last of all: what is set for them stays with the ROUTER."""
    if not config.slot_names:
        return None
    slots = SlotSockets(context, Path(config.slots_folder) / SOCKETS_FOLDER, config.slot_names)
    for name in config.slot_names:
        router.setsockopt_string(zmq.ZAP_DOMAIN, name)
        _bind_ipc(router, str(slots.path(name)))
        slots.path(name).chmod(_ANYBODY_MAY_CONNECT)
    return slots


def _set_options(router: zmq.Socket[bytes], config: AgentConfig, keepalive: Keepalive) -> None:
    options = {
        zmq.ROUTER_MANDATORY: 1,
        zmq.ROUTER_HANDOVER: 1,
        zmq.MAXMSGSIZE: config.max_message_bytes,
        zmq.SNDHWM: _SEND_QUEUE_MESSAGES,
        zmq.RCVHWM: RECEIVE_QUEUE_MESSAGES,
        zmq.HANDSHAKE_IVL: int(_HANDSHAKE_SECONDS * 1000),
        zmq.LINGER: _LINGER_MS,
        zmq.BACKLOG: _BACKLOG,
        zmq.TCP_KEEPALIVE: 1,
        zmq.TCP_KEEPALIVE_IDLE: keepalive.idle_seconds,
        zmq.TCP_KEEPALIVE_INTVL: keepalive.interval_seconds,
        zmq.TCP_KEEPALIVE_CNT: keepalive.probes,
        zmq.IPV6: int(
            ":" in config.host or (config.host == "*" and sockets_of_os.has_dualstack_ipv6())
        ),
    }
    for option, value in options.items():
        router.setsockopt(option, value)
    router.copy_threshold = COUNTED_BYTES  # libzmq tells when it has let larger replies go


def _max_links(listeners: int) -> int:
    """Connections that the descriptor limit allows, with two for each and some for the rest."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return sys.maxsize
    return max(_FEWEST_LINKS, (soft - _OTHER_DESCRIPTORS - listeners) // 2)


def _address(host: str) -> str:
    bare = bare_host(host)
    return f"[{bare}]" if ":" in bare else bare


def _bind_ipc(router: zmq.Socket[bytes], path: str) -> None:
    """Bind a Unix socket; one that a dead agent left is replaced, a living one's is not.

    libzmq unlinks whatever is there: what is no socket must not get that far.
    """
    if os.path.lexists(path):
        if not _is_socket(path):
            raise OSError(f"{path} exists and is no socket")
        with sockets_of_os.socket(sockets_of_os.AF_UNIX) as probe:
            try:
                probe.connect(path)
            except ConnectionRefusedError:
                Path(path).unlink(missing_ok=True)
            else:
                raise OSError(f"{path} is in use by a running process")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    router.bind(f"ipc://{path}")


def _is_socket(path: str) -> bool:
    try:
        return stat.S_ISSOCK(Path(path).stat().st_mode)
    except OSError:
        return False
