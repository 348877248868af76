"""Messages put together from the bytes of a connection (``wire_format.py``).

Small messages are cut out of what the connection has brought (``endpoint.py``). The pieces of a large one are received
where they belong, together with the digest and the prefix of the frame behind each, so they are copied once, by the
kernel.
"""

from __future__ import annotations

import socket
from collections import deque

from phalanx.rpc.links import wire_format
from phalanx.rpc.links.endpoint import UNCHECKED
from phalanx.rpc.links.wire_format import Layout
from phalanx.rpc.message import Message
from phalanx.wire.framing import Malformed
from phalanx.wire.session import TAG_BYTES, Session

__all__ = ["Assembler"]

_PREFIX = wire_format.PREFIX
_PIECES = (wire_format.PIECE, wire_format.HASHED)


class Assembler:
    """The receiving end of one connection, for one thread at a time.

    Args:
        session: the digests of its frames.
        rest: bytes that came with the handshake.

    Attributes:
        left: whether the other side has said that it leaves. What follows is not read.
        piece: of the large message that is coming: :meth:`receive` takes it from the socket, where it belongs. While
            there is none, :meth:`feed` takes what comes.
    """

    def __init__(self, session: Session, rest: bytes | bytearray = b"") -> None:
        self.left = False
        self._session = session
        self._data = bytes(rest)
        self.piece: memoryview | None = None
        self._got = 0  # bytes of it, and of the digest and the prefix behind it, that have come
        self._prefix = b""
        self._tail = bytearray(TAG_BYTES + _PREFIX.size)
        self._layout: Layout | None = None  # of the large message that is coming
        self._head = b""
        self._buffers: list[memoryview] = []
        self._filled = 0  # bytes of the last of these buffers

    def feed(self, data: bytes) -> None:
        """Add what has come."""
        self._data = self._data + data if self._data else data

    def next_number(self) -> int:
        """The number that the session gives the next message, if it begins with what comes next; else ``UNCHECKED``."""
        return UNCHECKED if self._data or self.left or self._session.encrypts else self._session.received

    def take_whole(self, frame: bytes) -> Message:
        """The message of a small frame that has come alone, and whose digest was found right.

        Raises:
            Malformed: it is no message.
        """
        self._session.received += 1
        return wire_format.small_message(frame)

    def receive(self, sock: socket.socket, piece: memoryview) -> tuple[int, bool]:
        """Take what a socket has of ``piece``, once: how many bytes, 0 at its end, and whether there may be more.

        Raises:
            BlockingIOError: nothing has come.
            OSError: the connection was lost.
        """
        places = [piece[self._got :], memoryview(self._tail)[max(0, self._got - len(piece)) :]]
        wanted = len(places[0]) + len(places[1])
        came = sock.recvmsg_into(places)[0]
        self._got += came
        return came, came == wanted

    def take(self, messages: deque[Message]) -> None:
        """Append the messages that are complete.

        Raises:
            Malformed: the other side did not send this, or it is no message. What was appended before is right.
        """
        if self.piece is not None:
            self._take_piece(self.piece, messages)
            if self.piece is not None:
                return
        start, data = 0, self._data
        nbytes = len(data)
        view = memoryview(data)
        while self.piece is None and nbytes >= start + _PREFIX.size and not self.left:
            length, kind = _PREFIX.unpack_from(data, start)
            if not 1 <= length <= wire_format.LONGEST_FRAME:
                raise Malformed(f"a frame of {length} bytes")
            end = start + wire_format.LENGTH_BYTES + length
            if nbytes < end + TAG_BYTES:
                if kind in _PIECES:
                    self._begin_piece(length - 1, view[start:])
                    start = nbytes
                break
            tag = view[end : end + TAG_BYTES]
            frame = self._session.opened(view[start:end], tag, _PREFIX.size, sha=kind == wire_format.HASHED)
            if kind == wire_format.SMALL:
                messages.append(wire_format.small_message(bytes(frame)))
            else:
                self._take_frame(kind, frame[_PREFIX.size :], messages)
            start = end + TAG_BYTES
        self._data = data[start:] if start < nbytes else b""

    def _begin_piece(self, nbytes: int, come: memoryview) -> None:
        """Receive the rest of a piece where it belongs. Its bytes count only once its digest has been found right."""
        self._prefix, body = bytes(come[: _PREFIX.size]), come[_PREFIX.size :]
        place = self._place_of(nbytes)
        self._got = len(body)
        place[: min(nbytes, len(body))] = body[:nbytes]
        self._tail[: len(body[nbytes:])] = body[nbytes:]
        self.piece = place

    def _take_piece(self, piece: memoryview, messages: deque[Message]) -> None:
        nbytes = len(piece)
        if self._got < nbytes + TAG_BYTES:
            return
        sha = self._prefix[-1] == wire_format.HASHED
        self._session.open_in_place(bytes(self._tail[:TAG_BYTES]), self._prefix, piece, sha=sha)
        self._data = bytes(self._tail[TAG_BYTES : self._got - nbytes])
        self.piece = None
        self._filled += nbytes
        self._finish_if_full(messages)

    def _take_frame(self, kind: int, body: memoryview, messages: deque[Message]) -> None:
        if kind in _PIECES:
            self._place_of(len(body))[:] = body
            self._filled += len(body)
            self._finish_if_full(messages)
        elif kind == wire_format.LARGE:
            layout, at = Layout.decode(body)
            self._layout, self._head = layout, bytes(body[at : at + layout.head_nbytes])
            wire_format.check_sizes(layout.sizes)
            self._buffers, self._filled = [], 0
            self._finish_if_full(messages)
        elif kind == wire_format.DROP:
            self._layout, self._buffers, self._head = None, [], b""
        elif kind == wire_format.END:
            self.left = True
        else:
            raise Malformed(f"a frame of kind {kind}")

    def _place_of(self, nbytes: int) -> memoryview:
        """Where the next piece of the large message belongs."""
        if self._layout is None:
            raise Malformed("a piece of no message")
        buffer = self._buffers[-1]
        if not 1 <= nbytes <= len(buffer) - self._filled:
            raise Malformed("a piece of a wrong length")
        return buffer[self._filled : self._filled + nbytes]

    def _finish_if_full(self, messages: deque[Message]) -> None:
        layout, buffers = self._layout, self._buffers
        if layout is None:
            return
        while not buffers or self._filled == len(buffers[-1]):
            if len(buffers) == len(layout.sizes):
                self._layout, self._buffers = None, []
                messages.append(Message(layout.kind, layout.call, layout.service, self._head, buffers))
                self._head = b""
                return
            buffers.append(wire_format.room_for(layout.sizes[len(buffers)]))
            self._filled = 0
