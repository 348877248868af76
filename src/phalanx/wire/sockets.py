"""TCP sockets: how they listen and connect, and how soon a peer that has vanished is noticed."""

from __future__ import annotations

import socket
from dataclasses import dataclass

_BACKLOG = 4096


@dataclass(frozen=True)
class KeepAlive:
    """When a silent peer counts as lost. Its kernel answers the probes, so a host that is merely busy is not lost.

    Attributes:
        idle_s, interval_s: after how much silence the first probe is sent, and then the next ones.
        probes: how many must stay unanswered.
        unacknowledged_s: how long sent data may stay unacknowledged; 0 leaves that to the kernel (about 15 minutes).
    """

    idle_s: int
    interval_s: int
    probes: int
    unacknowledged_s: int = 0

    def apply(self, sock: socket.socket) -> None:
        """Set this on a connected socket, which also sends every message at once (TCP_NODELAY)."""
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, self.idle_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, self.interval_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, self.probes)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * self.unacknowledged_s)


def listen(address: str, port: int) -> socket.socket:
    """Listen on exactly this address; port 0 takes any that is free."""
    family, kind, protocol, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def connect(where: tuple[str, int], timeout_s: float, keep_alive: KeepAlive, source: str = "") -> socket.socket:
    """Connect to an address and port, from the address ``source`` or any of this host's."""
    sock = socket.create_connection(where, timeout=timeout_s, source_address=(source, 0) if source else None)
    try:
        keep_alive.apply(sock)
    except BaseException:
        sock.close()
        raise
    return sock
