"""Messages as frames of a proven connection: small ones whole, large ones in pieces that let small ones pass.

    frame    length, kind, number, body, digest
    SMALL    a whole message: its layout, its head, its buffers
    LARGE    the layout and the head of a message whose buffers follow in pieces
    PIECE    the next bytes of the buffers of the large message that is on its way
    HASHED   like PIECE, but its digest is HMAC-SHA-256; the sender takes what is quicker on its processor
    DROP     the large message that is on its way ends here: its sender's time is over
    END      the sender leaves in order, and this is the last frame

Only one large message is on its way in each direction, so its pieces need no number. The digest is the session's
(``wire/session.py``), so nobody on the way can add, change, drop or repeat a frame. The pieces of a large message are
received where they belong, together with the digest and the prefix of the frame behind each, so they are copied once,
by the kernel.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
from collections import deque
from collections.abc import Iterator, Sequence

from phalanx.rpc.links.contract import Kind, Message, decode_service, encode_service
from phalanx.wire.framing import Malformed
from phalanx.wire.session import TAG_BYTES, Session

__all__ = ["LONGEST_FRAME", "MOST_BUFFERS", "UNCHECKED", "Assembler", "Layout", "layout_of", "pieces_of", "small_frame"]

SMALL, LARGE, PIECE, DROP, END, HASHED = 1, 2, 3, 4, 5, 6
_PIECES = (PIECE, HASHED)
PREFIX = struct.Struct("!IB")  # the length of what follows, without the digest; the kind of the frame
LENGTH_BYTES = 4
UNCHECKED = (1 << 64) - 1  # in the place of a number: what has come before is incomplete, so this is no message
PIECE_BYTES = 1 << 16
# A head is small: what is large travels beside it. Without a limit a broken length would reserve any amount of memory.
LONGEST_FRAME = 1 << 30
MOST_BUFFERS = 1 << 20  # each takes memory here as soon as its size has come
_MOST_BYTES = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
_MAPPED_BYTES = 1 << 18  # from here on, memory is mapped, and the kernel gives it when the bytes arrive
_FIXED = struct.Struct("!BQHII")  # kind, call, bytes of the service's name, number of buffers, bytes of the head
_SIZE = struct.Struct("!Q")
_SMALL_PREFIX = struct.Struct("!IBBQHII")  # PREFIX and _FIXED
_KINDS = {int(kind): kind for kind in Kind}


class Layout:
    """Layout of a message: everything but its bytes.

    Attributes:
        kind, call, service: of the message.
        head_nbytes: the length of its head.
        sizes: the lengths of its buffers.
    """

    def __init__(self, kind: Kind, call: int, service: str, head_nbytes: int, sizes: Sequence[int]) -> None:
        self.kind, self.call, self.service = kind, call, service
        self.head_nbytes = head_nbytes
        self.sizes = sizes

    def encode(self) -> bytes:
        """Encode the layout."""
        name = self.service.encode()
        fixed = _FIXED.pack(self.kind, self.call, len(name), len(self.sizes), self.head_nbytes)
        return fixed + name + struct.pack(f"!{len(self.sizes)}Q", *self.sizes)

    @staticmethod
    def decode(data: memoryview) -> tuple[Layout, int]:
        """Decode the layout at the start of ``data``; return it, and where it ends.

        Raises:
            Malformed: these bytes are not a layout.
        """
        if len(data) < _FIXED.size:
            raise Malformed("a message without a layout")
        kind, call, name_nbytes, count, head_nbytes = _FIXED.unpack_from(data)
        end = _FIXED.size + name_nbytes + count * _SIZE.size
        if count > MOST_BUFFERS or end > len(data):
            raise Malformed(f"a layout of {end} bytes in a frame of {len(data)}")
        try:
            service = bytes(data[_FIXED.size : _FIXED.size + name_nbytes]).decode()
            layout = Layout(
                Kind(kind), call, service, head_nbytes, struct.unpack_from(f"!{count}Q", data, end - 8 * count)
            )
        except ValueError as error:
            raise Malformed(f"a layout that cannot be read: {error}") from error
        if end + head_nbytes > len(data):
            raise Malformed(f"a head of {head_nbytes} bytes in a frame of {len(data)}")
        return layout, end


def small_frame(message: Message) -> bytes:
    """Make the frame of a small message, without its digest."""
    name, head, buffers = encode_service(message.service), message.head, message.buffers
    count = len(buffers)
    nbytes = 1 + _FIXED.size + len(name) + 8 * count + len(head)
    if not count:
        prefix = _SMALL_PREFIX.pack(nbytes, SMALL, message.kind, message.call, len(name), 0, len(head))
        return b"".join((prefix, name, head))
    sizes = [buffer.nbytes for buffer in buffers]
    prefix = _SMALL_PREFIX.pack(nbytes + sum(sizes), SMALL, message.kind, message.call, len(name), count, len(head))
    return b"".join((prefix, name, struct.pack(f"!{count}Q", *sizes), head, *buffers))


def _small_message(frame: bytes) -> Message:
    """Read the message of such a frame.

    Raises:
        Malformed: these bytes are not a message.
    """
    nbytes = len(frame)
    if nbytes >= _SMALL_PREFIX.size:
        _, _, kind, call, name_nbytes, count, head_nbytes = _SMALL_PREFIX.unpack_from(frame)
        end = _SMALL_PREFIX.size + name_nbytes
        if not count and end + head_nbytes == nbytes and kind in _KINDS:  # the usual one
            try:
                return Message(_KINDS[kind], call, decode_service(frame[_SMALL_PREFIX.size : end]), frame[end:])
            except UnicodeDecodeError as error:
                raise Malformed(f"a layout that cannot be read: {error}") from error
    body = memoryview(frame)[PREFIX.size :]
    layout, at = Layout.decode(body)
    head = bytes(body[at : at + layout.head_nbytes])
    at += layout.head_nbytes
    if len(body) - at != sum(layout.sizes):
        raise Malformed(f"{len(body) - at} bytes of buffers, and not {sum(layout.sizes)}")
    buffers = []
    for size in layout.sizes:
        buffers.append(memoryview(bytearray(body[at : at + size])))
        at += size
    return Message(layout.kind, layout.call, layout.service, head, buffers)


def layout_of(message: Message) -> Layout:
    """Return the layout of a message."""
    sizes = [buffer.nbytes for buffer in message.buffers]
    return Layout(message.kind, message.call, message.service, len(message.head), sizes)


def pieces_of(buffers: Sequence[memoryview]) -> Iterator[memoryview]:
    """Cut the buffers' bytes into pieces of at most ``PIECE_BYTES``. No piece has bytes of two buffers."""
    for buffer in buffers:
        view = buffer.cast("B") if buffer.format != "B" or buffer.ndim != 1 else buffer
        for start in range(0, len(view), PIECE_BYTES):
            yield view[start : start + PIECE_BYTES]


