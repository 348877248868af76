"""The way over a proven TCP connection: between hosts, and between processes that cannot share memory.

A sending thread writes to the socket itself, and one thread of the agent (``rpc/network.py``) reads all of them. The
kernel is given little at a time (TCP_NOTSENT_LOWAT), so that a small message never waits behind more than that, and a
piece, of a large one.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from collections.abc import Callable

from phalanx.rpc.links import wire_format
from phalanx.rpc.links.contract import Link, LinkEnded, Receiver
from phalanx.rpc.links.wire_format import Layout, layout_of, pieces_of
from phalanx.rpc.message import Message
from phalanx.wire.framing import Malformed
from phalanx.wire.session import TAG_BYTES, Session
from phalanx.wire.sockets import KeepAlive

__all__ = ["KEEP_ALIVE", "SocketLink"]

# A host that vanishes, or a link that is cut, counts as lost after 3 s. The kernel answers the probes, so a process
# that is stopped or busy is not lost.
KEEP_ALIVE = KeepAlive(idle_s=1, interval_s=1, probes=2, unacknowledged_s=3)
_UNSENT_BYTES = 1 << 17
_BLOCK = 1 << 18
_LENGTH = struct.Struct("!I")
_PREFIX = struct.Struct("!IB")  # the length of what follows, without the digest; the kind of the frame
_TCP_NOTSENT_LOWAT = 25


class SocketLink(Link):
    """One connection. :meth:`read` is called by the thread that reads; all else by any.

    Args:
        sock: the connection, whose handshake is done; the link closes it.
        session: the digests of its messages.
        receiver: takes what comes.
        rest: bytes that came with the handshake.
        forget: is called once the socket is not to be read any more.
    """

    name = "tcp"

    def __init__(
        self,
        sock: socket.socket,
        session: Session,
        receiver: Receiver,
        rest: bytes | bytearray = b"",
        forget: Callable[[SocketLink], None] = lambda link: None,
    ) -> None:
        self.sock = sock
        self._session = session
        self._receiver = receiver
        self._forget = forget
        self._data = bytearray(rest)
        self._layout: Layout | None = None  # of the large message that is coming
        self._head = b""
        self._buffers: list[memoryview] = []
        self._filled = 0  # bytes of the last of these buffers
        self._writing = threading.Lock()  # held for one frame
        self._large = threading.Lock()  # held for one large message
        self._unsent = b""  # the rest of a frame whose sender's time was over
        self._over = ""
        self._ending = threading.Lock()
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, _UNSENT_BYTES)

    def fileno(self) -> int:
        """The descriptor, for a selector."""
        return self.sock.fileno()

    def send(self, message: Message, timeout_s: float) -> None:
        """See :class:`Link`."""
        until = time.monotonic() + timeout_s
        layout = layout_of(message)
        if message.nbytes <= self.SMALL_BYTES:
            self._write(wire_format.SMALL, until, layout.encode(), bytes(message.head), *message.buffers)
            return
        if len(message.head) > wire_format.LONGEST_FRAME // 2:
            raise ValueError(f"the part of a message that is pickled has {len(message.head)} bytes, which is too long")
        if not self._large.acquire(timeout=max(0.0, min(timeout_s, threading.TIMEOUT_MAX))):
            raise TimeoutError(f"another large message has been on its way for {timeout_s:g} s")
        try:
            self._write(wire_format.LARGE, until, layout.encode(), bytes(message.head))
            try:
                for piece in pieces_of(message.buffers):
                    self._write(wire_format.PIECE, until, piece)
            except TimeoutError:
                self._write(wire_format.DROP, time.monotonic())
                raise
        finally:
            self._large.release()

    def _write(self, kind: int, until: float, *parts: bytes | memoryview) -> None:
        """Send one frame: all of it, or if its time is over, its rest before the next frame. TimeoutError: nothing."""
        nbytes = 1 + sum(part.nbytes if isinstance(part, memoryview) else len(part) for part in parts)
        with self._writing:
            if self._unsent and not self._flush(self._unsent, until):
                if kind != wire_format.DROP:
                    raise TimeoutError("the other process takes nothing")
                self._unsent += self._session.seal(_PREFIX.pack(nbytes, kind))
                return
            frame = self._session.seal(b"".join((_PREFIX.pack(nbytes, kind), *parts)))
            self._flush(frame, until)

    def _flush(self, data: bytes, until: float) -> bool:
        """Write as much as the time allows; the rest is kept. Whether all was written."""
        view = memoryview(data)
        while True:
            if self._over:
                raise LinkEnded(self._over)
            try:
                view = view[self.sock.send(view) :]
            except BlockingIOError:
                pass
            except OSError as error:
                # The thread that reads learns of it as well, after it has read what had come before.
                raise LinkEnded(f"the connection has ended: {error.strerror}") from error
            if not view:
                self._unsent = b""
                return True
            left = until - time.monotonic()
            poll = select.poll()
            poll.register(self.sock, select.POLLOUT)
            if left <= 0 or not poll.poll(min(left, 3600) * 1000):
                self._unsent = bytes(view)
                return False

    def read(self) -> None:
        """Read what has come, and deliver the messages in it."""
        try:
            data = self.sock.recv(_BLOCK)
        except BlockingIOError:
            return
        except OSError as error:
            self._end(f"the connection was lost: {error.strerror}")
            return
        if not data:
            self._end("its process has ended, or its host")
            return
        self._data += data
        try:
            self._parse()
        except Malformed as error:
            self._end(f"what it sent cannot be read: {error}")

    def begin(self) -> None:
        """Deliver what came with the handshake."""
        try:
            self._parse()
        except Malformed as error:
            self._end(f"what it sent cannot be read: {error}")

    def _parse(self) -> None:
        start = 0
        while len(self._data) >= start + _PREFIX.size and not self._over:
            nbytes, kind = _PREFIX.unpack_from(self._data, start)
            if not 1 <= nbytes <= wire_format.LONGEST_FRAME:
                raise Malformed(f"a frame of {nbytes} bytes")
            end = start + _LENGTH.size + nbytes
            if len(self._data) < end + TAG_BYTES:
                break
            frame = self._data[start : end + TAG_BYTES]
            self._session.check(frame, end - start)
            start = end + TAG_BYTES
            self._take(kind, memoryview(frame)[_PREFIX.size : -TAG_BYTES])
        del self._data[:start]

    def _take(self, kind: int, body: memoryview) -> None:
        if kind == wire_format.PIECE:
            self._fill(body)
        elif kind in (wire_format.SMALL, wire_format.LARGE):
            layout, at = Layout.decode(body)
            head = bytes(body[at : at + layout.head_nbytes])
            if kind == wire_format.LARGE:
                self._layout, self._head = layout, head
                wire_format.check_sizes(layout.sizes)
                self._buffers, self._filled = [], 0
                self._finish_if_full()
                return
            at += layout.head_nbytes
            if len(body) - at != sum(layout.sizes):
                raise Malformed(f"{len(body) - at} bytes of buffers, and not {sum(layout.sizes)}")
            buffers = []
            for size in layout.sizes:
                buffers.append(memoryview(bytearray(body[at : at + size])))
                at += size
            self._deliver(layout, head, buffers)
        elif kind == wire_format.DROP:
            self._layout, self._buffers, self._head = None, [], b""
        elif kind == wire_format.END:
            self._end("it has left")
        else:
            raise Malformed(f"a frame of kind {kind}")

    def _fill(self, body: memoryview) -> None:
        if self._layout is None:
            raise Malformed("a piece of no message")
        buffer = self._buffers[-1]
        if len(body) > len(buffer) - self._filled or not body:
            raise Malformed("a piece of a wrong length")
        buffer[self._filled : self._filled + len(body)] = body
        self._filled += len(body)
        self._finish_if_full()

    def _finish_if_full(self) -> None:
        layout, buffers = self._layout, self._buffers
        if layout is None:
            return
        while not buffers or self._filled == len(buffers[-1]):
            if len(buffers) == len(layout.sizes):
                self._layout, self._buffers = None, []
                self._deliver(layout, self._head, buffers)
                return
            buffers.append(wire_format.room_for(layout.sizes[len(buffers)]))
            self._filled = 0

    def _deliver(self, layout: Layout, head: bytes, buffers: list[memoryview]) -> None:
        message = Message(layout.kind, layout.call, layout.service, head, buffers)
        self._receiver.deliver(self, message, may_block=False)

    def close(self) -> None:
        """See :class:`Link`."""
        if not self._over:
            with contextlib.suppress(LinkEnded, TimeoutError):
                self._write(wire_format.END, time.monotonic() + 1.0)
        self._end("this process has closed it")

    def _end(self, why: str) -> None:
        with self._ending:
            if self._over:
                return
            self._over = why
        self._forget(self)
        with contextlib.suppress(OSError):  # it is gone
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()
        self._receiver.ended(self, why)
