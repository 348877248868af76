"""The pipes, sockets and report files that join the supervisor, the zygote and the ranks.

All of them are opened before the first fork, so no process has to open a path later. After a fork each process closes
the ends that it does not use. Control messages are JSON over a SOCK_SEQPACKET pair, which keeps their boundaries and
reports the end of the other process as an end of file.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from dataclasses import dataclass
from typing import Any

from phalanx.launch.rank.trace import Trace, open_trace

__all__ = [
    "Control",
    "Descriptors",
    "RankDescriptors",
    "RankEnds",
    "open_descriptors",
    "open_store",
    "release_input",
    "report_name",
]

# A message that lists every rank of a large job is longer than the kernel takes at once, so it is sent in pieces.
LARGEST_PIECE = 1 << 16
_MORE, _LAST = b"+", b"."


class Control:
    """One end of the control socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    def fileno(self) -> int:
        """The descriptor, for a selector."""
        return self._socket.fileno()

    def send(self, **message: Any) -> None:
        """Send one message. If the receiver has ended, nothing happens here; :meth:`receive` returns None."""
        data = json.dumps(message).encode()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for start in range(0, len(data), LARGEST_PIECE):
                end = start + LARGEST_PIECE
                self._socket.send((_MORE if end < len(data) else _LAST) + data[start:end])

    def receive(self) -> dict[str, Any] | None:
        """Wait for one message; None when the other side has ended."""
        data = b""
        while True:
            piece = self._receive_piece()
            if not piece:
                return None
            data += piece[1:]
            if piece[:1] == _LAST:
                message: dict[str, Any] = json.loads(data)
                return message

    def _receive_piece(self) -> bytes:
        try:
            return self._socket.recv(LARGEST_PIECE + 1)
        except ConnectionResetError:
            # ECONNRESET means that the peer ended with unread data from us. The kernel reports it once, before the data
            # that the peer had sent; so read again.
            try:
                return self._socket.recv(LARGEST_PIECE + 1)
            except ConnectionResetError:
                return b""

    def close(self) -> None:
        """Close this end."""
        self._socket.close()


@dataclass
class RankEnds:
    """The descriptors that a rank itself uses.

    Attributes:
        out_write: its standard output.
        err_write: its standard error.
        report: a memfd into which it writes why it failed. It has no name on disk, so no file is left behind.
        trace: the memfd that all ranks of a host share (``launch/rank/trace.py``).
    """

    out_write: int
    err_write: int
    report: int
    trace: int


@dataclass
class RankDescriptors(RankEnds):
    """The descriptors of one rank, with the supervisor's ends.

    Attributes:
        out_read: the end at which the supervisor reads the rank's standard output.
        err_read: the end at which it reads the rank's standard error.
    """

    out_read: int
    err_read: int


@dataclass
class Descriptors:
    """Every descriptor of the ranks that one zygote forks, or that a relay has started.

    Attributes:
        ranks: one entry a rank.
        supervisor: the supervisor's end of the control socket, or that of a host's agent in its place.
        zygote: the end of the zygote, or of the relay in its place.
        trace: the ranks' stacks, and how far they have come.
    """

    ranks: list[RankDescriptors]
    supervisor: Control
    zygote: Control
    trace: Trace

    def keep_supervisor_ends(self) -> None:
        """In the supervisor: close the ends that only the zygote (or the relay) and the ranks use."""
        self.zygote.close()
        for ends in self.ranks:
            os.close(ends.out_write)
            os.close(ends.err_write)

    def keep_zygote_ends(self) -> None:
        """In the zygote or the relay: close the supervisor's ends, so that its death is an end of file here."""
        self.supervisor.close()
        for ends in self.ranks:
            os.close(ends.out_read)
            os.close(ends.err_read)

    def close_rank_ends(self, *, but: int | None = None) -> None:
        """Close the write ends and the reports of all ranks, or of all but one."""
        for rank, ends in enumerate(self.ranks):
            if rank != but:
                os.close(ends.out_write)
                os.close(ends.err_write)
                os.close(ends.report)


def report_name(run_id: str, rank: int) -> str:
    """The name of a rank's report file, as ``/proc/<pid>/fd`` shows it."""
    return f"{run_id}-rank-{rank}"


def open_store(address: str) -> socket.socket:
    """The listening socket of the job's store, on a free port.

    It is bound by the supervisor, and the store inherits it, so no other program can take the port in between.
    """
    _guard_standard_streams()
    listener = socket.socket()
    listener.bind((address, 0))
    listener.listen(4096)
    return listener


def open_descriptors(ranks: int, run_id: str) -> Descriptors:
    """Open everything for ``ranks`` processes."""
    _guard_standard_streams()
    joined = []
    trace = Trace(open_trace(run_id), run_id)
    for rank in range(ranks):
        out_read, out_write = os.pipe()
        err_read, err_write = os.pipe()
        os.set_blocking(out_read, False)
        os.set_blocking(err_read, False)
        report = os.memfd_create(report_name(run_id, rank))
        joined.append(RankDescriptors(out_write, err_write, report, trace.descriptor, out_read, err_read))
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return Descriptors(joined, Control(mine), Control(theirs), trace)


def _guard_standard_streams() -> None:
    """Fill closed standard descriptors with /dev/null, so that no pipe is mistaken for one of them."""
    descriptor = os.open(os.devnull, os.O_RDWR)
    while descriptor <= 2:
        descriptor = os.open(os.devnull, os.O_RDWR)
    os.close(descriptor)


def release_input() -> None:
    """Close this process's standard input, so that its writer notices when no other process reads it any more."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
