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

*The end.* A thread that reads tells of it after everything that came before; :meth:`SocketLink.close` does so at once.
The socket is closed by the thread that finds both locks free then, so nobody uses a descriptor that is another one's.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence

from phalanx.rpc.links import wire_format
from phalanx.rpc.links.assembling import Assembler
from phalanx.rpc.links.contract import Link, LinkEnded, Receiver
from phalanx.rpc.links.readers import Armed, Readers
from phalanx.rpc.links.wire_format import layout_of, pieces_of
from phalanx.rpc.message import Kind, Message
from phalanx.wire.framing import Malformed
from phalanx.wire.session import Session
from phalanx.wire.sockets import KeepAlive

__all__ = ["KEEP_ALIVE", "SocketLink"]

# A host that vanishes, or a link that is cut, counts as lost after 3 s. The kernel answers the probes, so a process
# that is stopped or busy is not lost.
KEEP_ALIVE = KeepAlive(idle_s=1, interval_s=1, probes=2, unacknowledged_s=3)
_UNSENT_BYTES = 1 << 17
_DROP_S = 0.05
_END_S = 1.0
# How soon a caller that reads notices that its call has ended otherwise, as by cancel().
_SLICE_MS = 50
# How often a thread goes on reading one connection before it looks at the others.
_AT_ONCE = 32
_TCP_NOTSENT_LOWAT = 25


