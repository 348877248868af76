"""The link over a proven TCP connection: between hosts, and between processes that cannot share memory.

**Writing.** The sender writes to the socket itself, holding ``_writing`` for one frame. The kernel is given little at a
time (TCP_NOTSENT_LOWAT), so that a small message never waits behind more than that, and a piece, of a large one. What
does not fit in the sender's time is written by the next sender.

**Reading.** One thread at a time reads: the one that holds ``_reading``. A caller that waits for an answer takes it and
reads the socket itself (:meth:`SocketLink.wait`), so an answer wakes the thread that needs it and no other. While it
reads, the connection is not armed in the epoll of the threads that read for everybody (``readers.py``). When it leaves
it gives ``_reading`` back first and arms the connection then: what has come in between wakes one of those threads.

**The end.** A connection that breaks ends the link. So does a signal that raises between two steps of one frame: nobody
knows then how much of it has gone. The thread that reads tells of the end after everything that came before;
:meth:`SocketLink.close` does so at once. The socket is closed by the thread that finds both locks free.

=============  ==================================  ==================  =======================
field          written by                          read by             guard
=============  ==================================  ==================  =======================
``over``       the thread that ends the link       all                 ``_ending``; set once
``_unsent``    who writes                          who writes          ``_writing``
``_came``      who reads                           who reads           ``_reading``
``_reader``    who reads                           all                 ``_reading``; one word
=============  ==================================  ==================  =======================

Locks are taken in the order ``_large``, ``_reading``, ``_writing``.
"""

from __future__ import annotations

import contextlib
import math
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from phalanx.rpc.links import frames
from phalanx.rpc.links.contract import Kind, Link, LinkEnded, Message, Receiver
from phalanx.rpc.links.frames import Assembler, large_frame, pieces_of, small_frame
from phalanx.rpc.links.readers import Armed, Readers
from phalanx.wire.framing import Malformed
from phalanx.wire.session import Session, sha_is_quicker
from phalanx.wire.sockets import SILENT_S, Acknowledged, KeepAlive

__all__ = ["END_S", "KEEP_ALIVE", "SocketLink"]

# A connection whose other host has vanished, or that was cut, breaks after 2 s: by these probes while nothing is on its
# way, else by wire/sockets.py. The kernel answers both, so neither ends the connection of a process that is stopped.
KEEP_ALIVE = KeepAlive(idle_s=1, interval_s=1, probes=1)
END_S = 1.0
_UNSENT_BYTES = 1 << 17
_DROP_S = 0.05
# From how many bytes on HMAC-SHA-256 may be the quicker digest: it costs more to begin with.
_HASHED_BYTES = 1 << 13
# How soon a caller that reads notices that its call has ended otherwise, as by cancel().
_SLICE_MS = 50
_AT_ONCE = 32  # how often a thread goes on reading one connection before it looks at the others
_TCP_NOTSENT_LOWAT = 25
_DROPPED, _LEAVES = (frames.PREFIX.pack(1, kind) for kind in (frames.DROP, frames.END))
_TAKES_NOTHING = "the other process takes nothing"


