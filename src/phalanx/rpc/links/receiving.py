"""The receiving half of a TCP link (``sending.py`` has the other one, and ``socket.py`` the life of its connection).

One thread at a time reads: the one that holds ``_reading``. A caller that waits for an answer takes it, and reads the
socket itself (:meth:`ReceivingLink.wait`), so an answer wakes the thread that needs it and no other. It delivers all
that comes on the way, also what others wait for. While it reads, the connection is not armed in the epoll of those
threads that read for everybody (``readers.py``), so none of them is woken. When it leaves it gives ``_reading`` back
first and arms the connection then: what has come in between wakes one of those threads. A caller that does not get
``_reading`` sleeps until the thread that has it has delivered the answer. A thread of the epoll that is woken and does
not get ``_reading`` does nothing, because the thread that has it arms the connection afterwards.
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
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator

from phalanx.rpc.links.assembling import Assembler
from phalanx.rpc.links.contract import LinkEnded, Receiver
from phalanx.rpc.links.endpoint import BLOCK_BYTES, WHOLE, Endpoint
from phalanx.rpc.links.readers import Readers
from phalanx.rpc.links.sending import SendingLink
from phalanx.rpc.message import Kind, Message
from phalanx.wire.framing import Malformed
from phalanx.wire.session import TAG_BYTES, Session

__all__ = ["ReceivingLink"]

# How soon a caller that reads notices that its call has ended otherwise, as by cancel().
_SLICE_MS = 50
# How often a thread goes on reading one connection before it looks at the others.
_AT_ONCE = 32
# After how much the other side is told that it has come.
_ACKNOWLEDGED_BYTES, _ACKNOWLEDGED_FRAMES = 1 << 18, 64


class ReceivingLink(SendingLink):
    """A TCP link that sends and receives, and does not know yet what to do when its connection breaks.

    Args:
        sock: the connection, whose handshake is done; the link closes it.
        session: the digests of its messages.
        receiver: takes what comes.
        rest: bytes that came with the handshake.
        readers: the threads that read it while no caller does. Without them, somebody calls :meth:`read`.
        mends: whether another connection may take the place of this one.
    """

    def __init__(
        self,
        sock: socket.socket,
        session: Session,
        receiver: Receiver,
        rest: bytes | bytearray,
        readers: Readers | None,
        *,
        mends: bool,
    ) -> None:
        self._receiver = receiver
        self._readers = readers
        self._reading = threading.Lock()  # held by the thread that reads
        self._within = False  # that thread is between the socket and the receiver
        self._came: deque[Message] = deque()  # received, and not delivered yet
        super().__init__(sock, session, Assembler(session, rest), Endpoint(), mends=mends)

    @abstractmethod
    def _break(self, why: str) -> None:
        """The connection is of no use any more. The caller holds ``_reading``."""

    @abstractmethod
    def _end(self, why: str) -> None:
        """End the link."""

    def _use(self, sock: socket.socket, session: Session) -> None:
        super()._use(sock, session)
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)

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
        if self._armed is None or not self._reading.acquire(False):
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
                if self.over or self.down or self._armed is None:
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
                if self._unsent and not self.down:
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
            if self.over or self.down or self._reader != me:
                break
            piece = assembler.piece
            if piece is None:
                came = receive(sleep_ms, assembler.next_number())
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
            receive, sleep_ms = endpoint.look, 0
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
        if self._mends:
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
