"""The link over a proven TCP connection: between hosts, and between processes that cannot share memory.

**Writing.** The sender writes to the socket itself, holding ``_writing`` for one frame. The kernel is given little at a
time (TCP_NOTSENT_LOWAT), so that a small message never waits behind more than that, and a piece, of a large one. What
does not fit in the sender's time is written by the next sender, or by a thread that the epoll wakes when there is room.

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
``_unsent``    who writes                          who writes, reads   ``_writing``
``_came``      who reads                           who reads           ``_reading``
``_reader``    who reads                           all                 ``_reading``; one word
=============  ==================================  ==================  =======================

Locks are taken in the order ``_large``, ``_reading``, ``_writing``.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import math
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from ctypes import Structure, addressof, c_int32, c_uint32, c_uint64, c_void_p
from functools import partial

from phalanx.native.core import rpc
from phalanx.rpc.links import frames
from phalanx.rpc.links.contract import Kind, Link, LinkEnded, Message, Receiver
from phalanx.rpc.links.frames import Assembler, layout_of, pieces_of
from phalanx.rpc.links.readers import Armed, Readers
from phalanx.wire.framing import Malformed
from phalanx.wire.session import TAG_BYTES, Session, sha_is_quicker
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
_BLOCK_BYTES = 1 << 14
_WHOLE = 1 << 32  # PHX_RPC_WHOLE
_TAKES_NOTHING = "the other process takes nothing"


class _CoreEndpoint(Structure):
    """``struct phx_rpc_endpoint``."""

    _fields_ = [
        ("data", c_void_p),
        ("size", c_uint32),
        ("came", c_uint32),
        ("descriptor", c_int32),
        ("outgoing", c_uint64 * 8),
        ("incoming", c_uint64 * 8),
    ]


class _Endpoint:
    """One end of a connection in the core (``native/csrc/rpc/socket.c``): a small message is one call there each way.

    It serves one thread at a time that receives, and one that sends. A thread that waits sleeps at once. Watching the
    connection first made an empty call 10 to 20 us quicker while other programs left the cores alone, and many times
    slower while they did not.

    Args:
        descriptor: of the connection.
        session: the digests of its frames.

    Attributes:
        send: sends a frame with its digest as far as the kernel takes it at once: ``send(number, frame, len(frame))``.
            It returns how many bytes the kernel took, or a number of errno, negative.
        wait: receives what has come, or comes soon: ``wait(sleep_ms, number)``. What has come stays here until
            :meth:`take`, also if a signal interrupts the caller. It returns how many bytes there are, with ``WHOLE`` if
            they are one small frame with the digest of that number; 0 at the end of the connection; a number of errno,
            negative: EAGAIN if nothing has come.
        look: the same for a thread that does not sleep, and keeps the interpreter's lock.
    """

    def __init__(self, descriptor: int, session: Session) -> None:
        self._memory = ctypes.create_string_buffer(_BLOCK_BYTES)
        self._view = memoryview(self._memory).cast("B")
        self._endpoint = _CoreEndpoint(addressof(self._memory), _BLOCK_BYTES, 0, descriptor)
        address, core = addressof(self._endpoint), rpc()
        persons = session.outgoing_person, session.incoming_person
        core.phx_rpc_endpoint_key(address, session.key, len(session.key), *persons)
        self.send: Callable[[int, bytes, int], int] = partial(core.phx_rpc_write, address)
        self.wait: Callable[[int, int], int] = partial(core.phx_rpc_receive, address)
        self.look: Callable[[int, int], int] = partial(rpc(holding=True).phx_rpc_receive, address)

    def take(self, nbytes: int) -> bytes:
        """Return what has come, or its beginning; the rest of it is dropped."""
        data = bytes(self._view[:nbytes])
        self._endpoint.came = 0
        return data

    def has_come(self) -> bool:
        """Return whether something has come and was not taken, because a signal interrupted the caller."""
        return bool(self._endpoint.came)


class SocketLink(Link):
    """One connection. All methods may be called from any thread.

    Args:
        sock: the connection, whose handshake is done; the link closes it.
        session: the digests of its messages.
        receiver: takes what comes.
        rest: bytes that came with the handshake.
        readers: the threads that read it while no caller does. Without them, somebody calls :meth:`read`.

    Attributes:
        sock: the connection.
        over: why the link has ended; empty before.
    """

    name = "tcp"
    LONGEST_HEAD = frames.LONGEST_FRAME // 2
    MOST_BUFFERS = frames.MOST_BUFFERS

    def __init__(
        self,
        sock: socket.socket,
        session: Session,
        receiver: Receiver,
        rest: bytes | bytearray = b"",
        readers: Readers | None = None,
    ) -> None:
        self.sock = sock
        self.over = ""
        self._session = session
        self._receiver = receiver
        self._readers = readers
        self._armed: Armed | None = None
        self._assembler = Assembler(session, rest)
        self._endpoint = _Endpoint(sock.fileno(), session)
        self._host = Acknowledged(sock)
        self._ending = threading.Lock()
        self._large = threading.Lock()  # held for one large message
        self._reading = threading.Lock()  # held by the thread that reads
        self._writing = threading.Lock()  # held for one frame
        self._reader = 0  # which thread reads
        self._within = False  # that thread is between the socket and the receiver
        self._came: deque[Message] = deque()  # received, and not delivered yet
        self._unsent = b""  # the rest of a frame whose sender's time was over
        self._known = True  # how much of the last frame was sent
        self._quick_bytes = 0 if session.encrypts else _HASHED_BYTES  # of small frames, which the core sends
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
            self._write_small(frames.small_frame(message), until)
            return
        self.check(message)
        if self._reads():
            self._stop_reading()  # others have to read meanwhile: this may wait for what they receive
        self._send_large(message, until, timeout_s)

    def _send_large(self, message: Message, until: float, timeout_s: float) -> None:
        if not self._large.acquire(timeout=max(0.0, min(timeout_s, threading.TIMEOUT_MAX))):
            raise TimeoutError(f"another large message has been on its way for {timeout_s:g} s")
        try:
            self._write([layout_of(message).encode() + message.head], until, frames.LARGE)
            try:
                for piece in pieces_of(message.buffers):
                    hashed = len(piece) >= _HASHED_BYTES and not self._session.encrypts and sha_is_quicker()
                    self._write([piece], until, frames.HASHED if hashed else frames.PIECE)
            except (TimeoutError, KeyboardInterrupt):
                self._write([], time.monotonic() + _DROP_S, frames.DROP)
                raise
        finally:
            self._large.release()

    def _write_small(self, frame: bytes, until: float) -> None:
        """:meth:`_write` for a small message; in one step if nothing is in its way."""
        if not self._writing.acquire(False):
            self._write([frame], until)
            return
        try:
            if self._unsent or self.over or len(frame) >= self._quick_bytes:
                self._write_held([frame], until, frames.SMALL)
                return
            self._known = False
            sent = self._endpoint.send(self._session.sent, frame, len(frame))
            if sent == len(frame) + TAG_BYTES:
                self._session.sent += 1
            elif sent >= 0 or sent == -errno.EAGAIN:
                self._finish(_behind(max(sent, 0), [frame, self._session.digest(frame)]), until)
            else:
                raise self._broken(os.strerror(-sent))
            self._known = True
        except (LinkEnded, TimeoutError):
            self._known = True
            raise
        finally:
            self._end_frame()

    def _write(self, parts: list[bytes | memoryview], until: float, kind: int = frames.SMALL) -> None:
        """Send one frame: all of it, or if its time is over, its rest before the next frame. TimeoutError: nothing.

        Args:
            parts: what it has behind its prefix; a small message has its prefix already.
            until: when its time is over.
            kind: what frame it is.
        """
        if kind != frames.SMALL:
            parts.insert(0, frames.PREFIX.pack(1 + sum(map(len, parts)), kind))
        if not self._writing.acquire(False) and not self._writing.acquire(
            timeout=max(0.0, min(until - time.monotonic(), threading.TIMEOUT_MAX))
        ):
            raise TimeoutError(_TAKES_NOTHING)
        try:
            self._write_held(parts, until, kind)
        except (LinkEnded, TimeoutError):
            self._known = True
            raise
        finally:
            self._end_frame()

    def _write_held(self, parts: list[bytes | memoryview], until: float, kind: int) -> None:
        """:meth:`_write`, holding ``_writing``."""
        if self.over:
            raise LinkEnded(self.over)
        sha = kind == frames.HASHED
        if self._unsent and not self._finish([memoryview(self._unsent)], until):
            if kind != frames.DROP:
                raise TimeoutError(_TAKES_NOTHING)
            self._unsent += b"".join(self._session.sealed(parts, frames.PREFIX.size))
            return
        self._known = False
        few = len(parts) < 2
        sealed = self._session.sealed(parts, frames.PREFIX.size, sha=sha)
        self._finish([memoryview(b"".join(sealed))] if few else [memoryview(part) for part in sealed], until)
        self._known = True

    def _end_frame(self) -> None:
        if not self._known:  # a signal has come between two steps: nobody knows how much of a frame was sent
            self._known = True
            with contextlib.suppress(OSError):
                self.sock.shutdown(socket.SHUT_RDWR)
        self._stop_writing()

    def _stop_writing(self) -> None:
        self._writing.release()
        if self.over:
            self._close_socket()
        elif self._unsent and self._armed is not None:
            self._armed.arm_both()

    def _try_to_send(self, parts: Sequence[memoryview]) -> int:
        """Return how many bytes of these the kernel takes."""
        if self.over:
            raise LinkEnded(self.over)
        try:
            return self.sock.sendmsg(parts) if len(parts) > 1 else self.sock.send(parts[0])
        except BlockingIOError:
            return 0
        except OSError as error:
            raise self._broken(str(error.strerror)) from error

    def _broken(self, why: str) -> LinkEnded:
        # The thread that reads learns of it as well, after it has read what had come before.
        return LinkEnded(self.over or f"the connection has ended: {why}")

    def _finish(self, rest: list[memoryview], until: float) -> bool:
        """Write a frame, or its rest, as far as the time allows; what is left is kept. Whether all was written."""
        self._known, self._unsent = False, b""
        while rest := _behind(self._try_to_send(rest), rest):
            left = until - time.monotonic()
            try:
                writable = left > 0 and self._writable.poll(min(left, 3600) * 1000)
            except BaseException:  # a signal has come while it waited: what is unsent is known
                self._unsent, self._known = b"".join(rest), True
                raise
            if not writable:
                self._unsent, self._known = b"".join(rest), True
                return False
        self._known = True
        return True

    # -- reading -----------------------------------------------------------------------------------

    def begin(self) -> None:
        """Receive from now on. The receiver has to know the link before."""
        self._reading.acquire()
        self._reader = threading.get_ident()
        try:
            self._take(b"")  # what came with the handshake
            self._deliver(serving=False)
            if self._readers is not None and not self.over:
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
            if self._came:  # what a thread has left that was interrupted, or had to send
                self._deliver(serving=False)
            while self._reader == me and not self.over and not done():
                left_ms = 1000 * (until - time.monotonic())
                if left_ms <= 0:
                    break
                self._send_rest()  # the thread that was woken for it could not, because this one reads
                self._receive(serving=False, sleep_ms=math.ceil(min(left_ms, _SLICE_MS)))
        finally:
            self._stop_reading()

    def ready(self) -> None:
        """Something has come, or may be sent; a thread of ``readers`` calls this."""
        request = self._serve(armed=False)
        while request is not None:
            others = self._readers.leave()  # type: ignore[union-attr]
            self._receiver.deliver(self, request, may_block=others)
            request = self._serve(armed=True)

    def _serve(self, *, armed: bool) -> Message | None:
        """Deliver what has come. A request that this thread may run is returned, after the reading has been given back.

        Args:
            armed: the connection is armed again, because this thread has run a request since it read.
        """
        if not self._reading.acquire(False):
            return None
        try:
            self._reader = threading.get_ident()
            if armed:
                if self.over or self._armed is None:
                    return None
                self._armed.disarm()
            if self._came:  # what a thread has left that was interrupted, or had to send
                self._deliver(serving=False)
            self._send_rest()
            return self._receive(serving=True)
        finally:
            self._stop_reading()

    def _send_rest(self) -> None:
        """Send what the kernel had no room for, as far as it has now."""
        if self._unsent and self._writing.acquire(False):
            try:
                if self._unsent:
                    with contextlib.suppress(LinkEnded):
                        self._finish([memoryview(self._unsent)], 0.0)
            finally:
                self._stop_writing()

    def read(self) -> None:
        """Read what has come, and deliver the messages in it."""
        self._reading.acquire()
        self._reader = threading.get_ident()
        try:
            self._receive(serving=False)
        finally:
            self._stop_reading()

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
            left = self._unsent or self._came or self._endpoint.has_come()
            self._armed.arm_both() if left else self._armed.arm()

    def _receive(self, *, serving: bool, sleep_ms: int = 0) -> Message | None:
        """Read what has come, or comes soon, and deliver it, but return a request that this thread may run afterwards.

        Args:
            serving: there may be such a request.
            sleep_ms: how long to sleep if nothing has come.
        """
        assembler, endpoint, me = self._assembler, self._endpoint, threading.get_ident()
        receive = endpoint.wait if sleep_ms else endpoint.look
        request = None
        for _ in range(_AT_ONCE):
            if request is not None:
                self._receiver.deliver(self, request, may_block=False)
                request = None
            if self.over or self._reader != me:
                break
            piece = assembler.piece
            if piece is None:
                came = receive(sleep_ms, assembler.next_number())
                more = came == _BLOCK_BYTES
                self._within = True
            elif sleep_ms and not self._readable.poll(sleep_ms):
                break
            else:
                self._within = True
                try:
                    came, more = assembler.receive(self.sock, piece)
                except OSError as error:
                    came, more = -(error.errno or errno.EIO), False
            if came <= 0:
                self._within = False
                if came != -errno.EAGAIN:
                    self._lose(f"the connection was lost: {os.strerror(-came)}" if came else "")
                break
            receive, sleep_ms = endpoint.look, 0
            if piece is None:
                self._take(endpoint.take(came - _WHOLE - TAG_BYTES if came > _WHOLE else came), whole=came > _WHOLE)
            else:
                self._take(b"")
            self._within = False
            request = self._deliver(serving=serving)
            if not more:
                break
        return request

    def _take(self, data: bytes, *, whole: bool = False) -> None:
        """Take what is complete of what has come.

        Args:
            data: what has come, but for pieces.
            whole: it is a small frame whose digest the core has found right.
        """
        try:
            if whole:
                self._came.append(self._assembler.take_whole(data))
            else:
                self._assembler.feed(data)
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
                self._write([], time.monotonic() + END_S if until is None else until, frames.END)
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
        if self._readers is not None:
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
