"""TCP sockets: how they listen and connect, and how soon a peer that has vanished is noticed.

The kernel of the other host acknowledges data and probes, whatever the process there does, so one that is stopped is
not taken for a link that is cut. TCP_USER_TIMEOUT would also end a connection whose peer is there and takes nothing.
Keep-alive probes stop as soon as something is on its way, so TCP_INFO is looked at from time to time.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from dataclasses import dataclass

_BACKLOG = 4096
# How often a connection is looked at, and for how long a host must be silent until the connection is broken.
LOOK_S = 0.5
SILENT_S = 2.0
# Of struct tcp_info: tcpi_probes, tcpi_unacked, and tcpi_last_ack_recv in milliseconds.
_INFO = struct.Struct("=3xB20xI28xI")
_TCP_RTO_MAX_MS = 44  # Linux 6.15
_MOST_RTO_MS = 1000


@dataclass(frozen=True)
class KeepAlive:
    """Limits after which a silent peer is lost. Its kernel answers the probes, so a host that is merely busy is not.

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


class Acknowledged:
    """One connection, which ``is_silent`` after ``SILENT_S``. ``silent_s`` is called by one thread at a time."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.is_silent = False
        self._since: float | None = None  # when something was first seen to be unacknowledged
        # A peer that takes nothing is probed ever more seldom, so a cut would be noticed late.
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, _TCP_RTO_MAX_MS, _MOST_RTO_MS)

    def silent_s(self) -> float:
        """Return for how long the other host has owed an acknowledgement and sent none; 0 if it owes none."""
        try:
            info = self.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
        except OSError:  # it has been closed
            return 0.0
        probes, unacknowledged, heard_ms_ago = _INFO.unpack(info)
        now = time.monotonic()
        if not probes and not unacknowledged:
            self._since = None
            return 0.0
        if self._since is None:
            self._since = now
        self._since = max(self._since, now - heard_ms_ago / 1000)
        self.is_silent = now - self._since >= SILENT_S
        return now - self._since