def _check_sizes(sizes: Sequence[int]) -> None:
    """Refuse a large message that this machine cannot hold.

    Raises:
        Malformed: it says that it is larger than the machine's memory.
    """
    if sum(sizes) > _MOST_BYTES:
        raise Malformed(f"a message of {sum(sizes)} bytes, and this machine has {_MOST_BYTES} bytes of memory")


def _room_for(nbytes: int) -> memoryview:
    """Take memory for a buffer that will arrive. What does not arrive takes none.

    Raises:
        Malformed: the system refuses as much.
    """
    if nbytes < _MAPPED_BYTES:
        return memoryview(bytearray(nbytes))
    try:
        return memoryview(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    except (OSError, OverflowError, ValueError) as error:
        raise Malformed(f"a message with {nbytes} bytes in one piece, for which there is no memory: {error}") from error


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
        self._tail = bytearray(TAG_BYTES + PREFIX.size)
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
        """Return the message of a small frame that has come alone, and whose digest was found right.

        Raises:
            Malformed: it is no message.
        """
        self._session.received += 1
        return _small_message(frame)

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
        while self.piece is None and nbytes >= start + PREFIX.size and not self.left:
            length, kind = PREFIX.unpack_from(data, start)
            if not 1 <= length <= LONGEST_FRAME:
                raise Malformed(f"a frame of {length} bytes")
            end = start + LENGTH_BYTES + length
            if nbytes < end + TAG_BYTES:
                if kind in _PIECES:
                    self._begin_piece(length - 1, view[start:])
                    start = nbytes
                break
            tag = view[end : end + TAG_BYTES]
            frame = self._session.opened(view[start:end], tag, PREFIX.size, sha=kind == HASHED)
            if kind == SMALL:
                messages.append(_small_message(bytes(frame)))
            else:
                self._take_frame(kind, frame[PREFIX.size :], messages)
            start = end + TAG_BYTES
        self._data = data[start:] if start < nbytes else b""

    def _begin_piece(self, nbytes: int, come: memoryview) -> None:
        """Receive the rest of a piece where it belongs. Its bytes count only once its digest has been found right."""
        self._prefix, body = bytes(come[: PREFIX.size]), come[PREFIX.size :]
        place = self._place_of(nbytes)
        self._got = len(body)
        place[: min(nbytes, len(body))] = body[:nbytes]
        self._tail[: len(body[nbytes:])] = body[nbytes:]
        self.piece = place

    def _take_piece(self, piece: memoryview, messages: deque[Message]) -> None:
        nbytes = len(piece)
        if self._got < nbytes + TAG_BYTES:
            return
        sha = self._prefix[-1] == HASHED
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
        elif kind == LARGE:
            layout, at = Layout.decode(body)
            self._layout, self._head = layout, bytes(body[at : at + layout.head_nbytes])
            _check_sizes(layout.sizes)
            self._buffers, self._filled = [], 0
            self._finish_if_full(messages)
        elif kind == DROP:
            self._layout, self._buffers, self._head = None, [], b""
        elif kind == END:
            self.left = True
        else:
            raise Malformed(f"a frame of kind {kind}")

    def _place_of(self, nbytes: int) -> memoryview:
        """Return where the next piece of the large message belongs."""
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
            buffers.append(_room_for(layout.sizes[len(buffers)]))
            self._filled = 0