class SocketLink(Link):
    """One connection. All methods may be called from any thread.

    Args:
        sock: the connection, whose handshake is done; the link closes it.
        session: the digests of its messages.
        receiver: takes what comes.
        readers: the threads that read it while no caller does.

    Attributes:
        sock: the connection.
        over: why the link has ended; empty before.
    """

    name = "tcp"
    MOST_BUFFERS = frames.MOST_BUFFERS

    def __init__(self, sock: socket.socket, session: Session, receiver: Receiver, readers: Readers) -> None:
        self.sock = sock
        self.over = ""
        self._session = session
        self._receiver = receiver
        self._readers = readers
        self._armed: Armed | None = None
        self._assembler = Assembler(sock, session)
        self._host = Acknowledged(sock)
        self._ending = threading.Lock()
        self._large = threading.Lock()  # held for one large message
        self._reading = threading.Lock()  # held by the thread that reads
        self._writing = threading.Lock()  # held for one frame
        self._reader = 0  # which thread reads
        self._within = False  # that thread is between the socket and the receiver
        self._came: deque[Message] = deque()  # received, and not delivered yet
        self._unsent: bytes | None = b""  # the rest of a frame whose sender's time was over; None while one is sent
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(sock, select.POLLIN)
        self._writable.register(sock, select.POLLOUT)
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, _UNSENT_BYTES)

    def fileno(self) -> int:
        """The descriptor; -1 after the end."""
        return self.sock.fileno()

    # -- writing -----------------------------------------------------------------------------------

    def send(self, message: Message, timeout_s: float) -> None:
        """See :class:`Link`."""
        until = time.monotonic() + timeout_s
        few = not message.buffers
        if (len(message.head) if few else message.nbytes) <= self.SMALL_BYTES:
            if not few:
                self.check(message)
            self._write([small_frame(message)], until, frames.SMALL)
            return
        self.check(message)
        if self._reads():
            self._stop_reading()  # others have to read meanwhile: this may wait for what they receive
        self._send_large(message, until, timeout_s)

    def _send_large(self, message: Message, until: float, timeout_s: float) -> None:
        if not self._large.acquire(timeout=max(0.0, min(timeout_s, threading.TIMEOUT_MAX))):
            raise TimeoutError(f"another large message has been on its way for {timeout_s:g} s")
        parts = [memoryview(message.head), *message.buffers]
        try:
            self._write([large_frame(message, [part.nbytes for part in parts])], until, frames.LARGE)
            try:
                for piece in pieces_of(parts):
                    hashed = len(piece) >= _HASHED_BYTES and not self._session.encrypts and sha_is_quicker()
                    kind = frames.HASHED if hashed else frames.PIECE
                    self._write([frames.PREFIX.pack(1 + len(piece), kind), piece], until, kind)
            except (TimeoutError, KeyboardInterrupt):
                self._write([_DROPPED], time.monotonic() + _DROP_S, frames.DROP)
                raise
        finally:
            self._large.release()

    def _write(self, parts: list[bytes | memoryview], until: float, kind: int) -> None:
        """Send one frame: all of it, or if its time is over, its rest before the next frame. TimeoutError: nothing."""
        if not self._writing.acquire(False) and not self._writing.acquire(
            timeout=max(0.0, min(until - time.monotonic(), threading.TIMEOUT_MAX))
        ):
            raise TimeoutError(_TAKES_NOTHING)
        try:
            if self.over:
                raise LinkEnded(self.over)
            if self._unsent:
                self._push([self._unsent], until)
            unsent, self._unsent = self._unsent, None
            if unsent and kind != frames.DROP:
                self._unsent = unsent
                raise TimeoutError(_TAKES_NOTHING)
            sealed = self._session.sealed(parts, frames.PREFIX.size, sha=kind == frames.HASHED)
            if unsent:
                self._unsent = b"".join((unsent, *sealed))
            else:
                self._push(sealed, until)
        finally:
            if self._unsent is None:  # a signal has come between two steps: nobody knows how much of a frame was sent
                with contextlib.suppress(OSError):
                    self.sock.shutdown(socket.SHUT_RDWR)
            self._writing.release()
            if self.over:
                self._close_socket()

    def _push(self, rest: Sequence[bytes | memoryview], until: float) -> None:
        """Write a frame, or its rest, as far as the time allows; what is left is kept."""
        self._unsent = None
        while rest := _behind(self._try_to_send(rest), rest):
            try:
                left = until - time.monotonic()
                writable = left > 0 and self._writable.poll(min(left, 3600) * 1000)
            except BaseException:  # a signal has come while it waited: what is unsent is known
                self._unsent = b"".join(rest)
                raise
            if not writable:
                self._unsent = b"".join(rest)
                return
        self._unsent = b""

    def _try_to_send(self, parts: Sequence[bytes | memoryview]) -> int:
        """Return how many bytes of these the kernel takes."""
        try:
            return self.sock.sendmsg(parts)
        except BlockingIOError:
            return 0
        except OSError as error:
            # The thread that reads learns of it as well, after it has read what had come before.
            self._unsent = b""
            raise LinkEnded(self.over or f"the connection has ended: {error.strerror}") from error

    # -- reading -----------------------------------------------------------------------------------

    def begin(self) -> None:
        """Receive from now on. The receiver has to know the link before."""
        self._reading.acquire()
        self._reader = threading.get_ident()
        try:
            self._take()  # what came with the handshake
            self._deliver(serving=False)
            if not self.over:
                self._armed = self._readers.add(self)
        finally:
            self._stop_reading()

    def _reads(self) -> bool:
        """Return whether this thread still reads. A thread stops reading when it has to send."""
        return self._reader == threading.get_ident()

    def wait(self, done: Callable[[], bool], call: int, timeout_s: float) -> None:
        """See :class:`Link`."""
        if self._armed is None or not self._reading.acquire(False):
            return
        try:
            self._reader = me = threading.get_ident()
            if self.over:  # its descriptor may be another one's
                return
            self._armed.disarm()
            until = time.monotonic() + timeout_s
            while self._reader == me and not self.over and not done():
                left_ms = 1000 * (until - time.monotonic())
                if left_ms <= 0:
                    break
                self._receive(serving=False, sleep_ms=math.ceil(min(left_ms, _SLICE_MS)))
        finally:
            self._stop_reading()

    def ready(self) -> None:
        """Read what has come; a thread of ``readers`` calls this."""
        if not self._reading.acquire(False):
            return
        try:
            self._reader = threading.get_ident()
            request = self._receive(serving=True)
        finally:
            self._stop_reading()
        if request is not None:
            self._receiver.deliver(self, request, may_block=self._readers.leave())

    def _stop_reading(self) -> None:
        if not self._reads():
            return
        interrupted, self._within = self._within, False
        if interrupted and not self.over:  # by a signal: nobody knows how much of what had come was taken
            self._end("a signal has interrupted the thread that read from it")
        self._reader = 0
        self._reading.release()
        if self.over:
            self._close_socket()
        elif self._armed is not None:
            self._armed.arm_now() if self._came else self._armed.arm()

    def _receive(self, *, serving: bool, sleep_ms: int = 0) -> Message | None:
        """Read what has come, or comes soon, and deliver it, but return a request that this thread may run afterwards.

        Args:
            serving: there may be such a request.
            sleep_ms: how long to sleep if nothing has come.
        """
        request, me = None, threading.get_ident()
        if self._came:  # what a thread has left that was interrupted, or had to send
            self._deliver(serving=False)
            sleep_ms = 0
        for _ in range(_AT_ONCE):
            if request is not None:
                self._receiver.deliver(self, request, may_block=False)
                request = None
            if self.over or self._reader != me or (sleep_ms and not self._readable.poll(sleep_ms)):
                break
            sleep_ms = 0
            self._within = True
            try:
                more = self._assembler.receive()
            except BlockingIOError:
                self._within = False
                break
            except (EOFError, OSError) as error:
                self._within = False
                self._lose(f"the connection was lost: {error.strerror}" if isinstance(error, OSError) else "")
                break
            self._take()
            self._within = False
            request = self._deliver(serving=serving)
            if not more:
                break
        return request

    def _take(self) -> None:
        """Take what is complete of what has come."""
        try:
            self._assembler.take(self._came)
        except Malformed as error:
            self._deliver(serving=False)
            self._end(f"what it sent cannot be read: {error}")

    def _deliver(self, *, serving: bool) -> Message | None:
        came, left = self._came, self._assembler.left
        request = None
        if serving and came and came[-1].kind is Kind.REQUEST and not left:
            request = came.pop()
        while came and self._reads():
            self._receiver.deliver(self, came.popleft(), may_block=False)
        if left and self._reads():
            self._end("it has left", left=True)
        return request

    # -- the end -----------------------------------------------------------------------------------

    def look(self) -> None:
        """Break the connection if the other host is silent. One thread calls it from time to time."""
        host = self._host
        if self.over or host.is_silent:
            return
        self.silent_s = host.silent_s()
        if host.is_silent:
            with contextlib.suppress(OSError):
                host.sock.shutdown(socket.SHUT_RDWR)  # this wakes whoever reads, who ends the link

    def close(self, until: float | None = None) -> None:
        """See :class:`Link`. A peer that takes nothing is waited for until then; for ``END_S`` by default."""
        if not self.over:
            with contextlib.suppress(LinkEnded, TimeoutError):
                self._write([_LEAVES], time.monotonic() + END_S if until is None else until, frames.END)
        self._end("this process has closed it")

    def _lose(self, why: str) -> None:
        """The connection has ended, and the caller has read all that came."""
        if self._host.is_silent:
            why = f"its host has acknowledged nothing for {SILENT_S:g} s"
        self._end(why or "its process has ended, or its host")

    def _end(self, why: str, *, left: bool = False) -> None:
        with self._ending:
            if self.over:
                return
            self.over = why
        self._readers.remove(self)
        with contextlib.suppress(OSError):  # it is gone
            self.sock.shutdown(socket.SHUT_RDWR)  # this wakes whoever reads or writes
        self._close_socket()
        self._receiver.ended(self, why, left=left)

    def _close_socket(self) -> None:
        """Close the socket after the end, unless another thread reads or writes; that one does it then."""
        if self._reading.acquire(False):
            try:
                if self._writing.acquire(False):
                    try:
                        self.sock.close()
                    finally:
                        self._writing.release()
            finally:
                self._reading.release()


def _behind(nbytes: int, parts: Sequence[bytes | memoryview]) -> list[memoryview]:
    """Return what is behind the first ``nbytes`` of these."""
    rest = []
    for part in parts:
        if nbytes >= len(part):
            nbytes -= len(part)
        else:
            rest.append(memoryview(part)[nbytes:])
            nbytes = 0
    return rest
