"""Whether the other host still acknowledges what a TCP connection sends: the heartbeat of a link, kept by the kernels.

The kernel of the other host acknowledges data and probes, whatever the process there does, so one that is stopped is
not taken for a link that is cut. TCP_USER_TIMEOUT would also end a connection whose peer is there and takes nothing.
Keep-alive probes stop as soon as something is on its way, so TCP_INFO is looked at from time to time.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time

# How often a connection is looked at, and for how long a host must be silent until the connection is broken.
LOOK_S = 0.5
SILENT_S = 2.0
# Of struct tcp_info: tcpi_probes, tcpi_unacked, and tcpi_last_ack_recv in milliseconds.
_INFO = struct.Struct("=3xB20xI28xI")
_TCP_RTO_MAX_MS = 44  # Linux 6.15
_MOST_RTO_MS = 1000


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


def unanswered_s(sock: socket.socket) -> float:
    """Return for how long nothing has been heard of the other host while something is on its way to it; else 0.

    It is the time since the last acknowledgement, also one of the kernel's probes (:class:`.sockets.KeepAlive`) before
    anything was sent. So what is sent to a host that is out of reach already does not begin that time anew.
    """
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
    except OSError:  # it has been closed
        return 0.0
    _, unacknowledged, heard_ms_ago = _INFO.unpack(info)
    return max(1.0, heard_ms_ago) / 1000 if unacknowledged else 0.0
