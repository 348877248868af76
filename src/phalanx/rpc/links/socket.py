"""The way over a proven TCP connection: between hosts, and between processes that cannot share memory.

*Who reads* is in ``receiving.py``, *who writes* in ``sending.py``, and here is what becomes of the connection.

*A break.* A connection that is reset, or whose other host is silent (:meth:`SocketLink.look`), is not the end of a link
that has somebody to mend it (``rpc/mending.py``). The thread that reads puts it down: it takes ``_writing`` as well and
closes the socket. While the link is down, frames are kept (``unacknowledged.py``) and not written, and nobody reads.
:meth:`SocketLink.resume` takes both locks, puts another connection in its place, and writes again what the other side
has not received.

*The end.* A thread that reads tells of it after everything that came before; :meth:`SocketLink.close` does so at once.
The socket is closed by the thread that finds both locks free then, so nobody uses a descriptor that is another one's.

Locks are taken in the order ``_large``, ``_reading``, ``_writing``.
"""

from __future__ import annotations

import contextlib
import math
import socket
import threading
import time
from collections.abc import Callable

from phalanx.rpc.links import wire_format
from phalanx.rpc.links.contract import LinkEnded, Receiver
from phalanx.rpc.links.readers import Readers
from phalanx.rpc.links.receiving import ReceivingLink
from phalanx.wire.framing import Malformed
from phalanx.wire.session import Session
from phalanx.wire.sockets import SILENT_S, Acknowledged, KeepAlive

__all__ = ["END_S", "KEEP_ALIVE", "SocketLink"]

# A connection whose other host has vanished, or that was cut, breaks after 2 s: by these probes while nothing is on its
# way, else by wire/sockets.py. The kernel answers both, so neither ends the connection of a process that is stopped.
KEEP_ALIVE = KeepAlive(idle_s=1, interval_s=1, probes=1)
END_S = 1.0


class SocketLink(ReceivingLink):
    """One connection. All methods may be called from any thread.

    Args:
        sock: the connection, whose handshake is done; the link closes it.
        session: the digests of its messages.
        receiver: takes what comes.
        rest: bytes that came with the handshake.
        readers: the threads that read it while no caller does. Without them, somebody calls :meth:`read`.
        mend: is called when the connection breaks, with this link and the reason. Without it, that is the end.

    Attributes:
        mending: held by whoever puts another connection in its place.
        attempt: the number of the last attempt of the other side to connect again.
    """

    name = "tcp"

    def __init__(
        self,
        sock: socket.socket,
        session: Session,
        receiver: Receiver,
        rest: bytes | bytearray = b"",
        readers: Readers | None = None,
        mend: Callable[[SocketLink, str], None] | None = None,
    ) -> None:
        self.mending = threading.Lock()
        self.attempt = 0
        self._mend = mend
        self._ending = threading.Lock()
        super().__init__(sock, session, receiver, rest, readers, mends=mend is not None)

    def _use(self, sock: socket.socket, session: Session) -> None:
        super()._use(sock, session)
        self._host = Acknowledged(sock)
        self._silent_s = 0.0

    def look(self) -> None:
        """Break the connection if the other host is silent. One thread calls it from time to time."""
        host = self._host
        if self.down or self.over or host.is_silent:
            return
        self._silent_s = host.silent_s()
        if host.is_silent:
            with contextlib.suppress(OSError):
                host.sock.shutdown(socket.SHUT_RDWR)  # this wakes whoever reads, who breaks it

    def state(self) -> dict[str, float | str]:
        """See :class:`Link`."""
        return {"silent_s": self._silent_s}

    # Breaks

    def _break(self, why: str) -> None:
        """The connection is of no use any more. The caller holds ``_reading``."""
        if self._host.is_silent:
            why = f"its host has acknowledged nothing for {SILENT_S:g} s"
        if self._mend is None or self._assembler.left:
            self._end(why)
            return
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)  # this wakes a thread that writes
        with self._writing:
            if self.down or self.over:
                return
            self.down, self._unsent = True, b""
            if self._readers is not None:
                self._readers.remove(self)
            self.sock.close()
        self._mend(self, why)

    def suspend(self) -> bool:
        """Break the connection, because another one is to take its place. Whether the link is down, and not over."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)  # this wakes a thread that reads
        self._reading.acquire()
        self._reader = threading.get_ident()
        try:
            if not self.down and not self.over:
                self._break("the other side has connected anew")
        finally:
            self._stop_reading()
        return not self.over

    @property
    def received(self) -> int:
        """How many frames have come. It is final while the link is down."""
        return self._assembler.received

    def resume(self, sock: socket.socket, session: Session, rest: bytes | bytearray, received: int) -> None:
        """Go on with another connection.

        Args:
            sock: the connection, whose handshake is done; the link closes it.
            session: the digests of its frames.
            rest: bytes that came with the handshake.
            received: how many frames the other side has received.

        Raises:
            Malformed: it cannot have received as many, or the link does not have those after them any more.
        """
        with self._reading:
            self._writing.acquire()
            try:
                if self.over or not self.down:
                    sock.close()
                    self._writing.release()
                    return
                if received < self._kept.forgotten:
                    raise Malformed("frames are asked for again which have come")
                self._kept.forget(received)
                self._use(sock, session)
                self._assembler.go_on(session, rest)
                self._acknowledged = self.received, self._assembler.received_bytes
                self.down = False
                if self._readers is not None:
                    self._armed = self._readers.add(self)
            except BaseException:
                self._writing.release()
                raise
        # From here on this thread writes, and others read: both sides have to take what the other one sends again.
        try:
            self._arm()
            self._kept.own()  # the sender of a large message may return meanwhile
            for parts in self._kept.all():
                self._send_frame(parts, math.inf)
        except LinkEnded:
            pass
        finally:
            self._stop_writing()

    # The end

    def close(self, until: float | None = None) -> None:
        """See :class:`Link`. A peer that takes nothing is waited for until then; for ``END_S`` by default."""
        if not self.over:
            with contextlib.suppress(LinkEnded, TimeoutError):
                self._write([], time.monotonic() + END_S if until is None else until, wire_format.END)
        self._end("this process has closed it")

    def give_up(self, why: str) -> None:
        """End the link, because there will be no other connection."""
        self._end(why)

    def _end(self, why: str) -> None:
        with self._ending:
            if self.over:
                return
            self.over = why
        if self._readers is not None:
            self._readers.remove(self)
        with contextlib.suppress(OSError):  # it is gone
            self.sock.shutdown(socket.SHUT_RDWR)  # this wakes whoever reads or writes
        self._close_socket()
        with self._kept.changed:
            self._kept.changed.notify_all()  # they wait for what will not come
        self._receiver.ended(self, why)

    def _close_socket(self) -> None:
        if self._reading.acquire(False):
            try:
                if self._writing.acquire(False):
                    try:
                        self.sock.close()
                    finally:
                        self._writing.release()
            finally:
                self._reading.release()
