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
from phalanx.rpc.links.acknowledged import SILENT_S, Acknowledged
from phalanx.rpc.links.contract import Link, LinkEnded, Receiver
from phalanx.rpc.links.wire_format import Layout, layout_of, pieces_of
from phalanx.rpc.message import Message
from phalanx.wire.framing import Malformed
from phalanx.wire.session import TAG_BYTES, Session
from phalanx.wire.sockets import KeepAlive

__all__ = ["KEEP_ALIVE", "SocketLink"]

# A host that vanishes, or a link that is cut, counts as lost after 3 s: by these probes while nothing is on its way,
# else by acknowledged.py. The kernel answers both, so a process that is stopped or busy is not lost.
KEEP_ALIVE = KeepAlive(idle_s=1, interval_s=1, probes=2)
_UNSENT_BYTES = 1 << 17
_BLOCK = 1 << 18
_DROP_S = 0.05
_END_S = 1.0
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
        self._piece: memoryview | None = None  # of the large message: it is received where it belongs
        self._got = 0  # bytes of it, and of the digest and the prefix behind it, that have come
        self._prefix = b""
        self._tail = bytearray(TAG_BYTES + _PREFIX.size)
        self._layout: Layout | None = None  # of the large message that is coming
        self._head = b""
        self._buffers: list[memoryview] = []
        self._filled = 0  # bytes of the last of these buffers
        self._writing = threading.Lock()  # held for one frame
        self._large = threading.Lock()  # held for one large message
        self._waiting = False  # a thread that writes waits until the kernel takes more
        self._unsent = b""  # the rest of a frame whose sender's time was over
        self._over = ""
        self._ending = threading.Lock()
        self._acknowledged = Acknowledged(sock)
        self._silent_s = 0.0
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
            except (TimeoutError, KeyboardInterrupt):
                self._write(wire_format.DROP, time.monotonic() + _DROP_S)
                raise
        finally:
            self._large.release()

    def _write(self, kind: int, until: float, *parts: bytes | memoryview) -> None:
        """Send one frame: all of it, or if its time is over, its rest before the next frame. TimeoutError: nothing."""
        nbytes = 1 + sum(part.nbytes if isinstance(part, memoryview) else len(part) for part in parts)
        prefix = _PREFIX.pack(nbytes, kind)
        if not self._writing.acquire(timeout=max(0.0, min(until - time.monotonic(), threading.TIMEOUT_MAX))):
            raise TimeoutError("the other process takes nothing")
        try:
            if self._unsent and not self._flush(b"", until):
                if kind != wire_format.DROP:
                    raise TimeoutError("the other process takes nothing")
                self._unsent += self._session.seal(prefix)
                return
            if nbytes < wire_format.PIECE_BYTES // 4:
                self._flush(self._session.seal(b"".join((prefix, *parts))), until)
                return
            tag = self._session.digest(prefix, *parts)
            sent = self._try_to_send(prefix, *parts, tag)
            if sent < len(prefix) + nbytes - 1 + TAG_BYTES:
                rest = memoryview(b"".join((prefix, *parts, tag)))[sent:]
                self._flush(bytes(rest), until)
        except (LinkEnded, TimeoutError):
            raise
        except BaseException:
            if not self._waiting:  # a signal has come between two steps: nobody knows how much of a frame was sent
                with contextlib.suppress(OSError):
                    self.sock.shutdown(socket.SHUT_RDWR)
            raise
        finally:
            self._writing.release()

    def _try_to_send(self, *parts: bytes | memoryview) -> int:
        if self._over:
            raise LinkEnded(self._over)
        try:
            return self.sock.sendmsg(parts) if len(parts) > 1 else self.sock.send(parts[0])
        except BlockingIOError:
            return 0
        except OSError as error:
            # The thread that reads learns of it as well, after it has read what had come before.
            raise LinkEnded(self._over or f"the connection has ended: {error.strerror}") from error

    def _flush(self, data: bytes, until: float) -> bool:
        """Write what is unsent, and this, as far as the time allows; the rest is kept. Whether all was written."""
        self._unsent += data
        while True:
            self._unsent = self._unsent[self._try_to_send(self._unsent) :]
            if not self._unsent:
                return True
            left = until - time.monotonic()
            self._waiting = True  # from here on all that is unsent is known, and a signal does no harm
            poll = select.poll()
            # The socket is closed by _end() only when no thread is here, so the descriptor is its own.
            poll.register(self.sock, select.POLLOUT)
            if left <= 0 or not poll.poll(min(left, 3600) * 1000):
                self._waiting = False
                return False
            self._waiting = False

    def read(self) -> None:
        """Read what has come, and deliver the messages in it."""
        try:
            if self._piece is None:
                data = self.sock.recv(_BLOCK)
                came = len(data)
                self._data += data
            else:
                tail = memoryview(self._tail)[max(0, self._got - len(self._piece)) :]
                came = self.sock.recvmsg_into([self._piece[self._got :], tail])[0]
                self._got += came
        except BlockingIOError:
            return
        except OSError as error:
            self._end(f"the connection was lost: {error.strerror}")
            return
        if not came:
            self._end("its process has ended, or its host")
            return
        try:
            if self._piece is not None:
                self._take_piece(self._piece)
            self._parse()
        except Malformed as error:
            self._end(f"what it sent cannot be read: {error}")

    def look(self) -> None:
        """End the link if the other host is silent. The thread that reads calls it from time to time."""
        self._silent_s = self._acknowledged.silent_s()
        if self._silent_s >= SILENT_S:
            self._end(f"its host has acknowledged nothing for {SILENT_S:g} s")

    def state(self) -> dict[str, float | str]:
        """See :class:`Link`."""
        return {"silent_s": self._silent_s}

    def begin(self) -> None:
        """Deliver what came with the handshake."""
        try:
            self._parse()
        except Malformed as error:
            self._end(f"what it sent cannot be read: {error}")

    def _parse(self) -> None:
        start = 0
        data = memoryview(self._data)
        while self._piece is None and len(data) >= start + _PREFIX.size and not self._over:
            nbytes, kind = _PREFIX.unpack_from(data, start)
            if not 1 <= nbytes <= wire_format.LONGEST_FRAME:
                raise Malformed(f"a frame of {nbytes} bytes")
            end = start + _LENGTH.size + nbytes
            if len(data) < end + TAG_BYTES:
                if kind == wire_format.PIECE:
                    self._begin_piece(nbytes - 1, data[start:])
                    start = len(data)
                break
            self._session.check_parts(data[end : end + TAG_BYTES], data[start:end])
            self._take(kind, data[start + _PREFIX.size : end])
            start = end + TAG_BYTES
        self._data = bytearray(data[start:])

    def _begin_piece(self, nbytes: int, come: memoryview) -> None:
        """Receive the rest of a piece where it belongs. Its bytes count only once its digest has been found right."""
        self._prefix, body = bytes(come[: _PREFIX.size]), come[_PREFIX.size :]
        place = self._place_of(nbytes)
        self._got = len(body)
        place[: min(nbytes, len(body))] = body[:nbytes]
        self._tail[: len(body[nbytes:])] = body[nbytes:]
        self._piece = place

    def _take_piece(self, piece: memoryview) -> None:
        nbytes = len(piece)
        if self._got < nbytes + TAG_BYTES:
            return
        self._session.check_parts(bytes(self._tail[:TAG_BYTES]), self._prefix, piece)
        self._data = self._tail[TAG_BYTES : self._got - nbytes]
        self._piece = None
        self._filled += nbytes
        self._finish_if_full()

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
        self._place_of(len(body))[:] = body
        self._filled += len(body)
        self._finish_if_full()

    def _place_of(self, nbytes: int) -> memoryview:
        """Where the next piece of the large message belongs."""
        if self._layout is None:
            raise Malformed("a piece of no message")
        buffer = self._buffers[-1]
        if not 1 <= nbytes <= len(buffer) - self._filled:
            raise Malformed("a piece of a wrong length")
        return buffer[self._filled : self._filled + nbytes]

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
                self._write(wire_format.END, time.monotonic() + _END_S)
        self._end("this process has closed it")

    def _end(self, why: str) -> None:
        with self._ending:
            if self._over:
                return
            self._over = why
        self._forget(self)
        with contextlib.suppress(OSError):  # it is gone
            self.sock.shutdown(socket.SHUT_RDWR)
        with self._writing:  # whoever writes has been woken by that, and has to be done with the descriptor
            self.sock.close()
        self._receiver.ended(self, why)
