"""The way over a proven TCP connection: between hosts, and between processes that cannot share memory.

*Who reads.* One thread at a time: the one that holds ``_reading``. A caller that waits for an answer takes it, and
reads the socket itself (:meth:`SocketLink.wait`), so an answer wakes the thread that needs it and no other. It delivers
all that comes on the way, also what others wait for. While it reads, the connection is not armed in the epoll of those
threads that read for everybody (``readers.py``), so none of them is woken. When it leaves it gives ``_reading`` back
first and arms the connection then: what has come in between wakes one of those threads. A caller that does not get
``_reading`` sleeps until the thread that has it has delivered the answer. A thread of the epoll that is woken and does
not get ``_reading`` does nothing, because the thread that has it arms the connection afterwards.

*Who writes.* The sender itself, holding ``_writing`` for one frame (``sending.py``).

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
import errno
import math
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

from phalanx.rpc.links import wire_format
from phalanx.rpc.links.acknowledged import SILENT_S, Acknowledged
from phalanx.rpc.links.assembling import Assembler
from phalanx.rpc.links.contract import LinkEnded, Receiver
from phalanx.rpc.links.endpoint import BLOCK_BYTES, WHOLE, Endpoint, Watch
from phalanx.rpc.links.readers import Readers
from phalanx.rpc.links.sending import SendingLink
from phalanx.rpc.message import Kind, Message
from phalanx.wire.framing import Malformed
from phalanx.wire.session import TAG_BYTES, Session
from phalanx.wire.sockets import KeepAlive

__all__ = ["END_S", "KEEP_ALIVE", "SocketLink"]

# A connection whose other host has vanished, or that was cut, breaks after 2 s: by these probes while nothing is on its
# way, else by acknowledged.py. The kernel answers both, so neither ends the connection of a process that is stopped.
KEEP_ALIVE = KeepAlive(idle_s=1, interval_s=1, probes=1)
END_S = 1.0
# How soon a caller that reads notices that its call has ended otherwise, as by cancel().
_SLICE_MS = 50
# How long a thread that watches for the next request takes at most to leave, when a caller wants to read.
_LINGERS_S = 0.01
# How often a thread goes on reading one connection before it looks at the others.
_AT_ONCE = 32
# After how much the other side is told that it has come.
_ACKNOWLEDGED_BYTES, _ACKNOWLEDGED_FRAMES = 1 << 18, 64


class SocketLink(SendingLink):
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
        self._receiver = receiver
        self._readers = readers
        self._reading = threading.Lock()  # held by the thread that reads
        self._within = False  # that thread is between the socket and the receiver
        self._came: deque[Message] = deque()  # received, and not delivered yet
        self._lingers = False  # that thread has served a request, and watches for the next one
        self._ending = threading.Lock()
        endpoint = Endpoint(readers.watch if readers is not None else Watch())
        super().__init__(sock, session, Assembler(session, rest), endpoint, mends=mend is not None)

    def _use(self, sock: socket.socket, session: Session) -> None:
        super()._use(sock, session)
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)
        self._host = Acknowledged(sock)
        self._silent_s = 0.0

    def fileno(self) -> int:
        """The descriptor; -1 after the end."""
        return self.sock.fileno()

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

    @contextlib.contextmanager
    def _lent(self) -> Iterator[None]:
        """Have others read while this thread waits, if it is the one that reads: it may wait for what they receive."""
        if self._reads():
            self._stop_reading()
        yield

    def _reads(self) -> bool:
        """Whether this thread reads. It may have done so and do it no more, because it had to send in between."""
        return self._reader == threading.get_ident()

    def wait(self, done: Callable[[], bool], call: int, timeout_s: float) -> None:
        """See :class:`Link`."""
        if self._armed is None or not (self._reading.acquire(False) or (self._lingers and self._take_over())):
            return
        try:
            self._reader = me = threading.get_ident()
            if self.over or self.down:  # its descriptor may be another one's
                return
            self._armed.disarm()
            until = time.monotonic() + timeout_s
            if self._came:  # what a thread has left that was interrupted, or had to send
                self._deliver(serving=False)
            while self._reader == me and not self.over and not self.down and not done():
                left_ms = 1000 * (until - time.monotonic())
                if left_ms <= 0:
                    break
                self._receive(serving=False, watches=True, sleep_ms=math.ceil(min(left_ms, _SLICE_MS)))
        finally:
            self._stop_reading()

    def _take_over(self) -> bool:
        """Read in place of a thread that watches for the next request."""
        self._endpoint.want(True)
        try:
            return self._reading.acquire(timeout=_LINGERS_S)
        finally:
            self._endpoint.want(False)

    def ready(self) -> None:
        """Something has come, or may be sent; a thread of ``readers`` calls this."""
        request = self._serve(lingers=False)
        while request is not None:
            others = self._readers.leave()  # type: ignore[union-attr]
            self._receiver.deliver(self, request, may_block=others)
            request = self._serve(lingers=True)

    def _serve(self, *, lingers: bool) -> Message | None:
        """Deliver what has come. A request that this thread may run is returned, after the reading has been given back.

        Args:
            lingers: this thread has just run one, so the next one may come soon: watch for it for a short time.
        """
        if not self._reading.acquire(False):
            return None
        try:
            self._reader = threading.get_ident()
            if lingers:
                if self.over or self.down or self._armed is None:
                    return None
                self._armed.disarm()
                self._lingers = True
            if self._came:  # what a thread has left that was interrupted, or had to send
                self._deliver(serving=False)
            if self._unsent and self._writing.acquire(False):
                try:
                    if self._unsent and not self.down:
                        with contextlib.suppress(LinkEnded):
                            self._finish([memoryview(self._unsent)], 0.0)
                finally:
                    self._stop_writing()
            return self._receive(serving=True, watches=lingers)
        finally:
            self._lingers = False
            self._stop_reading()

    def read(self) -> None:
        """Read what has come, and deliver the messages in it."""
        self._reading.acquire()
        self._reader = threading.get_ident()
        try:
            self._receive(serving=False)
        finally:
            self._stop_reading()

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

    def _stop_reading(self) -> None:
        if not self._reads():
            return
        interrupted, self._within = self._within, False
        if interrupted and not self.over:  # by a signal: nobody knows how much of what had come was taken
            self._break("a signal has interrupted the thread that read from it")
        self._reader = 0
        self._reading.release()
        if self.over:
            self._close_socket()
        elif self._armed is not None and not self.down:
            self._arm()

    def _arm(self) -> None:
        if self._armed is not None:
            self._armed.arm_both() if self._unsent or self._came or self._endpoint.has_come() else self._armed.arm()

    def _receive(self, *, serving: bool, watches: bool = False, sleep_ms: int = 0) -> Message | None:
        """Read what has come, or comes soon, and deliver it, but return a request that this thread may run afterwards.

        Args:
            serving: there may be such a request.
            watches, sleep_ms: how to wait if nothing has come; see :meth:`Endpoint.receive`.
        """
        assembler, endpoint, me = self._assembler, self._endpoint, threading.get_ident()
        receive = endpoint.wait if watches or sleep_ms else endpoint.look
        request = None
        for _ in range(_AT_ONCE):
            if request is not None:
                self._receiver.deliver(self, request, may_block=False)
                request = None
            if self.over or self.down or self._reader != me:
                break
            piece = assembler.piece
            if piece is None:
                came = receive(serving, watches, sleep_ms, assembler.next_number())
                more = came == BLOCK_BYTES
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
                    lost = f"the connection was lost: {os.strerror(-came)}"
                    self._break(lost if came else "its process has ended, or its host")
                break
            receive, watches, sleep_ms = endpoint.look, False, 0
            if piece is None:
                self._take(endpoint.take(came - WHOLE - TAG_BYTES if came > WHOLE else came), whole=came > WHOLE)
            else:
                self._take(b"")
            self._within = False
            request = self._deliver(serving=serving)
            if not more:
                break
        return request

    def _take(self, data: bytes, *, whole: bool = False) -> None:
        """Take what is complete of what has come, and say now and then how much that was.

        Args:
            data: what has come, but for pieces.
            whole: it is a small frame whose digest the core has found right.
        """
        assembler, known = self._assembler, self._acknowledged
        try:
            if whole:
                self._came.append(assembler.take_whole(data))
            else:
                assembler.feed(data)
                assembler.take(self._came)
                if assembler.acknowledged > self._kept.forgotten:
                    self._kept.forget(assembler.acknowledged)
        except Malformed as error:
            self._deliver(serving=False)
            self._end(f"what it sent cannot be read: {error}")
            return
        if (
            assembler.received - known[0] >= _ACKNOWLEDGED_FRAMES
            or assembler.received_bytes - known[1] >= _ACKNOWLEDGED_BYTES
        ):
            self._acknowledge()

    def _acknowledge(self) -> None:
        """Say how much has come."""
        if self._mend is not None:
            self._acknowledges = True
            if self._writing.acquire(False):
                self._stop_writing()

    def _deliver(self, *, serving: bool) -> Message | None:
        came, left = self._came, self._assembler.left
        request = None
        if serving and came and came[-1].kind is Kind.REQUEST and not left:
            request = came.pop()
        while came and self._reads():
            self._receiver.deliver(self, came.popleft(), may_block=False)
        if left and self._reads():
            self._end("it has left")
        return request

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
