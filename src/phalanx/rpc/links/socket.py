"""The way over a proven TCP connection: between hosts, and between processes that cannot share memory.

*Who reads.* One thread at a time: the one that holds ``_reading``. A caller that waits for an answer takes it, and
reads the socket itself (:meth:`SocketLink.wait`), so an answer wakes the thread that needs it and no other. It delivers
all that comes on the way, also what others wait for. While it reads, the connection is not armed in the epoll of those
threads that read for everybody (``readers.py``), so none of them is woken. When it leaves it gives ``_reading`` back
first and arms the connection then: what has come in between wakes one of those threads. A caller that does not get
``_reading`` sleeps until the thread that has it has delivered the answer. A thread of the epoll that is woken and does
not get ``_reading`` does nothing, because the thread that has it arms the connection afterwards.

*Who writes.* The sender itself, holding ``_writing`` for one frame. The kernel is given little at a time
(TCP_NOTSENT_LOWAT), so that a small message never waits behind more than that, and a piece, of a large one.

*A break.* A connection that is reset, or times out, is not the end of a link that has somebody to mend it
(``rpc/mending.py``). The thread that reads puts it down: it takes ``_writing`` as well and closes the socket. While the
link is down, frames are kept (``unacknowledged.py``) and not written, and nobody reads. :meth:`SocketLink.resume` takes
both locks, puts another connection in its place, and writes again what the other side has not received.

*The end.* A thread that reads tells of it after everything that came before; :meth:`SocketLink.close` does so at once.
The socket is closed by the thread that finds both locks free then, so nobody uses a descriptor that is another one's.

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
from collections.abc import Callable, Iterator, Sequence

from phalanx.rpc.links import wire_format
from phalanx.rpc.links.assembling import Assembler
from phalanx.rpc.links.contract import Link, LinkEnded, Receiver
from phalanx.rpc.links.readers import Armed, Readers
from phalanx.rpc.links.unacknowledged import Unacknowledged
from phalanx.rpc.links.wire_format import layout_of, pieces_of
from phalanx.rpc.message import Kind, Message
from phalanx.wire.framing import Malformed
from phalanx.wire.session import Session
from phalanx.wire.sockets import KeepAlive

__all__ = ["KEEP_ALIVE", "SocketLink"]

# A connection whose other host has vanished, or that was cut, breaks after 2 s. The kernel answers the probes, so this
# does not end the connection of a process that is stopped or busy, unless that takes nothing of what was sent.
KEEP_ALIVE = KeepAlive(idle_s=1, interval_s=1, probes=1, unacknowledged_s=2)
_UNSENT_BYTES = 1 << 17
_DROP_S = 0.05
_END_S = 1.0
# How soon a caller that reads notices that its call has ended otherwise, as by cancel().
_SLICE_MS = 50
# How often a thread goes on reading one connection before it looks at the others.
_AT_ONCE = 32
# How much may be kept until the other side has said that it came: of large messages, and with small ones.
_WINDOW_BYTES = (4 << 20, 8 << 20)
# After how much it is said.
_ACKNOWLEDGED_BYTES, _ACKNOWLEDGED_FRAMES = 1 << 18, 64
_TCP_NOTSENT_LOWAT = 25
_TAKES_NOTHING = "the other process takes nothing"


class SocketLink(Link):
    """One connection. All methods may be called from any thread.

    Args:
        sock: the connection, whose handshake is done; the link closes it.
        session: the digests of its messages.
        receiver: takes what comes.
        rest: bytes that came with the handshake.
        readers: the threads that read it while no caller does. Without them, somebody calls :meth:`read`.
        mend: is called when the connection breaks, with this link and the reason. Without it, that is the end.

    Attributes:
        down: the connection has broken, and no other one has taken its place yet.
        over: why the link has ended; empty before.
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
        self.down = False
        self.over = ""
        self.mending = threading.Lock()
        self.attempt = 0
        self._mend = mend
        self._receiver = receiver
        self._readers = readers
        self._armed: Armed | None = None
        self._assembler = Assembler(session, rest)
        self._reading = threading.Lock()  # held by the thread that reads
        self._within = False  # that thread is between the socket and the receiver
        self._reader = 0  # which thread that is
        self._came: deque[Message] = deque()  # received, and not delivered yet
        self._acknowledged = (0, 0)  # the frames and bytes of which the other side knows that they have come
        self._acknowledges = False  # it is to be told of more
        self._kept = Unacknowledged()
        self._writing = threading.Lock()  # held for one frame
        self._large = threading.Lock()  # held for one large message
        self._unsent = b""  # the rest of a frame whose sender's time was over
        self._known = True  # how much of the last frame was sent
        self._ending = threading.Lock()
        self._use(sock, session)

    def _use(self, sock: socket.socket, session: Session) -> None:
        self.sock = sock
        self._session = session
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(sock, select.POLLIN)
        self._writable.register(sock, select.POLLOUT)
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, _UNSENT_BYTES)

    def fileno(self) -> int:
        """The descriptor; -1 after the end."""
        return self.sock.fileno()

    def begin(self) -> None:
        """Receive from now on. The receiver has to know the link before."""
        self._reading.acquire()
        try:
            self._take()  # what came with the handshake
            self._deliver(serving=False)
            if self._readers is not None and not self.over:
                self._armed = self._readers.add(self)
        finally:
            self._stop_reading()

    # Sending

    def send(self, message: Message, timeout_s: float) -> None:
        """See :class:`Link`."""
        until = time.monotonic() + timeout_s
        if message.nbytes <= self.SMALL_BYTES:
            self._write([wire_format.small_frame(message)], until)
            return
        if len(message.head) > wire_format.LONGEST_FRAME // 2:
            raise ValueError(f"the part of a message that is pickled has {len(message.head)} bytes, which is too long")
        with self._lent():
            self._send_large(message, until, timeout_s)

    @contextlib.contextmanager
    def _lent(self) -> Iterator[None]:
        """Have others read while this thread waits, if it is the one that reads: it may wait for what they receive."""
        me = threading.get_ident()
        if me != self._reader:
            yield
            return
        self._reader = 0
        self._reading.release()
        if self._armed is not None and not self.down:
            self._armed.arm()
        try:
            yield
        finally:
            self._reading.acquire()
            self._reader = me

    def _send_large(self, message: Message, until: float, timeout_s: float) -> None:
        if not self._large.acquire(timeout=max(0.0, min(timeout_s, threading.TIMEOUT_MAX))):
            raise TimeoutError(f"another large message has been on its way for {timeout_s:g} s")
        try:
            self._write([layout_of(message).encode() + message.head], until, wire_format.LARGE)
            try:
                for piece in pieces_of(message.buffers):
                    self._write([piece], until, wire_format.PIECE)
            except (TimeoutError, KeyboardInterrupt):
                self._write([], time.monotonic() + _DROP_S, wire_format.DROP)
                raise
        finally:
            self._kept.own()  # the caller may change it now
            self._large.release()

    def _write(self, parts: list[bytes | memoryview], until: float, kind: int = wire_format.SMALL) -> None:
        """Send one frame: all of it, or if its time is over, its rest before the next frame. TimeoutError: nothing.

        Args:
            parts: what it has behind its prefix; a small message has its prefix already.
            until: when its time is over.
            kind: what frame it is.
        """
        if kind != wire_format.SMALL:
            parts.insert(0, wire_format.PREFIX.pack(1 + sum(map(len, parts)), kind))
        if self._kept.nbytes > _WINDOW_BYTES[0]:
            self._wait_for_room(_WINDOW_BYTES[kind != wire_format.PIECE], until)
        if not self._writing.acquire(False) and not self._writing.acquire(
            timeout=max(0.0, min(until - time.monotonic(), threading.TIMEOUT_MAX))
        ):
            raise TimeoutError(_TAKES_NOTHING)
        try:
            if self.over:
                raise LinkEnded(self.over)
            if self._unsent and not self._finish([memoryview(self._unsent)], until):
                if kind != wire_format.DROP:
                    raise TimeoutError(_TAKES_NOTHING)
                self._keep(parts)
                self._unsent += self._session.seal(b"".join(parts))
                return
            self._known = False
            self._keep(parts)
            if not self.down:
                self._send_frame(parts, until)
            self._known = True
        except (LinkEnded, TimeoutError):
            self._known = True
            raise
        finally:
            if not self._known:  # a signal has come between two steps: nobody knows how much of a frame was sent
                self._known = True
                with contextlib.suppress(OSError):
                    self.sock.shutdown(socket.SHUT_RDWR)
            self._stop_writing()

    def _keep(self, parts: list[bytes | memoryview]) -> None:
        """Keep a frame until the other side has it, if the link can be mended."""
        if self._mend is not None:
            self._kept.add(tuple(parts), sum(map(len, parts)))

    def _send_frame(self, parts: Sequence[bytes | memoryview], until: float) -> None:
        """Write a frame with its digest; the rest is kept in ``_unsent`` if the time is over."""
        tag = self._session.digest(*parts)
        parts = [b"".join((*parts, tag))] if len(parts) < 2 else [*parts, tag]
        sent, nbytes = self._try_to_send(parts), sum(map(len, parts))
        if sent < nbytes:
            self._finish(_behind(sent, parts), until)

    def _wait_for_room(self, most_bytes: int, until: float) -> None:
        kept = self._kept
        if threading.get_ident() == self._reader:
            return  # nobody else would receive what it waits for
        with kept.changed:
            left = max(0.0, min(until - time.monotonic(), threading.TIMEOUT_MAX))
            if not kept.changed.wait_for(lambda: kept.nbytes <= most_bytes or self.over, left):
                raise TimeoutError(_TAKES_NOTHING)

    def _stop_writing(self) -> None:
        while True:
            if self._acknowledges and not self._unsent and not self.down and not self.over:
                self._send_acknowledgement()
            self._writing.release()
            if self.over:
                self._close_socket()
            # Another thread may have come with something to acknowledge, and gone because this one had the lock.
            if not self._acknowledges or self._unsent or self.down or not self._writing.acquire(False):
                break
        if self._unsent and self._armed is not None:
            self._armed.arm_both()

    def _send_acknowledgement(self) -> None:
        self._acknowledges = False
        assembler = self._assembler
        self._acknowledged = assembler.received, assembler.received_bytes
        body = wire_format.COUNT.pack(assembler.received)
        prefix = wire_format.PREFIX.pack(1 + len(body), wire_format.ACK)
        with contextlib.suppress(LinkEnded):
            self._send_frame([prefix + body], 0.0)

    def _try_to_send(self, parts: Sequence[bytes | memoryview]) -> int:
        """How many bytes of these the kernel takes; all of them if the connection has broken and will be mended."""
        if self.over:
            raise LinkEnded(self.over)
        try:
            return self.sock.sendmsg(parts) if len(parts) > 1 else self.sock.send(parts[0])
        except BlockingIOError:
            return 0
        except OSError as error:
            # The thread that reads learns of it as well, after it has read what had come before.
            if self._mend is None:
                raise LinkEnded(self.over or f"the connection has ended: {error.strerror}") from error
            with contextlib.suppress(OSError):
                self.sock.shutdown(socket.SHUT_RDWR)
            return sum(map(len, parts))

    def _finish(self, rest: list[memoryview], until: float) -> bool:
        """Write the rest of a frame as far as the time allows; what is left is kept. Whether all was written."""
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

    # Receiving

    def wait(self, done: Callable[[], bool], call: int, timeout_s: float) -> None:
        """See :class:`Link`."""
        if self._armed is None or not self._reading.acquire(False):
            return
        try:
            self._reader = threading.get_ident()
            self._armed.disarm()
            until = time.monotonic() + timeout_s
            self._deliver(serving=False)  # what a thread that was interrupted by a signal has left
            while not self.over and not self.down and not done():
                left_ms = 1000 * (until - time.monotonic())
                if left_ms <= 0:
                    break
                if self._readable.poll(min(left_ms, _SLICE_MS)):
                    self._receive(serving=False)
        finally:
            self._stop_reading()

    def ready(self) -> None:
        """Something has come, or may be sent; a thread of ``readers`` calls this."""
        request = None
        if not self._reading.acquire(False):
            return
        try:
            self._reader = threading.get_ident()
            if self._unsent and self._writing.acquire(False):
                try:
                    if self._unsent and not self.down:
                        with contextlib.suppress(LinkEnded):
                            self._finish([memoryview(self._unsent)], 0.0)
                finally:
                    self._stop_writing()
            request = self._receive(serving=True)
        finally:
            self._stop_reading()
        if request is not None:
            self._readers.leave()  # type: ignore[union-attr]
            self._receiver.deliver(self, request, may_block=True)

    def read(self) -> None:
        """Read what has come, and deliver the messages in it."""
        self._reading.acquire()
        try:
            self._receive(serving=False)
        finally:
            self._stop_reading()

    def _stop_reading(self) -> None:
        interrupted, self._within, self._reader = self._within, False, 0
        if interrupted and not self.over:  # by a signal: nobody knows how much of what had come was taken
            self._break("a signal has interrupted the thread that read from it")
        self._reading.release()
        if self.over:
            self._close_socket()
        elif self._armed is not None and not self.down:
            self._armed.arm_both() if self._unsent else self._armed.arm()

    def _receive(self, *, serving: bool) -> Message | None:
        """Read what has come, and deliver it, but return a request that this thread may run when it has left."""
        request = None
        for _ in range(_AT_ONCE):
            if request is not None:
                self._receiver.deliver(self, request, may_block=False)
                request = None
            if self.over or self.down:
                break
            self._within = True
            try:
                came, more = self._assembler.receive(self.sock)
            except BlockingIOError:
                self._within = False
                break
            except OSError as error:
                self._within = False
                self._break(f"the connection was lost: {error.strerror}")
                break
            if not came:
                self._within = False
                self._break("its process has ended, or its host")
                break
            self._take()
            self._within = False
            request = self._deliver(serving=serving)
            if not more:
                break
        return request

    def _take(self) -> None:
        """Take what is complete of what has come, and say now and then how much that was."""
        assembler, acknowledged = self._assembler, self._kept.forgotten
        try:
            assembler.take(self._came)
            if assembler.acknowledged > acknowledged:
                self._kept.forget(assembler.acknowledged)
        except Malformed as error:
            self._deliver(serving=False)
            self._end(f"what it sent cannot be read: {error}")
            return
        frames, nbytes = self._acknowledged
        if (
            assembler.received - frames >= _ACKNOWLEDGED_FRAMES
            or assembler.received_bytes - nbytes >= _ACKNOWLEDGED_BYTES
        ) and self._mend is not None:
            self._acknowledges = True
            if self._writing.acquire(False):
                self._stop_writing()

    def _deliver(self, *, serving: bool) -> Message | None:
        came, left = self._came, self._assembler.left
        request = None
        if serving and came and came[-1].kind is Kind.REQUEST and not left:
            request = came.pop()
        while came:
            self._receiver.deliver(self, came.popleft(), may_block=False)
        if left:
            self._end("it has left")
        return request

    # Breaks

    def _break(self, why: str) -> None:
        """The connection is of no use any more. The caller holds ``_reading``."""
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
            if self._armed is not None:
                self._armed.arm()
            for parts in self._kept.all():
                self._send_frame(parts, math.inf)
        except LinkEnded:
            pass
        finally:
            self._stop_writing()

    # The end

    def close(self) -> None:
        """See :class:`Link`."""
        if not self.over:
            with contextlib.suppress(LinkEnded, TimeoutError):
                self._write([], time.monotonic() + _END_S, wire_format.END)
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
        """Close the socket, unless another thread reads or writes; that one does it then."""
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
    """What is behind the first ``nbytes`` of these."""
    rest = []
    for part in parts:
        if nbytes >= len(part):
            nbytes -= len(part)
        else:
            rest.append(memoryview(part)[nbytes:])
            nbytes = 0
    return rest