class SocketLink(Link):
    """One connection. All methods may be called from any thread.

    Args:
        sock: the connection, whose handshake is done; the link closes it.
        session: the digests of its messages.
        receiver: takes what comes.
        rest: bytes that came with the handshake.
        readers: the threads that read it while no caller does. Without them, somebody calls :meth:`read`.
    """

    name = "tcp"

    def __init__(
        self,
        sock: socket.socket,
        session: Session,
        receiver: Receiver,
        rest: bytes | bytearray = b"",
        readers: Readers | None = None,
    ) -> None:
        self.sock = sock
        self._session = session
        self._receiver = receiver
        self._readers = readers
        self._armed: Armed | None = None
        self._assembler = Assembler(session, rest)
        self._reading = threading.Lock()  # held by the thread that reads
        self._within = False  # that thread is between the socket and the receiver
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)
        self._writing = threading.Lock()  # held for one frame
        self._large = threading.Lock()  # held for one large message
        self._unsent = b""  # the rest of a frame whose sender's time was over
        self._known = True  # how much of the last frame was sent
        self._writable = select.poll()
        self._writable.register(sock, select.POLLOUT)
        self._over = ""
        self._ending = threading.Lock()
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, _UNSENT_BYTES)

    def fileno(self) -> int:
        """The descriptor; -1 after the end."""
        return self.sock.fileno()

    def begin(self) -> None:
        """Receive from now on. The receiver has to know the link before."""
        self._reading.acquire()
        try:
            self._deliver(self._assembled(), serving=False)  # what came with the handshake
            if self._readers is not None and not self._over:
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
        if not self._large.acquire(timeout=max(0.0, min(timeout_s, threading.TIMEOUT_MAX))):
            raise TimeoutError(f"another large message has been on its way for {timeout_s:g} s")
        try:
            self._write([layout_of(message).encode(), bytes(message.head)], until, wire_format.LARGE)
            try:
                for piece in pieces_of(message.buffers):
                    self._write([piece], until, wire_format.PIECE)
            except (TimeoutError, KeyboardInterrupt):
                self._write([], time.monotonic() + _DROP_S, wire_format.DROP)
                raise
        finally:
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
        if not self._writing.acquire(False) and not self._writing.acquire(
            timeout=max(0.0, min(until - time.monotonic(), threading.TIMEOUT_MAX))
        ):
            raise TimeoutError("the other process takes nothing")
        try:
            if self._unsent and not self._finish([memoryview(self._unsent)], until):
                if kind != wire_format.DROP:
                    raise TimeoutError("the other process takes nothing")
                self._unsent += self._session.seal(b"".join(parts))
                return
            self._known = False
            parts.append(self._session.digest(*parts))
            if len(parts) < 3:
                parts = [b"".join(parts)]
            sent, nbytes = self._try_to_send(parts), sum(map(len, parts))
            if sent < nbytes:
                self._finish(_behind(sent, parts), until)
            self._known = True
        except (LinkEnded, TimeoutError):
            self._known = True
            raise
        finally:
            if not self._known:  # a signal has come between two steps: nobody knows how much of a frame was sent
                self._known = True
                with contextlib.suppress(OSError):
                    self.sock.shutdown(socket.SHUT_RDWR)
            self._writing.release()
            if self._over:
                self._close_socket()

    def _try_to_send(self, parts: Sequence[bytes | memoryview]) -> int:
        if self._over:
            raise LinkEnded(self._over)
        try:
            return self.sock.sendmsg(parts) if len(parts) > 1 else self.sock.send(parts[0])
        except BlockingIOError:
            return 0
        except OSError as error:
            # The thread that reads learns of it as well, after it has read what had come before.
            raise LinkEnded(self._over or f"the connection has ended: {error.strerror}") from error

    def _finish(self, rest: list[memoryview], until: float) -> bool:
        """Write the rest of a frame as far as the time allows; what is left is kept. Whether all was written."""
        self._known, self._unsent = False, b""
        while rest:
            left = until - time.monotonic()
            try:
                writable = left > 0 and self._writable.poll(min(left, 3600) * 1000)
            except BaseException:  # a signal has come while it waited: what is unsent is known
                self._unsent, self._known = b"".join(rest), True
                raise
            if not writable:
                self._unsent, self._known = b"".join(rest), True
                return False
            rest = _behind(self._try_to_send(rest), rest)
        self._known = True
        return True

    # Receiving

    def wait(self, done: Callable[[], bool], call: int, timeout_s: float) -> None:
        """See :class:`Link`."""
        if self._armed is None or not self._reading.acquire(False):
            return
        try:
            self._armed.disarm()
            until = time.monotonic() + timeout_s
            while not self._over and not done():
                left_ms = 1000 * (until - time.monotonic())
                if left_ms <= 0:
                    break
                if self._readable.poll(min(left_ms, _SLICE_MS)):
                    self._receive(serving=False)
        finally:
            self._stop_reading()

    def ready(self) -> None:
        """Something has come; a thread of ``readers`` calls this."""
        request = None
        if not self._reading.acquire(False):
            return
        try:
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
        interrupted, self._within = self._within, False
        self._reading.release()
        if interrupted and not self._over:  # by a signal: nobody knows how much of what had come was delivered
            self._end("a signal has interrupted the thread that read from it")
        elif self._over:
            self._close_socket()
        elif self._armed is not None:
            self._armed.arm()

    def _receive(self, *, serving: bool) -> Message | None:
        """Read what has come, and deliver it, but return a request that this thread may run when it has left."""
        request = None
        for _ in range(_AT_ONCE):
            if request is not None:
                self._deliver([request], serving=False)
                request = None
            self._within = True
            try:
                came, more = self._assembler.receive(self.sock)
            except BlockingIOError:
                self._within = False
                break
            except OSError as error:
                self._within = False
                self._end(f"the connection was lost: {error.strerror}")
                break
            if not came:
                self._within = False
                self._end("its process has ended, or its host")
                break
            request = self._deliver(self._assembled(), serving=serving)
            self._within = False
            if not more or self._over:
                break
        return request

    def _assembled(self) -> list[Message]:
        messages: list[Message] = []
        try:
            self._assembler.take(messages)
        except Malformed as error:
            self._deliver(messages, serving=False)
            self._end(f"what it sent cannot be read: {error}")
            return []
        return messages

    def _deliver(self, messages: list[Message], *, serving: bool) -> Message | None:
        request = None
        if serving and messages and messages[-1].kind is Kind.REQUEST and not self._assembler.left:
            request = messages.pop()
        for message in messages:
            self._receiver.deliver(self, message, may_block=False)
        if self._assembler.left:
            self._end("it has left")
        return request

    # The end

    def close(self) -> None:
        """See :class:`Link`."""
        if not self._over:
            with contextlib.suppress(LinkEnded, TimeoutError):
                self._write([], time.monotonic() + _END_S, wire_format.END)
        self._end("this process has closed it")

    def _end(self, why: str) -> None:
        with self._ending:
            if self._over:
                return
            self._over = why
        if self._readers is not None:
            self._readers.remove(self)
        with contextlib.suppress(OSError):  # it is gone
            self.sock.shutdown(socket.SHUT_RDWR)  # this wakes whoever reads or writes
        self._close_socket()
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
