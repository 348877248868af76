"""Whether the other host still acknowledges what a TCP connection sends: the heartbeat of a link, kept by the kernels.

The kernel of the other host acknowledges data and probes, whatever the process there does. So a process that is
stopped, or whose interpreter is held, is not taken for a link that is cut. TCP_USER_TIMEOUT cannot tell these apart: it
also ends a connection whose peer is there and takes nothing.

While nothing is on its way the kernel's keep-alive probes do this. They stop as soon as something is, so the thread
that accepts connections looks at TCP_INFO from time to time. No message is sent for it.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time

__all__ = ["LOOK_S", "SILENT_S", "Acknowledged"]

# How often a connection is looked at, and for how long a host must be silent until the connection is broken.
LOOK_S = 0.5
SILENT_S = 2.0
# Of struct tcp_info: tcpi_probes, tcpi_unacked, and tcpi_last_ack_recv in milliseconds.
_INFO = struct.Struct("=3xB20xI28xI")
_TCP_RTO_MAX_MS = 44  # Linux 6.15
_MOST_RTO_MS = 1000


class Acknowledged:
    """One connection. ``silent_s`` is called by one thread at a time.

    Args:
        sock: the connection.

    Attributes:
        sock: the same.
        is_silent: it has been silent for ``SILENT_S``.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.is_silent = False
        self._since: float | None = None  # when something was first seen to be unacknowledged
        # A peer that takes nothing is probed ever more seldom, so a cut would be noticed late.
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, _TCP_RTO_MAX_MS, _MOST_RTO_MS)

    def silent_s(self) -> float:
        """For how long the other host has owed an acknowledgement and sent none, in seconds; 0 if it owes none."""
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
