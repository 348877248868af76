"""The pipes, sockets and report files that join the supervisor, the zygote and the ranks.

All of them are opened before the first fork, so no process has to open a path later. After a fork each process closes
the ends that it does not use. Those of a further attempt (``--restarts``) are opened by the supervisor too, and sent to
the zygote over the control socket of the attempt before. Control messages are JSON over a SOCK_SEQPACKET pair, which
keeps their boundaries and reports the end of the other process as an end of file.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.launch.rank.trace import Trace, open_trace
from phalanx.system.interfaces import listening_address
from phalanx.wire.sockets import listen

__all__ = [
    "Control",
    "Descriptors",
    "RankDescriptors",
    "RankEnds",
    "ZygoteDescriptors",
    "open_descriptors",
    "open_store",
    "receive_descriptors",
    "release_input",
    "report_name",
]

# A message that lists every rank of a large job is longer than the kernel takes at once, so it is sent in pieces.
LARGEST_PIECE = 1 << 16
_MORE, _LAST = b"+", b"."
# The kernel passes at most 253 descriptors with one message (SCM_MAX_FD).
_MOST_PASSED = 250


class Control:
    """One end of the control socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    def fileno(self) -> int:
        """The descriptor, for a selector."""
        return self._socket.fileno()

    def send(self, **message: Any) -> None:
        """Send one message. If the receiver has ended, nothing happens here; :meth:`receive` returns None.

        Nor does anything after :meth:`close`: a signal's handler may send at any time.
        """
        data = json.dumps(message).encode()
        if self._socket.fileno() < 0:
            return
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

    def pass_on(self, descriptors: Sequence[int]) -> None:
        """Send descriptors, of which the receiver gets copies; like :meth:`send` if it has ended."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for start in range(0, len(descriptors), _MOST_PASSED):
                socket.send_fds(self._socket, [_LAST], descriptors[start : start + _MOST_PASSED])

    def take_over(self, count: int) -> list[int] | None:
        """Wait for that many descriptors of :meth:`pass_on`; None when the other side has ended.

        Raises:
            OSError: this process may not open so many.
        """
        taken: list[int] = []
        while len(taken) < count:
            try:
                data, some, flags, _ = socket.recv_fds(self._socket, 1, _MOST_PASSED, socket.MSG_CMSG_CLOEXEC)
            except ConnectionResetError:
                return None
            if not data:
                return None
            if flags & socket.MSG_CTRUNC or not some:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            taken += some
        return taken

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
class ZygoteDescriptors:
    """The descriptors of one attempt that its zygote needs.

    Attributes:
        ranks: one entry a rank.
        zygote: the zygote's end of the control socket, or that of a relay in its place.
        trace: the ranks' stacks, and how far they have come.
    """

    ranks: Sequence[RankEnds]
    zygote: Control
    trace: Trace

    def close_rank_ends(self, *, but: int | None = None) -> None:
        """Close the write ends and the reports of all ranks, or of all but one."""
        for rank, ends in enumerate(self.ranks):
            if rank != but:
                os.close(ends.out_write)
                os.close(ends.err_write)
                os.close(ends.report)

    def close(self) -> None:
        """In the zygote, when the attempt is over: close what it still has of it."""
        self.zygote.close()
        os.close(self.trace.descriptor)


@dataclass
class Descriptors(ZygoteDescriptors):
    """Every descriptor of the ranks that one zygote forks, or that a relay has started.

    Attributes:
        ranks: one entry a rank.
        supervisor: the supervisor's end of the control socket, or that of a host's agent in its place.
    """

    ranks: Sequence[RankDescriptors]
    supervisor: Control

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

    def pass_zygote_ends(self, control: Control, listener: socket.socket) -> None:
        """In the supervisor: send a zygote of an earlier attempt its ends of this one (:func:`receive_descriptors`).

        Args:
            control: the socket of the earlier attempt.
            listener: the listening socket of this attempt's store.
        """
        own = [self.zygote.fileno(), listener.fileno(), self.trace.descriptor]
        control.pass_on(own + [end for rank in self.ranks for end in (rank.out_write, rank.err_write, rank.report)])

    def close_files(self) -> None:
        """In the supervisor, when the attempt is over: close all but the control socket; pipes are closed already."""
        os.close(self.trace.descriptor)
        for ends in self.ranks:
            os.close(ends.report)


def report_name(run_id: str, rank: int) -> str:
    """The name of a rank's report file, as ``/proc/<pid>/fd`` shows it."""
    return f"{run_id}-rank-{rank}"


def open_store(addresses: Sequence[str]) -> socket.socket:
    """The listening socket of the job's store, on a free port.

    It is bound by the supervisor, and the store inherits it, so no other program can take the port in between.
    """
    _guard_standard_streams()
    return listen(listening_address(addresses), 0)


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
    return Descriptors(joined, Control(theirs), trace, Control(mine))


def receive_descriptors(control: Control, ranks: int, run_id: str) -> tuple[ZygoteDescriptors, socket.socket] | None:
    """In a zygote: its ends of another attempt, and the listening socket of that attempt's store.

    Args:
        control: the socket of the attempt before.
        ranks: how many ranks it forks.
        run_id: the job's name.

    Returns:
        None if the supervisor has ended.
    """
    taken = control.take_over(3 + 3 * ranks)
    if taken is None:
        return None
    zygote, listener, trace, *others = taken
    ends = [RankEnds(*own, trace) for own in zip(others[::3], others[1::3], others[2::3], strict=True)]
    opened = ZygoteDescriptors(ends, Control(socket.socket(fileno=zygote)), Trace(trace, run_id))
    return opened, socket.socket(fileno=listener)


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
